"""Keys and values in a byte a number: x ≈ s · q with |q| ≤ 127, one s for every 32 columns of a head of a token, in bfloat16.

A key of 64 columns takes 68 bytes where float32 takes 256. What attends reads float32 again, the same numbers however the tokens came,
one by one or in pieces, so cached decoding is still what the whole text gives under these keys. Groups are of 32 columns so that what an
identity adds behind a head, a trace's columns and a bias, does not share its scale with the head itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import StateError
from ...nn import Cache
from .cache import FIRST_ROOM, MOST_ROOM

GROUP = 32
STEPWISE = 32
"""Tokens at most that meet a cache of bytes one by one when they are read together."""


@dataclass(frozen=True)
class Bytes:
    """Numbers (B, G, K, W) in bytes, and the scales (B, G, K, groups) of their groups of columns."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def of(x: Tensor) -> Bytes:
        """A group that holds NaN or infinity comes out as NaN."""
        W = x.shape[-1]
        groups = F.pad(x.float(), (0, -W % GROUP)).unflatten(-1, (-1, GROUP))
        # The smallest that its reciprocal survives.
        scale = (groups.abs().amax(-1) / 127).clamp_min(1e-30).to(torch.bfloat16)
        # Rounded by the scale that is kept: its own rounding then costs nothing but the edge of the largest number.
        q = (groups / scale.float().unsqueeze(-1)).round_().clamp_(-127, 127).nan_to_num_(0.0)
        return Bytes(q.flatten(-2)[..., :W].to(torch.int8), scale)

    def numbers(self, length: int, dtype: torch.dtype) -> Tensor:
        W = self.q.shape[-1]
        q, scale = self.q.narrow(2, 0, length), self.scale.narrow(2, 0, length).to(dtype)
        x = q.to(dtype)
        if W % GROUP == 0:
            return x.unflatten(-1, (-1, GROUP)).mul_(scale.unsqueeze(-1)).flatten(-2)
        return x.mul_(scale.repeat_interleave(GROUP, -1)[..., :W])

    def room(self, capacity: int, old: Bytes | None, length: int) -> Bytes:
        """Room for `capacity` tokens like these, with those of an old one in it."""
        made = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (self.q, self.scale)]
        if old is not None:
            for new, before in zip(made, (old.q, old.scale), strict=True):
                new[:, :, :length] = before[:, :, :length]
        return Bytes(*made)

    def write(self, at: int, new: Bytes) -> None:
        for room, x in ((self.q, new.q), (self.scale, new.scale)):
            room.narrow(2, at, x.shape[2]).copy_(x)

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class Int8Cache(Cache):
    """A cache whose keys and values lie in bytes; `k` and `v` are the rooms' bytes, of which `length` places are taken."""

    length: int = 0
    capacity: int = FIRST_ROOM
    rooms: tuple[Bytes, Bytes] | None = None
    dtype: torch.dtype = torch.float32
    """Of what comes out."""
    taken: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """How far the rooms are written, shared by all views over them."""

    @property
    def tokens(self) -> int:
        return self.written or self.length - self.lead

    def keys(self) -> Tensor:
        assert self.rooms is not None
        return self.rooms[0].numbers(self.length, self.dtype)

    def values(self) -> Tensor:
        assert self.rooms is not None
        return self.rooms[1].numbers(self.length, self.dtype)

    def grown(self, k: Tensor, v: Tensor) -> Int8Cache:
        if self.written:
            raise StateError(f"this cache holds {self.written} tokens in a state of fixed size, and no keys")
        start, stop = self.length, self.length + k.shape[2]
        new = Bytes.of(k), Bytes.of(v)
        rooms, capacity, taken = self.rooms, self.capacity, self.taken
        for old, x in zip(rooms or (), (k, v), strict=False):
            B, G, _, W = old.q.shape
            if (x.shape[0], x.shape[1], x.shape[3]) != (B, G, W):
                raise StateError(f"the cache holds (B={B}, G={G}, width {W}), and is to grow by {tuple(x.shape)}")
        if rooms is None or stop > capacity or taken[0] != start:
            # Too small, or somebody else went on from here: a room of its own.
            capacity = capacity if stop <= capacity else max(stop, 2 * capacity)
            before = rooms or (None, None)
            rooms = new[0].room(capacity, before[0], start), new[1].room(capacity, before[1], start)
            taken = [start]
        for room, x in zip(rooms, new, strict=True):
            room.write(start, x)
        taken[0] = stop
        return replace(
            self, k=rooms[0].q, v=rooms[1].q, rooms=rooms, length=stop, capacity=capacity, taken=taken, dtype=k.dtype
        )

    def shortened(self, tokens: int) -> Int8Cache | None:
        """As `StaticCache.shortened`."""
        if tokens == len(self):
            return self
        if self.carry is not None or self.written:
            return None
        return self._given_back(self.lead + tokens)

    def reopened(self) -> Int8Cache:
        """As `StaticCache.reopened`."""
        return self if self.written or self.rooms is None else self._given_back(self.length)

    @property
    def nbytes(self) -> int:
        """Of its rooms."""
        return 0 if self.rooms is None else sum(x.nbytes for x in self.rooms)

    def _given_back(self, length: int) -> Int8Cache:
        self.taken[0] = min(self.taken[0], length)
        return replace(self, length=length)


def int8_caches(depth: int, capacity: int = FIRST_ROOM) -> tuple[Int8Cache, ...]:
    """One empty cache per layer, with room for `capacity` tokens (within reason) before it has to move."""
    return tuple(Int8Cache(capacity=min(max(1, capacity), MOST_ROOM)) for _ in range(depth))


__all__ = ["STEPWISE", "Int8Cache", "int8_caches"]
