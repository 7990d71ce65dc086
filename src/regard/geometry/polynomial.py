"""The polynomial kernel of kernel methods, κ = (q·k/√D + c)^p, as a kernel smoother: the score is log κ.

The degree is even, since an odd one makes negative weights, which no choice over a row of scores can express.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..state import State
from .base import Geometry, Lowered, Turn, stay


def polynomial_scores(q: Tensor, k: Tensor, degree: int, constant: float) -> Tensor:
    base = q @ k.mT * q.shape[-1] ** -0.5 + constant
    return degree * base.abs().clamp_min(torch.finfo(base.dtype).tiny).log()


@dataclass(frozen=True)
class Polynomial(Geometry):
    name = "polynomial"
    lowers = False
    degree: int = 2
    constant: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.degree, int) or self.degree < 2 or self.degree % 2:
            raise self.refuse("degree", "the degree must be an even whole number, so that no weight is negative")
        if not isinstance(self.constant, int | float) or not abs(self.constant) < float("inf"):
            raise self.refuse("constant", "the constant must be a finite number")

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        return polynomial_scores(*turn(q, k), self.degree, self.constant)

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        q, k = turn(q, k)
        return Lowered(q, k, pair=partial(polynomial_scores, degree=self.degree, constant=self.constant))
