"""Hard numbers: a finite result that is right, or an error that says what overflowed; never a silent NaN."""

import pytest
import torch
from helpers import GEOMETRY_SPECS, SELECTION_SPECS, Situation, every, inputs, joined, state_for

from regard import Causal, NumericsError, State, attend, inspect, parse

SITUATION = Situation(queries=5, keys=5)
SCALES = [1e4, 1e-4, 1e18, 1e-18, 1e30, 1e-30]
LINES = [*every(SELECTION_SPECS), *every(GEOMETRY_SPECS)]


def finite_or_refused(q, k, v, spec, state):
    try:
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = attend(q, k, v, spec, allow=Causal(), state=state)
    except NumericsError as error:
        said = str(error)
        return "overflow" in said or "not finite" in said
    return bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("line", LINES)
def test_huge_and_tiny_norms_give_a_finite_result_or_say_why_not(line, scale, dtype):
    spec = parse(line)
    q, k, v = inputs(SITUATION, dtype=dtype)
    state = state_for(spec, SITUATION, dtype=dtype)
    for pair in ((q * scale, k), (q, k * scale), (q * scale, k * scale)):
        assert finite_or_refused(*pair, v, spec, state)


@pytest.mark.parametrize("line", every(SELECTION_SPECS))
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_scores_of_ten_thousand_are_exact(line, size):
    """One key is ahead by a wide margin: whatever the selection, the row keeps it, in float32 as in float64.

    Where no score is weighed, the result is finite.
    """
    if line == "energy":
        return
    spec = joined("dot(scale=1)" if "gd" not in line else "euclidean(scale=1)", line)
    q = torch.full((1, 3, 2, 1), size)
    k = torch.tensor([0.5, 1.0, 0.2, -1.0]).view(1, 1, 4, 1).repeat(1, 3, 1, 1)
    k = k * size if "gd" in line else k * (1 if size > 0 else -1)
    v = torch.eye(4).view(1, 1, 4, 4).repeat(1, 3, 1, 1)
    seen = inspect(q, k, v, spec, state=State(alpha=torch.tensor([1.2, 1.5, 2.0]), temperature=torch.tensor([0.5, 1.0, 2.0])))
    assert seen.output.isfinite().all()
    kept = seen.output[0, 1, 0]
    if spec.inner.weighs_vectors:
        return
    if line in ("monotonic", "monotonic(mode=hard)"):
        assert kept.tolist() == [1, 0, 0, 0]
    elif "steps" not in line and "keep=all" not in line:
        assert int(kept.argmax()) == 1
        torch.testing.assert_close(kept, torch.tensor([0.0, 1, 0, 0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("line", [*every(SELECTION_SPECS), *every(GEOMETRY_SPECS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_are_shared_equally_or_go_to_the_first(line, dtype):
    spec = parse(line)
    q = torch.zeros(2, 3, 5, 6, dtype=dtype)
    k = torch.ones(2, 3, 5, 6, dtype=dtype)
    v = inputs(SITUATION, dtype=dtype)[2]
    state = state_for(spec, SITUATION, dtype=dtype)
    weights = inspect(q, k, v, spec, state=state).weights()
    assert weights.isfinite().all()
    if "topk" in line:
        kept = 3 if line == "topk(3)" else 2
        spread = [1 / kept] * kept + [0] * (5 - kept)
        assert torch.allclose(weights[0, 0, 0], torch.tensor(spread, dtype=dtype))
    elif line in ("hard", "gd", "gd(coherence=0.2)", "monotonic(mode=hard)"):
        assert weights.argmax(-1).eq(0).all()
    elif line == "hard(tie=right)":
        assert weights.argmax(-1).eq(4).all()
    elif line not in ("monotonic", "selective") and not spec.inner.ordered:
        assert (weights.amax(-1) - weights.amin(-1)).max() < 1e-6


def test_zero_vectors_have_no_direction_and_no_nan():
    for line in ("cosine", "trace(norm=unit)", "cosine | gd"):
        q, k, v = (torch.zeros(1, 2, 3, 4, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, line, state=State(trace=torch.eye(4).repeat(2, 1, 1)))
        assert out.isfinite().all()
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("line", LINES)
def test_gradients_stay_finite_at_large_scores(line):
    spec = parse(line)
    q, k, v = (x.requires_grad_() for x in inputs(SITUATION, dtype=torch.float32))
    state = state_for(spec, SITUATION, dtype=torch.float32)
    out = attend(q * 100, k * 10, None if line == "energy" else v, spec, allow=Causal(), state=state)
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True) if out.requires_grad else ()
    assert all(g is None or g.isfinite().all() for g in grads)


def test_an_overflow_names_the_sizes_and_a_way_out():
    q, k, v = inputs(SITUATION, dtype=torch.float32)
    with pytest.raises(NumericsError, match=r"overflow torch.float32: the largest \|q\|, \|k\|, \|v\| are .*e\+3.*normalise"):
        attend(q * 1e30, k * 1e30, v, "dot")
