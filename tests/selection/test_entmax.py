"""Sparse blending against published values, against the package `entmax`, and its own identities."""

import entmax as package
import pytest
import torch
from helpers import F64, assert_agree, random
from hypothesis import given
from hypothesis import strategies as st

from regard import State, attend, inspect
from regard.selection import entmax_weights
from regard.selection.entmax import entmax_bisected, entmax_sorted

PUBLISHED = torch.tensor([-2.0, 0.0, 0.5], dtype=F64)
ALPHAS = [1.05, 1.2, 1.5, 1.7, 2.0]
STEEP = [2.1, 2.5, 4.0]


def test_published_values_of_the_package():
    assert_agree(entmax_weights(PUBLISHED, 2.0), torch.tensor([0, 0.25, 0.75], dtype=F64))
    torch.testing.assert_close(entmax_weights(PUBLISHED, 1.5), torch.tensor([0, 0.3260, 0.6740], dtype=F64), rtol=0, atol=5e-5)


def test_published_gradients_of_the_package():
    """The weights at alpha 1.25 and how each moves with alpha; finite differences give the same."""
    alpha = torch.tensor(1.25, dtype=F64, requires_grad=True)
    weights = entmax_weights(PUBLISHED, alpha)
    torch.testing.assert_close(weights, torch.tensor([0.0053, 0.3521, 0.6426], dtype=F64), rtol=0, atol=5e-5)
    found = torch.stack([torch.autograd.grad(w, alpha, retain_graph=True)[0] for w in weights])
    torch.testing.assert_close(found, torch.tensor([-0.1123, -0.0590, 0.1713], dtype=F64), rtol=0, atol=5e-5)
    assert_agree(found, (entmax_weights(PUBLISHED, 1.25 + 1e-5) - entmax_weights(PUBLISHED, 1.25 - 1e-5)) / 2e-5, atol=1e-6)


@pytest.mark.parametrize("ours", [entmax_weights, entmax_sorted])
@pytest.mark.parametrize(("alpha", "theirs"), [(2.0, package.sparsemax), (1.5, package.entmax15)])
def test_equals_the_package_with_gradients(alpha, theirs, ours):
    x = random(13, 11, scale=2).requires_grad_()
    assert_same(ours(x, alpha), theirs(x, dim=-1), [x])


@pytest.mark.parametrize("ours", [entmax_weights, entmax_bisected])
@pytest.mark.parametrize("alpha", [*ALPHAS, *STEEP])
def test_equals_the_package_s_bisection_with_the_gradient_of_alpha(alpha, ours):
    x = random(13, 11, scale=2).requires_grad_()
    a = torch.full((13, 1), alpha, dtype=F64, requires_grad=True)
    # The package subtracts the same maximum but bisects without a last step, so that its own error is 1e-9.
    assert_same(ours(x, a), package.entmax_bisect(x, a, dim=-1, n_iter=100), [x, a], rtol=1e-6, atol=1e-8)


def assert_same(actual, expected, leaves, **tolerance):
    assert_agree(actual, expected, **tolerance)
    direction = random(*actual.shape)
    for a, b in zip(*(torch.autograd.grad((y * direction).sum(), leaves) for y in (actual, expected)), strict=True):
        assert_agree(a, b, **tolerance)


@given(
    st.lists(st.floats(-30, 30, allow_subnormal=False), min_size=1, max_size=9),
    st.sampled_from([*ALPHAS, *STEEP]),
    st.floats(-1e3, 1e3),
)
def test_one_row_alone_is_exact_sums_to_one_and_ignores_a_shift(row, alpha, shift):
    x = torch.tensor([row], dtype=F64)
    p = entmax_weights(x, alpha)
    assert_agree(p, package.entmax_bisect(x, alpha, dim=-1, n_iter=100), rtol=1e-6, atol=1e-8)
    assert_agree(p.sum(-1), torch.ones(1, dtype=F64))
    assert (p >= 0).all()
    assert_agree(entmax_weights(x + shift, alpha), p, atol=1e-7)
    order = torch.argsort(x, dim=-1)
    assert (p.gather(-1, order).diff() >= -1e-12).all(), "a larger score has no smaller weight"


