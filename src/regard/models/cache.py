"""A cache whose room is taken once: each step writes its keys and values into place and copies nothing that was there.

It speaks `regard.nn.Cache`'s protocol, state in, state out: `grown` gives a longer view over the same room, and the shorter
one still reads what it read. Two ways on from one cache are told apart: the second gets a room of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from ..nn import Cache

FIRST_ROOM = 64


@dataclass(frozen=True)
class StaticCache(Cache):
    """`k` and `v` are the room, (B, G, capacity, width); the first `length` places are taken."""

    length: int = 0
    capacity: int = FIRST_ROOM
    taken: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """How far the room is written, shared by all views over it."""

    def __len__(self) -> int:
        return self.length - self.lead

    def keys(self) -> Tensor:
        assert self.k is not None
        return self.k.narrow(2, 0, self.length)

    def values(self) -> Tensor:
        assert self.v is not None
        return self.v.narrow(2, 0, self.length)

    def grown(self, k: Tensor, v: Tensor) -> StaticCache:
        start, stop = self.length, self.length + k.shape[2]
        home = self
        if self.k is None or self.v is None or stop > self.capacity or start != self.taken[0]:
            home = self._moved(k, v, stop)
        assert home.k is not None
        assert home.v is not None
        home.k.narrow(2, start, stop - start).copy_(k)
        home.v.narrow(2, start, stop - start).copy_(v)
        home.taken[0] = stop
        return StaticCache(home.k, home.v, self.carry, self.lead, self.owner, stop, home.capacity, home.taken)

    def _moved(self, k: Tensor, v: Tensor, needed: int) -> StaticCache:
        """A new room, at least twice as large where the old one was too small."""
        capacity = self.capacity if needed <= self.capacity else max(needed, 2 * self.capacity)
        rooms: list[Tensor] = []
        for old, new in ((self.k, k), (self.v, v)):
            room = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            if old is not None:
                room[:, :, : self.length] = old[:, :, : self.length]
            rooms.append(room)
        return replace(self, k=rooms[0], v=rooms[1], capacity=capacity, taken=[self.length])

    def rows(self, index: Tensor) -> StaticCache:
        """The cache of some rows of the batch, in a room of their own."""
        if self.k is None or self.v is None:
            return self
        carry = None if self.carry is None else self.carry.index_select(0, index)
        k, v = (x.index_select(0, index) for x in (self.k, self.v))
        owner = None if self.owner is None else self.owner.pick(index)
        return replace(self, k=k, v=v, carry=carry, owner=owner, taken=[self.length])


def static_caches(depth: int, capacity: int = FIRST_ROOM) -> tuple[StaticCache, ...]:
    """One empty cache per layer, with room for `capacity` tokens before it has to move."""
    return tuple(StaticCache(capacity=max(1, capacity)) for _ in range(depth))


__all__ = ["StaticCache", "static_caches"]
