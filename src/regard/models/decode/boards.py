"""The caches of all layers of a step, as one call of C reads them.

Each layer's cache is a room whose filled part grows (`StaticCache`, of numbers or of bytes). Where a step goes on from the caches that the last one gave, only
their lengths are others, so what C is told about them is kept: a board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ...nn import Cache, RowRead
from . import native
from .cache import StaticCache, advanced

if TYPE_CHECKING:
    from .prepare import Layer

MOST = 16
"""Boards that are kept: whoever writes more texts at once makes some anew."""


@dataclass
class Board:
    """What C is told of some caches."""

    texts: native.Texts
    reads: list[RowRead | None]
    turned: list[tuple[Layer, RowRead | None]]
    """One layer of each kind of turn."""
    grown: tuple[Cache, ...]
    rooms: list[list[int]] = field(default_factory=list)

    def is_of(self, caches: Sequence[Cache], reads: Sequence[RowRead | None]) -> bool:
        for cache, room, mine, read in zip(caches, self.rooms, self.reads, reads, strict=True):
            if not isinstance(cache, StaticCache) or cache.taken is not room or mine is not read:
                return False
        return True


class Boards:
    """A model's boards, by the room of the first layer. Whoever works with one has taken it out."""

    def __init__(self) -> None:
        self.kept: dict[int, Board] = {}

    def board(self, layers: Sequence[Layer], caches: Sequence[Cache], shape: tuple[int, int], like: Tensor) -> Board | None:
        """The caches with room for (B, N) new tokens, reserved; None where one is not static or an override is not for C."""
        reads: list[RowRead | None] = []
        for layer in layers:
            a = layer.attention
            override = a.override
            read = None if override is None else override.row_read(a)
            if override is not None and read is None:
                return None
            reads.append(read)
        first = caches[0]
        if not isinstance(first, StaticCache) or not all(isinstance(c, StaticCache) for c in caches):
            return None
        static = cast(Sequence[StaticCache], caches)
        kept = self.kept.pop(id(first.taken), None)
        if kept is not None and first.batch == shape[0] and kept.is_of(caches, reads):
            grown = advanced(static, shape[1])
            if grown is not None:
                kept.grown = grown
                return kept
        return _made(layers, static, reads, shape, like)

    def keep(self, board: Board) -> None:
        while len(self.kept) >= MOST:
            self.kept.pop(next(iter(self.kept)), None)
        self.kept[id(board.rooms[0])] = board


def _made(
    layers: Sequence[Layer], caches: Sequence[StaticCache], reads: list[RowRead | None], shape: tuple[int, int], like: Tensor
) -> Board:
    B, N = shape
    grown: list[StaticCache] = []
    for layer, cache, read in zip(layers, caches, reads, strict=True):
        grown.append(layer.reserve(cache, B, N, read, like))
    kinds: dict[object, int] = {}
    turned: list[tuple[Layer, RowRead | None]] = []
    turns: list[int] = []
    for layer, read in zip(layers, reads, strict=True):
        key = layer.attention.spec.position, layer.attention.head_width, read and (read.behind, read.off)
        if key not in kinds:
            kinds[key] = len(turned)
            turned.append((layer, read))
        turns.append(kinds[key])
    texts = [
        [layer.text(*cache.row(i), read) for i in range(B)] for layer, cache, read in zip(layers, grown, reads, strict=True)
    ]
    return Board(native.Texts(texts, turns), reads, turned, tuple(grown), [c.taken for c in grown])


__all__ = ["Board", "Boards"]
