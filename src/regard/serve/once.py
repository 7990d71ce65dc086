"""Turns by `Idempotency-Key`: the same key again waits for the first, and gets its answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

MOST = 4096


class Once:
    """One lock for each turn that has a key, of the last few thousand."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, asyncio.Lock] = OrderedDict()

    def turn(self, token: str) -> asyncio.Lock:
        lock = self._turns.setdefault(token, asyncio.Lock())
        self._turns.move_to_end(token)
        if len(self._turns) > MOST:
            # Never one that is held: a second lock under its name would let a second turn run beside the first.
            oldest = next((t for t, held in self._turns.items() if t != token and not held.locked()), None)
            if oldest is not None:
                del self._turns[oldest]
        return lock


__all__ = ["Once"]
