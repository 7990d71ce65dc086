"""Selections that hold what keys left in a matrix of fixed size: keys are written once for all rows, and no pair of a row and a key is made
beyond a chunk.

That takes a rule under which all rows write the same keys: every key or, under `Causal`, every key up to the row's own, but for keys
that are hidden from all rows (padding). Under any other rule each row has writes of its own, and tiles make its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CombinationError
from ..selection.fast_weights import CHUNK, FastWeights
from ..selection.linear import Linear
from ..values import readable
from .allow import All, Allow, Both, Call, Causal, Tile, rule, same_for_all
from .gradients import only_once
from .problem import Problem
from .tiled import trains


@dataclass(frozen=True)
class Order:
    """A rule under which all rows write the same keys."""

    causal: bool
    shown: Allow | None
    """Which keys are there at all; None: every one."""

    def real(self, lo: int, hi: int, device: torch.device) -> Tensor | None:
        """(#B, #H, hi − lo)."""
        if self.shown is None:
            return None
        tile = self.shown.tile(Tile(0, 1, lo, hi, 0, device))[..., 0, :]
        return tile.expand(*tile.shape[:2], hi - lo)


def order(allow: Allow) -> Order | None:
    """The order of writes under a bound rule; None where each row has its own."""
    if isinstance(allow, Both):
        a, b = order(allow.a), order(allow.b)
        if a is None or b is None:
            return None
        shown = a.shown if b.shown is None else b.shown if a.shown is None else a.shown & b.shown
        return Order(a.causal or b.causal, shown)
    if isinstance(allow, (Causal, All)):
        return Order(isinstance(allow, Causal), None)
    return Order(False, allow) if same_for_all(allow) else None


def scan(p: Problem, how: Order) -> Tensor:
    """The output of a problem whose keys are all there."""
    linear = _linear(p)
    q, k, v, real = _heads(p, how.real(0, p.k.shape[2], p.q.device), linear)
    job = Job(linear, how.causal, p.offset, real, p.memo is not None and p.memo.again)
    return Scanned.apply(job, q, k, v) if trains(q, k, v) else job(q, k, v)  # pyright: ignore


@dataclass(frozen=True, eq=False)
class Job:
    """Everything about a problem that is not a differentiable tensor."""

    linear: Linear
    causal: bool
    offset: int
    real: Tensor | None
    again: bool = False
    """True where the result is known, and only its gradient is wanted."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = FastWeights.empty(self.linear, k, v)
        if not self.causal:
            return weights.write(k, v, self.real).read(q)
        return _causal(weights, (q, k, v), self.real, self.offset)


class Scanned(torch.autograd.Function):
    """Forward keeps q, k and v alone. Backward makes the chunks again, in full precision wherever it is called."""

    @staticmethod
    def forward(ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(q, k, v)
        return v.new_zeros(1).expand(*q.shape[:3], v.shape[-1]) if job.again else job(q, k, v)

    @staticmethod
    @only_once
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)]
        with torch.enable_grad():
            out = ctx.job(*parts)
        wanted = [x for x in parts if x.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad_outputs[0], allow_unused=True))
        return None, *(next(grads) if x.requires_grad else None for x in parts)


def _causal(weights: FastWeights, qkv: tuple[Tensor, Tensor, Tensor], real: Tensor | None, offset: int) -> Tensor:
    """Rows before the first key, those that stand at a key, and those after the last."""
    q, k, v = qkv
    Q, K = q.shape[2], k.shape[2]
    before = min(max(-offset, 0), Q)
    first = min(max(offset, 0), K)
    both = min(Q - before, K - first)
    keys = slice(first, first + both)
    shown = (None, None) if real is None else (real[..., :first], real[..., keys])
    weights = weights.write(k[:, :, :first], v[:, :, :first], shown[0])
    pieces = [v.new_zeros(*q.shape[:2], before, v.shape[-1])]
    if both:
        met, weights = weights.meet(q[:, :, before : before + both], k[:, :, keys], v[:, :, keys], shown[1])
        pieces.append(met)
    if before + both < Q:
        pieces.append(weights.read(q[:, :, before + both :]))
    return torch.cat(pieces, dim=2)


def scan_after(p: Problem, how: Order, held: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """New tokens, which are both the rows and the keys of the problem, after `held` that are in the carry; and the next carry."""
    linear, K = _linear(p), p.k.shape[2]
    q, k, v, real = _heads(p, how.real(held, held + K, p.q.device), linear)
    weights = FastWeights.empty(linear, k, v) if carry is None else FastWeights.unpacked(linear, carry, k.shape[1], v.dtype)
    earlier = how.real(0, held, p.q.device)
    if earlier is not None and readable(weights.count) and not bool((earlier.sum(-1, keepdim=True) == weights.count).all()):
        raise CombinationError(
            f"{p.spec}: what was written cannot be hidden again, and this rule shows other keys than those {held} steps wrote; "
            "hide a key when it comes, or begin with an empty cache under the new rule"
        )
    if how.causal:
        out, weights = weights.meet(q, k, v, real)
    else:
        weights = weights.write(k, v, real)
        out = weights.read(q)
    return out, weights.packed().to(p.q.dtype)


def order_after(allow: Allow | Tensor | None, p: Problem, held: int) -> Order | None:
    """The order of writes where a rule for all tokens so far meets the new ones alone."""
    B, H, _, Q, K, _, _ = p.sizes
    ruled = rule(allow)
    ruled.check(Call(B, H, Q, held + K, held, p.q.device))
    return order(ruled.bind(held + K))


def flops(p: Problem) -> int:
    """Of features, writes, reads and pairs within chunks."""
    B, H, G, Q, K, D, E = p.sizes
    linear = _linear(p)
    F = linear.features_for(D)
    made = 2 * D * F * (H * Q + G * K) if linear.map == "exp" else 0
    solved = G * K * CHUNK * (2 * F + E) if linear.delta is not None else 0
    return B * (made + solved + 2 * F * (E + 1) * (H * Q + G * K) + 2 * H * Q * min(CHUNK, K) * (F + E))


def _linear(p: Problem) -> Linear:
    assert isinstance(p.inner, Linear)
    return p.inner


def _heads(p: Problem, real: Tensor | None, linear: Linear) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v as the recurrence takes them; keys of their own for each query head where the rule tells those apart."""
    given, v = p.weighed(p.lower()), p.v
    q, k = given["q"], given["k"]
    if real is not None and real.shape[1] > k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if linear.map == "exp":
        # Features span hundreds of nats, which float32 does not hold.
        q, k, v = q.double(), k.double(), v.double()
    return q, k, v, real
