"""Masks of which one row is made: a rule and a position bias that depend on how far apart two tokens stand alone.

The number of a pair then stands on a diagonal of the mask, and Q + K − 1 numbers a head hold them all. With the keys in reverse
order the index of a pair is the *sum* of its row and its column, which strides of 1 and 1 read: the kernel gets a mask of any size
that lies in a few kilobytes, and each number of it is the definition's own, at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..position import Position
from ..values import hashable, keepable
from .allow import SMALL, Allow, Tile
from .problem import Problem

ROWS = 256
"""Query rows of a chunk: of a causal square the kernel then makes as much as it makes by itself."""


@dataclass(frozen=True, eq=False)
class Band:
    """What is added to the pair of a query at i and a key at j, by i − j: (heads, Q + K − 1), −inf where they may not meet."""

    numbers: Tensor
    keys: int

    def mask(self, t: Tile) -> Tensor:
        """(1, heads, rows, keys) of a tile whose keys stand in reverse order; a view."""
        heads, length = self.numbers.shape
        first = self.numbers.storage_offset() + t.start + self.keys - t.hi
        return self.numbers.as_strided((1, heads, t.stop - t.start, t.hi - t.lo), (0, length, 1, 1), first)


def serves(p: Problem) -> bool:
    """True when the rule and the bias of a pair depend on how far apart its tokens stand, and every row meets a key."""
    position, there = p.spec.position, p.q.shape[2] and p.k.shape[2]
    return bool(there) and position.biases and position.shift_invariant and p.allow.by_distance and not _starves(p)


def band(p: Problem, like: Tensor, table: Tensor | None, temperature: float) -> Band:
    H, K, line = like.shape[1], p.k.shape[2], _line(p)
    if table is None and H * line.stop <= SMALL and keepable() and hashable(p.spec.position, p.allow):
        return _kept(p.spec.position, p.allow, temperature, (line, K), (H, like.dtype))
    return Band(_numbers(p.spec.position, p.allow, temperature, line, like, table), K)


def _numbers(position: Position, allow: Allow, temperature: float, line: Tile, like: Tensor, table: Tensor | None) -> Tensor:
    numbers = position.bias(line.q_at().squeeze(-1), line.k_at(), like, table).squeeze(-1)
    numbers = numbers if temperature == 1.0 else numbers / temperature
    return numbers.masked_fill(~allow.tile(line)[0, 0, :, 0], float("-inf")).contiguous()


@lru_cache(maxsize=64)
def _kept(position: Position, allow: Allow, temperature: float, place: tuple[Tile, int], kind: tuple[int, torch.dtype]) -> Band:
    """The band of a position without a table, for the next call; read and never written."""
    (line, keys), (heads, dtype) = place, kind
    with torch.inference_mode(False):
        like = torch.empty(1, heads, 0, 0, dtype=dtype, device=line.device)
        return Band(_numbers(position, allow, temperature, line, like, None), keys)


def _line(p: Problem) -> Tile:
    """One key at 0 and the queries at every distance that there is."""
    Q, K = p.q.shape[2], p.k.shape[2]
    return Tile(0, Q + K - 1, 0, 1, p.offset - K + 1, p.q.device)


def _starves(p: Problem) -> bool:
    """True when a row has nothing allowed: −inf all along it is NaN in the kernel, and a diagonal cannot be changed for one row."""
    Q, K = p.q.shape[2], p.k.shape[2]
    span = p.allow.span(p.offset, p.offset + Q - 1, K).clip(K)
    if span.sure_hi > span.sure_lo:
        return False
    before = torch.cumsum(p.allow.tile(_line(p)).expand(1, 1, Q + K - 1, 1).flatten(), 0)
    # The keys of the first query are the first K of the line, those of the next begin one later.
    return bool((before[K - 1 :] == torch.nn.functional.pad(before[: Q - 1], (1, 0))).any())
