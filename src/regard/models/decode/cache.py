"""A cache whose room is taken once: each step writes its keys and values into place and copies nothing that was there.

It speaks `regard.nn.Cache`'s protocol, state in, state out: `grown` gives a longer view over the same room, and the shorter
one still reads what it read. Two ways on from one cache are told apart: the second gets a room of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast

from torch import Tensor

from ...errors import ShapeError, StateError
from ...nn import Cache

FIRST_ROOM = 64
MOST_ROOM = 1 << 14
"""Places that are taken at once: whoever says how long a text may become does not say that it will."""


@dataclass(frozen=True)
class StaticCache(Cache):
    """`k` and `v` are the room, (B, G, capacity, width); the first `length` places are taken."""

    length: int = 0
    capacity: int = FIRST_ROOM
    taken: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """How far the room is written, shared by all views over it."""

    @property
    def tokens(self) -> int:
        return self.written or self.length - self.lead

    def keys(self) -> Tensor:
        assert self.k is not None
        return self.k.narrow(2, 0, self.length)

    def values(self) -> Tensor:
        assert self.v is not None
        return self.v.narrow(2, 0, self.length)

    def row(self, i: int) -> tuple[Any, Any]:
        """The rooms (G, capacity, width) of one row: tensors, or `Bytes`."""
        assert self.k is not None
        assert self.v is not None
        return self.k[i], self.v[i]

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        """Copies of places start..stop, with which another cache may be `grown`."""
        assert self.k is not None
        assert self.v is not None
        return self.k[:, :, start:stop].clone(), self.v[:, :, start:stop].clone()

    def grown(self, k: Tensor, v: Tensor) -> StaticCache:
        if self.written:
            return cast(StaticCache, super().grown(k, v))
        start, stop = self.length, self.length + k.shape[2]
        for old, new in ((self.k, k), (self.v, v)):
            if old is not None:
                _check(old, new, k.shape[2])
        room = self
        if self.k is None or self.v is None or stop > self.capacity or not self._claimed(start, stop):
            room = self._moved(k, v, stop)
        assert room.k is not None
        assert room.v is not None
        room.k.narrow(2, start, stop - start).copy_(k)
        room.v.narrow(2, start, stop - start).copy_(v)
        # `replace`, in a quarter of its time: every layer of every token comes by.
        grown = object.__new__(type(self))
        grown.__dict__.update(self.__dict__, k=room.k, v=room.v, length=stop, capacity=room.capacity, taken=room.taken)
        return grown

    def reserved(self, shape: tuple[int, int, int], places: int, like: Tensor) -> StaticCache:
        """A longer view whose last `places`, of (B, G, width), somebody is about to write."""
        if self.written:
            raise StateError(f"this cache holds {self.written} tokens in a state of fixed size, and no keys")
        start, stop = self.length, self.length + places
        B, G, W = shape
        for room in (self.k, self.v):
            if room is not None and (room.shape[0], room.shape[1], room.shape[3]) != shape:
                held = tuple(room.shape)
                raise ShapeError(
                    f"the cache holds {held}, and is to grow by {(B, G, places, W)}: a cache is read by whoever filled it"
                )
        room = self
        if self.k is None or self.v is None or stop > self.capacity or not self._claimed(start, stop):
            template = like.new_empty(()).expand(B, G, places, W)
            room = self._moved(template, template, stop)
        grown = object.__new__(type(self))
        grown.__dict__.update(self.__dict__, k=room.k, v=room.v, length=stop, capacity=room.capacity, taken=room.taken)
        return grown

    def shortened(self, tokens: int) -> StaticCache | None:
        """The first `tokens` of them, to go on from in the same room: whoever holds a longer view must let it go. None where a carry has
        taken the others in, and cannot give them back."""
        if tokens == len(self):
            return self
        if self.carry is not None or self.written:
            return None
        return self._given_back(self.lead + tokens)

    def reopened(self) -> StaticCache:
        """This view, to go on from again in the same room: whoever holds a longer one must let it go."""
        return self if self.written or self.k is None else self._given_back(self.length)

    def _given_back(self, length: int) -> StaticCache:
        with _CLAIMING:
            self.taken[0] = min(self.taken[0], length)
        return replace(self, length=length)

    def _claimed(self, start: int, stop: int) -> bool:
        """True for the first who goes on from here; of two threads, one."""
        with _CLAIMING:
            if self.taken[0] != start:
                return False
            self.taken[0] = stop
            return True

    def _moved(self, k: Tensor, v: Tensor, needed: int) -> StaticCache:
        """A new room, at least twice as large where the old one was too small."""
        capacity = self.capacity if needed <= self.capacity else max(needed, 2 * self.capacity)
        rooms: list[Tensor] = []
        for old, new in ((self.k, k), (self.v, v)):
            room = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            if old is not None:
                room[:, :, : self.length] = old[:, :, : self.length]
            rooms.append(room)
        return replace(self, k=rooms[0], v=rooms[1], capacity=capacity, taken=[needed])

    def rows(self, index: Tensor) -> StaticCache:
        """The cache of some rows of the batch, in a room of their own."""
        carry = None if self.carry is None else self.carry.index_select(0, index)
        owner = None if self.owner is None else self.owner.pick(index)
        if self.k is None or self.v is None:
            return self if carry is None else replace(self, carry=carry, owner=owner)
        k, v = (x.index_select(0, index) for x in (self.k, self.v))
        return replace(self, k=k, v=v, carry=carry, owner=owner, taken=[self.length])


_CLAIMING = Lock()


def advanced(caches: Sequence[StaticCache], places: int) -> tuple[StaticCache, ...] | None:
    """All caches with so many places more in the rooms they have; None, and nothing taken, where one of them has to move."""
    with _CLAIMING:
        for c in caches:
            if c.written or c.taken[0] != c.length or c.length + places > c.capacity:
                return None
        for c in caches:
            c.taken[0] += places
    grown: list[StaticCache] = []
    for c in caches:
        longer = object.__new__(type(c))
        longer.__dict__.update(c.__dict__, length=c.length + places)
        grown.append(longer)
    return tuple(grown)


def _check(room: Tensor, new: Tensor, places: int) -> None:
    """Refuse what copy_ would spread: one row, head or column over all of them."""
    (B, G, _, D), (b, g, n, d) = room.shape, new.shape
    if (b, g, n, d) != (B, G, places, D):
        raise ShapeError(
            f"the cache is to grow by {(b, g, n, d)}; it holds (B={B}, G={G}, width {D}), and takes {(B, G, places, D)}"
        )


def static_caches(depth: int, capacity: int = FIRST_ROOM) -> tuple[StaticCache, ...]:
    """One empty cache per layer, with room for `capacity` tokens (within reason) before it has to move."""
    return tuple(StaticCache(capacity=min(max(1, capacity), MOST_ROOM)) for _ in range(depth))


__all__ = ["StaticCache", "advanced", "static_caches"]
