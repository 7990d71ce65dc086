"""Sparse blending: α-entmax, p = [(α−1)s − τ]₊^{1/(α−1)} with τ such that Σp = 1 (Peters et al. 2019; α = 2: sparsemax).

`plain` finds τ by sorting where a closed form exists (α = 1.5, 2) and by bisection elsewhere. `rows` finds the root of
‖[x − τ]₊‖_e − 1, e = 1/(α−1), by Newton's method. For α ≤ 2 this norm is convex in τ, so that Newton's steps from max(x) − 1
approach the root from one side and never overshoot; it is nearly linear, so few are needed. For α > 2 it is not convex, and
bisection takes turns with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..part import Learned, PerHead
from ..values import transformed
from .base import Given, Kernel, Selection, expected, per_head

_MOST_STEPS = 100


def threshold(x: Tensor, e: float | Tensor) -> Tensor:
    """τ with Σ[x − τ]₊^e = 1 along the last axis, for x whose largest value is 0; x may hold −inf."""
    narrow = 1e-6 if x.dtype != torch.float64 else 1e-13
    convex = bool((e >= 1).all()) if isinstance(e, Tensor) else e >= 1
    tau = torch.full_like(x[..., :1], -1.0)
    low, high = tau, torch.zeros_like(tau)
    for n in range(_MOST_STEPS):
        norm, slope = _norm_and_slope(x, tau, e)
        above = norm - 1
        step = above / slope
        if convex:
            tau = tau + step
            if float(above.max()) <= narrow:
                break
        else:
            low, high = torch.where(above > 0, tau, low), torch.where(above > 0, high, tau)
            if float(above.abs().max()) <= narrow or float((high - low).max()) <= narrow * 0.1:
                break
            tau = tau + step
            # The slope is infinite where a key enters, so Newton can creep: every other step halves the bracket.
            tau = torch.where((tau > low) & (tau < high) & (n % 2 == 0), tau, (low + high) / 2)
    return tau


def _norm_and_slope(x: Tensor, tau: Tensor, e: float | Tensor) -> tuple[Tensor, Tensor]:
    """‖u‖_e and −d‖u‖_e/dτ for u = [x − τ]₊."""
    u = torch.sub(x, tau).clamp_min_(0)
    if isinstance(e, float) and e == 1.0:
        return u.sum(-1, keepdim=True), u.sign_().sum(-1, keepdim=True)
    if isinstance(e, float) and e == 2.0:
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        return norm, u.sum(-1, keepdim=True) / norm
    floored = u.clamp_min(_FLOOR)
    powers = power(floored, e)
    inside = u.sign_()
    total = powers.mul_(inside).sum(-1, keepdim=True)
    norm = total ** (1 / e)
    return norm, powers.div_(floored).sum(-1, keepdim=True) * norm / total


_FLOOR = 1e-30
_LEAST_LOG, _MOST_LOG = -85.0, 60.0
"""log 0, exp of less than this, and denormals take the slow way through the vector units: ten times the time of a pass.

Many numbers at the upper end can still be summed in float32.
"""


def power(u: Tensor, e: float | Tensor) -> Tensor:
    """u^e for u of at least _FLOOR."""
    return u.log().mul_(e).clamp_(_LEAST_LOG, _MOST_LOG).exp_()


def _weights(u: Tensor, e: float | Tensor) -> Tensor:
    """[u]₊^e, in place where that is possible; zeros are exact."""
    u.clamp_min_(0)
    if isinstance(e, float) and e == 1.0:
        return u
    if isinstance(e, float) and e == 2.0:
        return u.square_()
    return power(u.clamp_min(_FLOOR), e).mul_(u.sign_())


class _Entmax(torch.autograd.Function):
    """Newton forward; backward is the closed Jacobian diag(w) − wwᵀ/Σw, w = p^{2−α} on the support."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float | Tensor) -> Tensor:
        x = (scores - scores.amax(-1, keepdim=True)).mul_(alpha - 1)
        e = 1 / (alpha - 1)
        p = _weights(x.sub_(threshold(x, e)), e)
        p = p.div_(p.sum(-1, keepdim=True))
        if isinstance(alpha, Tensor):
            ctx.save_for_backward(p, alpha)
        else:
            ctx.save_for_backward(p)
        ctx.alpha = alpha if isinstance(alpha, float) else None
        return p

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad: Tensor = grad_outputs[0]
        p: Tensor = ctx.saved_tensors[0]
        alpha: float | Tensor = ctx.saved_tensors[1] if ctx.alpha is None else ctx.alpha
        w = _support_weight(p, alpha)
        if isinstance(alpha, Tensor) or alpha > 2:
            # The smallest p has by far the largest w, so that its own gradient is nearly the mean; measured from there, none is lost.
            grad = grad - grad.gather(-1, w.argmax(-1, keepdim=True))
        total = w.sum(-1, keepdim=True)
        mean = (w * grad).sum(-1, keepdim=True) / total
        d_scores = w * (grad - mean)
        if not isinstance(alpha, Tensor) or not ctx.needs_input_grad[1]:
            return d_scores, None
        plogp = torch.special.entr(p).neg_()
        skewed = w / total
        d_alpha = (p - skewed) / (alpha - 1) ** 2 - (plogp - skewed * plogp.sum(-1, keepdim=True)) / (alpha - 1)
        return d_scores, (grad * d_alpha).sum_to_size(alpha.shape)


