"""A store as one folder, and back.

    store.backup("monday")             # monday/identities.db, monday/identities.blobs/ and monday/backup.json
    restore("monday", "people.db")     # into a store that is empty, or with replace=True in place of what is there

A backup is a store in SQLite, whatever database it was taken from: it opens by itself, can be checked, and goes back into either. It is
taken in one snapshot beside whoever writes, checked before it gets its name, and checked again before anything of it is restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from ... import files
from ...errors import CheckpointError
from .check import Checked, check
from .errors import MissingBlobError, StoreError
from .records import strict_json
from .store import IdentityStore

if TYPE_CHECKING:
    from .database import Connection

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
    with IdentityStore(draft / DATABASE) as copy:
        with store.db.read() as c, copy.db.write() as into:
            counts = copy_rows(c, into)
            blobs = store.db.blobs(c)
        for blob in sorted(blobs):
            copy.blobs.put(store.blobs.get(blob))
        report = check(copy)
        if not report.sound:
            raise CheckpointError(f"this store is damaged, and was not backed up: {report.problems[0]}")
    _settle(draft)
    note = {
        "schema": SCHEMA, "time": time.time(), "from": "sqlite" if store.db.lite else "postgresql", **counts,
        "database": _hash(draft / DATABASE), "blobs": len(blobs),
    }  # fmt: skip
    files.write_text(draft / NOTE, json.dumps(note, indent=1) + "\n", private=True)


def _hash(path: Path) -> str:
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
    """All commits, events and names from one database into an empty one; parents come before those that name them."""
    from .schema import commits, events, names, seals
    from sqlalchemy import insert, select  # isort: skip

    counts: dict[str, int] = {}
    order = {commits: commits.c.number, events: events.c.commit_id, names: names.c.name, seals: seals.c.key}
    for table, column in order.items():
        rows = [dict(row) for row in c.execute(select(table).order_by(column)).mappings()]
        for i in range(0, len(rows), ROWS):
            into.execute(insert(table), rows[i : i + ROWS])
        counts[table.name.removeprefix("identity_")] = len(rows)
    return counts


def verified(path: Path) -> Checked:
    """A backup against its own note and hashes; raises where it is not whole."""
    note = strict_json(files.read_plain(path / NOTE, 1 << 16), str(path / NOTE))
    if not isinstance(note, dict) or note.get("schema") != SCHEMA:
        schema = note.get("schema") if isinstance(note, dict) else None
        raise CheckpointError(f"{path / NOTE} has schema {schema!r:.40}; this version of regard reads {SCHEMA}: update regard")
    if _hash(files.require_plain(path / DATABASE)) != note.get("database"):
        raise CheckpointError(f"{path / DATABASE} is damaged: it is not the file that was backed up; take another backup")
    with _opened(path) as store:
        report = check(store)
    if not report.sound or (report.names, report.commits, report.events) != tuple(
        note.get(k) for k in ("names", "commits", "events")
    ):
        what = report.problems[0] if report.problems else f"it has {report}, and was made with {note!r:.200}"
        raise CheckpointError(f"the backup {path} is damaged: {what}")
    return report


def _opened(path: Path) -> IdentityStore:
    # Read only, so that the backup stays as it was made; its blobs stand where a store of that name has them.
    return IdentityStore(path / DATABASE, blobs=path / BLOBS, read_only=True)


def restore(
    path: str | Path, url: str | Path | None = None, *, blobs: str | Path | None = None, replace: bool = False
) -> Checked:
    """Put a backup back, all of it or nothing; over a store that holds names only with `replace`."""
    path = Path(path)
    backed_up = verified(path)
    try:
        target = IdentityStore(url, blobs=blobs)
    except CheckpointError:
        if not replace:
            raise
        target = _begun_anew(url, blobs)
    with target, _opened(path) as source:
        _refuse_full(target, replace=replace)
        with source.db.read() as c:
            for blob in sorted(source.db.blobs(c)):
                target.blobs.put(source.blobs.get(blob))
            try:
                with target.db.write() as into:
                    target.db.guard(into, exclusive=True)
                    _replace_rows(target, c, into)
            except CheckpointError:
                # Damaged below what opening it looks at.
                if not replace or target.db.file is None:
                    raise
                target.close()
                target = _begun_anew(url, blobs)
                for blob in sorted(source.db.blobs(c)):
                    target.blobs.put(source.blobs.get(blob))
                with target.db.write() as into:
                    _replace_rows(target, c, into)
        target.sweep()
        target.sweep_drafts()
        after = check(target)
        target.close()
    if not after.sound or (after.names, after.commits, after.events) != (backed_up.names, backed_up.commits, backed_up.events):
        raise CheckpointError(f"what was restored is not what was backed up: {after}")
    return after


def _refuse_full(target: IdentityStore, *, replace: bool) -> None:
    if replace:
        return
    with target.db.read() as c:
        there = list(target.db.heads(c))
    if there:
        raise StoreError(
            f"{target.db.where} holds {', '.join(there[:5])}{' …' if len(there) > 5 else ''}; restoring would remove them: give another "
            "store, or replace=True (--replace)"
        )


def _replace_rows(target: IdentityStore, c: Connection, into: Connection) -> None:
    from .schema import commits, doomed, events, names, seals
    from sqlalchemy import delete, select  # isort: skip

    old = {x for x in into.scalars(select(commits.c.blob)) if isinstance(x, str)}
    for table in (names, seals, events):
        into.execute(delete(table))
    # Youngest first: none before those that name it as their parent.
    for number in list(into.scalars(select(commits.c.number).distinct().order_by(commits.c.number.desc()))):
        into.execute(delete(commits).where(commits.c.number == number))
    into.execute(delete(doomed))
    copy_rows(c, into)
    # What was there before goes as if it had been deleted.
    target.db.doom(into, old)
    target.db.require_sound(into)


def _begun_anew(url: str | Path | None, blobs: str | Path | None) -> IdentityStore:
    """An empty store where a damaged one was, which is kept beside it."""
    from .connection import SIDES
    from .location import locate

    at = locate(url, blobs)
    if at.file is None:
        raise StoreError("a database on a server is not replaced from here: drop it, make it again, and restore into that")
    stamp = f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    for side in ("", *SIDES):
        file = at.file.with_name(f"{at.file.name}{side}")
        if file.exists():
            os.replace(file, at.file.with_name(f"{at.file.name}.{stamp}{side}"))
    if at.blobs.exists():
        os.replace(at.blobs, at.blobs.with_name(f"{at.blobs.name}.{stamp}"))
    return IdentityStore(url, blobs=blobs)


__all__ = ["backup", "restore", "verified"]
