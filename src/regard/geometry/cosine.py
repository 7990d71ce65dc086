"""Cosine of the angle over a temperature, cos(q, k)/τ. LayerNorm does not give this: only unit vectors have q·k = cos θ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..part import Learned, PerHead
from ..state import State
from .base import Geometry, Lowered, Turn, stay


@dataclass(frozen=True)
class Cosine(Geometry):
    name = "cosine"
    temperature: float | Learned = 0.1

    @property
    def per_head(self) -> tuple[PerHead, ...]:
        return (PerHead("temperature", start=0.1),) if self.temperature == "learned" else ()

    @property
    def bare(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self.check_positive("temperature")

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        q, k = turn(q, k)
        return unit(q) @ unit(k).mT / self._temperature(state, q)

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        q, k = turn(q, k)
        temperature = self._temperature(state, q)
        if isinstance(temperature, Tensor):
            return Lowered(unit(q) / temperature, unit(k))
        return Lowered(unit(q), unit(k), 1 / temperature)

    def distance(self, width: int) -> tuple[float, float] | None:
        """Between unit vectors |q−k|² = 2 − 2 cos."""
        return None if self.temperature == "learned" else (0.5 / self.temperature, 1 / self.temperature)

    def compared(self, x: Tensor) -> Tensor:
        return unit(x)

    def with_scale(self, scale: float) -> Cosine:
        return replace(self, temperature=1 / scale)

    def _temperature(self, state: State, q: Tensor) -> float | Tensor:
        if self.temperature == "learned":
            return self.per_head[0].read(state, self, q).view(-1, 1, 1)
        return self.temperature


_SHORTEST = 1024
"""Times the dtype's smallest normal number: the gradient 1/|x| of a shorter vector would overflow."""


def unit(x: Tensor) -> Tensor:
    """x/|x|; 0, with a gradient of 0, for a vector that is 0 or shorter than the dtype can divide by.

    Dividing by the largest component first keeps |x|² from overflowing or vanishing.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    # A factor of 0 makes both the value and the gradient 0. Any other vector is at least 1 long after it, so that the floor
    # of 0.5 is there for those of 0 alone.
    factor = torch.where(largest < _SHORTEST * torch.finfo(x.dtype).tiny, 0, 1 / largest)
    return F.normalize(x * factor, dim=-1, eps=0.5)
