"""Room for keys and values: as the model gives them, or in a byte a number; and how much of a text is read at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...errors import SpecError
from ...nn import Cache
from .cache import static_caches
from .int8_cache import int8_caches

PREFILL = 512
"""Tokens of the prompt that go through the model at a time: as fast as all at once, and bounded in memory."""
Caches = tuple[Cache, ...]
Rooms = Callable[[int, int], Caches]
"""How many layers, and for how many tokens."""
CacheKind = Literal["float32", "int8"]
ROOMS: dict[str, Rooms] = {"float32": static_caches, "int8": int8_caches}


def caches_of(cache: object) -> Rooms:
    """How keys and values are kept: as the model gives them, or in a byte a number."""
    rooms = ROOMS.get(cache) if isinstance(cache, str) else None
    if rooms is None:
        raise SpecError(f"cache={cache!r:.60}: choose 'float32' (as the model gives them) or 'int8' (a byte a number)")
    return rooms


__all__ = ["PREFILL", "CacheKind", "Caches", "Rooms", "caches_of"]
