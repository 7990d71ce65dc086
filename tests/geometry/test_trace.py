"""Trace: what it attracts and repels, its gradient, its bound, and that nothing is exactly nothing."""

import pytest
import torch
import torch.nn.functional as F
from helpers import F64, assert_agree, gradients, random

from regard import Causal, LowRank, State, attend, explain, inspect
from regard.attention.reference import attend_plainly
from regard.nn import Attention


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(random(*shape), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("position", ["", " | rope"])
def test_zero_trace_is_bit_identical_to_torch(dtype, position):
    q, k, v = (random(2, 4, 13, 16, dtype=dtype) for _ in range(3))
    plain = attend(q, k, v, "dot" + position, allow=Causal())
    if not position:
        assert torch.equal(plain, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    for nothing in (
        torch.zeros(4, 16, 16),
        LowRank(torch.zeros(4, 16, 2)),
        LowRank(torch.randn(4, 16, 2), signs=torch.zeros(2)),
    ):
        seen = inspect(q, k, v, "trace(gamma=0.3)" + position, allow=Causal(), state=State(trace=nothing))
        assert torch.equal(seen.output, plain)
        assert "bit-identical" in str(seen.plan)


def test_zero_trace_that_is_trained_still_has_its_gradient():
    q, k, v = (random(1, 2, 7, 4) for _ in range(3))
    T = torch.zeros(2, 4, 4, dtype=F64, requires_grad=True)
    (grad,) = gradients(attend(q, k, v, "trace", state=State(trace=T)), [T])
    assert grad.abs().max() > 1e-3


def test_score_is_the_published_formula():
    q, k, T = random(1, 1, 5, 4), random(1, 1, 7, 4), random(1, 4, 4)
    expected = torch.empty(5, 7, dtype=F64)
    for i in range(5):
        for j in range(7):
            delta = q[0, 0, i] - k[0, 0, j]
            expected[i, j] = q[0, 0, i] @ k[0, 0, j] / 2 - 0.3 * delta @ T[0] @ delta
    plain = attend_plainly(q, k, k, "trace(gamma=0.3)", state=State(trace=T))
    assert_agree(plain.scores[0, 0], expected)
    assert_agree(inspect(q, k, k, "trace(gamma=0.3)", state=State(trace=T)).weights()[0, 0], torch.softmax(expected, -1))


def weight_of_the_pair(T: torch.Tensor, q: torch.Tensor, k: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    row = torch.cat([k.view(1, 1, 1, -1), keys], 2)
    return inspect(q.view(1, 1, 1, -1), row, row, "trace", state=State(trace=T.view(1, 1, *T.shape[-2:]))).weights()[0, 0, 0]


@pytest.mark.parametrize("seed", range(7))
def test_k_by_q_attracts_its_pair_and_delta_by_delta_repels_it(seed):
    torch.manual_seed(seed)
    q, k, others = unit(64), unit(64), unit(1, 1, 31, 64)
    delta = k - q
    base = weight_of_the_pair(torch.zeros(64, 64, dtype=F64), q, k, others)
    drawn = weight_of_the_pair(4 * torch.outer(k, q), q, k, others)
    pushed = weight_of_the_pair(4 * torch.outer(delta, delta), q, k, others)
    assert drawn[0] > 5 * base[0]
    assert int(drawn.argmax()) == 0, "the imprinted pair beats every other key"
    assert pushed[0] < base[0] / 5


def test_score_of_the_imprinted_pair_is_beta_times_one_minus_c_squared():
    q, k = unit(16), unit(16)
    scores = attend_plainly(
        *(x.view(1, 1, 1, 16) for x in (q, k, k)), "trace(base=none)", state=State(trace=3 * torch.outer(k, q).unsqueeze(0))
    ).scores
    assert_agree(scores.flatten()[0], 3 * (1 - q @ k) ** 2)


def test_a_rescaled_key_between_the_norms_is_repelled():
    """k = 2q gives −2β: with general norms the sign of k ⊗ q is not safe, which is why norm=unit exists."""
    q = unit(16)
    T = torch.outer(2 * q, q).unsqueeze(0)
    here = [x.view(1, 1, 1, 16) for x in (q, 2 * q, q)]
    assert_agree(
        attend_plainly(*here, "trace(base=none)", state=State(trace=T)).scores.flatten()[0], torch.tensor(-2.0, dtype=F64)
    )
    assert_agree(
        attend_plainly(*here, "trace(base=none, norm=unit)", state=State(trace=T)).scores.flatten()[0],
        torch.tensor(0.0, dtype=F64),
    )


def test_gradient_is_symmetric_and_the_antisymmetric_part_is_inert():
    q, k, v = (random(2, 2, 7, 6) for _ in range(3))
    T = random(2, 6, 6, scale=0.2).requires_grad_()
    out = attend(q, k, v, "trace(gamma=0.5)", allow=Causal(), state=State(trace=T))
    (grad,) = gradients(out, [T])
    assert_agree(grad, grad.mT)
    assert grad.abs().max() > 1e-3
    twisted = random(2, 6, 6, scale=10)
    assert_agree(attend(q, k, v, "trace(gamma=0.5)", allow=Causal(), state=State(trace=T + twisted - twisted.mT)), out)


def test_gradient_of_surprise_is_a_signed_sum_of_delta_by_delta():
    """∂L/∂T = −γ Σ_ij g_ij δδᵀ with g the gradient of the scores."""
    q, k, v, T = random(1, 1, 5, 4), random(1, 1, 7, 4), random(1, 1, 7, 3), random(1, 4, 4, scale=0.2).requires_grad_()
    out = attend(q, k, v, "trace(gamma=0.7)", state=State(trace=T))
    direction = random(1, 1, 5, 3)
    (grad,) = torch.autograd.grad((out * direction).sum(), T)
    weights = inspect(q, k, v, "trace(gamma=0.7)", state=State(trace=T)).weights()[0, 0]
    g = weights * torch.einsum("ie,ije->ij", direction[0, 0], v[0, 0][None] - out.detach()[0, 0][:, None])
    delta = q[0, 0][:, None] - k[0, 0][None]
    assert_agree(grad[0], -0.7 * torch.einsum("ij,ijd,ije->de", g, delta, delta))
    assert (g > 1e-4).any()
    assert (g < -1e-4).any()


def test_unit_norm_bounds_the_metric_s_share_of_a_score():
    q, k, T = random(1, 2, 11, 6, scale=50), random(1, 2, 13, 6, scale=50), random(2, 6, 6)
    scores = attend_plainly(q, k, k, "trace(gamma=0.3, base=none, norm=unit)", state=State(trace=T)).scores
    largest = torch.linalg.matrix_norm((T + T.mT) / 2, ord=2).view(1, 2, 1, 1)
    assert (scores.abs() <= 4 * 0.3 * largest + 1e-9).all()
    assert scores.abs().max() > 0.1


def test_metric_does_not_see_the_position():
    """A common shift of all places changes nothing, since T acts before RoPE turns q and k."""
    q, k, v, T = random(1, 2, 5, 6), random(1, 2, 5, 6), random(1, 2, 5, 6), random(2, 6, 6, scale=0.3)
    out = attend(q, k, v, "trace(gamma=0.5) | rope", state=State(trace=T))
    for shift in (1, 17, 1000):
        pad = random(1, 2, shift, 6)
        later = torch.zeros(5, shift + 5, dtype=torch.bool)
        later[:, shift:] = True
        moved = attend(
            q, *(torch.cat([pad, x], 2) for x in (k, v)), "trace(gamma=0.5) | rope", allow=later, state=State(trace=T)
        )
        assert_agree(moved, out, atol=1e-8)


def test_low_rank_factors_are_their_dense_product():
    q, k, v = random(2, 4, 7, 6), random(2, 2, 7, 6), random(2, 2, 7, 6)
    for trace in (
        LowRank(random(2, 6, 2)),
        LowRank(random(2, 6, 2), random(2, 6, 2)),
        LowRank(random(2, 6, 2), signs=random(2)),
    ):
        for line in ("trace(gamma=0.3)", "trace(gamma=0.3) | rope", "trace(base=none) | sparsemax"):
            assert_agree(
                attend(q, k, v, line, state=State(trace=trace)), attend(q, k, v, line, state=State(trace=trace.dense()))
            )


def test_one_trace_for_each_batch_row():
    q, k, v, T = random(3, 2, 7, 6), random(3, 2, 7, 6), random(3, 2, 7, 6), random(3, 2, 6, 6, scale=0.3)
    for line in ("trace(gamma=0.3)", "trace(gamma=0.3) | rope", "trace(base=none) | entmax(1.5)"):
        together = attend(q, k, v, line, state=State(trace=T))
        for b in range(3):
            one = attend(*(x[b : b + 1] for x in (q, k, v)), line, state=State(trace=T[b]))
            assert_agree(together[b : b + 1], one)


def test_a_negative_eigenvalue_makes_a_long_key_win_and_stays_finite():
    """An indefinite T scores a key t·e by ½t² for every query; a positive one lets it vanish."""
    e = torch.zeros(8, dtype=F64)
    e[0] = 1
    q, k = random(1, 1, 31, 8), random(1, 1, 15, 8)
    for sign, wins in ((-0.5, True), (0.5, False)):
        T = (sign * torch.outer(e, e)).unsqueeze(0)
        row = torch.cat([k, 5 * e.view(1, 1, 1, 8)], 2)
        seen = inspect(q, row, row, "trace", state=State(trace=T))
        assert seen.output.isfinite().all()
        assert bool(seen.weights()[..., -1].mean() > 0.9) is wins


def test_explain_names_the_width_that_the_metric_costs():
    q, k, v = (random(1, 2, 64, 8) for _ in range(3))
    costs = {
        line: explain(q, k, v, line, state=State(trace=T)).flops
        for line, T in (
            ("trace", random(2, 8, 8)),
            ("trace | rope", random(2, 8, 8)),
            ("trace(norm=unit)", LowRank(random(2, 8, 2))),
        )
    }
    assert costs["trace"] < costs["trace(norm=unit)"] < costs["trace | rope"]


def test_module_takes_its_trace_with_the_call():
    module = Attention(12, 2, "trace(gamma=0.3)").to(F64)
    x, T = random(1, 5, 12), random(2, 6, 6)
    assert not torch.equal(module(x, state=State(trace=T)), module(x, state=State(trace=torch.zeros_like(T))))
    with pytest.raises(ValueError, match=r"needs state\.trace"):
        module(x)
