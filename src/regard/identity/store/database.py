"""Every statement that is sent to the tables of a store, and every answer checked: what comes back is what was written, or an error."""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from .connection import SIDES, Turn, driver
from .episode_rows import EpisodeRows
from .schema import commits, count, doomed, episodes, events, key_of, names, seal_of, seals

# After `schema`, which says what to install where there is no SQLAlchemy.
from sqlalchemy import CTE, Connection, delete, insert, literal, select, text, union_all, update  # isort: skip
from sqlalchemy.exc import IntegrityError, OperationalError  # isort: skip

from ...errors import CheckpointError
from .errors import StaleError, StoreError
from .records import Commit, Event, journal_hash, lists, strict_json

CHUNK = 500
SCRUB = "-"
"""Begins a mark among the doomed blobs: the database's own files may still hold what one removal took out of its tables."""
REWRITTEN = ("identity_events", "identity_commits", "identity_episodes")
"""Tables from which a removal takes rows that tell of somebody."""
TRIES, BRIEFLY = 8, 0.25
"""How often, and for how many seconds, the scrubbing of a database waits for those who read it."""


class Database(EpisodeRows):
    # -- reading -----------------------------------------------------------------------------------------------------

    def names(self, c: Connection) -> dict[str, Commit]:
        """Every name and the commit at its head; refused where the two records of the names differ."""
        heads = self.heads(c)
        by_id: dict[str, Commit] = {}
        for ids in _chunks(sorted(set(heads.values()))):
            rows = c.execute(select(commits.c.id, commits.c.body).where(commits.c.id.in_(ids)))
            by_id |= {id: Commit.read(id, body) for id, body in rows}
        for name, head in heads.items():
            if head not in by_id:
                raise self._damage(f"commit {head[:12]}, the head of {name!r}, is not there")
        return {name: by_id[head] for name, head in heads.items()}

    def heads(self, c: Connection) -> dict[str, str]:
        # One statement, and so one snapshot, in transactions that write too.
        both = union_all(
            select(literal(0), names.c.name, names.c.head), select(literal(1), seals.c.key, seals.c.seal)
        )  # fmt: skip
        heads: dict[str, str] = {}
        sealed: dict[str, str] = {}
        for kind, key, value in c.execute(both):
            if not isinstance(key, str) or not isinstance(value, str) or key in (sealed if kind else heads):
                raise self._damage(f"a name is recorded as {key!r:.80}, with {value!r:.80}")
            (sealed if kind else heads)[key] = value
        for name, head in heads.items():
            if sealed.pop(key_of(name), None) != seal_of(name, head):
                raise self._damage(f"the name {name!r:.80} is not as it was written")
        if sealed:
            lost = "a name is" if len(sealed) == 1 else f"{len(sealed)} names are"
            raise self._damage(f"{lost} lost: the second record of names has more than the first")
        return dict(sorted(heads.items()))

    def head(self, c: Connection, name: str, *, lock: bool = False) -> Commit | None:
        if lock:
            # Locked alone, then read: a joined row would be the one from before the wait.
            c.execute(select(names.c.head).where(names.c.name == name).with_for_update())
        head = select(names.c.head).where(names.c.name == name).scalar_subquery()
        seal = select(seals.c.seal).where(seals.c.key == key_of(name)).scalar_subquery()
        id, sealed = c.execute(select(head, seal)).one()
        if id is None and sealed is None:
            # Nobody of that name, unless damage took both records: then others differ too, or the file is refused as malformed.
            return None
        if not isinstance(id, str) or sealed != seal_of(name, id):
            raise self._damage(f"the name {name!r} is lost, or not as it was written")
        return self.commit(c, id)

    def created(self, c: Connection, wanted: Sequence[str]) -> dict[str, float]:
        """When each of these names was begun."""
        found: dict[str, float] = {}
        for some in _chunks(wanted):
            rows = c.execute(select(names.c.name, names.c.created).where(names.c.name.in_(some)))
            found |= {name: float(when) for name, when in rows}
        return found

    def count(self, c: Connection) -> int:
        return count(c, names)

    def commit(self, c: Connection, id: str) -> Commit:
        body = c.scalar(select(commits.c.body).where(commits.c.id == id))
        if body is None:
            raise CheckpointError(f"commit {id[:12]} is named in {self.where} and not there; run: regard identity check")
        return Commit.read(id, body)

    def beginning(self, c: Connection, prefix: str) -> list[str]:
        """At most three ids that begin so."""
        return list(c.scalars(select(commits.c.id).where(commits.c.id.startswith(prefix)).order_by(commits.c.id).limit(3)))

    def by_token(self, c: Connection, token: str) -> Commit | None:
        row = c.execute(select(commits.c.id, commits.c.body).where(commits.c.token == token)).first()
        return None if row is None else Commit.read(row[0], row[1])

    def chain(self, c: Connection, head: Commit, limit: int | None = None) -> list[Commit]:
        """From the head back to the root, or as far as `limit`; all of them, each the parent of the one before it."""
        floor = -1 if limit is None else head.number - limit
        walk = _walk(select(commits.c.id, commits.c.parent, commits.c.number).where(commits.c.id == head.id), floor)
        rows = c.execute(select(commits.c.id, commits.c.body).join(walk, walk.c.id == commits.c.id))
        chain = sorted((Commit.read(id, body) for id, body in rows), key=lambda x: -x.number)
        for a, b in itertools.pairwise(chain):
            if a.parent != b.id:
                raise CheckpointError(f"commit {a.id[:12]} follows {str(a.parent)[:12]}, and {b.id[:12]} stands in its place")
        if len(chain) != head.number - max(floor, -1) or chain[0].id != head.id or (floor < 0 and chain[-1].parent is not None):
            raise CheckpointError(
                f"the history of commit {head.id[:12]} has a gap: {len(chain)} commits, the last is "
                f"{chain[-1].id[:12] if chain else 'none'}; run: regard identity check"
            )
        return chain

    def events(self, c: Connection, chain: Sequence[Commit]) -> list[list[Event]]:
        """The events of each of these commits, checked against its hash."""
        bodies: dict[str, list[str]] = {x.id: [] for x in chain}
        for ids in _chunks(bodies):
            rows = select(events.c.commit_id, events.c.body).where(events.c.commit_id.in_(ids))
            for id, body in c.execute(rows.order_by(events.c.commit_id, events.c.position)):
                if id not in bodies or not isinstance(body, str):
                    raise self._damage(f"an event belongs to {id!r:.80}, which is none of the commits that it was asked for")
                bodies[id].append(body)
        journals: list[list[Event]] = []
        for commit in chain:
            journal = [Event.read(strict_json(body, "an event")) for body in bodies[commit.id]]
            if journal_hash(journal) != commit.journal:
                raise CheckpointError(
                    f"the events of commit {commit.id[:12]} are not those that were written: their hash differs"
                )
            journals.append(journal)
        return journals

    def events_by(self, c: Connection, source: str) -> list[tuple[str, str]]:
        """The commit and the record of every event that a source of this name wrote, in whatever history."""
        rows = c.execute(select(events.c.commit_id, events.c.body).where(events.c.source == source))
        return [(id, body) for id, body in rows if isinstance(id, str) and isinstance(body, str)]

    def every_record(self, c: Connection) -> Iterable[str]:
        """All text that the tables hold: what may stand in the database's files."""
        for column in (commits.c.body, events.c.body, events.c.source, names.c.name):
            yield from (x for x in c.scalars(select(column)) if isinstance(x, str))

    def every_commit(self, c: Connection) -> list[Commit]:
        """By their records: `gc` must not believe a column that damage has changed."""
        every: list[Commit] = []
        for id, blob, body in c.execute(select(commits.c.id, commits.c.blob, commits.c.body)):
            every.append(Commit.read(id, body))
            if every[-1].blob != blob:
                raise self._damage(f"commit {every[-1].id[:12]} is listed with another blob than its record has")
        return every

    def blobs(self, c: Connection) -> set[str]:
        """Those that commits name: of states, and of episodes."""
        return {x.blob for x in self.every_commit(c)} | {x.blob for x in self.episode_rows(c).values()}

    def has(self, c: Connection, id: str) -> bool:
        return c.scalar(select(commits.c.id).where(commits.c.id == id)) is not None

    def integrity(self, c: Connection) -> list[str]:
        """What SQLite finds wrong with its own pages and references; a server keeps watch over its own."""
        if not self.lite:
            return []
        wrong = [str(row[0]) for row in c.exec_driver_sql("PRAGMA integrity_check(20)") if row[0] != "ok"]
        return wrong + [
            f"a row of {row[0]} refers to one of {row[2]} that is not there"
            for row in c.exec_driver_sql("PRAGMA foreign_key_check")
        ]

    def require_sound(self, c: Connection) -> None:
        """Raise where names, commits or pages are missing: before anything is removed for not being named."""
        wrong = self.integrity(c)
        if wrong:
            raise self._damage(wrong[0])
        for head in self.names(c).values():
            self.chain(c, head)
        rows = self.episode_rows(c)
        for commit in self.every_commit(c):
            if not lists(rows, commit):
                raise self._damage(f"the episodes of commit {commit.id[:12]} are not all there")

    def names_blob(self, c: Connection, blob: str) -> bool:
        return any(c.scalar(select(t.c.id).where(t.c.blob == blob).limit(1)) is not None for t in (commits, episodes))

    def doomed(self, c: Connection) -> list[str]:
        return [x for x in c.scalars(select(doomed.c.blob)) if isinstance(x, str)]

    def _damage(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged: {what}; run: regard identity check")

    # -- writing -----------------------------------------------------------------------------------------------------

    def insert(self, c: Connection, commit: Commit, journal: Sequence[Event]) -> None:
        row = {k: getattr(commit, k) for k in ("id", "parent", "origin", "number", "token", "blob")}
        c.execute(insert(commits).values(**row, body=commit.body()))
        if journal:
            rows = [
                {"commit_id": commit.id, "position": i, "source": e.source, "body": e.body()} for i, e in enumerate(journal)
            ]
            c.execute(insert(events), rows)

    def add_name(self, c: Connection, name: str, head: Commit, now: float) -> None:
        try:
            c.execute(insert(names).values(name=name, head=head.id, created=now))
            c.execute(insert(seals).values(key=key_of(name), seal=seal_of(name, head.id)))
        except IntegrityError as error:
            raise StoreError(f"{name!r} is in the store already; choose another name") from error

    def move(self, c: Connection, name: str, old: Commit, new: Commit) -> None:
        moved = c.execute(update(names).where(names.c.name == name, names.c.head == old.id).values(head=new.id))
        if moved.rowcount != 1:
            raise StaleError(f"the head of {name!r} is no longer {old.id[:12]}; load it and write again")
        sealed = c.execute(update(seals).where(seals.c.key == key_of(name)).values(seal=seal_of(name, new.id)))
        if sealed.rowcount != 1:
            raise self._damage(f"the second record of the name {name!r} is lost")

    def drop_name(self, c: Connection, name: str) -> None:
        c.execute(delete(names).where(names.c.name == name))
        c.execute(delete(seals).where(seals.c.key == key_of(name)))

    def purge(self, c: Connection, old: Commit) -> tuple[list[Commit], str]:
        """Remove the commits behind `old` that no name leads to, and mark their blobs; what was removed, youngest first, and the
        mark that stands until the database's files are clean of it."""
        heads = select(commits.c.id, commits.c.parent, commits.c.number).join(names, names.c.head == commits.c.id)
        live = set(c.scalars(select(_walk(heads, -1, once=True).c.id)))
        gone = [x for x in self.chain(c, old) if x.id not in live]
        # Youngest first: no commit may be removed before those that name it as their parent.
        for ids in _chunks(x.id for x in gone):
            c.execute(delete(events).where(events.c.commit_id.in_(ids)))
            c.execute(delete(commits).where(commits.c.id.in_(ids)))
        lived = self.purge_rows(c, self.every_commit(c)) if any(x.episodes for x in gone) else set[str]()
        return gone, self.doom(c, {x.blob for x in gone} | lived)

    def doom(self, c: Connection, blobs: set[str]) -> str:
        """Mark blobs that no commit names any more, and that the database's files are to be scrubbed; that mark."""
        # One for each removal: who scrubbed before this transaction must not take it for done.
        mark = f"{SCRUB}{uuid.uuid4().hex}"
        marked = blobs - self.blobs(c) - set(self.doomed(c))
        c.execute(insert(doomed), [{"blob": blob} for blob in (mark, *sorted(marked))])
        return mark

    def release(self, c: Connection, marks: Iterable[str]) -> None:
        for ids in _chunks(marks):
            c.execute(delete(doomed).where(doomed.c.blob.in_(ids)))

    def scrub(self) -> bool:
        """Write the database's files anew without what was removed; False where somebody who reads stands in the way."""
        return self._scrub_lite() if self.lite else self._scrub_server()

    def _scrub_lite(self) -> bool:
        with self.errors(), self.engine.connect() as c:
            connection = driver(c)
            # secure_delete has overwritten removed rows where they lay, but not the copies that the balancing of a page leaves in
            # the unused parts of its neighbours: only a database that is written anew has none.
            try:
                connection.execute("VACUUM")
            except sqlite3.OperationalError as error:
                if not any(word in str(error) for word in ("full", "locked", "busy")):
                    raise
                # No room for it now, or no turn: the mark stays, and the next opening tries again.
                return False
            try:
                # Briefly, again and again: whoever waits for readers here keeps writers waiting.
                connection.execute(f"PRAGMA busy_timeout = {int(BRIEFLY * 1000)}")
                for _ in range(TRIES):
                    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    if not busy:
                        return True
                return False
            finally:
                # The pool gives the next user a connection with its own patience.
                c.invalidate()

    def _scrub_server(self) -> bool:
        left: list[int] = []

        def on_notice(notice: Any) -> None:
            # "0 dead row versions cannot be removed yet": those that an older snapshot may still look at.
            if number := re.match(r"\D*(\d+)", notice.message_detail or ""):
                left.append(int(number[1]))

        with self.errors(), self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
            driver(c).add_notice_handler(on_notice)
            try:
                c.execute(text(f"SET lock_timeout = {int(BRIEFLY * 1000)}"))
                return all(self._rewritten(c, table, left) for table in REWRITTEN)
            finally:
                driver(c).remove_notice_handler(on_notice)
                c.invalidate()

    def _rewritten(self, c: Connection, table: str, left: list[int]) -> bool:
        """FULL writes a table anew; without it the old rows would stay where they are until something needs the room."""
        for attempt in range(TRIES):
            if attempt:
                # Not in the queue for the lock, where everyone who comes later would wait behind it.
                time.sleep(BRIEFLY)
            left.clear()
            before = c.scalar(text(f"SELECT pg_relation_filenode('{table}')"))
            try:
                c.execute(text(f"VACUUM (FULL, VERBOSE) {table}"))
            except OperationalError:
                continue
            # A table that is not ours to rewrite is skipped with a warning, and stays in its file.
            if c.scalar(text(f"SELECT pg_relation_filenode('{table}')")) != before and left and not any(left):
                return True
        return False


def _walk(start: Any, floor: int, *, once: bool = False) -> CTE:
    walk = start.cte("walk", recursive=True)
    step = select(commits.c.id, commits.c.parent, commits.c.number).join(walk, commits.c.id == walk.c.parent)
    # Downwards only: parents that damage has made into a circle end.
    step = step.where(commits.c.number > floor, commits.c.number < walk.c.number)
    # Forks share what is behind them: from many heads each commit is walked once.
    return walk.union(step) if once else walk.union_all(step)


def _chunks(values: Iterable[str]) -> Iterable[list[str]]:
    """Databases limit how many values one statement may carry."""
    every = list(values)
    return (every[i : i + CHUNK] for i in range(0, len(every), CHUNK))


__all__ = ["SCRUB", "SIDES", "Connection", "Database", "Turn"]
