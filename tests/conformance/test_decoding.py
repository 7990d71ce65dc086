"""Step by step with a cache gives what the whole gives, for every selection that can be decoded."""

import pytest
import torch
from helpers import (
    F64,
    GEOMETRY_SPECS,
    POSITION_SPECS,
    SELECTION_SPECS,
    Situation,
    assert_agree,
    every,
    inputs,
    joined,
    random,
    state_for,
)

from regard import Causal, CombinationError, Self, State, StateError, Window, attend, inspect, parse
from regard.nn import Attention

WIDTH, LENGTH = 24, 9
STEPS = [(0, 1), (1, 2), (2, 5), (5, 9)]
DECODED = [line for line in every(SELECTION_SPECS) if line != "energy"]


def assert_steps_give_the_whole(line: str, allow=None) -> None:
    attention = Attention(WIDTH, 4, line, key_heads=2, self_width=3).to(F64)
    with torch.no_grad():
        for p in attention.trained.values():
            p.add_(torch.randn_like(p) * 0.3)
    state = State(trace=random(2, WIDTH // 4, WIDTH // 4, scale=0.2), self=Self(random(3)))
    x, allow = random(2, LENGTH, WIDTH), allow or Causal()
    whole = attention(x, allow=allow, state=state)
    cache = None
    for start, stop in STEPS:
        before = cache
        held = len(before) if before is not None else 0
        out, cache = attention.step(x[:, start:stop], before, allow=allow, state=state)
        assert before is None or len(before) == held, "the old cache changed"
        assert len(cache) == stop
        if attention.points:
            assert_agree(out, whole[:, :, start:stop, :stop])
            assert not whole[:, :, start:stop, stop:].any()
        else:
            assert_agree(out, whole[:, start:stop])


@pytest.mark.parametrize("selection", DECODED)
def test_every_selection(selection):
    assert_steps_give_the_whole(selection)


@pytest.mark.parametrize("selection", DECODED)
def test_every_selection_in_a_window(selection):
    assert_steps_give_the_whole(selection, Causal() & Window(3))


@pytest.mark.parametrize("position", every(POSITION_SPECS))
@pytest.mark.parametrize(
    "selection", ["softmax", "entmax(learned)", "selective", "monotonic", "hopfield(steps=2)", *SELECTION_SPECS["linear"]]
)
def test_every_position(selection, position):
    if joined(selection, position) is not None:
        assert_steps_give_the_whole(f"{selection} | {position}")
    else:
        with pytest.raises(CombinationError, match="adds to a score, and linear has none; use decay"):
            parse(f"{selection} | {position}")


@pytest.mark.parametrize("geometry", every(GEOMETRY_SPECS))
@pytest.mark.parametrize("selection", ["softmax", "sparsemax", "selective"])
def test_every_geometry(selection, geometry):
    assert_steps_give_the_whole(f"{geometry} | {selection}")


def test_energy_is_refused_with_its_reason():
    attention = Attention(WIDTH, 4, "energy")
    with pytest.raises(CombinationError, match="later tokens do, so it cannot be decoded step by step"):
        attention.step(torch.zeros(1, 1, WIDTH))


@pytest.mark.parametrize(("position", "selection"), [(p, s) for p in ("", "alibi") for s in DECODED if joined(s, p)])
def test_the_state_that_inspect_returns_carries_on(selection, position):
    spec = joined(selection, position)
    situation = Situation(heads=4, key_heads=2, queries=LENGTH, keys=LENGTH)
    q, k, v = inputs(situation)
    state = state_for(spec, situation)
    whole = attend(q, k, v, spec, allow=Causal(), state=state)
    for start, stop in STEPS:
        seen = inspect(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], spec, allow=Causal(), state=state)
        expected = whole[:, :, start:stop]
        assert_agree(seen.output, expected[..., :stop] if spec.selection.name == "pointer" else expected)
        state = seen.state


@pytest.mark.parametrize("selection", ["selective", "monotonic", "monotonic(mode=hard)"])
def test_a_selection_that_carries_needs_its_carry(selection):
    """The comparison above would be empty if forgetting the carry gave the same."""
    situation = Situation(queries=LENGTH, keys=LENGTH)
    q, k, v = inputs(situation)
    whole = attend(q, k, v, selection, allow=Causal())
    forgetful = attend(q[:, :, 5:], k, v, selection, allow=Causal())
    assert (whole[:, :, 5:] - forgetful).abs().max() > 1e-2


def test_one_query_at_a_given_place_sees_no_later_key():
    situation = Situation(queries=1, keys=7)
    q, k, v = inputs(situation)
    for line in ("dot", "euclidean", "sparsemax"):
        out = attend(q, k, v, line, allow=Causal(), state=State(offset=2))
        assert_agree(out, attend(q, k[:, :, :3], v[:, :, :3], line))


@pytest.mark.parametrize("line", ["dot", "dot | softmax | rope", "dot | softmax | alibi", "euclidean | sparsemax"])
@pytest.mark.parametrize("given", [0, 2, 7, "x"])
def test_a_step_refuses_an_offset_that_is_not_the_end_of_its_cache(line, given):
    """Causal rules, RoPE and the cache would each put the token elsewhere."""
    attention = Attention(WIDTH, 4, line)
    x = torch.randn(1, 4, WIDTH)
    _, cache = attention.step(x[:, :3])
    with pytest.raises(StateError, match=rf"state.offset={given!r}, .* stands at 3, .* leave offset out"):
        attention.step(x[:, 3:], cache, state=State(offset=given))
    out, _ = attention.step(x[:, 3:], cache, state=State(offset=3))
    assert_agree(out, attention.step(x[:, 3:], cache)[0])


def test_a_step_reads_its_state_also_where_the_mechanism_needs_none():
    attention = Attention(WIDTH, 4, "dot")
    for state, says in ((3, "state=3"), (State(temperature=torch.ones(4, dtype=torch.complex64)), "it must be real")):
        with pytest.raises(StateError, match=says):
            attention.step(torch.zeros(1, 1, WIDTH), state=state)


def test_a_rule_of_the_module_can_be_decoded_under_padding():
    attention = Attention(WIDTH, 4, parse("euclidean | entmax(1.5)")).to(F64)
    x = random(2, LENGTH, WIDTH)
    real = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    real[1, ..., :3] = False
    whole = attention(x, allow=Causal() & real)
    cache = None
    for n in range(LENGTH):
        out, cache = attention.step(x[:, n : n + 1], cache, allow=Causal() & real[..., : n + 1])
        assert_agree(out, whole[:, n : n + 1])
