"""Trace: a metric written by experience, q·k/√D − γ (q−k)ᵀ T (q−k), or the metric alone with base=none.

Only T + Tᵀ is seen: (q−k)ᵀT(q−k) = qᵀTq [constant along the row] − qᵀ(T+Tᵀ)k + kᵀTk. So one product k(T+Tᵀ) gives both
the new keys and the bias per key, and the whole costs one fused call, where the definition makes an N·N·D tensor
(docs/maths.md, “Trace: one fused call”).

T acts on q and k as they are before any position turns them: after RoPE it would depend on absolute position. With
`norm=unit` the metric sees unit vectors, which bounds its share of a score by 4γ‖T‖.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ShapeError, StateError
from ..position.base import Position
from ..state import LowRank, State, magnitude
from .base import Geometry, Lowered, Turn, stay
from .bending import bent
from .cosine import unit


@dataclass(frozen=True)
class Trace(Geometry):
    name = "trace"
    needs = ("trace",)
    reads_unturned = True
    gamma: float = 1.0
    base: Literal["dot"] | None = "dot"
    norm: Literal["raw", "unit"] = "raw"

    def __post_init__(self) -> None:
        if not isinstance(self.gamma, int | float) or not abs(self.gamma) < float("inf"):
            raise self.refuse("gamma", "gamma must be a finite number")
        if self.base not in ("dot", None):
            raise self.refuse("base", "base must be dot or none")
        self.check_choice("norm", ("raw", "unit"))

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        q_m, k_m = self._seen(q, k)
        trace = self._trace(state, q, None)
        narrow = trace.dense() if isinstance(trace, LowRank) else trace
        T = narrow.repeat_interleave(q.shape[1] // narrow.shape[-3], dim=-3)
        delta = q_m.unsqueeze(-2) - k_m.unsqueeze(-3)
        metric = -self.gamma * torch.einsum("bhqkd,bhde,bhqke->bhqk", delta, T.expand(q.shape[0], *T.shape[-3:]), delta)
        if self.base is None:
            return metric
        q, k = turn(q, k)
        return q @ k.mT * q.shape[-1] ** -0.5 + metric

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        trace = self._trace(state, q, k.shape[1])
        heads = (trace.left if isinstance(trace, LowRank) else trace).shape[-3]
        group = q.shape[1] // heads
        q_m, k_m = self._seen(q, k)
        scale = 1.0 if self.base is None else q.shape[-1] ** -0.5
        strength = self.gamma / scale
        q_t, k_t = (q, k) if self.base is None else turn(q, k)
        joined = self.base is not None and q_t is q and k_t is k and self.norm == "raw"
        # The map goes on whichever side T counts its heads by, so that no key is repeated for its queries.
        if heads == k.shape[1]:
            seen = bent(k_m, _symmetric(trace, strength), -0.5 * scale, onto=joined)
            if seen is None:
                mapped = _doubled(k_m, trace, strength)
                seen = k + mapped if joined else mapped, torch.linalg.vecdot(k_m, mapped) * (-0.5 * scale)
            metric, key_bias = (q_m, seen[0]), seen[1]
        else:
            metric = (_doubled(q_m, trace, strength), k_m)
            k_wide = k_m.repeat_interleave(heads // k.shape[1], dim=1)
            key_bias = torch.linalg.vecdot(k_wide, _doubled(k_wide, trace, strength)) * (-0.5 * scale)

        def row_bias() -> Tensor:
            T = trace.dense() if isinstance(trace, LowRank) else trace
            return -self.gamma * torch.linalg.vecdot(q_m, q_m @ T.repeat_interleave(group, dim=-3))

        if self.base is None:
            return Lowered(*metric, scale, key_bias, row_bias)
        if joined:
            q, k = (q, metric[1]) if heads == k.shape[1] else (q + metric[0], k)
            return Lowered(q, k, scale, key_bias, row_bias)
        # The content is turned and the metric is not, so the metric's product takes columns of its own.
        if isinstance(trace, LowRank) and heads == k.shape[1]:
            a, b = trace.symmetric()
            metric = (q_m @ (strength * a).repeat_interleave(group, dim=-3), k_m @ b)
        return Lowered(torch.cat([q_t, metric[0]], -1), torch.cat([k_t, metric[1]], -1), scale, key_bias, row_bias)

    def distance(self, width: int) -> tuple[float, float] | None:
        return (self.gamma, 0.0) if self.base is None and self.gamma > 0 else None

    def idle(self, state: State) -> bool:
        tensors = self._tensors(state)
        silent = self.gamma == 0 or min(magnitude(t, "state.trace") for t in tensors) == 0
        return silent and self.base is not None and not any(t.requires_grad for t in tensors)

    def lowered_width(self, width: int, turned: bool, state: State) -> int:
        if self.base is None or (self.norm == "raw" and not turned):
            return width
        trace = state.trace
        if isinstance(trace, LowRank):
            return width + trace.left.shape[-1] * (1 if trace.right is None else 2)
        return 2 * width

    def lowering_flops(self, keys: int, width: int) -> int:
        return 2 * keys * width * width

    def refuses(self, position: Position) -> str | None:
        if self.base is not None or not position.turns:
            return None
        at = position.name
        return f"the metric acts before {at} turns q and k, so {at} would do nothing; use base=dot or alibi"

    def _tensors(self, state: State) -> list[Tensor]:
        trace = state.need("trace", self)
        if not isinstance(trace, Tensor | LowRank):
            raise StateError(f"state.trace is a {type(trace).__name__}; it must be a tensor (G, D, D) or a LowRank")
        return trace.tensors() if isinstance(trace, LowRank) else [trace]

    def _seen(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (unit(q), unit(k)) if self.norm == "unit" else (q, k)

    def _trace(self, state: State, q: Tensor, key_heads: int | None) -> Tensor | LowRank:
        """The state's trace, checked against the shapes; the plain definition, whose keys are repeated, knows no G."""
        trace = state.trace
        if not isinstance(trace, Tensor | LowRank):
            raise StateError(f"{self} needs state.trace")
        batch, H, _, D = q.shape
        G = key_heads or H
        factors = [trace.left, trace.right] if isinstance(trace, LowRank) else [trace]
        for t in factors:
            if t is None:
                continue
            square = isinstance(trace, LowRank) or t.shape[-1] == D
            if t.ndim not in (3, 4) or (key_heads and t.shape[-3] not in (G, H)) or t.shape[-2] != D or not square:
                raise ShapeError(
                    f"state.trace is {tuple(t.shape)}; a trace is square, (G, D, D) = ({G}, {D}, {D}) per key head or "
                    f"(H, D, D) = ({H}, {D}, {D}) per query head, or factors (G, D, R), with a batch in front if wanted"
                )
            if t.ndim == 4 and t.shape[0] not in (1, batch):
                raise ShapeError(f"state.trace is {tuple(t.shape)} and q has a batch of {batch}; give one T for each row")
        if isinstance(trace, LowRank):
            left, right = trace.left.to(q.dtype), None if trace.right is None else trace.right.to(q.dtype)
            if right is not None and right.shape != left.shape:
                raise ShapeError(f"state.trace has left {tuple(left.shape)} and right {tuple(right.shape)}; make them equal")
            if trace.signs is not None and tuple(trace.signs.shape) != (left.shape[-1],):
                raise ShapeError(
                    f"state.trace has signs {tuple(trace.signs.shape)}; with rank {left.shape[-1]} they are ({left.shape[-1]},)"
                )
            return LowRank(left, right, None if trace.signs is None else trace.signs.to(q.dtype))
        return trace.to(q.dtype)


def _symmetric(trace: Tensor | LowRank, strength: float) -> Tensor:
    """strength · (T + Tᵀ), D × D for each head."""
    if isinstance(trace, Tensor):
        return strength * (trace + trace.mT)
    a, b = trace.symmetric()
    return (strength * a) @ b.mT


def _doubled(x: Tensor, trace: Tensor | LowRank, strength: float) -> Tensor:
    """strength · x(T + Tᵀ), through the factors where there are factors; the number is folded into the small tensor."""
    if isinstance(trace, Tensor):
        return x @ (strength * (trace + trace.mT))
    a, b = trace.symmetric()
    return (x @ (strength * a)) @ b.mT
