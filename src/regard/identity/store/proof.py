"""What was removed is searched for in the bytes of the files that could hold it.

A text does not lie in a database as one piece: long ones are cut into pages. So fragments of it are searched for, one after another
without a gap, each in the spelling of the tables (JSON in ASCII) and in UTF-8; of a state, rows of keys and runs of tokens as they lie in a
blob; of an episode, all of its tokens, which can be read as words, and of every token a piece of its keys and of whatever else is kept of it. A fragment that the tables still hold, because somebody else said it too, proves nothing and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..episodes import Episode
from ..state import Identity
from .blobs import READ, Searchable
from .folder_blobs import files_below, searchable_file
from .records import canonical

if TYPE_CHECKING:
    from .store import IdentityStore

LENGTH = 16
"""Bytes of a fragment: fewer are found by chance, and more are missed where a page ends."""
SHORTEST = 8
LITE = (
    "copies, exports and backups that were made before",
    "blocks that the file system or the disk has freed and not yet overwritten, and its snapshots",
)
SERVER = (
    "the server's write-ahead log, its archives, replicas and backups, and blocks that it has freed",
    "the memory of other processes, and checkpoints of sleeps that were interrupted on other machines, until they open the store again",
    "copies, exports and backups that were made before",
)


@dataclass(frozen=True)
class Searched:
    files: tuple[str, ...]
    """Read from end to end."""
    left: tuple[str, ...]
    """Those in which something was found."""
    unreachable: tuple[str, ...]
    """What no process on this side can read, and what may therefore still hold it."""


def fragments_of_text(texts: Iterable[str]) -> set[bytes]:
    fragments: set[bytes] = set()
    for text in texts:
        for spelled in (canonical(text)[1:-1].encode(), text.encode("utf-8", "surrogatepass")):
            fragments |= _cut(spelled)
    return fragments


def fragments_of_state(identity: Identity, source: str) -> set[bytes]:
    """Keys and tokens of the imprints that `source` left, in runs as they lie side by side in a file."""
    if source not in identity.sources:
        return set()
    mine = (identity.imprints.source == identity.sources.index(source)).tolist()
    codes, tokens = identity.imprints.k.codes[0, 0].numpy(), identity.imprints.token.numpy()
    fragments: set[bytes] = set()
    start: int | None = None
    for i, here in enumerate([*mine, False]):
        if here and start is None:
            start = i
        elif not here and start is not None:
            fragments |= _cut(codes[start:i].tobytes()) | _cut(tokens[start:i].tobytes())
            start = None
    return fragments


def fragments_of_episode(episode: Episode) -> set[bytes]:
    codes = episode.keys.codes
    # One piece of a token's keys is enough: its whole row was written at once, and a life has thousands of rows.
    fragments = _cut(episode.tokens.numpy().tobytes()) | _cut(codes.numpy().tobytes(), max(LENGTH, codes.shape[1]))
    if episode.meaning is not None:
        fragments |= _cut(episode.meaning.codes.numpy().tobytes())
    for kept in (episode.k, episode.v):
        if kept is not None:
            fragments |= _cut(kept.codes.numpy().tobytes(), max(LENGTH, kept.codes[0].numel()))
    return fragments


def _cut(data: bytes, every: int = LENGTH) -> set[bytes]:
    pieces = {data[i : i + LENGTH] for i in range(0, max(len(data) - LENGTH, 0) + 1, every)} | {data[-LENGTH:]}
    # A row of one and the same byte is found anywhere.
    return {p for p in pieces if len(p) >= SHORTEST and len(set(p)) > 3}


def found_in(parts: Iterable[bytes], needles: set[bytes]) -> set[bytes]:
    """Which of `needles` occur in these parts; none is searched for across two of them."""
    by_start: dict[bytes, list[bytes]] = {}
    for needle in needles:
        by_start.setdefault(needle[:8], []).append(needle)
    keys = np.array([int.from_bytes(k, "little") for k in by_start], dtype=np.uint64)
    table = np.zeros(1 << 20, dtype=bool)
    table[_slots(keys)] = True
    present: set[bytes] = set()
    for data in parts:
        for offset in range(min(8, max(len(data) - 7, 0))):
            view = np.frombuffer(data, dtype="<u8", offset=offset, count=(len(data) - offset) // 8)
            # Most are ruled out by a table of bits; only what passes it is compared.
            likely = np.flatnonzero(table[_slots(view)])
            for at in likely[np.isin(view[likely], keys)].tolist():
                place = offset + 8 * at
                present |= {n for n in by_start[data[place : place + 8]] if data.startswith(n, place)}
    return present


def _slots(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (words * np.uint64(0x9E37_79B9_7F4A_7C15)) >> np.uint64(44)


def _overlapping(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Each with the end of the one before it, so that nothing is missed between them."""
    tail = b""
    for data in parts:
        yield tail + data
        tail = (tail + data)[-LENGTH:]


def _joined(records: Iterable[str]) -> Iterator[bytes]:
    batch: list[bytes] = []
    size = 0
    for record in records:
        batch.append(record.encode("utf-8", "surrogatepass"))
        size += len(batch[-1])
        if size > READ:
            yield b"\0".join(batch)
            batch, size = [], 0
    yield b"\0".join(batch)


def search(store: IdentityStore, needles: set[bytes]) -> Searched:
    """Look through every file of the store that a commit does not vouch for."""
    with store.db.read() as c:
        named = store.db.blobs(c)
    files = list(_files(store, named))
    hits = [found_in(_overlapping(file.parts()), needles) if needles else set[bytes]() for file in files]
    every = set[bytes]().union(*hits)
    if every:
        # Afterwards, so that whatever was written meanwhile is in them too.
        with store.db.read() as c:
            every -= found_in(_joined(store.db.every_record(c)), every)
    left = tuple(file.name for file, hit in zip(files, hits, strict=True) if hit & every)
    unreachable = (*(LITE if store.db.lite else SERVER), *store.blobs.unreachable)
    return Searched(tuple(file.name for file in files), left, unreachable)


def _files(store: IdentityStore, named: set[str]) -> Iterator[Searchable]:
    from .connection import SIDES

    file = store.db.file
    for path in () if file is None else (file, *(file.with_name(f"{file.name}{side}") for side in SIDES)):
        if path.exists():
            yield searchable_file(path)
    yield from store.blobs.searchable(named)
    for folder in (store.sleep_checkpoints, store.db.locks):
        yield from files_below(folder, named)


__all__ = ["Searched", "fragments_of_episode", "fragments_of_state", "fragments_of_text", "search"]
