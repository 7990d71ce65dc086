"""Affect: a warp of the scores against its formula, its limits, its order, its gradients, and nothing at all without affect."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import F64, assert_agree, random

from regard import Causal, Self, State, attend, explain
from regard.attention.reference import attend_plainly
from regard.geometry.affect import affected
from regard.nn import Attention

H, W, S = 3, 6, 3


def posed():
    return random(2, H, 7, W), random(2, H, 7, W), random(2, H, 7, W)


def someone(s=None, **weights) -> State:
    return State(self=Self(random(S) if s is None else s, {"w": random(H, S), "t": random(H, S, scale=0.3), **weights}))


def test_the_scores_are_warped_by_the_formula():
    q, k, v = posed()
    w, t, s = random(H, S), random(H, S), random(S)
    e = q @ k.mT / W**0.5
    lean, gain = (w @ s).tanh().view(H, 1, 1), (t @ s).exp().view(H, 1, 1)
    expected = torch.softmax(gain * (e + lean * torch.log(torch.cosh(e))), -1) @ v
    assert_agree(attend(q, k, v, "affect", state=someone(s, w=w, t=t)), expected)


@pytest.mark.parametrize("lean", [-1.0, -0.6, 0.0, 0.3, 1.0])
def test_the_order_of_the_keys_never_changes(lean):
    e = torch.linspace(-12, 12, 4001, dtype=F64)
    assert bool((affected(e, torch.tensor(lean, dtype=F64), torch.tensor(0.7, dtype=F64)).diff() > 0).all())


def test_full_affect_flattens_one_side_and_doubles_the_other():
    e = torch.linspace(-30, 30, 401, dtype=F64)
    one = torch.ones((), dtype=F64)
    assert_agree(affected(e, one, one), F.softplus(2 * e) - math.log(2))
    assert_agree(affected(e, -one, one), math.log(2) - F.softplus(-2 * e))


def test_scores_of_any_size_stay_finite():
    e = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30], dtype=torch.float32, requires_grad=True)
    for lean in (-1.0, 0.5, 1.0):
        found = affected(e, torch.tensor(lean), torch.ones(()))
        (slope,) = torch.autograd.grad(found.sum(), e)
        assert torch.isfinite(found).all()
        assert_agree(slope, 1 + lean * e.detach().tanh(), atol=1e-6)


def test_without_the_warp_it_is_a_temperature():
    q, k, v = posed()
    t, s = random(H, S), random(S)
    cool = attend(q, k, v, "self_conditioned(form=temperature)", state=State(self=Self(s, {"w": t})))
    assert_agree(attend(q, k, v, "affect", state=someone(s, w=torch.zeros(H, S, dtype=F64), t=t)), cool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rest", ["softmax", "entmax(1.5) | rope", "topk(3) | alibi"])
def test_no_affect_is_bit_identical_to_plain_attention(dtype, rest):
    q, k, v = (x.to(dtype) for x in posed())
    weights = {n: random(H, S, dtype=dtype) for n in "wt"}
    nobody = State(self=Self(torch.zeros(S, dtype=dtype), weights))
    assert torch.equal(attend(q, k, v, f"affect | {rest}", allow=Causal(), state=nobody), attend(q, k, v, rest, allow=Causal()))


def test_a_self_that_is_trained_starts_at_plain_attention_and_has_a_gradient():
    q, k, v = posed()
    s = torch.zeros(S, dtype=F64, requires_grad=True)
    out = attend(q, k, v, "affect", state=someone(s))
    assert_agree(out, attend(q, k, v))
    (slope,) = torch.autograd.grad(out.square().sum(), s)
    assert slope.abs().min() > 1e-6


def test_jacobian_at_zero_is_the_covariance_of_values_and_what_affect_adds():
    q, k, v = (x[:1] for x in posed())
    w, t = random(H, S), random(H, S)
    found = torch.autograd.functional.jacobian(
        lambda s: attend(q, k, v, "affect", state=someone(s, w=w, t=t)), torch.zeros(S, dtype=F64)
    )
    e = q @ k.mT / W**0.5
    a = e.softmax(-1)
    centred = v.unsqueeze(2) - (a @ v).unsqueeze(3)
    added = torch.einsum("bhqk,hs->bhqks", e, t) + torch.einsum("bhqk,hs->bhqks", e.cosh().log(), w)
    assert_agree(found, torch.einsum("bhqk,bhqke,bhqks->bhqes", a, centred, added))


def test_gradients_are_those_of_finite_differences():
    q, k, v = (random(1, H, 4, W).requires_grad_() for _ in range(3))
    s, w, t = (random(*shape).requires_grad_() for shape in ((2, S), (H, S), (H, S)))
    q, k, v = (x.detach().repeat(2, 1, 1, 1).requires_grad_() for x in (q, k, v))

    def run(*x):
        q, k, v, s, w, t = x
        return attend(q, k, v, "affect | rope", allow=Causal(), state=State(self=Self(s, {"w": w, "t": t})))

    out = run(q, k, v, s, w, t)
    assert not torch.allclose(out, attend(q, k, v, "rope", allow=Causal()), atol=1e-3)
    assert torch.autograd.gradcheck(run, (q, k, v, s, w, t))


def test_each_row_of_a_batch_has_its_own_affect():
    q, k, v = posed()
    weights = {n: random(H, S) for n in "wt"}
    s = random(2, S)
    both = attend(q, k, v, "affect", state=State(self=Self(s, weights)))
    for b in range(2):
        alone = attend(*(x[b : b + 1] for x in (q, k, v)), "affect", state=State(self=Self(s[b], weights)))
        assert_agree(both[b : b + 1], alone)


def test_a_thousand_keys_in_tiles_are_the_plain_definition():
    q, k, v = random(1, H, 300, W), random(1, 1, 1000, W), random(1, 1, 1000, W)
    state = someone()
    assert_agree(attend(q, k, v, "affect", state=state), attend_plainly(q, k, v, "affect", state=state).output)


def test_explain_says_why_it_runs_in_tiles_and_when_it_is_off():
    q, k, v = posed()
    assert "affect is no dot product" in str(explain(q, k, v, "affect", state=someone()))
    off = explain(q, k, v, "affect", state=someone(torch.zeros(S, dtype=F64)))
    assert off.backend == "sdpa"
    assert "bit-identical to dot" in str(off)


def test_a_module_trains_its_weights_and_an_episode_brings_s():
    attention = Attention(12, heads=3, spec="affect", self_width=S)
    assert set(attention.trained) == {"self_w", "self_t"}
    x, s = torch.randn(2, 5, 12), torch.randn(2, S)
    attention(x, state=State(self=Self(s))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in attention.trained.values())
