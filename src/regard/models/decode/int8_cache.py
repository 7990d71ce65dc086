"""Keys and values in a byte a number: x ≈ s · q with |q| ≤ 127, one s for every 32 columns of a head of a token, in bfloat16.

A key of 64 columns takes 68 bytes where float32 takes 256. s · q has 15 bits, which float32 holds exactly: C reads the bytes as they lie
(`bytes.h`) and gets the bits that the numbers written out would give; where C does not serve, torch writes them out. Groups are of 32
columns so that what an identity adds behind a head, a trace's columns and a bias, does not share its scale with the head itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import StateError
from .cache import FIRST_ROOM, MOST_ROOM, StaticCache

GROUP = 32
"""As bytes.h has it."""
STEPWISE = 32
"""Tokens at most that meet a cache of bytes one by one when they are read together and C does not serve."""


@dataclass(frozen=True)
class Bytes:
    """Numbers (…, K, W) in bytes, and the scales (…, K, groups) of their groups of columns."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def empty(*shape: int, device: torch.device | str = "cpu") -> Bytes:
        *before, W = shape
        scale = torch.empty(*before, -(-W // GROUP), dtype=torch.bfloat16, device=device)
        return Bytes(torch.empty(*shape, dtype=torch.int8, device=device), scale)

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

    def numbers(self, dtype: torch.dtype) -> Tensor:
        W, scale = self.q.shape[-1], self.scale.to(dtype)
        x = self.q.to(dtype)
        if W % GROUP == 0:
            return x.unflatten(-1, (-1, GROUP)).mul_(scale.unsqueeze(-1)).flatten(-2)
        return x.mul_(scale.repeat_interleave(GROUP, -1)[..., :W])

    def places(self, start: int, stop: int) -> Bytes:
        """A view of places start..stop."""
        return Bytes(self.q[..., start:stop, :], self.scale[..., start:stop, :])

    def rows(self, index: Tensor) -> Bytes:
        """Some rows of the batch, in memory of their own."""
        return Bytes(self.q.index_select(0, index), self.scale.index_select(0, index))

    def clone(self) -> Bytes:
        return Bytes(self.q.clone(), self.scale.clone())

    def write(self, at: int, new: Bytes) -> None:
        here = self.places(at, at + new.q.shape[-2])
        here.q.copy_(new.q)
        here.scale.copy_(new.scale)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class Int8Cache(StaticCache):
    """A static cache whose rooms are bytes; `k` and `v` are those without their scales."""

    rooms: tuple[Bytes, Bytes] | None = None
    dtype: torch.dtype = torch.float32
    """Of what comes out."""

    def keys(self) -> Tensor:
        assert self.rooms is not None
        return self.rooms[0].places(0, self.length).numbers(self.dtype)

    def values(self) -> Tensor:
        assert self.rooms is not None
        return self.rooms[1].places(0, self.length).numbers(self.dtype)

    def row(self, i: int) -> tuple[Bytes, Bytes]:
        assert self.rooms is not None
        k, v = (Bytes(x.q[i], x.scale[i]) for x in self.rooms)
        return k, v

    def part(self, start: int, stop: int) -> tuple[Bytes, Bytes]:
        assert self.rooms is not None
        k, v = (x.places(start, stop).clone() for x in self.rooms)
        return k, v

    def grown(self, k: Tensor | Bytes, v: Tensor | Bytes) -> Int8Cache:
        """By numbers, or by what `part` gave: bytes that were numbers in between may be others."""
        shapes, places = (k.shape, v.shape), k.shape[2]
        grown = self._longer(shapes, places, (k.q if isinstance(k, Bytes) else k).device)
        assert grown.rooms is not None
        for room, x in zip(grown.rooms, (k, v), strict=True):
            room.write(self.length, x if isinstance(x, Bytes) else Bytes.of(x))
        return grown if isinstance(k, Bytes) else replace(grown, dtype=k.dtype)

    def reserved(self, shape: tuple[int, int, int], places: int, like: Tensor) -> Int8Cache:
        B, G, W = shape
        grown = self._longer((torch.Size((B, G, places, W)),) * 2, places, like.device)
        return grown if grown.dtype is like.dtype else replace(grown, dtype=like.dtype)

    @property
    def nbytes(self) -> int:
        """Of its rooms."""
        return 0 if self.rooms is None else sum(x.nbytes for x in self.rooms)

    def rows(self, index: Tensor) -> Int8Cache:
        owner = None if self.owner is None else self.owner.pick(index)
        carry = None if self.carry is None else self.carry.index_select(0, index)
        if self.rooms is None:
            return self if carry is None else replace(self, carry=carry, owner=owner)
        k, v = (x.rows(index) for x in self.rooms)
        return replace(self, k=k.q, v=v.q, rooms=(k, v), carry=carry, owner=owner, taken=[self.length])

    def _longer(self, shapes: tuple[torch.Size, ...], places: int, device: torch.device) -> Int8Cache:
        """A longer view whose last places, of keys and of values, are about to be written."""
        if self.written:
            raise StateError(f"this cache holds {self.written} tokens in a state of fixed size, and no keys")
        start, stop = self.length, self.length + places
        for old, new in zip(self.rooms or (), shapes, strict=False):
            B, G, _, W = old.shape
            if tuple(new) != (B, G, places, W):
                raise StateError(
                    f"the cache holds (B={B}, G={G}, width {W}), and is to grow by {tuple(new)}: a cache is read by whoever filled it"
                )
        rooms, capacity, taken = self.rooms, self.capacity, self.taken
        if rooms is None or stop > capacity or not self._claimed(start, stop):
            # Too small, or somebody else went on from here: a room of its own.
            capacity = capacity if stop <= capacity else max(stop, 2 * capacity)
            made = [Bytes.empty(B, G, capacity, W, device=device) for B, G, _, W in shapes]
            for new, old in zip(made, rooms or (), strict=False):
                new.write(0, old.places(0, start))
            rooms, taken = (made[0], made[1]), [stop]
        grown = object.__new__(type(self))
        grown.__dict__.update(
            self.__dict__, k=rooms[0].q, v=rooms[1].q, rooms=rooms, length=stop, capacity=capacity, taken=taken
        )
        return grown


def int8_caches(depth: int, capacity: int = FIRST_ROOM) -> tuple[Int8Cache, ...]:
    """One empty cache per layer, with room for `capacity` tokens (within reason) before it has to move."""
    return tuple(Int8Cache(capacity=min(max(1, capacity), MOST_ROOM)) for _ in range(depth))


__all__ = ["STEPWISE", "Bytes", "Int8Cache", "int8_caches"]
