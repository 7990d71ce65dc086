"""Every row of the tables in every situation: the fast backend gives what the plain definition gives, and its gradients.

Adding a row to a table adds its tests: a row without an example fails `test_every_row_of_the_tables_has_an_example`.
"""

import pytest
import torch
from helpers import (
    GEOMETRY_SPECS,
    POSITION_SPECS,
    RANK,
    SELECTION_SPECS,
    SITUATIONS,
    D,
    E,
    Situation,
    assert_agree,
    assert_fast_is_plain,
    every,
    full_state,
    gradients,
    inputs,
    joined,
    random,
    state_for,
    trained,
)

from regard import Additive, Causal, LowRank, Mask, State, Window, attend, explain, parse
from regard.attention.reference import attend_plainly
from regard.geometry import GEOMETRIES
from regard.position import POSITIONS
from regard.selection import SELECTIONS

GEOMETRY_LINES, SELECTION_LINES, POSITION_LINES = map(every, (GEOMETRY_SPECS, SELECTION_SPECS, POSITION_SPECS))


def pairs() -> list[tuple[str, str, str]]:
    """Every geometry with every selection it has a meaning with, the positions taking turns."""
    places = ["", *POSITION_LINES]
    found: list[tuple[str, str, str]] = []
    for i, geometry in enumerate(GEOMETRY_LINES):
        for j, selection in enumerate(SELECTION_LINES):
            turns = [places[(i + j + n) % len(places)] for n in range(len(places))]
            position = next((p for p in turns if joined(geometry, selection, p)), None)
            if position is not None:
                found.append((geometry, selection, position))
    return found


def assert_conforms(line: str, situation: Situation) -> None:
    spec = parse(line)
    state, leaves = trained(state_for(spec, situation))
    assert_fast_is_plain(spec, situation, state, leaves)


@pytest.mark.parametrize(
    ("table", "examples"),
    [(GEOMETRIES, GEOMETRY_SPECS), (SELECTIONS, SELECTION_SPECS), (POSITIONS, POSITION_SPECS)],
    ids=["geometries", "selections", "positions"],
)
def test_every_row_of_the_tables_has_an_example(table, examples):
    assert set(examples) == set(table)
    for name, lines in examples.items():
        assert lines, f"{name} has no example"
        for line in lines:
            assert type(getattr(parse(line), table_kind(table))) is table[name]


def table_kind(table) -> str:
    return {id(GEOMETRIES): "geometry", id(SELECTIONS): "selection", id(POSITIONS): "position"}[id(table)]


@pytest.mark.parametrize(("geometry", "selection", "position"), pairs())
def test_geometry_with_selection(geometry, selection, position):
    """One situation for each pair, taking turns, so that all pairs of (mechanism, situation) are met many times."""
    spec = joined(geometry, selection, position)
    fitting = [s for s in SITUATIONS.values() if s.suits(spec)]
    turn = sum(map(ord, geometry + selection))
    for n in (0, 4):
        assert_conforms(str(spec), fitting[(turn + n) % len(fitting)])


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("selection", SELECTION_LINES)
def test_selection_in_situation(selection, situation):
    if SITUATIONS[situation].suits(parse(selection)):
        assert_conforms(selection, SITUATIONS[situation])
    else:
        q, k, _ = inputs(SITUATIONS[situation])
        with pytest.raises(ValueError, match="as many heads and as many tokens"):
            attend(q, k, None, selection)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("geometry", GEOMETRY_LINES)
def test_geometry_in_situation(geometry, situation):
    assert_conforms(geometry, SITUATIONS[situation])


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("position", POSITION_LINES)
@pytest.mark.parametrize("rest", ["dot | softmax(0.7)", "trace(gamma=0.3) | entmax(1.5)"])
def test_position_in_situation(rest, position, situation):
    spec = joined(rest, position)
    if SITUATIONS[situation].suits(spec):
        assert_conforms(str(spec), SITUATIONS[situation])
    else:
        s = SITUATIONS[situation]
        with pytest.raises(ValueError, match="position"):
            attend(*inputs(s), spec, state=state_for(spec, s))


@pytest.mark.parametrize("position", POSITION_LINES)
def test_position_whose_table_is_not_trained_stays_fused(position):
    situation = SITUATIONS["gqa"]
    spec = joined("trace(gamma=0.3)", position)
    state = state_for(spec, situation)
    q, k, v = inputs(situation)
    assert explain(q, k, v, spec, state=state, allow=Causal()).backend == "flash"
    assert_fast_is_plain(spec, situation, state, [])


