"""Gradients where a careless formula has none: zero vectors, no keys, empty rows beside large scores, places outside the text."""

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
    gradients,
    inputs,
    random,
    state_for,
    trained,
)

from regard import Causal, CombinationError, State, Window, attend, explain, inspect, parse
from regard.attention.reference import attend_plainly
from regard.geometry.cosine import unit

LINES = [*every(GEOMETRY_SPECS), *every(SELECTION_SPECS), *every(POSITION_SPECS)]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_vector_of_zero_has_no_direction_and_a_gradient_of_zero(dtype):
    x = random(5, 4, dtype=dtype)
    x[1], x[3] = 0, x[3] * torch.finfo(dtype).tiny
    x.requires_grad_()
    y = unit(x)
    (grad,) = torch.autograd.grad(y.square().sum() + (y * random(5, 4, dtype=dtype)).sum(), x)
    assert not y[[1, 3]].any()
    assert not grad[[1, 3]].any()
    assert grad[[0, 2, 4]].abs().amin(-1).gt(0).all()
    torch.testing.assert_close(torch.linalg.vector_norm(y[[0, 2, 4]], dim=-1), torch.ones(3, dtype=dtype))


def test_the_direction_of_a_vector_does_not_depend_on_its_length():
    x = random(3, 4, dtype=torch.float32)
    for length in (1e-30, 1e-20, 1e20, 1e37):
        torch.testing.assert_close(unit(x * length), unit(x))
    assert torch.autograd.gradcheck(unit, random(3, 4).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "line", ["cosine", "cosine(temperature=learned)", "cosine | entmax(1.5)", "cosine | gd", "trace(norm=unit, base=none)"]
)
def test_zero_keys_and_queries_have_finite_gradients(line, dtype):
    situation = Situation()
    q, k, v = inputs(situation, dtype=dtype)
    k[:, :, 2], q[:, 1, 3] = 0, 0
    state, leaves = trained(state_for(parse(line), situation, dtype=dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    grads = gradients(attend(q, k, v, line, state=state), [q, k, v, *leaves])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][:, :, 2].any()
    assert not grads[0][:, 1, 3].any()
    assert grads[1].any()


@pytest.mark.parametrize("sizes", [{"keys": 0}, {"queries": 0}, {"batch": 0}, {"keys": 0, "queries": 0}], ids=str)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("allow", [None, Causal()], ids=["all", "causal"])
def test_no_rows_and_no_keys_have_gradients_of_zero(line, allow, sizes):
    situation, spec = Situation(**sizes), parse(line)
    if not situation.suits(spec):
        return
    state, leaves = trained(state_for(spec, situation))
    q, k, v = (x.requires_grad_() for x in inputs(situation))
    assert explain(q, k, v, spec, allow=allow, state=state).flops >= 0
    out = attend(q, k, v, spec, allow=allow, state=state)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))
    needed = [x for x in leaves if x.grad is not None]
    assert all(not x.grad.any() for x in needed)
    alone = attend(*inputs(situation), spec, state=state)
    assert alone.requires_grad == bool(needed)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "line", ["dot", "euclidean", "trace(gamma=0.3)", "alibi", "abstain(softmax, null_logit=0)", "entmax(1.5)"]
)
def test_a_row_with_nothing_allowed_beside_large_scores(line, dtype):
    """What such a row's scores would have been can be above the largest exponent."""
    situation = Situation(queries=5, keys=5)
    q, k, v = (x * 100 for x in inputs(situation, dtype=dtype))
    q, k, v = (x.detach().requires_grad_() for x in (q.abs(), k.abs(), v))
    allow = torch.ones(5, 5).tril(-1).bool()
    out = attend(q, k, v, line, allow=allow, state=state_for(parse(line), situation, dtype=dtype))
    grads = gradients(out, [q, k, v])
    assert not out[:, :, 0].any()
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :, 0].any()
    assert grads[2].any()


@pytest.mark.parametrize("offset", [-9, -3, -1, 0, 2, 6, 12])
@pytest.mark.parametrize(
    "line", ["dot", "euclidean", "trace(gamma=0.3)", "alibi", "rope", "entmax(1.5)", "selective", "monotonic"]
)
def test_a_first_query_anywhere(line, offset):
    spec = parse(line)
    for queries in (1, 4):
        for allow in (None, Causal(), Causal() & Window(2), ~Causal()):
            situation = Situation(queries=queries, keys=7)
            state, leaves = trained(state_for(spec, situation))
            state = State(**{**vars(state), "offset": offset})
            q, k, v = (x.requires_grad_() for x in inputs(situation))
            fast = attend(q, k, v, spec, allow=allow, state=state)
            plain = attend_plainly(q, k, v, spec, allow=allow, state=state).output
            assert_agree(fast, plain)
            wanted = [q, k, v, *leaves]
            for found, expected in zip(gradients(fast, wanted), gradients(plain, wanted), strict=True):
                assert_agree(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("line", ["monotonic", "monotonic(mode=hard)", "selective"])
def test_a_carry_reaches_beyond_the_keys_that_a_rule_still_allows(line):
    """The reader stands at key 5; a rule that leaves the first key alone must not put it back there."""
    situation = Situation(queries=3, keys=7)
    q, k, v = inputs(situation)
    carry = torch.zeros(2, 7, dtype=F64) if line == "selective" else torch.zeros(2, 3, 7, dtype=F64)
    carry[..., 5] = 1
    allow = torch.arange(7) < 1
    for rule in (allow.expand(3, 7), Window(1)):
        state = State(carry=carry, offset=0)
        found = inspect(q, k, v, line, allow=rule, state=state)
        plain = attend_plainly(q, k, v, line, allow=rule, state=state)
        assert_agree(found.output, plain.output)
        assert_agree(found.weights(), plain.weights)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_autocast_rounds_no_score_in_tiles_nor_in_their_gradients(line, half):
    situation = Situation()
    spec = parse(line)
    if not situation.suits(spec):
        return
    tensors = [10 * x for x in inputs(situation, dtype=torch.float32)]
    state = state_for(spec, situation, dtype=torch.float32)

    def run(enabled: bool) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        with torch.autocast("cpu", half, enabled=enabled):
            seen = inspect(q, k, v, spec, allow=Causal(), state=state)
            return [seen.output.detach(), seen.weights(), *gradients(seen.output, [q, k, v])]

    if inspect(*tensors, spec, allow=Causal(), state=state).plan.backend == "sdpa" or spec.selection.name == "hopfield":
        return
    # How a state maps q and k, and how q meets the token of a self, is torch's own product, whose gradient autocast rounds where
    # backward runs inside of it.
    own = 2 if spec.geometry.name in ("trace", "additive") or "self_token" in line else None
    for found, expected in zip(run(True)[:own], run(False)[:own], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("line", [*LINES, "cosine | entmax(1.5)", "self_conditioned(form=temperature) | sparsemax"])
def test_a_second_derivative_is_refused_and_never_wrong(line):
    situation = Situation()
    spec = parse(line)
    if not situation.suits(spec):
        return
    q, k, v = inputs(situation)
    q.requires_grad_()
    out = attend(q, k, v, spec, state=state_for(spec, situation))
    (slope,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises((CombinationError, RuntimeError), match=r"no second derivative|derivative for"):
        torch.autograd.grad(slope.square().sum(), q)
