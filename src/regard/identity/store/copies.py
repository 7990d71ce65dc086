"""Which other names hold what a source wrote: by ancestry and by content, never by the name of the source alone.

Two sources may have one name, such as a date. They are told apart by their events: each carries its time and its text, so the same event in two histories was copied there, by a fork, an import or an earlier forgetting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ..state import Identity
from .proof import fragments_of_state, fragments_of_text
from .records import Commit, Event, strict_json

if TYPE_CHECKING:
    from .database import Connection
    from .store import IdentityStore


@dataclass(frozen=True)
class Written:
    """All that one source wrote into one history."""

    source: str
    commits: frozenset[str]
    """Whose state or events hold it."""
    records: frozenset[str]
    """Of its events, as they are kept."""
    texts: frozenset[str]
    moments: frozenset[bytes]
    """Its imprints: the keys of each."""
    fragments: frozenset[bytes]
    """Of texts and states, as they would lie in a file."""

    @classmethod
    def of(
        cls, store: IdentityStore, source: str, theirs: Sequence[Event], chain: Sequence[tuple[Commit, Sequence[Event]]]
    ) -> Written:
        held = [x for x, events in chain if source in (x.source, *x.sources) or any(e.source == source for e in events)]
        states: list[Identity] = []
        for commit in {x.blob: x for x in held if source in x.sources}.values():
            try:
                states.append(store.identity_of(commit))
            except CheckpointError:
                # A state that is lost can be forgotten all the same.
                continue
        texts = {e.text for e in theirs if e.text}
        parts = fragments_of_text(texts).union(*(fragments_of_state(x, source) for x in states))
        return cls(
            source,
            frozenset(x.id for x in held),
            frozenset(e.body() for e in theirs),
            frozenset(texts),
            frozenset(m for x in states for m in moments(x, source)),
            frozenset(parts),
        )


def moments(identity: Identity, source: str) -> set[bytes]:
    """The imprints of one source, each by its keys in every layer and head, its token and its place."""
    if source not in identity.sources:
        return set()
    imprints, index = identity.imprints, identity.sources.index(source)
    mine = (imprints.source == index).nonzero().flatten().tolist()
    return {
        b"".join(
            x.numpy().tobytes()
            for x in (imprints.k.codes[:, :, i], imprints.k.scale[:, :, i], imprints.token[i], imprints.position[i])
        )
        for i in mine
    }


def others(store: IdentityStore, c: Connection, name: str, written: Written) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The other names that still hold it, and those into which the same text was written by itself."""
    same_record: set[str] = set(written.commits)
    by_source: set[str] = set()
    same_text: set[str] = set()
    for id, body in store.db.events_by(c, written.source):
        by_source.add(id)
        if body in written.records:
            same_record.add(id)
        elif strict_json(body, "an event").get("text") in written.texts:
            same_text.add(id)
    forks: list[str] = []
    copies: list[str] = []
    for other, head in store.db.names(c).items():
        if other == name:
            continue
        chain = store.db.chain(c, head)
        # A history with events of that source wrote its state itself, even where the two states are equal.
        without_events = not any(x.id in by_source for x in chain)
        if any(x.id in same_record for x in chain) or (without_events and _keeps(store, chain, written)):
            forks.append(other)
        elif any(x.id in same_text for x in chain):
            copies.append(other)
    return tuple(forks), tuple(copies)


def _keeps(store: IdentityStore, chain: Sequence[Commit], written: Written) -> bool:
    """Whether a state came here without its events, as a folder that was saved and imported does."""
    for commit in {x.blob: x for x in chain if written.source in x.sources}.values():
        try:
            if written.moments & moments(store.identity_of(commit), written.source):
                return True
        except CheckpointError:
            continue
    return False


__all__ = ["Written", "moments", "others"]