@pytest.mark.parametrize("alpha", [*ALPHAS, *STEEP])
def test_one_hot_exactly_when_the_gap_reaches_one_over_alpha_minus_one(alpha):
    gap = 1 / (alpha - 1)
    for factor, sure in ((0.99, False), (1.01, True)):
        weights = entmax_weights(torch.tensor([[0.0, -gap * factor]], dtype=F64), alpha)
        assert bool(weights[0, 1] == 0) is sure


def test_sparsemax_of_a_distribution_is_itself():
    p = torch.softmax(random(7, 5), dim=-1)
    assert_agree(entmax_weights(p, 2.0), p)


def test_jacobian_is_the_closed_form():
    x = random(7)
    for alpha in ALPHAS:
        p = entmax_weights(x, alpha)
        w = torch.where(p > 0, p ** (2 - alpha), 0)
        expected = torch.diag(w) - torch.outer(w, w) / w.sum()
        assert_agree(torch.autograd.functional.jacobian(lambda z, a=alpha: entmax_weights(z, a), x), expected)


def test_alpha_near_one_is_softmax_and_a_large_alpha_is_hard():
    x = random(5, 7)
    torch.testing.assert_close(entmax_weights(x, 1.0001), torch.softmax(x, -1), rtol=0, atol=1e-3)
    assert ((entmax_weights(x, 40.0) > 0.5).sum(-1) <= 1).all()


def test_each_head_learns_its_own_alpha():
    q, k, v = (random(2, 3, 11, 6) for _ in range(3))
    alpha = torch.tensor([1.1, 1.5, 2.0], dtype=F64, requires_grad=True)
    seen = inspect(q, k, v, "entmax(learned)", state=State(alpha=alpha))
    support = seen.support.double().mean((0, 2))
    assert support[0] > support[1] > support[2]
    for head, value in enumerate((1.1, 1.5, 2.0)):
        assert_agree(seen.output[:, head], attend(q, k, v, f"entmax({value})")[:, head])
    seen.output.square().sum().backward()
    assert (alpha.grad.abs() > 1e-6).all()


def test_energy_is_minus_the_largest_regularised_value():
    """No other distribution reaches a lower −⟨p, s⟩ − H(p): the weights minimise it."""
    q, k, v = (random(1, 2, 5, 4) for _ in range(3))
    for line, alpha in (("sparsemax", 2.0), ("entmax(1.5)", 1.5)):
        seen = inspect(q, k, v, line)
        scores = q @ k.mT / 2
        for _ in range(20):
            p = torch.softmax(random(1, 2, 5, 5, scale=2), -1)
            value = (p * scores).sum(-1) + (1 - p.pow(alpha).sum(-1)) / (alpha * (alpha - 1))
            assert (seen.energy <= -value + 1e-9).all()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("alpha", [3.0, 4.0, 6.0, 9.0, "learned"])
def test_gradients_of_a_steep_alpha_are_finite_and_sum_to_zero(alpha, native, monkeypatch):
    """Above α = 2 a small weight has a large slope: p^(2−α) of a weight of 0 is infinite, and a small one drowns the others."""
    if not native:
        monkeypatch.setattr("regard.attention.native.library", lambda: None)
    steep = 5.0 if alpha == "learned" else alpha
    small = 1e-4 ** (1 / (steep - 1))
    # Two weights, small and 1 − small, and a key that has none.
    gap = ((1 - small) ** (steep - 1) - small ** (steep - 1)) / (steep - 1)
    keys = torch.tensor([0.0, -gap, -9.0]).view(1, 1, 3, 1).requires_grad_()
    values = torch.tensor([1003.0, 1004.0, 1005.0]).view(1, 1, 3, 1)
    out = attend(
        torch.ones(1, 1, 1, 1), keys, values, f"dot(scale=1) | entmax({alpha})", state=State(alpha=torch.tensor([steep]))
    )
    (found,) = torch.autograd.grad(out, keys)
    slopes = torch.tensor([1 - small, small], dtype=F64) ** (2 - steep)
    slope = float(slopes.prod() / slopes.sum())
    torch.testing.assert_close(found.flatten().double(), torch.tensor([-slope, slope, 0], dtype=F64), rtol=2e-2, atol=0)
