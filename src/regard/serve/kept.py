"""Responses that are kept for `previous_response_id`: a bounded number of them, in memory, for each key apart."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 64 << 20
"""Of all conversations that are kept for one key."""


@dataclass(frozen=True)
class Kept:
    """A response, and the conversation up to it."""

    messages: list[dict[str, str]]
    response: dict[str, Any]
    size: int


class Responses:
    """The last responses of each key."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, Kept]] = {}
        self._lock = threading.Lock()

    def keep(self, caller: str, kept: Kept, most: int) -> None:
        with self._lock:
            mine = self._of.setdefault(caller, OrderedDict())
            mine[kept.response["id"]] = kept
            while len(mine) > most or (len(mine) > 1 and sum(k.size for k in mine.values()) > MOST_BYTES):
                mine.popitem(last=False)

    def get(self, caller: str, id: str) -> Kept | None:
        with self._lock:
            return self._of.get(caller, {}).get(id)

    def drop(self, caller: str, id: str) -> bool:
        with self._lock:
            return self._of.get(caller, {}).pop(id, None) is not None


__all__ = ["Kept", "Responses"]
