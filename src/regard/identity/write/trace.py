"""Trace: a tensor T per layer and key head that deforms the metric, score = … − (q−k)ᵀT(q−k), written by experience.

    published   T' = λT + α tanh|shock| k⊗q                              as it was printed; only its symmetric part is ever seen
    centred     the same on q̃ = unit(q − q̄), k̃ = unit(k − k̄)             q̄, k̄ the base model's own means
    delta       T' = λT + β Σ (±1 − k̃ᵀT q̃) sym(k̃⊗q̃)                      writes what is missing, so that repetition does not grow it;
                                                                         the sign is that of affect

Plain k⊗q tells people apart badly: raw keys all point the same way, so two people's traces have cosine 0.98; centring removes that.
sym(k⊗q) is never a metric (eigenvalues (k·q ± |k||q|)/2), so T is kept as L diag(±1) Lᵀ: its strongest directions of each sign,
with a bound on its eigenvalues, and λ forgets toward the start, which is no trace at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import SpecError
from ..experience import Experience
from ..packed import Packed
from ..state import TraceState

STRONGEST = 32
"""Tokens of an experience, the most shocking ones, that the delta rule writes one after another."""


@dataclass(frozen=True)
class TraceRule:
    """How an experience is written into T."""

    write: Literal["published", "centred", "delta"] = "delta"
    rate: float = 0.05
    decay: float = 0.98
    """λ: what is left of T after an experience."""
    bound: float = 4.0
    """The largest eigenvalue, either way; scores then stay within 4 · bound."""
    rank: int = 8

    def __post_init__(self) -> None:
        if self.write not in ("published", "centred", "delta"):
            raise SpecError(f"write={self.write!r} is not one of published, centred, delta")
        if not 0 <= self.decay <= 1 or self.rank < 2 or self.rank % 2 or self.bound <= 0:
            raise SpecError(f"{self}: decay lies in 0..1, rank is even and at least 2, bound is above 0")


def dense(trace: TraceState) -> Float[Tensor, "L G D D"]:
    left = trace.left.dense()
    return left.mT @ (left * trace.signs[:, None].float())


def written(
    old: Float[Tensor, "L G D D"],
    e: Experience,
    rule: TraceRule,
    means: tuple[Tensor, Tensor] | None = None,
    gain: Float[Tensor, "L G"] | None = None,
) -> Float[Tensor, "L G D D"]:
    """T after an experience. `means` are q̄ and k̄ (L, G, D); `gain` is how strongly each head writes."""
    said = e.content.nonzero().flatten()
    G = e.k.shape[1]
    # One query per key head: the mean of the group that shares it.
    q, k = e.q.unflatten(1, (G, -1)).mean(2)[:, :, said].cpu(), e.k[:, :, said].cpu()
    aim = -1.0 if e.affect < 0 else 1.0
    depth = e.shock[said].abs().tanh().cpu() * abs(e.affect) * rule.rate
    if rule.write != "published":
        if means is not None:
            q, k = q - means[0][:, :, None], k - means[1][:, :, None]
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if gain is None:
        gain = torch.ones(e.k.shape[0], G)
    if rule.write != "delta":
        new = torch.einsum("lgnd,lgne,n->lgde", k, q, aim * depth)
        return rule.decay * old + gain[..., None, None] * _symmetric(new)
    now = rule.decay * old
    for t in e.shock[said].cpu().topk(min(STRONGEST, len(said))).indices.sort().values.tolist():
        kt, qt = k[:, :, t], q[:, :, t]
        missing = aim - torch.einsum("lgd,lgde,lge->lg", kt, now, qt)
        pair = _symmetric(kt[..., :, None] * qt[..., None, :])
        now = now + (depth[t] * gain * missing)[..., None, None] * pair
    return now


def compressed(T: Float[Tensor, "L G D D"], rule: TraceRule) -> TraceState:
    """The strongest directions of each sign, half of the rank for each, and no eigenvalue beyond the bound."""
    values, vectors = torch.linalg.eigh(_symmetric(T).double())
    half = rule.rank // 2
    columns = torch.cat([vectors[..., -half:], vectors[..., :half]], -1)
    size = torch.cat([values[..., -half:].clamp(min=0), -values[..., :half].clamp(max=0)], -1).clamp(max=rule.bound)
    signs = torch.cat([torch.ones(half), -torch.ones(half)]).to(torch.int8)
    return TraceState(Packed.of((columns * size.sqrt()[..., None, :]).mT.float()), signs)


def spectrum(trace: TraceState) -> Float[Tensor, "L G R"]:
    """Eigenvalues of T, largest first: what a picture of a trace shows."""
    left = trace.left.dense().double()
    # T = Lᵀ Σ L has the eigenvalues of Σ L Lᵀ, a matrix as small as the rank.
    small = trace.signs[:, None].double() * (left @ left.mT)
    return torch.linalg.eigvals(small).real.sort(-1, descending=True).values.float()


def cosine(a: TraceState, b: TraceState) -> float:
    """How alike two traces are, over all layers and heads at once."""
    x, y = dense(a).flatten(), dense(b).flatten()
    return float(F.cosine_similarity(x, y, dim=0))


def _symmetric(T: Tensor) -> Tensor:
    return (T + T.mT) / 2


__all__ = ["TraceRule", "compressed", "cosine", "dense", "spectrum", "written"]
