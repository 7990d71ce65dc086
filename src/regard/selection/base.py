"""A selection says how a row of scores becomes a choice.

`plain` is the definition that tests trust: the whole matrix of scores to the whole matrix of weights. `rows` is the same
map for one tile of queries, as fast as we can make it; by default it *is* `plain`. A score of −inf is a pair that may not
meet; every row that reaches a selection has at least one finite score, since rows with nothing allowed are taken out before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..geometry.base import Geometry
from ..part import Learned, Part
from ..position.base import Position


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
    q: Tensor | None = None
    """(B, H, R, D), for a selection that weighs vectors: what the geometry multiplies, times the root of its scale."""
    k: Tensor | None = None
    """(B, G, C, D), likewise."""


@dataclass(frozen=True)
class Refusal:
    """How a row may be refused: by what falls on a slot of this score, or by a largest score below this threshold."""

    null_logit: float | None
    threshold: float | None


@dataclass(frozen=True)
class Jump:
    """From each query to the key it chose; rows that were refused point nowhere (index −1, the rest zero)."""

    index: Tensor
    distance: Tensor
    direction: Tensor
    point: Tensor
    energy: Tensor
    coherence: Tensor


@dataclass(frozen=True)
class Kernel:
    """A row map as a kernel of a device knows it, online over blocks of keys."""

    kind: Literal["entmax", "picks", "relaxed", "topk"]
    """α-entmax; the key of the largest score; softmax; softmax among the `keep` largest."""
    alpha: float | Learned = 1.0
    """Entmax's own; for the others the inverse temperature of the softmax, or of what a pick's gradient relaxes to."""
    right: bool = False
    """Ties go to the rightmost key."""
    keep: int = 0
    least: float | None = None
    """The geometry's own score below which a key is refused."""
    flat_at_top: bool = False
    """No score counts above that of distance 0, which matters where a bias raises scores: the kernel does not know it."""


class Reach(NamedTuple):
    """Where a tile of scores stands: its query rows, and its first key."""

    rows: slice
    first: int
    scores: Tensor
    given: Given


@dataclass(frozen=True)
class Selection(Part, ABC):
    carries: ClassVar[bool] = False
    """True when a row's choice depends on earlier rows."""
    absolute: ClassVar[bool] = False
    """True when a constant added to a row changes the choice."""
    both_sides: ClassVar[bool] = False
    """True when the result is what rows read of the keys and what keys read of the rows, (B, H, N, 2D); v is not read."""
    weighs_vectors: ClassVar[bool] = False
    """True when weights are made of q and k themselves (`Given.q`, `Given.k`); of the scores it reads which are −inf."""
    sums_to_one: ClassVar[bool] = True
    natural_geometry: ClassVar[str] = "dot"
    cost: ClassVar[int] = 1
    """Tiles the row map keeps alive in training, to size the tiles by."""
    not_in_abstain: ClassVar[str | None] = None
    """Why `abstain` has no meaning around it, or None."""
    not_in_pointer: ClassVar[str | None] = None
    """Why `pointer` has no meaning around it, or None."""

    @abstractmethod
    def plain(self, scores: Tensor, given: Given) -> Tensor:
        """The definition: scores (B, H, Q, K) to weights of the same shape."""

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        """One tile: its weights, and what the next tile has to know."""
        return self.plain(scores, given), None

    def features_for(self, width: int) -> int:
        """Features of a head of this width, where the selection weighs vectors by some."""
        return width

    @property
    def signed(self) -> bool:
        """True when weights may be negative."""
        return False

    @property
    def ordered(self) -> bool:
        """True when the order of the keys matters, beside the positions that they have."""
        return False

    def shift_invariant(self, position: Position) -> bool:
        """True when a text gives after hidden keys what it gives alone."""
        return position.shift_invariant and not self.carries

    @property
    def picks(self) -> bool:
        """True when a row keeps one key, so that the output is a gather and no product."""
        return False

    def index(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        """For selections that pick: the key of each row, and where the pick is accepted (None: everywhere)."""
        raise TypeError(f"{self.name} does not pick one key")

    def kernel(self, distance: tuple[float, float] | None) -> Kernel | None:
        """The kernel that computes this row map, on a geometry of this `distance`; None where there is none."""
        return None

    @property
    def softmax_temperature(self) -> float | Learned | None:
        """τ where the weights are softmax(s/τ), which the fused kernels compute; None where they are no softmax."""
        return None

    @property
    def hides_nan(self) -> bool:
        """True when finite weights can come of scores that are not, so that q and k are looked at too."""
        return False

    def reads_row_bias(self, training: bool) -> bool:
        """True when the row map sees the geometry's own scores, and not only up to a constant along the row."""
        return self.absolute

    def carry_shape(self, B: int, H: int, K: int) -> tuple[int, ...]:
        """Of what a selection that carries leaves behind; keys are the last axis."""
        return B, H, K

    def start_carry(self, B: int, H: int, K: int, like: Tensor) -> Tensor:
        """The carry before the first row."""
        return like.new_zeros(self.carry_shape(B, H, K))

    def repeats(self, geometry: Geometry) -> tuple[Geometry, Selection, int] | None:
        """For a choice that is made more than once, its result the next query: geometry and selection of a step, and how many."""
        return None

    def unwrap(self) -> tuple[Selection, Refusal | None, bool]:
        """The row map inside, the refusal around it, and whether the weights themselves are the result."""
        return self, None, False

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        """Why this selection has no meaning on a geometry, or with slots beside the keys; or None."""
        return None

    def refuses_position(self, position: Position) -> str | None:
        """Why this selection has no meaning with a position, or None."""
        return None

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor | None:
        """−max over p of ⟨p, scores⟩ + H(p), the free energy that this selection's weights attain; None: it has none."""
        return None

    def retrieval_energy(self, lse: Tensor, beta: float, state: Tensor, count: Tensor, largest: Tensor) -> Tensor | None:
        """For a selection that repeats: the energy of the last query, from the log-sum-exp of its scores at scale β.

        `count` and `largest` are the number of keys that it may meet, and the largest norm among them.
        """
        return None

    def jump(self, q: Tensor, k: Tensor, tiles: Iterable[Reach]) -> Jump | None:
        """The story of each row's choice, for a selection that has one; k has as many heads as q."""
        return None


def expected(weights: Tensor, scores: Tensor) -> Tensor:
    """⟨p, s⟩ with 0 · −inf = 0."""
    return (weights * scores.masked_fill(weights == 0, 0)).sum(-1)


def one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, index.unsqueeze(-1), 1)


def per_head(x: Tensor) -> Tensor:
    """(H) against tiles (B, H, R, C)."""
    return x.view(-1, 1, 1)
