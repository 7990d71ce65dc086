"""Take back what one source wrote, or one event alone, and prove it by replay.

The identity is made again from its empty beginning out of every event that remains, twice, and both must
come to the same state, bit for bit: then nothing of what is to go can be in it, whatever the writes mixed together. The
name's whole history is replaced, because each later commit carries what was left in it; commits, texts and blobs
that no other name needs are removed for good. Other names are left as they are, and named in the report where they hold the same
commits, events, imprints or episodes; a source of the same name that wrote something else is somebody else.

Then the database is written anew, and every file of the store is read for what was removed: the report says what was read, and what
cannot be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import CheckpointError, StateError
from ..state import Identity
from .copies import Written, others
from .errors import StaleError, StoreError
from .proof import Searched, fragments_of_text, search
from .records import WRITES, Commit, Event, checked_name, checked_source, label_of

if TYPE_CHECKING:
    from .database import Connection
    from .store import IdentityStore

Replay = Callable[[Identity, Sequence[Event]], Identity]


@dataclass(frozen=True)
class Forgotten:
    """The proof: `after` is what the remaining events make, and `again` what they made a second time."""

    name: str
    source: str
    events_removed: int
    """Of the whole history, those that had been rolled back among them."""
    events_kept: int
    before: str
    after: str
    again: str
    commits_removed: int
    blobs_removed: int
    forks: tuple[str, ...]
    """Other names that still hold it: they share its commits, carry the same events, or keep the same imprints or episodes."""
    copies: tuple[str, ...]
    """Other names into which a source of this name wrote the same text at another time, by itself."""
    echoes: int
    """Remaining events whose text holds, word for word, a text that was removed: somebody else said it too."""
    scrubbed: bool
    """Whether the database was written anew and nothing of it was found in any file; if not, the next opening tries again."""
    searched: Searched
    """The files that were read for it, those that still hold it, and what cannot be read from here."""
    head: str
    whole: bool = True
    """False where one event was taken back, or one line of it, and not all that the source wrote."""

    def __str__(self) -> str:
        lines = [
            f"{'' if self.whole else 'a line of '}{self.source!r} is forgotten in {self.name!r}: {self.events_removed} events removed, {self.events_kept} replayed",
            f"  before  {self.before}",
            f"  after   {self.after}",
            f"  again   {self.again}",
            f"  {self.commits_removed} commits and {self.blobs_removed} blobs removed",
        ]
        if self.echoes:
            lines.append(f"  {self.echoes} remaining events repeat a removed text word for word")
        if self.searched.left:
            lines.append(f"  it is still in the bytes of {', '.join(self.searched.left)}")
        elif self.searched.files:
            lines.append(f"  read from end to end, and nothing of it is there: {_listed(self.searched.files)}")
        if not self.scrubbed:
            lines.append(
                "  the database could not be written anew while others used it; any verb tries again: regard identity check says whether it is done"
            )
        lines.append(f"  cannot be read from here, and may keep it: {'; '.join(self.searched.unreachable)}")
        if self.forks:
            lines.append(f"  it is still in {', '.join(self.forks)}: forget it there too, or delete them")
        if self.copies:
            lines.append(f"  the same words were also written, by themselves, into {', '.join(self.copies)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Removal:
    """What is to go: all events of a source, or one, of which `instead` may stay."""

    source: str
    event: Event | None = None
    instead: Event | None = None

    def takes(self, event: Event) -> bool:
        return event.source == self.source if self.event is None else event == self.event

    def left_of(self, events: Sequence[Event]) -> list[Event]:
        """The events that write, and are replayed."""
        stays = [] if self.instead is None else [self.instead]
        return [x for e in events if e.kind in WRITES for x in (stays if self.takes(e) else [e])]

    def echoed_in(self, event: Event, removed: Sequence[Event]) -> bool:
        """Whether an event that remains holds, word for word, what is removed."""
        if self.event is None:
            return any(t.text and event.text and t.text in event.text for t in removed)
        from .lines import lines_of

        before, after, other = ({line.text for line in lines_of(e)} if e else set() for e in (self.event, self.instead, event))
        return bool((before - after) & other)


def forget(store: IdentityStore, name: str, source: str | Event, replay: Replay, instead: Event | None = None) -> Forgotten:
    checked_name(name)
    if isinstance(source, str):
        checked_source(source)
    db = store.db
    with db.turn(name) as turn:
        with turn.read() as c:
            head = store.head_of(c, name)
            chain = db.chain(c, head)
            by_commit = db.events(c, chain)
            every = [e for journal in by_commit for e in journal]
            path, events = store.lineage(c, head)
            firsts = db.events(c, path[:1])[0]
        known = {e.source for e in every if e.source} | {s for x in chain for s in x.sources}
        removal = _removal(source, name, known, events, instead)
        source = removal.source
        theirs = [e for e in every if removal.takes(e)]
        start = _start(store, path, firsts)
        remaining = removal.left_of(events)
        # Of a source that wrote nothing else, nothing may be left, not even its name.
        silent = source not in {e.source for e in remaining}
        after, again = (replay(start, tuple(remaining)) for _ in range(2))
        _agree(start, after, again, source if silent else None)
        data, empty = store.encoded(after), store.encoded(start)
        echoes = sum(removal.echoed_in(e, theirs) for e in remaining)
        proof = Event(
            "forget",
            rule={
                "removed": len(theirs),
                "kept": len(remaining),
                "before": head.digest,
                "after": after.digest(),
                "again": again.digest(),
            },
        )
        written = Written.of(
            store, source, theirs, list(zip(chain, by_commit, strict=True)), None if removal.event is None else after
        )
        with turn.write() as c:
            now = store.head_of(c, name, lock=True)
            if now.id != head.id:
                raise StaleError(
                    f"{name!r} moved to {now.id[:12]} while {source!r} was being forgotten; nothing changed, try again"
                )
            db.guard(c, exclusive=True)
            root = store.write(c, start, empty, None, [Event("new", time=path[0].time)], "")
            last = store.write(c, after, data, root, [*remaining, proof], "replayed")
            db.move(c, name, head, last)
            gone, mark = db.purge(c, head)
            _prove(store, c, last, removal, source if silent else None, again.digest())
            forks, copies = others(store, c, name, written)
    # After the transaction: if this is not reached, the store does it when it is next opened.
    removed, _, clean = store.sweep(mark)
    store.sweep_drafts()
    searched = search(
        store, set(written.fragments) | fragments_of_text([*(x.message for x in gone), *([source] if silent else [])])
    )
    return Forgotten(
        name, source, len(theirs), len(remaining), head.digest, after.digest(), again.digest(), len(gone), removed, forks, copies,
        echoes, clean and not searched.left, searched, last.id, removal.event is None,
    )  # fmt: skip


def _removal(source: str | Event, name: str, known: set[str], events: Sequence[Event], instead: Event | None) -> _Removal:
    if isinstance(source, str):
        if instead is not None:
            raise StoreError(f"instead={instead!r:.60} stays of one event; {source!r} is a source, of which nothing does")
        return _Removal(_which(source, name, known))
    if not isinstance(source, Event):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(
            f"forget({source!r:.60}): give a source, by its name; those of {name!r} are {', '.join(sorted(known)) or 'none'}"
        )
    if source not in events or source.kind not in WRITES:
        raise StoreError(f"{name!r} holds no such event by {source.source!r}, or not any more; see journal({name!r})")
    if instead is not None and (instead == source or (instead.kind, instead.source) != (source.kind, source.source)):
        raise StoreError(f"instead of an event by {source.source!r}, only another {source.kind} by it may stay")
    return _Removal(str(source.source), source, instead)


def _which(source: str, name: str, known: set[str]) -> str:
    """The source of that name, or the one source that people call so."""
    if source in known:
        return source
    same = sorted(s for s in known if label_of(s) == source)
    if len(same) > 1:
        raise StoreError(f"{source!r} could be {len(same)} sources of {name!r}: {', '.join(same)}; name one of them")
    if not same:
        raise StoreError(f"{source!r} wrote nothing in {name!r}; its sources are {', '.join(sorted(known)) or 'none'}")
    return same[0]


def _listed(files: Sequence[str], most: int = 6) -> str:
    return ", ".join(files[:most]) + (f" and {len(files) - most} more" if len(files) > most else "")


def _start(store: IdentityStore, path: Sequence[Commit], firsts: Sequence[Event]) -> Identity:
    """The empty identity that it all began with; refused where some of the state came without an event."""
    root = path[0]
    first = store.identity_of(root)
    empty = first.empty and not first.sources
    if not empty and not any(e.kind in WRITES for e in firsts):
        raise StoreError(
            f"the history begins at {root.id[:12]} ({root.kind}) with a state that no event tells of; it cannot be replayed, "
            "only deleted"
        )
    for before, commit in itertools.pairwise(path):
        if commit.kind is None and commit.digest != before.digest:
            raise StoreError(
                f"commit {commit.id[:12]} was written without an event; replaying would lose it: roll it back first"
            )
    return Identity.new(first.base) if not empty else first


def _agree(start: Identity, after: Identity, again: Identity, source: str | None) -> None:
    if after.digest() != again.digest():
        raise StateError(
            f"two replays of the same events came to {after.digest()[:12]} and {again.digest()[:12]}; replay must depend on "
            "nothing but the identity and the events (and their seeds). Nothing was changed"
        )
    if source is not None and source in after.sources:
        raise StateError(f"the replayed identity still names {source!r} among its sources; nothing was changed")
    if after.base.fingerprint != start.base.fingerprint:
        raise StateError(
            f"the replay was made on another base: {after.base.fingerprint[:12]}, not {start.base.fingerprint[:12]}. Nothing was changed"
        )


def _prove(store: IdentityStore, c: Connection, last: Commit, removal: _Removal, source: str | None, digest: str) -> None:
    """Look at what is now there, as a reader would; anything found undoes the transaction."""
    chain = store.db.chain(c, last)
    theirs = [e for each in store.db.events(c, chain) for e in each if removal.takes(e)]
    for commit in chain:
        named = source is not None and source in (commit.source, *commit.sources, *store.identity_of(commit, c=c).sources)
        if theirs or named:
            raise CheckpointError(f"{removal.source!r} would still stand in commit {commit.id[:12]}; nothing was changed")
    if store.identity_of(last, c=c).digest() != digest:
        raise CheckpointError(f"commit {last.id[:12]} does not hold what the replay made; nothing was changed")


__all__ = ["Forgotten", "Replay"]
