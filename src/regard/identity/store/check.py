"""Whether a store is whole: everything that it holds, against everything that it says of it.

    checked = store.check()
    print(checked)                     # a line for each problem, with what to do about it
    assert checked.sound

Nothing is changed. What is merely untidy, such as a file that nobody names, is told apart from what is lost.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from ... import files
from ...errors import CheckpointError, RegardError
from .folder_blobs import open_files
from .reading import expect_whole
from .records import Commit, EpisodeRow, Event, journal_hash, lists, reached, strict_json

if TYPE_CHECKING:
    from .database import Connection
    from .store import IdentityStore

Grave = Literal["lost", "untidy"]
RESTORE = "restore a backup: regard identity restore"
GC = "regard identity gc"
MOST_SHOWN = 3
"""Commits that a problem names; the first ones are those to roll back behind."""


@dataclass(frozen=True)
class Finding:
    where: str
    what: str
    todo: str
    grave: Grave = "lost"

    def __str__(self) -> str:
        return f"{self.grave:<6}  {self.where}: {self.what}; {self.todo}"


@dataclass
class Checked:
    """What was looked at, and what is wrong with it."""

    names: int = 0
    commits: int = 0
    events: int = 0
    blobs: int = 0
    """Of states; one for each episode comes on top of them."""
    episodes: int = 0
    problems: list[Finding] = field(default_factory=list[Finding])

    @property
    def sound(self) -> bool:
        """True when nothing is lost or damaged; what is untidy may be left."""
        return all(p.grave == "untidy" for p in self.problems)

    def add(self, where: str, what: object, todo: str, grave: Grave = "lost") -> None:
        self.problems.append(Finding(where, str(what), todo, grave))

    def __str__(self) -> str:
        counts = (
            f"{self.names} names, {self.commits} commits, {self.events} events, {self.episodes} episodes and {self.blobs} blobs"
        )
        return "\n".join([f"{counts}: {'sound' if self.sound else 'damaged'}", *(f"  {p}" for p in self.problems)])


@dataclass(frozen=True)
class Holders:
    """Commits, rows of episodes and heads, to say whom a lost file concerns."""

    commits: dict[str, Commit]
    episodes: dict[str, EpisodeRow]
    heads: dict[str, str]

    def of_state(self, blob: str) -> list[Commit]:
        return [x for x in self.commits.values() if x.blob == blob]

    def of_episode(self, blob: str) -> list[Commit]:
        """Those whose list goes through it."""
        after: set[str] = set()
        # Each row comes before those that follow it.
        for row in self.episodes.values():
            if row.blob == blob or row.previous in after:
                after.add(row.id)
        return [x for x in self.commits.values() if x.last_episode in after]

    def described(self, held: list[Commit]) -> str:
        ids = {x.id for x in held}
        names: list[str] = []
        for name, head in self.heads.items():
            at: str | None = head
            while at in self.commits and at not in ids:
                at = self.commits[at].parent
            if at in ids:
                names.append(name)
        shown = ", ".join(x.id[:12] for x in sorted(held, key=lambda x: x.number)[:MOST_SHOWN])
        more = f" and {len(held) - MOST_SHOWN} more" if len(held) > MOST_SHOWN else ""
        return f"in {', '.join(names) or 'no name'}: commit {shown}{more}"


def check(store: IdentityStore) -> Checked:
    report = Checked()
    rows: dict[str, Commit] = {}
    journals: dict[str, list[Event]] = {}
    try:
        with store.db.read() as c:
            for what in store.db.integrity(c):
                report.add("database", what, RESTORE)
            rows = _commits(store, c, report)
            journals = _events(store, c, report, rows)
            episodes = _episodes(store, c, report, rows)
            heads = _heads(store, c, report, rows)
            doomed = set(store.db.doomed(c))
    except RegardError as error:
        report.add("database", error, RESTORE)
        return report
    _reached(report, rows, heads)
    report.events = sum(map(len, journals.values()))
    _blobs(store, report, Holders(rows, episodes, heads), doomed)
    _untidy(store, report, doomed)
    return report


def _commits(store: IdentityStore, c: Connection, report: Checked) -> dict[str, Commit]:
    """Every record against its hash, and every column against its record."""
    from .schema import commits
    from sqlalchemy import select  # isort: skip

    rows: dict[str, Commit] = {}
    columns = ("parent", "origin", "number", "token", "blob")
    for row in c.execute(select(commits)).mappings():
        try:
            commit = Commit.read(row["id"], row["body"])
        except CheckpointError as error:
            report.add("commits", error, RESTORE)
            continue
        wrong = [k for k in columns if row[k] != getattr(commit, k)]
        if wrong:
            report.add(f"commit {commit.id[:12]}", f"its {', '.join(wrong)} is not what its record says", RESTORE)
        rows[commit.id] = commit
    for commit in rows.values():
        parent = rows.get(commit.parent or "")
        if commit.parent is not None and parent is None:
            report.add(f"commit {commit.id[:12]}", f"its parent {commit.parent[:12]} is not there", RESTORE)
        elif commit.number != (0 if parent is None else parent.number + 1):
            report.add(f"commit {commit.id[:12]}", f"it is number {commit.number}, and its parent says otherwise", RESTORE)
        if commit.origin is not None and commit.origin not in rows:
            report.add(f"commit {commit.id[:12]}", f"{commit.origin[:12]}, which it went back to, is not there", RESTORE)
    report.commits = len(rows)
    return rows


def _events(store: IdentityStore, c: Connection, report: Checked, rows: dict[str, Commit]) -> dict[str, list[Event]]:
    from .schema import events
    from sqlalchemy import select  # isort: skip

    journals: dict[str, list[Event]] = {id: [] for id in rows}
    broken: set[str] = set()
    for row in c.execute(select(events).order_by(events.c.commit_id, events.c.position)).mappings():
        id = row["commit_id"]
        if id not in journals:
            report.add("events", f"one belongs to commit {id!r:.20}, which is not there", RESTORE)
            continue
        try:
            event = Event.read(strict_json(row["body"] if isinstance(row["body"], str) else "", "an event"))
            if event.source != row["source"]:
                raise CheckpointError("the source of an event is not what its record says")
            journals[id].append(event)
        except CheckpointError as error:
            broken.add(id)
            report.add(f"events of {id[:12]}", error, RESTORE)
    for id, commit in rows.items():
        if id not in broken and journal_hash(journals[id]) != commit.journal:
            report.add(f"events of {id[:12]}", "they are not those that were written: their hash differs", RESTORE)
    return journals


def _episodes(store: IdentityStore, c: Connection, report: Checked, rows: dict[str, Commit]) -> dict[str, EpisodeRow]:
    """Every row against its hash and the one before it, and against what the commits say of it."""
    try:
        episodes = store.db.episode_rows(c)
    except CheckpointError as error:
        report.add("episodes", error, RESTORE)
        return {}
    for commit in rows.values():
        if not lists(episodes, commit):
            report.add(f"commit {commit.id[:12]}", f"not all of its {commit.episodes} episodes are there", RESTORE)
    lost = len(episodes) - len(reached(episodes, rows.values()))
    if lost:
        report.add("episodes", f"no commit leads to {lost} of them", RESTORE)
    return episodes


def _heads(store: IdentityStore, c: Connection, report: Checked, rows: dict[str, Commit]) -> dict[str, str]:
    try:
        heads = store.db.heads(c)
    except CheckpointError as error:
        report.add("names", error, RESTORE)
        return {}
    for name, head in heads.items():
        if head not in rows:
            report.add(f"name {name}", f"its head {head[:12]} is not there", RESTORE)
    report.names = len(heads)
    return heads


def _reached(report: Checked, rows: dict[str, Commit], heads: dict[str, str]) -> None:
    """Commits to which no name leads: a removal takes them with it, so a name has been lost."""
    live: set[str] = set()
    for head in heads.values():
        at: str | None = head
        while at is not None and at not in live and at in rows:
            live.add(at)
            at = rows[at].parent
    lost = [x for x in rows.values() if x.id not in live]
    if lost and report.sound:
        tip = max(lost, key=lambda x: x.number)
        report.add("names", f"no name leads to {len(lost)} commits, the last of them {tip.id[:12]}", RESTORE)


def _blobs(store: IdentityStore, report: Checked, holders: Holders, doomed: set[str]) -> None:
    episodes = {x.blob for x in holders.episodes.values()}
    sources: dict[str, str] = {}
    for blob in sorted(episodes):
        try:
            sources[blob] = store.episode(blob, anew=True).source
        except RegardError as error:
            _lost(store, report, f"episode {blob[:12]}", error, holders.of_episode(blob), holders)
    sound: set[str] = set()
    wrong: set[str] = set()
    # A list that has a gap is a problem already, and has no digest.
    for commit in {x.digest: x for x in holders.commits.values() if lists(holders.episodes, x)}.values():
        try:
            expect_whole(commit, store.state_of(commit), holders.episodes, sources)
            sound.add(commit.blob)
        except RegardError as error:
            if commit.blob not in wrong:
                wrong.add(commit.blob)
                _lost(store, report, f"blob {commit.blob[:12]}", error, holders.of_state(commit.blob), holders)
    report.blobs, report.episodes = len(sound - wrong), len(sources)
    named = episodes | {x.blob for x in holders.commits.values()} | doomed
    stray = store.blobs.strays(named)
    if stray:
        report.add("blobs", f"{len(stray)} files that no commit names, such as {stray[0][:20]}", GC, "untidy")


def _lost(store: IdentityStore, report: Checked, where: str, error: RegardError, held: list[Commit], holders: Holders) -> None:
    """What is damaged, and who holds it; nothing where all of them were removed since the tables were read."""
    with contextlib.suppress(RegardError):
        if not any(store.holds(commit.id) for commit in held):
            return
    first = min(held, key=lambda x: x.number)
    report.add(
        where, f"{error} ({holders.described(held)})", f"{RESTORE}, or roll back to before commit {first.id[:12]}",
    )  # fmt: skip


def _untidy(store: IdentityStore, report: Checked, doomed: set[str]) -> None:
    if doomed:
        report.add("database", f"{len(doomed)} removals are not cleared away yet", GC, "untidy")
    nights = len(list(store.sleep_checkpoints.glob(f"{files.DRAFT}*")))
    for where, drafts in ((store.blobs.where, store.blobs.drafts()[0]), (str(store.sleep_checkpoints), nights)):
        if drafts:
            report.add(PurePath(where).name, f"{drafts} unfinished files", f"{GC}, when nobody writes", "untidy")
    for path in _others_may_read(store):
        report.add(path.name, f"others may read it (mode {stat.S_IMODE(path.stat().st_mode):o})", f"chmod go= {path}", "untidy")


def _others_may_read(store: IdentityStore) -> Iterator[Path]:
    from .connection import SIDES

    file = store.db.file
    for path in () if file is None else (file, *(file.with_name(f"{file.name}{side}") for side in SIDES)):
        yield from open_files(path)
    yield from store.blobs.open_to_others()
    for folder in (store.sleep_checkpoints, store.db.locks):
        yield from open_files(folder)


__all__ = ["Checked", "Finding", "check"]
