"""Softmax through torch's public call, which serves every device: what is added to a product is written as columns of it."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    F64,
    GEOMETRY_SPECS,
    LAYOUTS,
    RANK,
    SITUATIONS,
    D,
    Situation,
    assert_agree,
    assert_fast_is_plain,
    every,
    inputs,
    joined,
    random,
    state_for,
    trained,
)

from regard import Causal, Document, LowRank, Prefix, State, Window, attend, explain, parse
from regard.attention import columns, fused, plan
from regard.attention.plan import preferring
from regard.attention.private import NAME, find
from regard.attention.problem import pose
from regard.attention.reference import attend_plainly

SOFTMAXES = ["softmax", "softmax(0.5)", "softmax(learned)", "abstain(softmax(0.7), null_logit=0.5)", "hopfield(steps=3)"]
LINES = [
    str(spec)
    for n, (geometry, position) in enumerate(itertools.product(every(GEOMETRY_SPECS), ["", "alibi", "relative", "rope"]))
    if (spec := joined(geometry, SOFTMAXES[n % len(SOFTMAXES)], position)) is not None
]


@pytest.fixture(autouse=True)
def _columns():
    with preferring("columns"):
        yield


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 rows or less, and ALiBi's column over four keys at most."""
    monkeypatch.setattr(columns, "CHUNK", 1)
    monkeypatch.setattr(columns, "FAR", 4)


def backend(line, situation, state):
    q, k, v = inputs(situation)
    return explain(q, k, v, line, allow=situation.allow(situation.queries, situation.keys), state=state).backend


@pytest.mark.parametrize("line", LINES)
def test_columns_give_the_definition_and_its_gradients(line):
    spec = parse(line)
    turn, served = sum(map(ord, line)), []
    for n in (0, 3, 7):
        situation = list(SITUATIONS.values())[(turn + n) % len(SITUATIONS)]
        state, leaves = trained(state_for(spec, situation))
        served.append(backend(line, situation, state))
        assert_fast_is_plain(spec, situation, state, leaves)
    lowers = spec.geometry.lowers
    trains_a_table = "relative" in line
    assert ("columns" in served) == (lowers and not trains_a_table), served


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("line", LINES[::3])
@pytest.mark.parametrize("rule", [lambda Q, K: Causal() & Window(5), lambda Q, K: ~Causal(), lambda Q, K: Causal() | Prefix(9)])
def test_borders_of_chunks_leave_no_mark(line, rule):
    situation = Situation(queries=37, keys=37, heads=4, key_heads=2, allow=rule)
    spec = parse(line)
    state, leaves = trained(state_for(spec, situation))
    assert_fast_is_plain(spec, situation, state, leaves)


@pytest.mark.parametrize("form", ["per query head", "per batch row", "low rank per query head"])
@pytest.mark.parametrize("line", ["trace(gamma=0.3) | alibi", "trace(base=none)", "trace(gamma=0.3, norm=unit) | rope"])
def test_a_metric_for_each_query_head_shares_its_keys(line, form):
    situation = SITUATIONS["gqa"]
    H, G, B = situation.heads, situation.key_heads, situation.batch
    trace = {
        "per query head": random(H, D, D, scale=0.2),
        "per batch row": random(B, G, D, D, scale=0.2),
        "low rank per query head": LowRank(random(H, D, RANK, scale=0.4)),
    }[form]
    state, leaves = trained(State(trace=trace))
    assert backend(line, situation, state) == "columns"
    assert_fast_is_plain(parse(line), situation, state, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout):
    for line in ("euclidean | abstain(softmax, null_logit=0.2) | alibi", "self_conditioned(form=self_token)"):
        for name in ("causal", "empty rows"):
            spec = parse(line)
            state, leaves = trained(state_for(spec, SITUATIONS[name]))
            assert_fast_is_plain(spec, SITUATIONS[name], state, leaves, LAYOUTS[layout])


def test_a_table_that_is_not_trained_is_a_mask_of_chunks():
    situation = SITUATIONS["gqa"]
    spec = parse("euclidean | relative")
    state = state_for(spec, situation)
    assert backend(str(spec), situation, state) == "columns"
    assert_fast_is_plain(spec, situation, state, [])


def test_a_null_logit_of_minus_infinity_takes_nothing():
    q, k, v = inputs(SITUATIONS["gqa"])
    line = "euclidean | abstain(softmax, null_logit=-inf)"
    assert explain(q, k, v, line, allow=Causal()).backend == "columns"
    assert_agree(attend(q, k, v, line, allow=Causal()), attend(q, k, v, "euclidean", allow=Causal()))


def test_not_finite_inputs_are_said_and_not_turned_into_zeros():
    q, k, v = inputs(SITUATIONS["gqa"])
    q[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="q has 6 of"):
        attend(q, k, v, "euclidean", allow=Causal())


