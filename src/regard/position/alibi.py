"""ALiBi: −m_h · |i − j|, a slope per head (Press et al. 2022). Slopes are 2^(−8h/H), interpolated off powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Position


def slopes(heads: int) -> list[float]:
    whole = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (h + 1) / whole) for h in range(whole)]
    between = [2 ** (-8 * (h + 1) / (2 * whole)) for h in range(0, 2 * (heads - whole), 2)]
    return first + between


@dataclass(frozen=True)
class Alibi(Position):
    name = "alibi"
    biases = True
    shift_invariant = True

    def bias(self, q_at: Tensor, k_at: Tensor, like: Tensor, table: Tensor | None) -> Tensor:
        far = (q_at.unsqueeze(-1) - k_at).abs().to(like.dtype)
        return far * -torch.tensor(slopes(like.shape[1]), device=like.device, dtype=like.dtype).view(-1, 1, 1)

    def slope_per_head(self, heads: int) -> list[float]:
        return slopes(heads)