def _support_weight(p: Tensor, alpha: float | Tensor) -> Tensor:
    if isinstance(alpha, float) and alpha == 1.5:
        return p.sqrt()
    if isinstance(alpha, float) and alpha == 2.0:
        return p.sign()
    return power(p.clamp_min(_FLOOR), 2 - alpha).mul_(p.sign())


def entmax_weights(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """α-entmax along the last axis, with the gradient of the scores and of α (a tensor that broadcasts to a row)."""
    return _Entmax.apply(scores, float(alpha) if isinstance(alpha, int) else alpha)  # pyright: ignore


def entmax_sorted(scores: Tensor, alpha: float) -> Tensor:
    """The closed forms at α = 2 and 1.5, by sorting; every row has a finite score."""
    x = (scores - scores.amax(-1, keepdim=True)) * (alpha - 1)
    z = torch.sort(x, dim=-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    finite = z.masked_fill(z == float("-inf"), -1e4)
    mean = finite.cumsum(-1) / rank
    if alpha == 2.0:
        tau = mean - 1 / rank
    else:
        spread = finite.square().cumsum(-1) / rank - mean.square()
        tau = mean - ((1 / rank) - spread).clamp_min(0).sqrt()
    size = (tau < finite).sum(-1, keepdim=True).clamp_min(1)
    u = (x - tau.gather(-1, size - 1)).clamp_min(0)
    return u if alpha == 2.0 else u.square()


def entmax_bisected(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """Any α > 1, by halving [max − 1, max] until float64 has no more digits; differentiable through τ's last Newton step."""
    # −inf times the gradient of α would be NaN; a score as low as this has the same weight, 0.
    x = (scores - scores.amax(-1, keepdim=True)).clamp_min(-1e30) * (alpha - 1)
    e = 1 / (alpha - 1)
    with torch.no_grad():
        low, high = torch.full_like(x[..., :1], -1.0), torch.zeros_like(x[..., :1])
        for _ in range(60):
            middle = (low + high) / 2
            above = _masked_power(x - middle, e).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        slope = _masked_power(x - low, e - 1).sum(-1, keepdim=True) * e
    # At the root the sum is 1, so this step changes nothing and carries the whole derivative of τ.
    tau = low + (_masked_power(x - low, e).sum(-1, keepdim=True) - 1) / slope
    if transformed():
        # One with its own slope carries the second derivative too, which `torch.func` may ask for.
        slope = _masked_power(x - tau, e - 1).sum(-1, keepdim=True) * e
        tau = tau + (_masked_power(x - tau, e).sum(-1, keepdim=True) - 1) / slope
    return _masked_power(x - tau, e)


def _masked_power(u: Tensor, e: float | Tensor) -> Tensor:
    inside = u > 0
    return torch.where(inside, torch.where(inside, u, 1.0) ** e, 0.0)


@dataclass(frozen=True)
class Entmax(Selection):
    name = "entmax"
    cost = 3
    alpha: float | Learned = 1.5

    def __post_init__(self) -> None:
        if self.alpha == "learned":
            return
        if not isinstance(self.alpha, int | float) or not 1 < self.alpha < float("inf"):
            raise self.refuse("alpha", "alpha must be above 1 (1 is softmax, 2 is sparsemax), or learned")

    @property
    def per_head(self) -> tuple[PerHead, ...]:
        return (PerHead("alpha", start=1.5, above=1.0),) if self.alpha == "learned" else ()

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        alpha = self._alpha(given)
        if isinstance(alpha, float) and alpha in (1.5, 2.0):
            return entmax_sorted(scores, alpha)
        return entmax_bisected(scores, alpha)

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        return entmax_weights(scores, self._alpha(given)), None

    def kernel(self, distance: tuple[float, float] | None) -> Kernel:
        return Kernel("entmax", self.alpha)

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        alpha = self._alpha(given)
        tsallis = (1 - weights.pow(alpha).sum(-1, keepdim=True)) / (alpha * (alpha - 1))
        return -(expected(weights, scores) + tsallis.squeeze(-1))

    def _alpha(self, given: Given) -> float | Tensor:
        return per_head(given.params["alpha"]) if self.alpha == "learned" else float(self.alpha)


@dataclass(frozen=True)
class Sparsemax(Entmax):
    """The projection of a row of scores onto the simplex (Martins & Astudillo 2016)."""

    name = "sparsemax"
    alpha: float | Learned = 2.0

    def __post_init__(self) -> None:
        if self.alpha != 2.0:
            raise self.refuse("alpha", "sparsemax is entmax(2); write entmax(alpha) for another")
