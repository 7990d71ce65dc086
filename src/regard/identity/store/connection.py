"""How a store talks to its database: engines, transactions and locks; SQLite in a file, or PostgreSQL.

Order of locks, the same everywhere so that no two writers wait for each other: first the name (its row in PostgreSQL, a
locked file beside SQLite), then the guard that keeps those who remove things apart from those who add them.

Who reads has one snapshot for all of its statements, and waits for nobody who writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import schema
from .schema import URL, names

# After `schema`, which says what to install where there is no SQLAlchemy.
from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select  # isort: skip
from sqlalchemy.exc import DBAPIError, SQLAlchemyError  # isort: skip
from sqlalchemy.pool import QueuePool  # isort: skip

from ...errors import CheckpointError
from .errors import StoreError
from .location import StoreLocation, secrets, shown

PATIENCE = 60.0
"""Seconds that a writer waits for SQLite's one write lock."""
GUARD = 0x7265_6761_7264
"""PostgreSQL's advisory locks are numbers; this one is "regard" in ASCII."""
SWEEP = GUARD + 1
SIDES = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside its file."""
DAMAGE = ("not a database", "malformed", "unsupported file format", "decode to UTF-8", "disk I/O error")
"""What SQLite says of a file that is not as it wrote it."""
POOL = {"pool_size": 8, "max_overflow": 32, "hide_parameters": True}


@dataclass(frozen=True)
class Turn:
    """One writer's time with one name: its transactions, while no other writer's turn on that name can begin."""

    read: Callable[[], AbstractContextManager[Connection]]
    write: Callable[[], AbstractContextManager[Connection]]


class Connections:
    def __init__(self, at: StoreLocation, *, read_only: bool = False) -> None:
        self.lite = at.file is not None
        self.file = at.file
        self.where = shown(at.url)
        self.locks = at.locks
        self.read_only = read_only
        self._secrets = secrets(at.url)
        self.engine = self._engine(at.url)
        try:
            self._prepared(at)
        except BaseException:
            self.close()
            raise

    def _engine(self, url: URL) -> Engine:
        if self.file is None:
            # TCP and the server's own limits decide how long it may take to answer; a place that is not there must not hang.
            engine = create_engine(url, pool_pre_ping=True, **POOL)
            if self.read_only:
                engine = engine.execution_options(postgresql_readonly=True)
            return engine
        if self.read_only:
            uri = read_only_uri(self.file)
            engine = create_engine(
                "sqlite://",
                creator=lambda: sqlite3.connect(uri, uri=True, timeout=PATIENCE, check_same_thread=False),
                poolclass=QueuePool,
                **POOL,
            )
        else:
            engine = create_engine(url, connect_args={"timeout": PATIENCE}, **POOL)
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
        return engine

    def _prepared(self, at: StoreLocation) -> None:
        """A store of the newest schema: found so, upgraded, or made. Found so, it takes no lock and waits for nobody."""
        with self.read() as c:
            version = schema.version_of(c, self.where)
            others = {t for t in inspect(c).get_table_names() if not t.startswith("identity_")}
        if version != schema.newest():
            if self.read_only:
                old = "is no store of identities" if version is None else f"has schema {version}, of {schema.newest()}"
                raise StoreError(f"{self.where} {old}, and was opened to be read only; open it once to be written")
            self._upgrade(at)
        if self.file is not None and not self.read_only and not others:
            # Where other tables are, the file is somebody else's too, and stays as they keep it.
            close_to_others(self.file)

    def _upgrade(self, at: StoreLocation) -> None:
        with self.errors(), self.locked(".schema") if self.lite else contextlib.nullcontext():
            if self.lite:
                with self.engine.connect() as c:
                    # Readers never wait for a writer, and a writer never for readers. It is kept in the file: set once, alone.
                    driver(c).execute("PRAGMA journal_mode=WAL")
            with self.engine.begin() as c:
                self.guard(c, exclusive=True)
                version = schema.version_of(c, self.where)
                if version is None:
                    some = next(at.blobs.every(), None)
                    if some is not None:
                        raise CheckpointError(
                            f"{self.where} holds no store, and {at.blobs.where} holds identities of one: the database was damaged or "
                            "replaced. Restore a backup, or move that folder away to begin anew"
                        )
                    schema.create(c)
                else:
                    schema.upgrade(c, version)

    def close(self) -> None:
        self.engine.dispose()

    # -- transactions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Generator[Connection]:
        options: dict[str, Any] = {"regard_reads": True}
        if not self.lite:
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self.errors(), self.engine.connect().execution_options(**options) as c:
            yield c

    @contextlib.contextmanager
    def write(self) -> Generator[Connection]:
        self.refuse_read_only()
        with self.errors(), self.engine.begin() as c:
            yield c

    @contextlib.contextmanager
    def turn(self, name: str) -> Generator[Turn]:
        """Writers of one name come one after another; writers of other names do not wait."""
        self.refuse_read_only()
        if self.lite:
            # Not SQLite's own lock: it is one for all names, and what runs in a turn may take as long as a model takes.
            with self.locked(name):
                yield Turn(self.read, self.write)
        else:
            with self.write() as c:
                c.execute(select(names.c.head).where(names.c.name == name).with_for_update())
                yield Turn(lambda: contextlib.nullcontext(c), lambda: contextlib.nullcontext(c))

    def refuse_read_only(self) -> None:
        if self.read_only:
            raise StoreError(
                f"{self.where} was opened to be read only (read_only=True, or its files may not be written); nothing was changed"
            )

    def guard(self, c: Connection, *, exclusive: bool) -> None:
        """Who adds shares it, who removes holds it alone, so that nothing is removed that is about to be named."""
        if not self.lite:
            lock = func.pg_advisory_xact_lock if exclusive else func.pg_advisory_xact_lock_shared
            c.execute(select(lock(GUARD)))

    @contextlib.contextmanager
    def alone(self) -> Generator[bool]:
        """True for the one that may clear away what was removed; False, at once, while another does it."""
        if self.lite:
            with self.locked(".sweep", wait=False) as mine:
                yield mine
            return
        with self.errors(), self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
            mine = bool(c.scalar(select(func.pg_try_advisory_lock(SWEEP))))
            try:
                yield mine
            finally:
                if mine:
                    c.execute(select(func.pg_advisory_unlock(SWEEP)))

    @contextlib.contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Generator[bool]:
        try:
            import fcntl
        except ImportError:
            # Without it two writers may both try; the second finds the head moved, and tries again.
            yield True
            return
        self.locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        # By hash: some systems do not tell A from a in a file's name, and a name that was deleted leaves nothing to read.
        file = self.locks / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Whatever the database says, in our words: without the statement's values, and without a password."""
        try:
            yield
            return
        except (DBAPIError, sqlite3.Error) as error:
            below = error.orig if isinstance(error, DBAPIError) else error
            said = str(below).strip()
            why = self.hidden(said.splitlines()[0] if said else type(below).__name__)
            if any(word in why for word in DAMAGE):
                raised: Exception = CheckpointError(f"{self.where} is not a store of identities, or a damaged one: {why}")
            else:
                raised = StoreError(f"{self.where} did not answer as it should: {why}; what was acknowledged is kept")
            cause: Exception | None = error
        except UnicodeDecodeError as error:
            # SQLite quotes a name from its tables, and damage has made it no text.
            raised, cause = CheckpointError(f"{self.where} is a damaged store: what SQLite says of it is no text"), error
        except SQLAlchemyError as error:
            raised, cause = StoreError(f"{self.where} cannot be used: {self.hidden(str(error))}"), error
        # A chain of errors is printed with its words; one that quotes a password is left out of it, context and all.
        raise raised from (cause if not self._quotes(cause) else None)

    def hidden(self, text: str) -> str:
        for word in self._secrets:
            text = text.replace(word, "***")
        return text

    def _quotes(self, error: BaseException | None) -> bool:
        seen: list[BaseException] = []
        while error is not None and error not in seen:
            if any(word in str(error) for word in self._secrets):
                return True
            seen.append(error)
            error = error.__cause__ or error.__context__
        return False


