"""T5's relative bias: a trained number per head and bucket of distances (Raffel et al. 2020), state.relative (buckets, H).

Half of the buckets are exact distances, the other half grow logarithmically up to `max_distance`. With `direction=both`
past and future have buckets of their own; with `past` the future shares bucket 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ShapeError
from ..part import Sizes
from ..state import State
from .base import Position


@dataclass(frozen=True)
class Relative(Position):
    name = "relative"
    biases = True
    shift_invariant = True
    needs = ("relative",)
    buckets: int = 32
    max_distance: int = 128
    direction: Literal["both", "past"] = "both"

    def __post_init__(self) -> None:
        self.check_positive("buckets", "max_distance")
        self.check_choice("direction", ("both", "past"))
        for p in ("buckets", "max_distance"):
            if not isinstance(getattr(self, p), int):
                raise self.refuse(p, f"{p} must be a whole number")
        if self.buckets % 4:
            raise self.refuse("buckets", "buckets split in two directions and two scales, so they are a multiple of 4")
        exact = self.buckets // (4 if self.direction == "both" else 2)
        if self.max_distance <= exact:
            raise self.refuse("max_distance", f"{exact} of the buckets are exact distances, so it must be above {exact}")

    def bucket(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """(Q, K) of bucket numbers."""
        back = q_at.unsqueeze(-1) - k_at
        count, first = self.buckets, torch.zeros_like(back)
        if self.direction == "both":
            count //= 2
            first = torch.where(back < 0, count, 0)
            back = back.abs()
        back = back.clamp_min(0)
        exact = count // 2
        ratio = torch.log(back.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).to(torch.long)).clamp_max(count - 1)
        return first + torch.where(back < exact, back, far)

    def bias(self, q_at: Tensor, k_at: Tensor, like: Tensor, table: Tensor | None) -> Tensor:
        heads = like.shape[1]
        if table is None or tuple(table.shape) != (self.buckets, heads):
            given = None if table is None else tuple(table.shape)
            raise ShapeError(f"state.relative is {given}; {self} with {heads} heads needs ({self.buckets}, {heads})")
        return table[self.bucket(q_at, k_at)].permute(2, 0, 1).to(like.dtype)

    def table(self, state: State) -> Tensor:
        return state.tensor("relative", self)

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"relative": torch.zeros(self.buckets, sizes.H)}
