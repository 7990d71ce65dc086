"""Scaled dot product, q·k/√D (Vaswani et al. 2017). √D keeps the variance of a score at 1 for unit-variance q, k."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..state import State
from .base import Geometry, Lowered, Turn, stay


@dataclass(frozen=True)
class Dot(Geometry):
    name = "dot"
    scale: float | None = None

    def __post_init__(self) -> None:
        self.check_positive("scale")

    def scale_for(self, width: int) -> float:
        return self.scale or width**-0.5

    @property
    def bare(self) -> bool:
        return True

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        q, k = turn(q, k)
        return q @ k.mT * self.scale_for(q.shape[-1])

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        q, k = turn(q, k)
        return Lowered(q, k, self.scale_for(q.shape[-1]))

    def with_scale(self, scale: float) -> Dot:
        return replace(self, scale=scale)
