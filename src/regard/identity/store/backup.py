"""A store as one folder, and back.

    store.backup("monday")             # monday/identities.db, monday/identities.blobs/ and monday/backup.json
    restore("monday", "people.db")     # `restore.py`: into a store that is empty, or with replace=True in place of what is there

A backup is a store in SQLite, whatever database it was taken from: it opens by itself, can be checked, and goes back into either. It is
taken in one snapshot beside whoever writes, checked before it gets its name, and checked again before anything of it is restored.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ... import files
from ...errors import CheckpointError
from .check import check
from .errors import MissingBlobError, StoreError

if TYPE_CHECKING:
    from .database import Connection
    from .store import IdentityStore

DATABASE, BLOBS, NOTE = "identities.db", "identities.blobs", "backup.json"
SCHEMA = 1
ROWS = 200
TRIES = 20


def backup(store: IdentityStore, path: Path) -> Path:
    if path.exists() or path.is_symlink():
        raise StoreError(f"{path} is there already; a backup begins a new folder")
    files.new_folders(path.parent.absolute())
    files.sweep(path.parent)
    for attempt in range(TRIES):
        try:
            with files.new_folder(path, private=True) as draft:
                _write(store, draft)
            return path
        except MissingBlobError:
            # Removed with its commit while it was being copied: the next snapshot no longer names it.
            if attempt == TRIES - 1:
                raise
    raise AssertionError


def _write(store: IdentityStore, draft: Path) -> None:
    with type(store)(draft / DATABASE) as copy:
        with store.db.read() as c, copy.db.write() as into:
            counts = copy_rows(c, into)
            blobs = store.db.blobs(c)
        for blob in sorted(blobs):
            # Under its own name, whatever it holds: the check below reads all of it.
            copy.blobs.put(store.blobs.read(blob), blob)
        report = check(copy)
        if not report.sound:
            raise CheckpointError(f"this store is damaged, and was not backed up: {report.problems[0]}")
    _settle(draft)
    note = {
        "schema": SCHEMA, "time": time.time(), "from": "sqlite" if store.db.lite else "postgresql", **counts,
        "database": file_hash(draft / DATABASE), "blobs": len(blobs),
    }  # fmt: skip
    files.write_text(draft / NOTE, json.dumps(note, indent=1) + "\n", private=True)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _settle(folder: Path) -> None:
    """Everything in the database's one file, and nothing beside it that is of use to writers only."""
    import sqlite3

    file = folder / DATABASE
    connection = sqlite3.connect(file)
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        # Without a log a backup opens wherever it lies, on a medium that cannot be written too.
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
    for lock in (folder / f"{file.stem}.locks").glob("*"):
        lock.unlink()
    (folder / f"{file.stem}.locks").rmdir()


def copy_rows(c: Connection, into: Connection) -> dict[str, int]:
    """All commits, episodes, events and names from one database into an empty one; parents come before those that name them."""
    from .schema import commits, episodes, events, names, seals
    from sqlalchemy import insert, select  # isort: skip

    counts: dict[str, int] = {}
    order = {
        commits: commits.c.number,
        episodes: episodes.c.number,
        events: events.c.commit_id,
        names: names.c.name,
        seals: seals.c.key,
    }
    for table, column in order.items():
        rows = [dict(row) for row in c.execute(select(table).order_by(column)).mappings()]
        for i in range(0, len(rows), ROWS):
            into.execute(insert(table), rows[i : i + ROWS])
        counts[table.name.removeprefix("identity_")] = len(rows)
    return counts


__all__ = ["backup", "copy_rows", "file_hash"]
