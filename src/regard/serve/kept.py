"""Responses that are kept for `previous_response_id`: a bounded number and a bounded size of them, in memory, each key's own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 256 << 20
"""Of all conversations that are kept, whoever's they are."""


@dataclass(frozen=True)
class Kept:
    """A response, and the conversation up to it."""

    messages: list[dict[str, str]]
    response: dict[str, Any]
    identity: str | None = None
    """Who answered; None is the model itself."""

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def size(self) -> int:
        """About how many bytes it takes: what was said, and as much again for what is around it."""
        return sum(len(m["content"].encode("utf-8", "surrogatepass")) for m in self.messages) * 2 + 4096


class Responses:
    """The last responses of each key; the oldest leave first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, caller: str, kept: Kept, most: int) -> None:
        with self._lock:
            self._kept[caller, kept.id] = kept
            self._bytes += kept.size
            mine = [key for key in self._kept if key[0] == caller]
            for key in mine[: max(0, len(mine) - most)]:
                self._drop(key)
            while self._bytes > self.most_bytes and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def get(self, caller: str, id: str) -> Kept | None:
        with self._lock:
            return self._kept.get((caller, id))

    def drop(self, caller: str, id: str) -> bool:
        with self._lock:
            return self._drop((caller, id))

    def forget(self, identity: str) -> None:
        """Keep nothing that somebody answered: who was deleted, or has forgotten, must not be read from here."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.identity == identity]:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        self._bytes -= 0 if kept is None else kept.size
        return kept is not None


__all__ = ["Kept", "Responses"]
