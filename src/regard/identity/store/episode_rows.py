"""Which episodes a commit has: a row for each, which names the one before it, and the commit names the last.

    a ← b ← c ← d          the row of d stands for the list (a, b, c, d): its id is the hash of the row before it and of d
            ↖ e            and (a, b, c, e), as a fork has it, is one row more

So a commit of a long life writes rows for what is new, and a list that was changed anywhere has another id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .connection import Connections
from .schema import commits, episodes

# After `schema`, which says what to install where there is no SQLAlchemy.
from sqlalchemy import Connection, delete, select  # isort: skip
from sqlalchemy.dialects import postgresql, sqlite  # isort: skip

from ...errors import CheckpointError
from .errors import MissingBlobError
from .records import Commit, EpisodeRow, reached, row_id

CHUNK = 500
RECENT = 64
"""Rows at the end of a list that are looked for first: what is new is mostly one or two."""


class EpisodeRows(Connections):
    def episodes(self, c: Connection, commit: Commit) -> list[str]:
        """The blobs of a commit's episodes, oldest first; all of them, as they were written."""
        if commit.last_episode is None:
            return []
        columns = (episodes.c.id, episodes.c.previous, episodes.c.number, episodes.c.blob)
        walk = select(*columns).where(episodes.c.id == commit.last_episode).cte("walk", recursive=True)
        # Downwards only: rows that damage has made into a circle end.
        step = select(*columns).join(walk, episodes.c.id == walk.c.previous).where(episodes.c.number < walk.c.number)
        walk = walk.union_all(step)
        rows = sorted((_checked(*row) for row in c.execute(select(walk))), key=lambda x: x.number)
        if not rows and not c.scalar(select(commits.c.id).where(commits.c.id == commit.id)):
            raise MissingBlobError(commit.blob, f"commit {commit.id[:12]} was removed while it was being read")
        ids = [None, *(x.id for x in rows)]
        if len(rows) != commit.episodes or ids[-1] != commit.last_episode or [x.previous for x in rows] != ids[:-1]:
            raise CheckpointError(
                f"the list of episodes of commit {commit.id[:12]} has a gap: {len(rows)} of {commit.episodes} are there; "
                "run: regard identity check"
            )
        return [x.blob for x in rows]

    def episode_rows(self, c: Connection) -> dict[str, EpisodeRow]:
        """All rows, each before those that follow it; refused where one is not as it was written."""
        rows: dict[str, EpisodeRow] = {}
        for row in c.execute(select(episodes).order_by(episodes.c.number)):
            x = _checked(*row)
            if x.number != (0 if x.previous is None else 1 + rows[x.previous].number if x.previous in rows else -1):
                raise CheckpointError(
                    f"{self.where} is damaged: an episode follows one that is not there; run: regard identity check"
                )
            rows[x.id] = x
        return rows

    def rows_present(self, c: Connection, rows: Sequence[EpisodeRow]) -> int:
        """How many of a list are there already; where one is, all before it are."""
        at, size = len(rows), RECENT
        while at:
            ids = [x.id for x in rows[max(0, at - size) : at]]
            there = set(c.scalars(select(episodes.c.id).where(episodes.c.id.in_(ids))))
            for i, id in reversed(list(enumerate(ids, at - len(ids)))):
                if id in there:
                    return i + 1
            at, size = at - len(ids), CHUNK
        return 0

    def insert_rows(self, c: Connection, rows: Sequence[EpisodeRow]) -> None:
        # Two writers may add one row at once, to two names: what the other has written stands.
        add = (sqlite if self.lite else postgresql).insert(episodes).on_conflict_do_nothing()
        for i in range(0, len(rows), CHUNK):
            c.execute(add, [vars(x) for x in rows[i : i + CHUNK]])

    def purge_rows(self, c: Connection, needed: Iterable[Commit]) -> set[str]:
        """Remove the rows that none of these commits leads to; the blobs that they named."""
        rows = self.episode_rows(c)
        live = reached(rows, needed)
        # The last ones first: none may be removed before those that name it.
        gone = [x for x in reversed(rows.values()) if x.id not in live]
        for i in range(0, len(gone), CHUNK):
            c.execute(delete(episodes).where(episodes.c.id.in_([x.id for x in gone[i : i + CHUNK]])))
        return {x.blob for x in gone}


def _checked(id: object, previous: object, number: object, blob: object) -> EpisodeRow:
    match id, previous, number, blob:
        case str(), str() | None, int(), str() if row_id(previous, blob) == id:
            return EpisodeRow(id, previous, number, blob)
        case _:
            raise CheckpointError(f"an episode is recorded as {id!r:.20}, and its hash differs: the database is damaged")


__all__ = ["EpisodeRows"]