TRACES = {
    "full": lambda s: random(s.key_heads, D, D, scale=0.2),
    "per query head": lambda s: random(s.heads, D, D, scale=0.2),
    "per batch row": lambda s: random(s.batch, s.key_heads, D, D, scale=0.2),
    "low rank": lambda s: LowRank(random(s.key_heads, D, RANK, scale=0.4)),
    "low rank with two factors": lambda s: LowRank(*(random(s.key_heads, D, RANK, scale=0.4) for _ in range(2))),
    "low rank with signs": lambda s: LowRank(random(s.key_heads, D, RANK, scale=0.4), signs=torch.tensor([1.0, -1.0]).double()),
    "low rank per query head": lambda s: LowRank(random(s.heads, D, RANK, scale=0.4)),
    "low rank per batch row": lambda s: LowRank(random(s.batch, s.key_heads, D, RANK, scale=0.4)),
}


@pytest.mark.parametrize("position", ["", "rope", "alibi"])
@pytest.mark.parametrize("geometry", GEOMETRY_SPECS["trace"])
@pytest.mark.parametrize("form", TRACES)
def test_every_form_of_a_trace_and_its_gradient(form, geometry, position):
    spec = joined(geometry, "softmax", position)
    if spec is None:
        assert "base=none" in geometry
        assert position == "rope"
        return
    for name in ("gqa", "padded"):
        state, leaves = trained(State(trace=TRACES[form](SITUATIONS[name])))
        assert_fast_is_plain(spec, SITUATIONS[name], state, leaves)


@pytest.mark.parametrize("selection", ["entmax(1.5)", "gd(coherence=0.1)", "abstain(softmax, threshold=-1)", "selective"])
@pytest.mark.parametrize("form", TRACES)
def test_every_form_of_a_trace_in_tiles(form, selection):
    state, leaves = trained(State(trace=TRACES[form](SITUATIONS["gqa"])))
    assert_fast_is_plain(joined("trace(base=none)", selection), SITUATIONS["gqa"], state, leaves)


def test_additive_weights_can_be_shared_by_the_heads():
    state, leaves = trained(State(additive=Additive(random(7), random(7, D), random(7, D))))
    assert_fast_is_plain(parse("additive | entmax(1.5)"), SITUATIONS["gqa"], state, leaves)


@pytest.mark.parametrize("geometry", GEOMETRY_SPECS["self_conditioned"])
def test_each_batch_row_can_have_its_own_self(geometry):
    situation = SITUATIONS["gqa"]
    base = full_state(situation).self
    own = type(base)(random(situation.batch, 3), base.weights)
    state, leaves = trained(State(self=own))
    assert_fast_is_plain(joined(geometry), situation, state, leaves)
    q, k, v = inputs(situation)
    together = attend(q, k, v, geometry, state=State(self=own))
    for b in range(situation.batch):
        alone = attend(*(x[b : b + 1] for x in (q, k, v)), geometry, state=State(self=type(base)(own.s[b], base.weights)))
        assert_agree(together[b : b + 1], alone)


RULES = {
    "causal": lambda Q, K: Causal(),
    "window": lambda Q, K: Causal() & Window(5),
    "not the first half": lambda Q, K: ~Causal() | Window(2, ahead=1),
    "mask": lambda Q, K: Mask(torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(1)) < 0.4),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("selection", [*SELECTION_LINES, "trace(gamma=0.3)", "alibi", "rope | euclidean", "additive"])
def test_borders_of_tiles_leave_no_mark(selection, rule):
    """37 rows in tiles of 16: what one tile leaves to the next, and the rows of the last, shorter one."""
    situation = Situation(queries=37, keys=37, heads=2, key_heads=2 if selection == "energy" else 1, allow=RULES[rule])
    spec = parse(selection)
    state, leaves = trained(state_for(spec, situation))
    assert_fast_is_plain(spec, situation, state, leaves)


@pytest.mark.parametrize("value_width", [1, E, D, 2 * D + 1])
@pytest.mark.parametrize("line", ["dot", "alibi", "euclidean | sparsemax", "self_conditioned(form=self_token)"])
def test_values_may_be_wider_or_narrower_than_keys(line, value_width):
    situation = SITUATIONS["gqa"]
    state = full_state(situation, value_width=value_width)
    q, k, v = (x.requires_grad_() for x in inputs(situation, value_width=value_width))
    fast = attend(q, k, v, line, allow=Causal(), state=state)
    plain = attend_plainly(q, k, v, line, allow=Causal(), state=state).output
    assert fast.shape == (*q.shape[:3], value_width)
    assert_agree(fast, plain)
    for found, expected in zip(gradients(fast, [q, k, v]), gradients(plain, [q, k, v]), strict=True):
        assert_agree(found, expected)
