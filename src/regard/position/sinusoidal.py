"""Absolute positions, added to q and k: sinusoids (Vaswani et al. 2017), or a learned table (state.positions).

    PE[p, 2i] = sin(p / base^(2i/D)),   PE[p, 2i+1] = cos(p / base^(2i/D))

Self-attention without a position is permutation *equivariant*, not invariant: a shuffled input gives shuffled outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ShapeError
from ..part import Sizes
from ..state import State
from .base import Position


@lru_cache(maxsize=32)
def sinusoids(length: int, width: int, base: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """(N, D) for positions 0, 1, …, computed in float64 so that long positions keep their phase."""
    if width % 2:
        raise ShapeError(f"sinusoids come in pairs (sin, cos), and the width is {width}; make it even")
    # The table outlives the call: made under inference mode it could never be trained with.
    with torch.inference_mode(False):
        rate = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
        angle = torch.arange(length, device=device, dtype=torch.float64).unsqueeze(-1) * rate
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Sinusoidal(Position):
    name = "sinusoidal"
    turns = True
    base: float = 10000.0

    def __post_init__(self) -> None:
        self.check_positive("base")

    def apply(self, x: Tensor, start: int, state: State) -> Tensor:
        if start < 0:
            raise ShapeError(f"sinusoidal: the first query stands at {start}; positions count from 0")
        stop = start + x.shape[-2]
        return x + sinusoids(stop, x.shape[-1], self.base, x.device)[start:].to(x.dtype)


_TRAINED_LENGTH = 1024
"""Places in the table that a module trains."""


@dataclass(frozen=True)
class LearnedPosition(Position):
    name = "learned"
    turns = True
    needs = ("positions",)

    def apply(self, x: Tensor, start: int, state: State) -> Tensor:
        table = state.tensor("positions", self.name)
        last = start + x.shape[-2] - 1
        if table.ndim != 2 or table.shape[1] != x.shape[-1] or last >= table.shape[0] or start < 0:
            raise ShapeError(
                f"state.positions is {tuple(table.shape)}; position {last} of vectors of width {x.shape[-1]} needs at "
                f"least ({last + 1}, {x.shape[-1]})"
            )
        return x + table[start : last + 1].to(x.dtype)

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"positions": torch.randn(_TRAINED_LENGTH, sizes.D) * 0.02}
