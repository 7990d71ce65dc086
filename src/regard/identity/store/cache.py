"""Episodes in memory, by digest: a life of thousands is read from its files once, and not again for every answer."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..episodes import Episode

MOST = 512 << 20
"""Bytes of episodes that one open store keeps in memory: of some four hundred thousand tokens."""


class EpisodeCache:
    """What is named by its content never changes, so nothing here is ever out of date; the ones longest unused go first."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.bytes = most, 0
        self._episodes: OrderedDict[str, Episode] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._episodes)

    def get(self, digest: str) -> Episode | None:
        with self._lock:
            episode = self._episodes.get(digest)
            if episode is not None:
                self._episodes.move_to_end(digest)
            return episode

    def add(self, episode: Episode) -> None:
        with self._lock:
            if episode.digest not in self._episodes:
                self.bytes += episode.nbytes
            self._episodes[episode.digest] = episode
            self._episodes.move_to_end(episode.digest)
            while self.bytes > self.most:
                self.bytes -= self._episodes.popitem(last=False)[1].nbytes

    def drop(self, digest: str) -> None:
        """What was removed for good is not remembered either."""
        with self._lock:
            episode = self._episodes.pop(digest, None)
            self.bytes -= 0 if episode is None else episode.nbytes

    def clear(self) -> None:
        with self._lock:
            self._episodes.clear()
            self.bytes = 0


__all__ = ["EpisodeCache"]
