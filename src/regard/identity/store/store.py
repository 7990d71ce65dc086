"""A store of identities: append-only, content-addressed, in SQLite or PostgreSQL.

    store = IdentityStore()                                   # or a file, or "postgresql+psycopg://…", blobs="s3://bucket/prefix"
    store.new("mara", Identity.new(base_of(model)))
    store.update("mara", lambda me: imprint(me, seen, rule), event=Event("imprint", source="mara", text="…"))
    store.log("mara"); store.diff("mara", "3f2a"); store.fork("mara", "mara-2"); store.rollback("mara", 1)

A write is acknowledged when it can no longer be lost: first the tensors, in a file named by their hash, written under another
name, synced and renamed, or in an object that a bucket keeps; then, in one transaction, the commit that names the file and the head that names the commit. A crash
in between leaves a file that nothing names, which `gc` removes. A name's head moves only from the commit that the writer
started from, so that no writer undoes another's work unseen.

Open a store in the process that uses it: connections do not survive a fork.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import files
from ...errors import StateError
from ..episodes import Episode
from ..state import Base, Identity, Recollection
from .cache import EpisodeCache
from .codec import encode, encode_episode, readable, readable_episode
from .drafting import draft, sealed
from .errors import StaleError, StoreError
from .reading import Reading
from .records import Commit, Event, checked_message, checked_name, rows_of

if TYPE_CHECKING:
    from .check import Checked
    from .database import Connection
    from .forget import Forgotten

MOST_NAMES = 100_000
GRACE = 3600.0
"""Seconds for which `gc` leaves a file alone that no commit names yet."""
SHORTEST_GRACE = 60.0
"""For a file that is still being written, whatever `gc` was asked for."""


@dataclass(frozen=True)
class Collected:
    """What `gc` removed."""

    blobs: int
    drafts: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.blobs} blobs that no commit names and {self.drafts} unfinished files removed, {self.bytes:,} bytes"


class IdentityStore(Reading):
    def __init__(
        self, url: str | Path | None = None, *, blobs: str | Path | None = None, read_only: bool | None = None
    ) -> None:
        """`read_only` is by default what the permissions of its files say."""
        from .database import Database
        from .location import locate

        at = locate(url, blobs)
        read_only = not at.writable() if read_only is None else read_only
        self.blobs = at.blobs
        self.cached_episodes = EpisodeCache()
        self.sleep_checkpoints = at.sleep_checkpoints
        if not read_only:
            at.make()
        self.db = Database(at, read_only=read_only)
        try:
            if not read_only:
                # What a crash kept from being removed, and what killed processes left half written, is removed now.
                self.sweep()
                self.sweep_drafts()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the database; the store is a context manager that does so at its end."""
        self.cached_episodes.clear()
        self.db.close()

    def __enter__(self) -> IdentityStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing -----------------------------------------------------------------------------------------------------

    def new(self, name: str, identity: Identity, *, message: str = "", event: Event | None = None) -> Commit:
        """Begin a name with `identity`, mostly an empty one: only then can all of it be replayed, and taken back."""
        return self.begin(name, identity, [event or Event("new")], message)

    def commit(
        self,
        name: str,
        identity: Identity,
        *,
        event: Event | None = None,
        message: str = "",
        expected: str | None = None,
        token: str | None = None,
    ) -> Commit:
        """Add a commit to `name`, whose head must still be `expected`: by default the commit that `identity` was loaded from.

        A `token` names the attempt: a second try with the same one, after an outcome that nobody saw, gives the first's commit.
        """
        start = expected or identity.parent
        if start is None:
            raise StaleError(
                f"nothing says which commit this identity was made from; load {checked_name(name)!r} from the store and write on "
                "that, or give expected=store.head(name).id"
            )

        def head_or_done(c: Connection, *, lock: bool) -> tuple[Commit, Commit | None]:
            head, done = self.head_of(c, name, lock=lock), self._done(c, token, identity)
            if done is None and head.id != start:
                raise StaleError(
                    f"{name!r} moved from {start[:12]} to {head.id[:12]} ({head.kind}, {head.message or 'no message'}) since this "
                    "identity was loaded; load it and write again, or use update()"
                )
            return head, done

        with self.db.read() as c:
            # Before any file: who comes too late must not bring back what was forgotten meanwhile.
            if (done := head_or_done(c, lock=False)[1]) is not None:
                return done
        data = self.encoded(identity)
        with self.db.write() as c:
            head, done = head_or_done(c, lock=True)
            return done or self.append(c, name, head, identity, data, [event] if event else [], message, token=token)

    def update(
        self,
        name: str,
        write: Callable[[Identity], Identity],
        *,
        event: Event | None = None,
        message: str = "",
        token: str | None = None,
    ) -> Commit:
        """Load the head, call `write` on it and commit what it gives; writers of one name take turns.

        `write` may be called again if a plain `commit` came between, and must not itself write to the same name.
        """
        checked_name(name)
        while True:
            with self.db.turn(name) as turn:
                with turn.read() as c:
                    head = self.head_of(c, name)
                    done = self._done(c, token, None)
                if done is not None:
                    return done
                identity = write(self.identity_of(head))
                data = self.encoded(identity)
                try:
                    with turn.write() as c:
                        self._expect(self.head_of(c, name, lock=True), head, name)
                        return self.append(c, name, head, identity, data, [event] if event else [], message, token=token)
                except StaleError:
                    continue

    def fork(self, name: str, new_name: str, at: str | None = None) -> Commit:
        """A second name for the head of the first, or for a commit in its history; from then on they go apart."""
        with self.db.write() as c:
            self.db.guard(c, exclusive=False)
            head = self.head_of(c, name)
            commit = head if at is None else self._in_history(c, name, head, at)
            self._add_name(c, new_name, commit)
            return commit

    def rollback(self, name: str, to: str | int, *, message: str = "") -> Commit:
        """Be again what the identity was `to` commits ago, or at commit `to`; a further commit, so that it can be undone."""
        with self.db.write() as c:
            head = self.head_of(c, name, lock=True)
            if isinstance(to, str):
                target = self._in_history(c, name, head, to)
            else:
                if not isinstance(to, int) or isinstance(to, bool) or not 1 <= to <= head.number:  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise StoreError(f"rollback({name!r}, {to!r:.60}): there are {head.number} commits to go back")
                target = self.db.chain(c, head, to + 1)[-1]
            self.db.guard(c, exclusive=False)
            event = Event("rollback", rule={"to": target.id})
            commit = sealed(
                replace(target, parent=head.id, origin=target.id, number=head.number + 1, token=uuid.uuid4().hex,
                        message=checked_message(message) or f"back to {target.id[:12]}"), [event],
            )  # fmt: skip
            self.db.insert(c, commit, [event])
            self.db.move(c, name, head, commit)
            return commit

    def delete(self, name: str) -> int:
        """Remove a name, and every commit and blob that no other name needs; how many commits are gone."""
        with self.db.write() as c:
            head = self.head_of(c, name, lock=True)
            self.db.guard(c, exclusive=True)
            self.db.drop_name(c, name)
            gone, mark = self.db.purge(c, head)
        self.sweep(mark)
        self.sweep_drafts()
        return len(gone)

    def gc(self, grace: float = GRACE) -> Collected:
        """Remove files that no commit names and that nobody has touched for `grace` seconds; safe beside writers."""
        self.db.refuse_read_only()
        removed, freed, _ = self.sweep()
        _, before = self.blobs.drafts()
        drafts = self.sweep_drafts(max(grace, SHORTEST_GRACE))
        freed += max(0, before - self.blobs.drafts()[1])
        with self.db.write() as c:
            self.db.guard(c, exclusive=True)
            # Refused where the database is damaged: what it fails to name may still be restored.
            self.db.require_sound(c)
            named = self.db.blobs(c)
            for blob in list(self.blobs.old(grace)):
                if blob not in named:
                    freed += self.blobs.drop(blob)
                    removed += 1
        return Collected(removed, drafts, freed)

    def export(self, name: str, path: str | Path) -> Path:
        """Write the identity and its journal to a new folder, or to one file if `path` ends in .safetensors."""
        from .exchange import export

        return export(self, name, Path(path))

    def import_(self, path: str | Path, name: str, base: Base | None = None) -> Commit:
        """Begin `name` with what `export` or `Identity.save` wrote."""
        from .exchange import import_

        return import_(self, Path(path), name, base)

    def check(self) -> Checked:
        """Everything that the store holds, against everything that it says of it: see `regard.identity.store.check`."""
        from .check import check

        return check(self)

    def backup(self, path: str | Path) -> Path:
        """A new folder with all of it as it is at one moment, checked: see `regard.identity.store.backup`."""
        from .backup import backup

        return backup(self, Path(path))

    def forget(
        self,
        name: str,
        source: str | Event,
        replay: Callable[[Identity, Sequence[Event]], Identity],
        *,
        instead: Event | None = None,
    ) -> Forgotten:
        """Take back all that `source` wrote into `name`, or one event of its journal, `instead` of which another may stay: see
        `regard.identity.store.forget`."""
        from .forget import forget

        return forget(self, name, source, replay, instead)

    # -- what the verbs are made of ----------------------------------------------------------------------------------

    def encoded(self, identity: Identity) -> bytes:
        self.db.refuse_read_only()
        if isinstance(identity, Recollection):
            raise StateError("a recollection is made for one prompt, and is not committed: commit the identity that it is of")
        data = encode(identity)
        readable(identity, data)
        # Before any lock is taken: a sync takes long, and nobody else needs to wait for it.
        self.blobs.put(data)
        if identity.episodes:
            rows = rows_of(tuple(e.digest for e in identity.episodes))
            with self.db.read() as c:
                present = self.db.rows_present(c, rows)
            self._put(identity.episodes[present:])
        return data

    def _put(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            data = encode_episode(episode)
            readable_episode(episode, data)
            self.blobs.put(data, episode.digest)
            self.cached_episodes.add(episode)

    def append(
        self, c: Connection, name: str, head: Commit, identity: Identity, data: bytes, events: Sequence[Event], message: str,
        *, token: str | None = None,
    ) -> Commit:  # fmt: skip
        """A commit on top of `head`, which the caller holds locked."""
        if identity.base.fingerprint != head.fingerprint:
            raise StateError(
                f"{name!r} belongs to the base {head.fingerprint[:12]}, and this identity was written on "
                f"{identity.base.name or identity.base.family} ({identity.base.fingerprint[:12]}): give it a name of its own"
            )
        self.db.guard(c, exclusive=False)
        commit = self.write(c, identity, data, head, events, message, token)
        self.db.move(c, name, head, commit)
        return commit

    def write(
        self, c: Connection, identity: Identity, data: bytes, parent: Commit | None, events: Sequence[Event], message: str,
        token: str | None = None,
    ) -> Commit:  # fmt: skip
        commit = draft(identity, data, parent, events, message, token)
        # Under the guard, where nobody removes: if it is there now, it stays until this transaction ends.
        if not self.blobs.has(commit.blob):
            self.blobs.put(data)
        if identity.episodes:
            rows = rows_of(tuple(e.digest for e in identity.episodes))
            present = self.db.rows_present(c, rows)
            self._put([e for e in identity.episodes[present:] if not self.blobs.has(e.digest)])
            self.db.insert_rows(c, rows[present:])
        self.db.insert(c, commit, events)
        return commit

    def begin(self, name: str, identity: Identity, events: Sequence[Event], message: str) -> Commit:
        """A new name with a commit of its own."""
        checked_name(name)
        data = self.encoded(identity)
        with self.db.write() as c:
            self.db.guard(c, exclusive=False)
            commit = self.write(c, identity, data, None, events, message)
            self._add_name(c, name, commit)
        return commit

    def _add_name(self, c: Connection, name: str, commit: Commit) -> None:
        if self.db.head(c, checked_name(name)) is not None:
            raise StoreError(f"{name!r} is in the store already; choose another name")
        if self.db.count(c) >= MOST_NAMES:
            raise StoreError(f"the store has {MOST_NAMES:,} names, which is the limit; delete() some")
        self.db.add_name(c, name, commit, time.time())

    def _done(self, c: Connection, token: str | None, identity: Identity | None) -> Commit | None:
        if token is None:
            return None
        if not isinstance(token, str) or not 8 <= len(token) <= 64 or not token.isascii() or not token.isprintable():
            raise StoreError(
                f"token={token!r:.80}; give 8 to 64 ASCII characters that no other commit has, such as uuid4().hex"
            )
        done = self.db.by_token(c, token)
        if done is not None and identity is not None and done.digest != identity.digest():
            raise StoreError(
                f"token {token!r} belongs to commit {done.id[:12]}, which holds another identity; take a new token"
            )
        return done

    def _expect(self, head: Commit, expected: Commit, name: str) -> None:
        if head.id != expected.id:
            raise StaleError(f"{name!r} moved from {expected.id[:12]} to {head.id[:12]}; load it and write again")

    def sweep(self, mark: str | None = None) -> tuple[int, int, bool]:
        """Remove for good what has no commit any more: how many blobs, their bytes, and whether nothing of it is left.

        With the `mark` of a removal, for as long as somebody else is at it; without one, only where nobody is.
        """
        from .database import BRIEFLY, SCRUB, TRIES

        removed = freed = 0
        for _ in range(TRIES if mark else 1):
            with self.db.alone() as mine:
                with self.db.read() as c:
                    doomed = self.db.doomed(c)
                if not doomed or (mark and mark not in doomed and not mine):
                    break
                if not mine:
                    time.sleep(BRIEFLY)
                    continue
                clean = self.db.scrub()
                with self.db.write() as c:
                    self.db.guard(c, exclusive=True)
                    gone = {x for x in doomed if not x.startswith(SCRUB)}
                    for blob in gone - self.db.blobs(c):
                        freed += self.blobs.drop(blob)
                        self.cached_episodes.drop(blob)
                        removed += 1
                    self.db.release(c, doomed if clean else gone)
                break
        with self.db.read() as c:
            left = self.db.doomed(c)
        return removed, freed, mark not in left if mark else not left

    def sweep_drafts(self, older_than: float = files.STALE) -> int:
        """Remove what killed processes left half written, and checkpoints of interrupted sleeps over commits that were removed."""
        swept = self.blobs.sweep(older_than) + files.sweep(self.sleep_checkpoints, older_than)
        for checkpoint in list(self.sleep_checkpoints.glob("*.safetensors")):
            if not self.holds(checkpoint.stem):
                checkpoint.unlink(missing_ok=True)
        return swept


__all__ = ["Collected", "IdentityStore"]
