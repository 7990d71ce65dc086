"""A selection says how a row of scores becomes a choice.

`plain` is the definition that tests trust: the whole matrix of scores to the whole matrix of weights. `rows` is the same
map for one tile of queries, as fast as we can make it; by default it *is* `plain`. A score of −inf is a pair that may not
meet; every row that reaches a selection has at least one finite score, since rows with nothing allowed are taken out before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..part import Part


@dataclass(frozen=True)
class Given:
    """What a tile knows beside its scores."""

    at: Tensor
    """Positions of the tile's queries (R)."""
    empty: Tensor | None = None
    """(#B, #H, R): rows with nothing allowed; their scores are placeholders."""
    slots: int = 0
    """How many of the last columns are slots, not keys."""
    carry: Tensor | None = None
    """What earlier rows left behind, for a selection that carries."""
    row_bias: Tensor | None = None
    """(B, H, R), what the scores lack to be the geometry's own."""
    distance: tuple[float, float] | None = None
    """(c, top) with scores = top − c · distance², where the geometry is a distance."""
    params: Mapping[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())


@dataclass(frozen=True)
class Selection(Part, ABC):
    needs: ClassVar[tuple[str, ...]] = ()
    carries: ClassVar[bool] = False
    """True when a row's choice depends on earlier rows."""
    absolute: ClassVar[bool] = False
    """True when a constant added to a row changes the choice."""
    picks: ClassVar[bool] = False
    """True when a row keeps one key, so that the output is a gather and no product."""
    sums_to_one: ClassVar[bool] = True
    natural_geometry: ClassVar[str] = "dot"
    cost: ClassVar[int] = 1
    """Tiles the row map keeps alive in training, to size the tiles by."""

    @abstractmethod
    def plain(self, scores: Tensor, given: Given) -> Tensor:
        """The definition: scores (B, H, Q, K) to weights of the same shape."""

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        """One tile: its weights, and what the next tile has to know."""
        return self.plain(scores, given), None

    def index(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        """For selections that pick: the key of each row, and where the pick is accepted (None: everywhere)."""
        raise TypeError(f"{self.name} does not pick one key")

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor | None:
        """−max over p of ⟨p, scores⟩ + H(p), the free energy that this selection's weights attain; None: it has none."""
        return None


def expected(weights: Tensor, scores: Tensor) -> Tensor:
    """⟨p, s⟩ with 0 · −inf = 0."""
    return (weights * scores.masked_fill(weights == 0, 0)).sum(-1)


def one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, index.unsqueeze(-1), 1)


def per_head(x: Tensor) -> Tensor:
    """(H) against tiles (B, H, R, C)."""
    return x.view(-1, 1, 1)
