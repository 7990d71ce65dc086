"""Tensors named by the hash of what they hold, whole or absent; in a folder (`folder_blobs.py`) or in an object store (`object_blobs.py`).

What a store relies on, wherever they are: `put` returns when the bytes can no longer be lost, and never leaves half of them; what stands
under a name never changes, except that writing it again heals damage; `get` gives what was put, or raises.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...errors import CheckpointError

SUFFIX = ".safetensors"
READ = 4 << 20
"""Bytes that are searched at once."""


@dataclass(frozen=True)
class Searchable:
    """Something that is read from end to end for what was removed."""

    name: str
    parts: Callable[[], Iterator[bytes]]


class Blobs(Protocol):
    where: str
    """The folder or the URL, as it may stand in a message."""
    unreachable: tuple[str, ...]
    """Where a removed blob may still be, and nothing on this side can read it."""

    def label(self, blob: str) -> str:
        """What a message calls it."""
        ...

    def put(self, data: bytes, name: str | None = None) -> str:
        """Keep `data`, under a name that stands for its content, by default its hash; when this returns it survives a power cut."""
        ...

    def has(self, blob: str) -> bool:
        """Whether something stands under that name."""
        ...

    def read(self, blob: str) -> bytes:
        """Whatever stands under that name."""
        ...

    def get(self, blob: str) -> bytes:
        """What stands under the name of its own hash."""
        data = self.read(blob)
        if hashlib.sha256(data).hexdigest() != blob:
            raise CheckpointError(f"{self.label(blob)} is damaged: what it holds has another hash; restore it or roll back")
        return data

    def drop(self, blob: str) -> int:
        """Remove it; the bytes that this freed."""
        ...

    def every(self) -> Iterator[str]:
        """The names of all that is kept."""
        ...

    def old(self, grace: float) -> Iterator[str]:
        """The names of those that nobody has written for `grace` seconds."""
        ...

    def strays(self, named: set[str]) -> list[str]:
        """Whatever lies among the blobs and is none of these."""
        ...

    def drafts(self) -> tuple[int, int]:
        """How many are being written, or were when their process was killed, and their bytes."""
        ...

    def sweep(self, older_than: float) -> int:
        """Remove what killed processes left half written; how many they were."""
        ...

    def searchable(self, named: set[str]) -> Iterator[Searchable]:
        """All that no commit vouches for: a blob that one names is the state of another name, and its hash says what it holds."""
        ...

    def open_to_others(self) -> Iterator[Path]:
        """Files that others than their owner may read, as far as that can be seen."""
        ...

    def writable(self) -> bool:
        """Whether this process may write here, as far as permissions say."""
        ...

    def make(self, *, own: bool) -> None:
        """Be ready to write; `own` where nobody else keeps anything there."""
        ...

    def set_aside(self, stamp: str) -> None:
        """Move all of it out of the way, and keep it."""
        ...


NAMED = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})\.safetensors")
"""Where a blob stands, below its folder or prefix."""


def name_of(data: bytes, name: str | None) -> str:
    return name or hashlib.sha256(data).hexdigest()


def place_of(blob: str) -> str:
    return f"{blob[:2]}/{blob}{SUFFIX}"


__all__ = ["NAMED", "READ", "SUFFIX", "Blobs", "Searchable", "name_of", "place_of"]
