"""The tables of a store, and the steps from each older schema to this one.

A step runs once, in one transaction with the number that says so: an upgrade that is interrupted has not begun.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import CheckpointError, needs_extra

with needs_extra("identity"):
    from sqlalchemy import (
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
        func,
        insert,
        inspect,
        make_url,
        select,
    )  # fmt: skip

from .errors import StoreError
from .records import canonical

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
episodes = Table(
    "identity_episodes",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("previous", String(64), ForeignKey("identity_episodes.id"), index=True),
    Column("number", Integer, nullable=False),
    Column("blob", String(64), nullable=False, index=True),
)
"""What commits have for episodes: each row names the one before it, and a commit the last, so that lists share what they begin with."""
seals = Table(
    "identity_seals",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("seal", String(64), nullable=False),
)
"""A second record of every name, in pages of its own: a name that damage takes from one of the two is missed by the other."""


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def seal_of(name: str, head: str) -> str:
    return hashlib.sha256(canonical([name, head]).encode()).hexdigest()


@dataclass(frozen=True)
class Step:
    """From one schema to the next: the tables that it adds, and what it fills them with."""

    adds: tuple[Table, ...]
    fill: Callable[[Connection], None]


def _fill_seals(c: Connection) -> None:
    rows = [{"key": key_of(name), "seal": seal_of(name, head)} for name, head in c.execute(select(names.c.name, names.c.head))]
    if rows:
        c.execute(insert(seals), rows)


FIRST = (schema, commits, events, names, doomed)
"""The tables of schema 1."""
STEPS: list[Step] = [Step((seals,), _fill_seals), Step((episodes,), lambda c: None)]
"""To schema 2, 3, …"""


def newest() -> int:
    return 1 + len(STEPS)


def tables(version: int) -> list[Table]:
    return [*FIRST, *(table for step in STEPS[: version - 1] for table in step.adds)]


def version_of(c: Connection, where: str) -> int | None:
    """The schema of a database; None where no store is in it yet. One that is older is upgraded, and one with a gap is damaged:
    a table that went missing must never be made again, empty."""
    there = {name for name in inspect(c).get_table_names() if name.startswith("identity_")}
    if schema.name not in there:
        ours = sorted(there & {t.name for t in tables(newest())})
        if ours:
            raise CheckpointError(f"{where} is damaged: it has {', '.join(ours)} and no {schema.name}; restore a backup")
        return None
    versions = list(c.scalars(select(schema.c.version)))
    if not versions or any(type(v) is not int or v < 1 for v in versions):
        raise CheckpointError(f"{where} is damaged: its schema is {versions!r:.80}, not a number; restore a backup")
    version = max(versions)
    if version > newest():
        raise StoreError(f"{where} has schema {version}; this version of regard reads up to {newest()}: update regard")
    missing = sorted({t.name for t in tables(version)} - there)
    if missing:
        raise CheckpointError(f"{where} is damaged: a store of schema {version} has {', '.join(missing)}; restore a backup")
    return version


def create(c: Connection) -> None:
    """The tables of the newest schema, where there are none."""
    metadata.create_all(c, tables=tables(newest()), checkfirst=False)
    c.execute(insert(schema).values(version=newest()))


def upgrade(c: Connection, version: int) -> None:
    for number, step in enumerate(STEPS[version - 1 :], version + 1):
        metadata.create_all(c, tables=list(step.adds), checkfirst=False)
        step.fill(c)
        c.execute(insert(schema).values(version=number))


def count(c: Connection, table: Table) -> int:
    return c.scalar(select(func.count()).select_from(table)) or 0


__all__ = [
    "FIRST", "STEPS", "URL", "Step", "commits", "count", "create", "doomed", "episodes", "events", "key_of", "make_url", "metadata", "names", "newest", "schema",
    "seal_of", "seals", "tables", "upgrade", "version_of",
]  # fmt: skip
