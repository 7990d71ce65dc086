"""Squared distance, −c|q−k|². The cross term is a dot product, |k|² a bias per key, |q|² constant along the row.

`euclidean` takes c = 1/√D, as dot does, so that keys of one norm give exactly dot's weights up to a factor 2 in
temperature. `rbf` is the fixed Gaussian kernel of kernel methods, κ = exp(−γ|q−k|²), with γ = 1/D unless given; under
softmax it is the Nadaraya–Watson smoother.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from ..state import State
from .base import Geometry, Lowered, Turn, stay


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


@dataclass(frozen=True)
class Distance(Geometry):
    """−c|q−k|²; a subclass names c."""

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        return -self.factor(q.shape[-1]) * squared_distance(*turn(q, k))

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        q, k = turn(q, k)
        c = self.factor(q.shape[-1])
        # A common shift of q and k changes no distance, and keeps |k|² small enough not to drown the cross term.
        centre = k.detach().mean(-2, keepdim=True)
        k = k - centre
        q = q - (centre if q.shape[1] == k.shape[1] else centre.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        return Lowered(q, k, 2 * c, -c * k.square().sum(-1), lambda: -c * q.square().sum(-1))

    def distance(self, width: int) -> tuple[float, float]:
        return self.factor(width), 0.0

    @abstractmethod
    def factor(self, width: int) -> float:
        """c for vectors of this width."""


@dataclass(frozen=True)
class Euclidean(Distance):
    name = "euclidean"
    scale: float | None = None

    def __post_init__(self) -> None:
        self.check_positive("scale")

    def factor(self, width: int) -> float:
        return self.scale or width**-0.5

    def with_scale(self, scale: float) -> Euclidean:
        return replace(self, scale=scale)


@dataclass(frozen=True)
class Rbf(Distance):
    name = "rbf"
    gamma: float | None = None

    def __post_init__(self) -> None:
        self.check_positive("gamma")

    def factor(self, width: int) -> float:
        return self.gamma or 1 / width

    def with_scale(self, scale: float) -> Rbf:
        return replace(self, gamma=scale)
