"""Additive attention, w · tanh(W_q q + W_k k) (Bahdanau et al. 2015). Not a dot product, so it runs in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ShapeError, StateError
from ..part import Sizes
from ..state import Additive as Weights
from ..state import State
from .base import Geometry, Lowered, Turn, stay


def additive_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q and k are projected already: (B, H, Q, A) and (B, H, K, A); w is (H, A) or (A)."""
    met = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))
    return (met * w.unsqueeze(-2).unsqueeze(-2)).sum(-1)


@dataclass(frozen=True)
class Additive(Geometry):
    name = "additive"
    needs = ("additive",)
    lowers = False

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        weights = self._weights(state, q)
        q, k = turn(q, k)
        return additive_scores(q @ weights.w_q.mT, k @ weights.w_k.mT, weights.w)

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        weights = self._weights(state, q)
        q, k = turn(q, k)
        if weights.w_k.ndim == 3:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return Lowered(q @ weights.w_q.mT, k @ weights.w_k.mT, pair=additive_scores, params=(weights.w,))

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        H, D = sizes.H, sizes.D
        return {n: torch.randn(shape) * D**-0.5 for n, shape in (("w", (H, D)), ("w_q", (H, D, D)), ("w_k", (H, D, D)))}

    def fill(self, state: State, trained: Mapping[str, Tensor]) -> State:
        if state.additive is not None or "w" not in trained:
            return state
        return replace(state, additive=Weights(trained["w"], trained["w_q"], trained["w_k"]))

    def _weights(self, state: State, q: Tensor) -> Weights:
        weights = state.need("additive", self.name)
        if not isinstance(weights, Weights):
            raise StateError(f"state.additive is a {type(weights).__name__}; pass regard.Additive(w, w_q, w_k)")
        H, D = q.shape[1], q.shape[-1]
        hidden = weights.w.shape[-1]
        for name in ("w", "w_q", "w_k"):
            x: Tensor = getattr(weights, name)
            last = (hidden,) if name == "w" else (hidden, D)
            if tuple(x.shape) not in (last, (H, *last)):
                raise ShapeError(
                    f"state.additive.{name} is {tuple(x.shape)}; with D={D} and {hidden} hidden units it is "
                    f"{last}, or {(H, *last)} with one set per query head"
                )
        return Weights(weights.w.to(q.dtype), weights.w_q.to(q.dtype), weights.w_k.to(q.dtype))
