"""The self: `uniform` proven inert in exact arithmetic, and the identities of the forms that act."""

import random as exact_random
from fractions import Fraction

import pytest
import torch
from helpers import F64, assert_agree, random

from regard import Causal, Self, State, attend, inspect

H, W, S = 3, 6, 3


def given(form_weights: dict, s=None) -> State:
    return State(self=Self(random(S) if s is None else s, form_weights))


def posed():
    return random(2, H, 7, W), random(2, H, 7, W), random(2, H, 7, W)


def choice(scores: list[int]) -> list[Fraction]:
    """A softmax of base 2 in rational numbers: no rounding anywhere."""
    powers = [Fraction(2) ** s for s in scores]
    return [p / sum(powers) for p in powers]


def test_a_constant_along_a_row_cancels_exactly():
    draw = exact_random.Random(0)
    for _ in range(200):
        scores = [draw.randint(-20, 20) for _ in range(draw.randint(1, 9))]
        constant = draw.randint(-1000, 1000)
        assert choice([s + constant for s in scores]) == choice(scores)
    assert choice([0, 1]) != choice([0, 2])


def test_uniform_self_does_nothing_and_learns_nothing():
    q, k, v = posed()
    u = random(H, S).requires_grad_()
    s = random(S).requires_grad_()
    for line in ("softmax", "entmax(1.5)", "topk(3)", "hard"):
        out = attend(q, k, v, f"self_conditioned(form=uniform) | {line}", allow=Causal(), state=given({"u": u}, s))
        assert_agree(out, attend(q, k, v, line, allow=Causal()))
        if out.requires_grad:
            grads = torch.autograd.grad(out.square().sum(), (u, s), allow_unused=True)
            assert all(g is None or g.abs().max() < 1e-12 for g in grads)


def test_uniform_self_acts_where_a_choice_is_absolute():
    """A threshold, unlike a softmax, sees a constant: this is what makes the scalar live."""
    q, k, v = posed()
    lifted = given({"u": torch.full((H, S), 9.0, dtype=F64)}, torch.ones(S, dtype=F64))
    line = "self_conditioned(form=uniform) | abstain(softmax, threshold=3)"
    assert inspect(q, k, v, line, state=lifted).accepted.all()
    assert not inspect(q, k, v, "abstain(softmax, threshold=3)").accepted.all()


def test_temperature_multiplies_the_scores():
    q, k, v = posed()
    w, s = random(H, S), random(S)
    scores = q @ k.mT / W**0.5 * torch.exp(w @ s).view(H, 1, 1)
    assert_agree(attend(q, k, v, "self_conditioned(form=temperature)", state=given({"w": w}, s)), torch.softmax(scores, -1) @ v)


def test_key_bias_adds_k_dot_u_s():
    q, k, v = posed()
    U, s = random(H, W, S), random(S)
    scores = q @ k.mT / W**0.5 + torch.einsum("bhkd,hds,s->bhk", k, U, s).unsqueeze(-2)
    assert_agree(attend(q, k, v, "self_conditioned(form=key_bias)", state=given({"U": U}, s)), torch.softmax(scores, -1) @ v)


def test_low_rank_bends_the_query():
    q, k, v = posed()
    A, B, C, s = random(H, W, 2), random(2, S), random(H, 2, W), random(S)
    bend = torch.eye(W, dtype=F64) + A @ torch.diag(B @ s) @ C
    bent = torch.einsum("hde,bhqe->bhqd", bend, q)
    assert_agree(
        attend(q, k, v, "self_conditioned(form=low_rank)", state=given({"A": A, "B": B, "C": C}, s)), attend(bent, k, v)
    )


def test_null_slot_is_a_gate_on_the_log_sum_exp():
    """o = σ(LSE + u·s) · o_standard."""
    q, k, v = posed()
    u, s = random(H, S), random(S)
    lse = torch.logsumexp(q @ k.mT / W**0.5, -1)
    gate = torch.sigmoid(lse + (u @ s).view(1, H, 1))
    found = attend(q, k, v, "self_conditioned(form=null_slot)", state=given({"u": u}, s))
    assert_agree(found, gate.unsqueeze(-1) * attend(q, k, v))


def test_self_token_is_one_more_key_at_the_gate_of_s():
    q, k, v = posed()
    W_k, W_v, s = random(H, W, S), random(H, W, S), random(S)
    key, value = (torch.einsum("hds,s->hd", m, s).expand(2, H, W).unsqueeze(2) for m in (W_k, W_v))
    n = s.square().sum()
    scores = torch.cat([q @ k.mT, q @ key.mT], -1) / W**0.5
    scores[..., -1] += torch.log(n / (1 + n))
    expected = torch.softmax(scores, -1) @ torch.cat([v, value], 2)
    assert_agree(attend(q, k, v, "self_conditioned(form=self_token)", state=given({"W_k": W_k, "W_v": W_v}, s)), expected)


WEIGHTS = {
    "uniform": {"u": (H, S)},
    "temperature": {"w": (H, S)},
    "key_bias": {"U": (H, W, S)},
    "low_rank": {"A": (H, W, 2), "B": (2, S), "C": (H, 2, W)},
    "self_token": {"W_k": (H, W, S), "W_v": (H, W, S)},
}


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_self_is_bit_identical_to_plain_attention(form, dtype):
    q, k, v = (x.to(dtype) for x in posed())
    weights = {n: random(*shape, dtype=dtype) for n, shape in WEIGHTS[form].items()}
    line = f"self_conditioned(form={form})"
    nobody = State(self=Self(torch.zeros(S, dtype=dtype), weights))
    assert torch.equal(attend(q, k, v, line, state=nobody), attend(q, k, v))
    # A self that is being trained is not bypassed, and starts from the same place.
    s = torch.zeros(S, dtype=dtype, requires_grad=True)
    out = attend(q, k, v, line, state=State(self=Self(s, weights)))
    torch.testing.assert_close(out, attend(q, k, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["temperature", "key_bias"])
def test_jacobian_at_zero_is_the_covariance_of_values_and_what_s_moves(form):
    q, k, v = (x[:1] for x in posed())
    weights = {n: random(*shape) for n, shape in WEIGHTS[form].items()}
    line = f"self_conditioned(form={form})"
    found = torch.autograd.functional.jacobian(
        lambda s: attend(q, k, v, line, state=State(self=Self(s, weights))), torch.zeros(S, dtype=F64)
    )
    a = torch.softmax(q @ k.mT / W**0.5, -1)
    centred = v.unsqueeze(2) - (a @ v).unsqueeze(3)
    expected = {
        "temperature": lambda: torch.einsum("bhqk,bhqke,bhqk,hs->bhqes", a, centred, q @ k.mT / W**0.5, weights["w"]),
        "key_bias": lambda: torch.einsum("bhqk,bhqke,bhkd,hds->bhqes", a, centred, k, weights["U"]),
    }[form]()
    assert_agree(found, expected)


def test_key_bias_before_rope_is_relative():
    q, k, v = (x[:1] for x in posed())
    state = given({"U": random(H, W, S)})
    line = "self_conditioned(form=key_bias) | rope"
    pad = random(1, H, 100, W)
    later = torch.cat([torch.zeros(7, 100, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool)], -1)
    moved = attend(q, torch.cat([pad, k], 2), torch.cat([pad, v], 2), line, allow=later, state=state)
    assert_agree(moved, attend(q, k, v, line, state=state), atol=1e-8)
