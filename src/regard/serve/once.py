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
        while len(self._turns) > MOST:
            self._turns.popitem(last=False)
        return lock


__all__ = ["Once"]
