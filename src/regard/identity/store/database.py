"""The tables of a store, and every statement that is sent to them: SQLite in a file, or PostgreSQL.

Order of locks, the same everywhere so that no two writers wait for each other: first the name (its row in PostgreSQL, a
locked file beside SQLite), then the guard that keeps those who remove things apart from those who add them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from sqlalchemy import (
        CTE,
        URL,
        Column,
        Connection,
        Float,
        ForeignKey,
        Integer,
        MetaData,
        String,
        Table,
        Text,
        create_engine,
        delete,
        event,
        func,
        insert,
        make_url,
        select,
        text,
        update,
    )  # fmt: skip
    from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
except ImportError as error:
    raise ImportError("a store of identities needs SQLAlchemy 2: pip install 'regard[identity]'") from error

import itertools

from ...errors import CheckpointError
from .errors import StaleError, StoreError
from .records import Commit, Event, canonical, journal_hash, strict_json

SCHEMA = 1
PATIENCE = 60.0
"""Seconds that a writer waits for SQLite's one write lock."""
GUARD = 0x7265_6761_7264
"""PostgreSQL's advisory locks are numbers; this one is "regard" in ASCII."""
CHUNK = 500

metadata = MetaData()
schema = Table("identity_schema", metadata, Column("version", Integer, primary_key=True))
commits = Table(
    "identity_commits",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("parent", String(64), ForeignKey("identity_commits.id"), index=True),
    Column("origin", String(64), ForeignKey("identity_commits.id"), index=True),
    Column("number", Integer, nullable=False),
    Column("token", String(64), nullable=False, unique=True),
    Column("blob", String(64), nullable=False, index=True),
    Column("body", Text, nullable=False),
)
events = Table(
    "identity_events",
    metadata,
    Column("commit_id", String(64), ForeignKey("identity_commits.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("source", Text, index=True),
    Column("body", Text, nullable=False),
)
names = Table(
    "identity_names",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("head", String(64), ForeignKey("identity_commits.id"), nullable=False, index=True),
    Column("created", Float, nullable=False),
)
doomed = Table("identity_doomed", metadata, Column("blob", String(64), primary_key=True))
"""Blobs whose last commit is gone: removed after the transaction, or by whoever opens the store next."""
SCRUB = "-"
"""Stands among them while the database's own files may still hold what was removed from it."""


@dataclass(frozen=True)
class Turn:
    """One writer's time with one name: its transactions, while no other writer's turn on that name can begin."""

    read: Callable[[], AbstractContextManager[Connection]]
    write: Callable[[], AbstractContextManager[Connection]]


class Database:
    def __init__(self, url: URL, locks: Path) -> None:
        self.lite = url.get_backend_name() == "sqlite"
        self.where = url.render_as_string(hide_password=True)
        self.locks = locks
        if self.lite:
            self.engine = create_engine(url, connect_args={"timeout": PATIENCE}, pool_size=8, max_overflow=32)
            event.listen(self.engine, "connect", _prepare)
            event.listen(self.engine, "begin", _begin)
        else:
            self.engine = create_engine(url, pool_pre_ping=True, pool_size=8, max_overflow=32)
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        with self._errors(), self._locked(".schema") if self.lite else contextlib.nullcontext():
            if self.lite:
                with self.engine.connect() as c:
                    _wal(c)
            with self.engine.begin() as c:
                self.guard(c, exclusive=True)
                metadata.create_all(c, tables=[schema])
                version = c.scalar(select(func.max(schema.c.version)))
                if version is None:
                    c.execute(insert(schema).values(version=SCHEMA))
                elif version > SCHEMA:
                    raise StoreError(
                        f"{self.where} has schema {version}; this version of regard reads up to {SCHEMA}: update regard"
                    )
                metadata.create_all(c)

    def close(self) -> None:
        self.engine.dispose()

    # -- transactions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Generator[Connection]:
        with self._errors(), self.engine.connect().execution_options(regard_reads=True) as c:
            yield c

    @contextlib.contextmanager
    def write(self) -> Generator[Connection]:
        with self._errors(), self.engine.begin() as c:
            yield c

    @contextlib.contextmanager
    def turn(self, name: str) -> Generator[Turn]:
        """Writers of one name come one after another; writers of other names do not wait."""
        if self.lite:
            # Not SQLite's own lock: it is one for all names, and what runs in a turn may take as long as a model takes.
            with self._locked(name):
                yield Turn(self.read, self.write)
        else:
            with self.write() as c:
                c.execute(select(names.c.head).where(names.c.name == name).with_for_update())
                yield Turn(lambda: contextlib.nullcontext(c), lambda: contextlib.nullcontext(c))

    def guard(self, c: Connection, *, exclusive: bool) -> None:
        """Who adds shares it, who removes holds it alone, so that nothing is removed that is about to be named."""
        if not self.lite:
            lock = func.pg_advisory_xact_lock if exclusive else func.pg_advisory_xact_lock_shared
            c.execute(select(lock(GUARD)))

    @contextlib.contextmanager
    def _locked(self, name: str) -> Generator[None]:
        try:
            import fcntl
        except ImportError:
            # Without it two writers may both try; the second finds the head moved, and tries again.
            yield
            return
        self.locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        # By hash: some systems do not tell A from a in a file's name, and a name that was deleted leaves nothing to read.
        file = self.locks / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except DBAPIError as error:
            why = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
            if "not a database" in why or "malformed" in why:
                raise CheckpointError(f"{self.where} is not a store of identities, or a damaged one: {why}") from error
            raise StoreError(f"{self.where} did not answer as it should: {why}; what was acknowledged is kept") from error
        except SQLAlchemyError as error:
            raise StoreError(f"{self.where} cannot be used: {error}") from error

    # -- reading -----------------------------------------------------------------------------------------------------

    def names(self, c: Connection) -> dict[str, Commit]:
        found = select(names.c.name, commits.c.id, commits.c.body).join(commits, names.c.head == commits.c.id)
        return {name: Commit.read(id, body) for name, id, body in c.execute(found.order_by(names.c.name))}

    def some_names(self, c: Connection, limit: int) -> list[str]:
        return list(c.scalars(select(names.c.name).order_by(names.c.name).limit(limit)))

    def count(self, c: Connection) -> int:
        return c.scalar(select(func.count()).select_from(names)) or 0

    def head(self, c: Connection, name: str, *, lock: bool = False) -> Commit | None:
        found = select(names.c.head).where(names.c.name == name)
        # Locked alone, then read: a joined row would be the one from before the wait.
        id = c.scalar(found.with_for_update() if lock else found)
        return None if id is None else self.commit(c, id)

    def commit(self, c: Connection, id: str) -> Commit:
        body = c.scalar(select(commits.c.body).where(commits.c.id == id))
        if body is None:
            raise CheckpointError(f"commit {id[:12]} is named in {self.where} and not there")
        return Commit.read(id, body)

    def beginning(self, c: Connection, prefix: str) -> list[str]:
        """At most three ids that begin so."""
        return list(c.scalars(select(commits.c.id).where(commits.c.id.startswith(prefix)).order_by(commits.c.id).limit(3)))

    def by_token(self, c: Connection, token: str) -> Commit | None:
        row = c.execute(select(commits.c.id, commits.c.body).where(commits.c.token == token)).first()
        return None if row is None else Commit.read(row[0], row[1])

    def chain(self, c: Connection, head: Commit, limit: int | None = None) -> list[Commit]:
        """From the head back to the root."""
        floor = -1 if limit is None else head.number - limit
        walk = _walk(select(commits.c.id, commits.c.parent, commits.c.number).where(commits.c.id == head.id), floor)
        rows = c.execute(select(commits.c.id, commits.c.body).join(walk, walk.c.id == commits.c.id))
        found = sorted((Commit.read(id, body) for id, body in rows), key=lambda x: -x.number)
        for a, b in itertools.pairwise(found):
            if a.parent != b.id:
                raise CheckpointError(f"commit {a.id[:12]} follows {str(a.parent)[:12]}, and {b.id[:12]} stands in its place")
        return found

    def events(self, c: Connection, chain: Sequence[Commit]) -> list[list[Event]]:
        """The events of each of these commits, checked against its hash."""
        bodies: dict[str, list[str]] = {x.id: [] for x in chain}
        for ids in _chunks(bodies):
            rows = select(events.c.commit_id, events.c.body).where(events.c.commit_id.in_(ids))
            for id, body in c.execute(rows.order_by(events.c.commit_id, events.c.position)):
                bodies[id].append(body)
        result: list[list[Event]] = []
        for commit in chain:
            found = [Event.read(strict_json(body, "an event")) for body in bodies[commit.id]]
            if journal_hash(found) != commit.journal:
                raise CheckpointError(
                    f"the events of commit {commit.id[:12]} are not those that were written: their hash differs"
                )
            result.append(found)
        return result

    def holders(self, c: Connection, source: str) -> list[str]:
        """Names in whose history `source` still stands."""
        suspects = set(c.scalars(select(events.c.commit_id).where(events.c.source == source)))
        quoted = commits.c.body.contains(canonical(source), autoescape=True)
        for id, body in c.execute(select(commits.c.id, commits.c.body).where(quoted)):
            commit = Commit.read(id, body)
            if source == commit.source or source in commit.sources:
                suspects.add(id)
        found: list[str] = []
        for name, head in self.names(c).items() if suspects else ():
            if any(x.id in suspects for x in self.chain(c, head)):
                found.append(name)
        return found

    def blobs(self, c: Connection) -> set[str]:
        return set(c.scalars(select(commits.c.blob).distinct()))

    def doomed(self, c: Connection) -> list[str]:
        return list(c.scalars(select(doomed.c.blob)))

    # -- writing -----------------------------------------------------------------------------------------------------

    def insert(self, c: Connection, commit: Commit, found: Sequence[Event]) -> None:
        row = {k: getattr(commit, k) for k in ("id", "parent", "origin", "number", "token", "blob")}
        c.execute(insert(commits).values(**row, body=commit.body()))
        if found:
            rows = [{"commit_id": commit.id, "position": i, "source": e.source, "body": e.body()} for i, e in enumerate(found)]
            c.execute(insert(events), rows)

    def add_name(self, c: Connection, name: str, head: Commit, now: float) -> None:
        try:
            c.execute(insert(names).values(name=name, head=head.id, created=now))
        except IntegrityError as error:
            raise StoreError(f"{name!r} is in the store already; choose another name") from error

    def move(self, c: Connection, name: str, old: Commit, new: Commit) -> None:
        moved = c.execute(update(names).where(names.c.name == name, names.c.head == old.id).values(head=new.id))
        if moved.rowcount != 1:
            raise StaleError(f"the head of {name!r} is no longer {old.id[:12]}; load it and write again")

    def drop_name(self, c: Connection, name: str) -> None:
        c.execute(delete(names).where(names.c.name == name))

    def purge(self, c: Connection, old: Commit) -> list[Commit]:
        """Remove the commits behind `old` that no name leads to, and mark their blobs; what was removed, youngest first."""
        heads = select(commits.c.id, commits.c.parent, commits.c.number).join(names, names.c.head == commits.c.id)
        live = set(c.scalars(select(_walk(heads, -1, once=True).c.id)))
        gone = [x for x in self.chain(c, old) if x.id not in live]
        # Youngest first: no commit may be removed before those that name it as their parent.
        for ids in _chunks(x.id for x in gone):
            c.execute(delete(events).where(events.c.commit_id.in_(ids)))
            c.execute(delete(commits).where(commits.c.id.in_(ids)))
        marked = ({SCRUB} | {x.blob for x in gone}) - self.blobs(c) - set(self.doomed(c))
        if marked:
            c.execute(insert(doomed), [{"blob": blob} for blob in sorted(marked)])
        return gone

    def release(self, c: Connection, found: Iterable[str]) -> None:
        for ids in _chunks(found):
            c.execute(delete(doomed).where(doomed.c.blob.in_(ids)))

    def scrub(self) -> bool:
        """Leave nothing of removed rows in the database's files; False where a reader stood in the way."""
        if self.lite:
            # secure_delete has overwritten them in the database itself; what is left stands in the log.
            with self._errors(), self.engine.connect() as c:
                busy, _, _ = _driver(c).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                return not busy
        with self._errors(), self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
            # FULL writes the tables anew; without it the old rows would stay where they are until something needs the room.
            c.execute(text("VACUUM (FULL) identity_events"))
            c.execute(text("VACUUM (FULL) identity_commits"))
        return True


def _walk(start: Any, floor: int, *, once: bool = False) -> CTE:
    walk = start.cte("walk", recursive=True)
    step = select(commits.c.id, commits.c.parent, commits.c.number).join(walk, commits.c.id == walk.c.parent)
    step = step.where(commits.c.number > floor)
    # Forks share what is behind them: from many heads each commit is walked once.
    return walk.union(step) if once else walk.union_all(step)


def _chunks(found: Iterable[str]) -> Iterable[list[str]]:
    """Databases limit how many values one statement may carry."""
    every = list(found)
    return (every[i : i + CHUNK] for i in range(0, len(every), CHUNK))


def _wal(c: Connection) -> None:
    # Readers never wait for a writer, and a writer never for readers. It is kept in the file, so it is set once, alone.
    _driver(c).execute("PRAGMA journal_mode=WAL")


def _driver(c: Connection) -> Any:
    """The connection below SQLAlchemy's, for what may not stand in a transaction."""
    return c.connection.dbapi_connection


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    # Python would begin transactions late and without the write lock; `_begin` does it instead.
    connection.isolation_level = None
    # FULL and not NORMAL: with a write-ahead log NORMAL survives a killed process but not a power cut, and a commit that was
    # acknowledged must survive both. One sync for each commit is small beside what a model takes to write one.
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(c: Connection) -> None:
    # A transaction that reads first and then writes could find that it may not: writers take the lock at once.
    c.exec_driver_sql("BEGIN" if c.get_execution_options().get("regard_reads") else "BEGIN IMMEDIATE")


__all__ = ["SCRUB", "URL", "Connection", "Database", "Turn", "make_url"]