def in_half(line, dtype, q, k, v, allow, state=None):
    """The columns themselves in half precision, as a device with kernels for it runs them."""
    p = pose(q.to(dtype), k.to(dtype), v.to(dtype), line, (None, None, None), allow, state).upcast()
    return columns.attend(p, p.lower(), 1.0, dtype)[0].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "line", ["euclidean", "alibi", "euclidean | abstain(softmax, null_logit=-3) | alibi", "trace(base=none)"]
)
def test_half_precision_loses_no_more_than_torchs_own_call_does(line, dtype):
    situation = Situation(queries=600, keys=600, heads=4, key_heads=2, batch=1)
    q, k, v = (x.to(dtype).double() for x in inputs(situation, 16, 16))
    state = State(trace=0.125 * torch.eye(16, dtype=F64).expand(2, 16, 16))
    p = pose(q, k, v, line, (None, None, None), Causal(), state)
    low = p.upcast().lower()
    # A lowered query or key is rounded once, as torch's own call rounds its inputs; what the columns hold is not.
    rounded = replace(p.lower(), q=low.q.to(dtype).double(), k=low.k.to(dtype).double())
    exact = columns.attend(p, rounded, 1.0, F64)[0]
    own = in_half("dot", dtype, q, k, v, Causal()) - attend_plainly(q, k, v, "dot", allow=Causal()).output
    found = in_half(line, dtype, q, k, v, Causal(), State(trace=state.trace.float()))
    assert (found - exact).abs().mean() <= 2 * own.abs().mean()
    assert (found - exact).abs().max() <= 2 * own.abs().max()


def test_float16_holds_biases_beyond_its_largest_number():
    q, k, v = (x.half().double() for x in inputs(SITUATIONS["gqa"]))
    q, k = q * 100, k * 100
    exact = attend_plainly(q, k, v, "euclidean(scale=20)", allow=Causal()).output
    torch.testing.assert_close(in_half("euclidean(scale=20)", torch.float16, q, k, v, Causal()), exact, atol=2e-2, rtol=2e-2)


def test_alibi_is_as_exact_at_the_end_of_a_long_text_as_at_its_beginning():
    """m · j alone is thousands: the column is centred, and longer texts are cut."""
    q, k, v = (x.float() for x in inputs(Situation(queries=9000, keys=9000, heads=1, key_heads=1, batch=1), 4, 4))
    out = attend(q, k, v, "alibi", allow=Causal())
    for rows in (slice(0, 40), slice(4480, 4520), slice(8960, 9000)):
        state = State(offset=rows.start)
        exact = attend_plainly(q[:, :, rows].double(), k.double(), v.double(), "alibi", allow=Causal(), state=state).output
        assert (out[:, :, rows].double() - exact).abs().max() < 3e-4


def other(name=NAME, forward=None, backward=None):
    """torch's operators, with another one or none under a name."""
    made = {NAME: forward, f"{NAME}_backward": backward}
    return SimpleNamespace(**{n: op or getattr(torch.ops.aten, n) for n, op in made.items() if n == name or op or n != NAME})


def schema(*names, extra=(), returns=2):
    arguments = [
        SimpleNamespace(name=n, kwarg_only=n in ("attn_mask", "scale"), has_default_value=lambda: False) for n in names
    ]
    arguments += [SimpleNamespace(name=n, kwarg_only=True, has_default_value=lambda d=d: d) for n, d in extra]
    return SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments, returns=[None] * returns)))


FORWARD = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
OTHER_TORCHES = {
    "has no aten::": SimpleNamespace(),
    "takes (query, key": other(forward=schema("query", "key", "value", "is_causal", "dropout_p", "attn_mask", "scale")),
    "also asks for sinks": other(forward=schema(*FORWARD, extra=[("sinks", False)])),
    "gives 3 results": other(forward=schema(*FORWARD, returns=3)),
    "arguments can be read": other(forward=SimpleNamespace(default=None)),
}


@pytest.mark.parametrize("because", OTHER_TORCHES)
def test_another_torch_falls_back_and_says_why(because, monkeypatch):
    found = find(OTHER_TORCHES[because])
    assert found.forward is None
    assert because in (found.missing or "")
    for module in (plan, fused):
        monkeypatch.setattr(module, "OPERATOR", found)
    monkeypatch.setattr(fused, "_kernel", None)
    monkeypatch.setattr(plan, "_preferred", None)
    for line in ("trace(gamma=0.3)", "alibi", "dot | abstain(softmax, null_logit=0)"):
        situation = SITUATIONS["gqa"]
        spec = parse(line)
        state = state_for(spec, situation)
        q, k, v = inputs(situation)
        made = explain(q, k, v, spec, allow=Causal(), state=state)
        assert made.backend == "columns"
        assert because in str(made)
        assert_fast_is_plain(spec, situation, *trained(state))
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    assert explain(q, k, v, "dot", allow=Causal() & Document(ids)).backend == "columns"


def test_an_argument_that_came_later_and_has_a_default_is_welcome():
    later = other(forward=schema(*FORWARD, extra=[("sinks", True)]))
    assert find(later).missing is None
    assert find().missing is None
