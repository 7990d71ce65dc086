"""What opens stores beside the one that a caller holds: a backup put back, and a check of a store that may not open.

restore("monday", "people.db")     # into a store that is empty, or with replace=True in place of what is there
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from ... import files
from ...errors import CheckpointError
from .backup import BLOBS, DATABASE, NOTE, SCHEMA, copy_rows, file_hash
from .check import RESTORE, Checked, check
from .errors import StoreError
from .location import locate
from .records import strict_json
from .store import IdentityStore

if TYPE_CHECKING:
    from .database import Connection


def check_place(url: str | Path | None = None, *, blobs: str | Path | None = None) -> Checked:
    """`check`, also of a store that cannot be opened: then that is the problem."""
    at = locate(url, blobs)
    if at.file is not None and not at.file.exists():
        raise StoreError(f"there is no store at {at.file}; nothing was checked")
    try:
        store = IdentityStore(url, blobs=blobs, read_only=True)
    except StoreError as error:
        if "schema" not in str(error):
            raise
        # An older schema is no damage; it is checked after the upgrade that opening it is.
        store = IdentityStore(url, blobs=blobs)
    except CheckpointError as error:
        report = Checked()
        report.add("database", error, RESTORE)
        return report
    with store:
        return check(store)


def verified(path: Path) -> Checked:
    """A backup against its own note and hashes; raises where it is not whole."""
    note = strict_json(files.read_plain(path / NOTE, 1 << 16), str(path / NOTE))
    if not isinstance(note, dict) or note.get("schema") != SCHEMA:
        schema = note.get("schema") if isinstance(note, dict) else None
        raise CheckpointError(f"{path / NOTE} has schema {schema!r:.40}; this version of regard reads {SCHEMA}: update regard")
    if file_hash(files.require_plain(path / DATABASE)) != note.get("database"):
        raise CheckpointError(f"{path / DATABASE} is damaged: it is not the file that was backed up; take another backup")
    with _opened(path) as store:
        report = check(store)
    if not report.sound or (report.names, report.commits, report.events) != tuple(
        note.get(k) for k in ("names", "commits", "events")
    ):
        what = report.problems[0] if report.problems else f"it has {report}, and was made with {note!r:.200}"
        raise CheckpointError(f"the backup {path} is damaged: {what}")
    return report


@contextlib.contextmanager
def _opened(path: Path) -> Generator[IdentityStore]:
    """A backup to be read; it stays as it was made, also where its schema is older."""
    with contextlib.ExitStack() as stack:
        try:
            store = IdentityStore(path / DATABASE, blobs=path / BLOBS, read_only=True)
        except StoreError as error:
            if "schema" not in str(error):
                raise
            # A copy of its tables is upgraded; for its owner alone, and gone when it was read.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regard-")))
            shutil.copyfile(path / DATABASE, folder / DATABASE)
            store = IdentityStore(folder / DATABASE, blobs=path / BLOBS, read_only=False)
        yield stack.enter_context(store)


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
                target.blobs.put(source.blobs.read(blob), blob)
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
                    target.blobs.put(source.blobs.read(blob), blob)
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
    from .schema import commits, doomed, episodes, events, names, seals
    from sqlalchemy import delete, select  # isort: skip

    old = {x for t in (commits, episodes) for x in into.scalars(select(t.c.blob)) if isinstance(x, str)}
    for table in (names, seals, events, episodes):
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

    at = locate(url, blobs)
    if at.file is None:
        raise StoreError("a database on a server is not replaced from here: drop it, make it again, and restore into that")
    stamp = f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    for side in ("", *SIDES):
        file = at.file.with_name(f"{at.file.name}{side}")
        if file.exists():
            os.replace(file, at.file.with_name(f"{at.file.name}.{stamp}{side}"))
    at.blobs.set_aside(stamp)
    return IdentityStore(url, blobs=blobs)


__all__ = ["check_place", "restore", "verified"]
