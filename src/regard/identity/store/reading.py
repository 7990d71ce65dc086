"""The verbs of a store that only read: each in one snapshot, and again where what it named was removed meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ...errors import CheckpointError, StateError
from ..episodes import Episode
from ..state import Base, Identity
from .blobs import Blobs
from .cache import EpisodeCache
from .codec import decode, decode_episode
from .difference import Diff, compare
from .errors import MissingBlobError, StoreError, UnknownNameError
from .records import PREFIX, Commit, EpisodeRow, Event, checked_name, lists, reached

if TYPE_CHECKING:
    from .database import Connection, Database

T = TypeVar("T")
AGAIN = 50
"""How often something is read again because what it named was removed meanwhile."""


class Reading:
    db: Database
    blobs: Blobs
    cached_episodes: EpisodeCache

    def names(self) -> dict[str, Commit]:
        """Every name and the commit at its head."""
        with self.db.read() as c:
            return self.db.names(c)

    def __contains__(self, name: str) -> bool:
        """Whether somebody has this name."""
        with self.db.read() as c:
            return self.db.head(c, checked_name(name)) is not None

    def head(self, name: str) -> Commit:
        with self.db.read() as c:
            return self.head_of(c, name)

    def find(self, ref: str) -> Commit:
        """The head of a name, or the one commit whose id begins so; a name goes first."""
        with self.db.read() as c:
            return self._find(c, ref)

    def load(self, ref: str, base: Base | None = None) -> Identity:
        """The identity at a name or commit, its `parent` set to that commit; refused where it belongs to another base."""
        return self.settled(lambda: self.identity_of(self.find(ref), base))

    def log(self, name: str, limit: int | None = None) -> list[Commit]:
        """What happened to a name, youngest first."""
        if limit is not None and limit < 1:
            raise StoreError(f"limit={limit}; the log shows at least one commit")
        with self.db.read() as c:
            return self.db.chain(c, self._find(c, name), limit)

    def events(self, ref: str) -> list[Event]:
        """The events of one commit; most have one, an import or a forgetting carries those before it too."""
        with self.db.read() as c:
            return self.db.events(c, [self._find(c, ref)])[0]

    def journal(self, ref: str) -> list[Event]:
        """Every event that the identity at `ref` is made of, oldest first: what was rolled back is not among them."""
        with self.db.read() as c:
            return self.lineage(c, self._find(c, ref))[1]

    def diff(self, a: str, b: str) -> Diff:
        def read() -> Diff:
            with self.db.read() as c:
                x, y = self._find(c, a), self._find(c, b)
            names = (a if a == x.id else f"{a} ({x.id[:12]})", b if b == y.id else f"{b} ({y.id[:12]})")
            return compare(self.identity_of(x), self.identity_of(y), names)

        return self.settled(read)

    def verify(self, name: str) -> int:
        """Check every commit, event and blob behind a name against its hash; how many commits there are."""

        def read() -> int:
            with self.db.read() as c:
                chain = self.db.chain(c, self.head_of(c, name))
                self.db.events(c, chain)
                rows = self.db.episode_rows(c)
            sources = {row.blob: self.episode(row.blob, anew=True).source for row in (rows[id] for id in reached(rows, chain))}
            for commit in {x.digest: x for x in chain}.values():
                expect_whole(commit, self.state_of(commit), rows, sources)
            return len(chain)

        return self.settled(read)

    def settled(self, read: Callable[[], T]) -> T:
        """What `read` gives; again where a blob was removed, with its commit, between being named and being read."""
        last = False
        for _ in range(AGAIN):
            try:
                return read()
            except MissingBlobError as error:
                with self.db.read() as c:
                    named = self.db.names_blob(c, error.blob)
                # Still named after it was missed twice: it is lost, and not removed.
                if named and last:
                    raise
                last = named
        return read()

    def head_of(self, c: Connection, name: str, *, lock: bool = False) -> Commit:
        head = self.db.head(c, checked_name(name), lock=lock)
        if head is None:
            raise UnknownNameError(f"there is no identity {name!r} in {self.db.where}; there {self._listed(c)}")
        return head

    def _find(self, c: Connection, ref: str) -> Commit:
        if not isinstance(ref, str):
            raise StoreError(f"a name or the beginning of a commit's id is a string, not {ref!r:.80}")
        head = self.db.head(c, checked_name(ref))
        if head is not None:
            return head
        ids = self.db.beginning(c, ref) if PREFIX.fullmatch(ref) else []
        if len(ids) > 1:
            raise StoreError(f"{ref!r} begins {len(ids)} or more commits, such as {ids[0][:16]} and {ids[1][:16]}: say more")
        if not ids:
            raise UnknownNameError(f"no name is {ref!r:.80}, and no commit's id begins so; there {self._listed(c)}")
        return self.db.commit(c, ids[0])

    def _listed(self, c: Connection) -> str:
        # All of them, with both of their records: a name that damage took is not answered as if it had never been.
        some = list(self.db.heads(c))
        return f"are {', '.join(some[:8])}{' …' if len(some) > 8 else ''}" if some else "are none yet"

    def _in_history(self, c: Connection, name: str, head: Commit, ref: str) -> Commit:
        commit = self._find(c, ref)
        if not any(x.id == commit.id for x in self.db.chain(c, head)):
            raise StoreError(f"commit {commit.id[:12]} is not in the history of {name!r}; see log({name!r})")
        return commit

    def identity_of(self, commit: Commit, base: Base | None = None, c: Connection | None = None) -> Identity:
        """What a commit holds; `c` is the transaction that wrote it, where that has not ended."""
        state = self.state_of(commit)
        if base is not None:
            state.base.refuse(base)
        with self.db.read() if c is None and commit.episodes else contextlib.nullcontext(c) as c:
            blobs = () if c is None else self.db.episodes(c, commit)
        expect_digest(commit, state, blobs)
        try:
            return replace(state, episodes=tuple(map(self.episode, blobs)), parent=commit.id)
        except StateError as error:
            raise CheckpointError(f"commit {commit.id[:12]} holds no sound identity: {error}") from error

    def state_of(self, commit: Commit) -> Identity:
        """What a commit holds, without its episodes; they belong to its digest, which is not checked here."""
        return decode(self.blobs.get(commit.blob), f"commit {commit.id[:12]}")[0]

    def episode(self, blob: str, *, anew: bool = False) -> Episode:
        """The episode of a digest; `anew` from its file, also where it is in memory."""
        episode = None if anew else self.cached_episodes.get(blob)
        if episode is None:
            episode = decode_episode(self.blobs.read(blob), blob, self.blobs.label(blob))
            if not anew:
                self.cached_episodes.add(episode)
        return episode

    def lineage(self, c: Connection, head: Commit) -> tuple[list[Commit], list[Event]]:
        """The commits that made the state at `head`, oldest first, and their events; a rollback leads to where it went."""
        chain = {x.id: x for x in self.db.chain(c, head)}
        path: list[Commit] = []
        at: str | None = head.id
        while at is not None:
            if at not in chain:
                raise CheckpointError(f"commit {at[:12]} is not in the history of {head.id[:12]}, which was made from it")
            commit = chain.pop(at)
            if commit.origin is not None:
                at = commit.origin
                continue
            path.append(commit)
            at = commit.parent
        path.reverse()
        return path, [e for journal in self.db.events(c, path) for e in journal]

    def attempted(self, token: str) -> Commit | None:
        """What an earlier try with this token wrote; None where it wrote nothing."""
        with self.db.read() as c:
            return self.db.by_token(c, token)

    def holds(self, commit: str) -> bool:
        """Whether a commit is still there."""
        with self.db.read() as c:
            return self.db.has(c, commit)


def expect_digest(commit: Commit, state: Identity, blobs: Sequence[str]) -> None:
    if state.digest_with(blobs) != commit.digest:
        raise CheckpointError(f"commit {commit.id[:12]} names an identity with another digest than its blobs hold")


def expect_whole(commit: Commit, state: Identity, rows: Mapping[str, EpisodeRow], sources: Mapping[str, str]) -> None:
    """A commit against all rows, and against who wrote each episode."""
    if not lists(rows, commit):
        raise CheckpointError(f"the list of episodes of commit {commit.id[:12]} has a gap: not all {commit.episodes} are there")
    blobs: list[str] = []
    at = commit.last_episode
    while at is not None:
        blobs.append(rows[at].blob)
        at = rows[at].previous
    expect_digest(commit, state, blobs[::-1])
    strangers = {sources[blob] for blob in blobs if blob in sources} - set(state.sources)
    if strangers:
        raise CheckpointError(f"commit {commit.id[:12]} has an episode by {min(strangers)!r:.60}, which is none of its sources")


__all__ = ["Reading", "expect_whole"]