def read_only_uri(file: Path) -> str:
    """How SQLite opens a file that it may not write."""
    if not file.exists():
        raise StoreError(f"{file} is not there; a store that is read only cannot be made")
    place = f"file:{quote(str(file))}?mode=ro"
    if os.access(file.parent, os.W_OK):
        return place
    wal, shm = (file.with_name(f"{file.name}{side}") for side in ("-wal", "-shm"))
    if not wal.exists() or not wal.stat().st_size:
        # Nobody writes, and SQLite could not make the files by which it would notice.
        return f"{place}&immutable=1"
    if not shm.exists():
        raise StoreError(
            f"{wal} holds commits that are not in {file.name} yet, and only somebody who may write there can bring them in: open the "
            "store once with that permission, or copy both files to a folder of your own"
        )
    return place


def close_to_others(file: Path) -> None:
    """The database and what SQLite keeps beside it, for their owner alone; made by an older version, they may be open."""
    for path in (file, *(file.with_name(f"{file.name}{side}") for side in SIDES)):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink():
                path.chmod(0o600)


def driver(c: Connection) -> Any:
    """The connection below SQLAlchemy's, for what may not stand in a transaction."""
    return c.connection.dbapi_connection


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    # Python would begin transactions late and without the write lock; `_begin` does it instead.
    connection.isolation_level = None
    # FULL and not NORMAL: with a write-ahead log NORMAL survives a killed process but not a power cut, and a commit that was
    # acknowledged must survive both. One sync for each commit is small beside what a model takes to write one. In memory, what is
    # sorted or rewritten for a moment: a file elsewhere would keep it in blocks that nobody can find again.
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON", "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(c: Connection) -> None:
    # A transaction that reads first and then writes could find that it may not: writers take the lock at once.
    c.exec_driver_sql("BEGIN" if c.get_execution_options().get("regard_reads") else "BEGIN IMMEDIATE")


__all__ = ["SIDES", "Connections", "Turn", "close_to_others", "driver", "read_only_uri"]
