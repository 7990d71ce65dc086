"""Which other names hold what a source wrote: by ancestry and by content, never by the name of the source alone.

Two sources may have one name, such as a date. They are told apart by their events: each carries its time and its text, so the same event in two histories was copied there, by a fork, an import or an earlier forgetting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ..episodes import Episode
from ..state import Identity
from .proof import fragments_of_episode, fragments_of_state, fragments_of_text
from .records import Commit, EpisodeRow, Event, reached, strict_json

if TYPE_CHECKING:
    from .database import Connection
    from .store import IdentityStore


@dataclass(frozen=True)
class Written:
    """All that one source wrote into one history, or one event of it."""

    source: str
    commits: frozenset[str]
    """Whose state or events hold it."""
    records: frozenset[str]
    """Of its events, as they are kept."""
    texts: frozenset[str]
    moments: frozenset[bytes]
    """Its imprints: the keys of each."""
    episodes: frozenset[str]
    """Their digests."""
    fragments: frozenset[bytes]
    """Of texts, states and episodes, as they would lie in a file."""

    @classmethod
    def of(
        cls,
        store: IdentityStore,
        source: str,
        theirs: Sequence[Event],
        chain: Sequence[tuple[Commit, Sequence[Event]]],
        after: Identity | None = None,
    ) -> Written:
        """From a history, youngest first. `after` is what remains where one event goes; without it, all of the source does."""
        with store.db.read() as c:
            rows = store.db.episode_rows(c)
        by_event = [any(e in theirs for e in events) for _, events in chain]
        if after is None:
            held = [x for i, (x, _) in enumerate(chain) if by_event[i] or source in (x.source, *x.sources)]
            wrote, stays = _Left.by(store, source, held, rows), _Left()
        else:
            # A state that came after the event was made with it, also where no imprint of it is left: places count on.
            first = max((i for i, here in enumerate(by_event) if here), default=-1) + 1
            held = [x for i, (x, _) in enumerate(chain) if by_event[i]]
            wrote, stays = (_Left.by(store, source, [x for x, _ in part], rows) for part in (chain[:first], chain[first:]))
            stays = _Left([*stays.states, after], [*stays.episodes, *(e for e in after.episodes if e.source == source)])
        texts = {e.text for e in theirs if e.text}
        return cls(
            source,
            frozenset(x.id for x in held),
            frozenset(e.body() for e in theirs),
            frozenset(texts),
            frozenset(wrote.moments(source) - stays.moments(source)),
            frozenset({e.digest for e in wrote.episodes} - {e.digest for e in stays.episodes}),
            frozenset(fragments_of_text(texts) | (wrote.fragments(source) - stays.fragments(source))),
        )


@dataclass(frozen=True)
class _Left:
    """What a source left in some commits."""

    states: Sequence[Identity] = ()
    episodes: Sequence[Episode] = ()

    @classmethod
    def by(cls, store: IdentityStore, source: str, commits: Sequence[Commit], rows: Mapping[str, EpisodeRow]) -> _Left:
        states: list[Identity] = []
        episodes: list[Episode] = []
        # What is lost, of a state or of an episode, can be forgotten all the same.
        for commit in {x.blob: x for x in commits if source in x.sources}.values():
            with contextlib.suppress(CheckpointError):
                states.append(store.state_of(commit))
        for blob in {rows[id].blob for id in reached(rows, commits)}:
            with contextlib.suppress(CheckpointError):
                episodes.append(store.episode(blob))
        return cls(states, [e for e in episodes if e.source == source])

    def moments(self, source: str) -> set[bytes]:
        return {m for x in self.states for m in moments(x, source)}

    def fragments(self, source: str) -> set[bytes]:
        parts = [*(fragments_of_state(x, source) for x in self.states), *(fragments_of_episode(e) for e in self.episodes)]
        return set[bytes]().union(*parts)


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
    rows = store.db.episode_rows(c)
    forks: list[str] = []
    copies: list[str] = []
    for other, head in store.db.names(c).items():
        if other == name:
            continue
        chain = store.db.chain(c, head)
        # A history with events of that source wrote its state itself, even where the two states are equal.
        without_events = not any(x.id in by_source for x in chain)
        if any(x.id in same_record for x in chain) or (without_events and _keeps(store, chain, rows, written)):
            forks.append(other)
        elif any(x.id in same_text for x in chain):
            copies.append(other)
    return tuple(forks), tuple(copies)


def _keeps(store: IdentityStore, chain: Sequence[Commit], rows: Mapping[str, EpisodeRow], written: Written) -> bool:
    """Whether a state came here without its events, as a folder that was saved and imported does."""
    held = [x for x in chain if written.source in x.sources]
    if any(rows[id].blob in written.episodes for id in reached(rows, held)):
        return True
    for commit in {x.blob: x for x in held}.values():
        with contextlib.suppress(CheckpointError):
            if written.moments & moments(store.state_of(commit), written.source):
                return True
    return False


__all__ = ["Written", "moments", "others"]
