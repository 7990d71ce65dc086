"""The service: all that the routes share. One model, one engine, one store, the keys and the limits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..identity.body import body_of
from ..identity.read.finding import finder_of, plain_meanings
from ..identity.state import Base, Identity
from ..identity.store import IdentityStore
from ..identity.store.records import NAME, Commit
from ..models.base import Model
from ..models.tokenizer import Tokenizer
from .contract import EngineLike, QueueFullError
from .errors import ApiError, no_identity
from .jobs import Jobs
from .kept import Responses
from .keys import Caller, Keys
from .metrics import Metrics
from .once import Once
from .settings import Settings
from .summaries import Summaries

T = TypeVar("T")
SECONDS_EACH = 0.5
"""About what a turn with a person takes beside its tokens: to say when to come again."""
HELD = 64
"""Identities that are held in memory between requests."""


BRIEFLY = 0.05


class _BusyError(Exception):
    """Out of a write to somebody who is being made to forget."""


@dataclass(eq=False)
class Service:
    model: Model
    tokenizer: Tokenizer
    base: Base
    """Whose name is what clients call the model."""
    engine: EngineLike
    store: IdentityStore
    keys: Keys
    settings: Settings = field(default_factory=Settings)
    metrics: Metrics = field(default_factory=Metrics)
    jobs: Jobs = field(default_factory=Jobs)
    """Long work on identities."""
    summaries: Summaries = field(default_factory=Summaries)
    importing: asyncio.Lock = field(default_factory=asyncio.Lock)
    uploads: int = 0
    """Files that are being received."""
    started: float = field(default_factory=time.time)
    responses: Responses = field(default_factory=Responses)
    once: Once = field(default_factory=Once)
    draining: bool = False
    pending: int = 0
    """Turns with people that wait for what comes to mind, or for their commit."""
    in_flight: int = 0
    """Requests that are being answered."""
    at_end: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Called before the engine is closed, the last first."""

    _held: OrderedDict[str, tuple[str, Identity]] = field(default_factory=OrderedDict[str, tuple[str, Identity]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics.watch(self.engine)
        self.at_end.append(self.jobs.close)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.base.name or self.base.family

    @property
    def guarded(self) -> bool:
        """Whether a request needs a key."""
        return not self.settings.loopback or self.keys.required

    def head(self, caller: Caller, name: str) -> Commit:
        """The head of an identity that this caller may see; anybody else's is not there."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or not caller.may(name) or name not in self.store:
            raise no_identity(name)
        return self.store.head(name)

    def person(self, caller: Caller, name: str) -> str:
        """The name of an identity that this caller may see."""
        self.head(caller, name)
        return name

    def new_person(self, caller: Caller, name: str) -> str:
        """A name under which this caller may begin somebody, if the limit leaves room and the name is free."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ApiError(
                400, f"{name!r:.80} cannot name an identity: a letter or digit, then up to 63 of A–Z a–z 0–9 . _ -",
                code="invalid_value", param="id",
            )  # fmt: skip
        if not caller.may(name):
            # Nothing here says whether somebody has it: the names that a key owns are known to its holder.
            raise ApiError(403, f"this key does not own the name {name!r}", code="not_owned", param="id")
        if name in self.store:
            raise ApiError(409, f"{name!r} is here already; choose another name", code="exists", param="id")
        if not caller.admin and len(self.people(caller)) >= self.settings.identities:
            raise ApiError(
                403,
                f"this key has {self.settings.identities:,} identities, which is its limit; delete some",
                code="identity_limit",
            )
        return name

    def people(self, caller: Caller) -> dict[str, Commit]:
        """Every identity that this caller may see, of any model, with its head."""
        return {name: head for name, head in self.store.names().items() if caller.may(name)}

    def commit(self, caller: Caller, name: str, ref: str) -> Commit:
        """A commit by its id's beginning in the history of `name`, or the head of another identity of this caller's."""
        head = self.head(caller, name)
        if NAME.fullmatch(ref) and caller.may(ref) and ref in self.store:
            return self.store.head(ref)
        found = [c for c in self.store.log(name) if len(ref) >= 4 and c.id.startswith(ref)]
        if len(found) != 1:
            raise ApiError(404, f"{ref!r:.80} is no commit in the history of {head.id[:12]}", code="commit_not_found")
        return found[0]

    def load(self, ref: str) -> Identity:
        """The identity at a name or commit, refused where it belongs to another model."""
        return self.store.load(ref, self.base)

    def loaded(self, name: str, head: Commit) -> Identity:
        """The identity at a head, held for the next request; of each name only the youngest, and of all names a few."""
        with self._lock:
            held = self._held.get(name)
            if held is not None and held[0] == head.id:
                self._held.move_to_end(name)
                return held[1]
        identity = self.load(head.id)
        with self._lock:
            self._held[name] = head.id, identity
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return identity

    def let_go(self, name: str) -> None:
        """Hold nothing of somebody any more: who was deleted, or has forgotten."""
        with self._lock:
            self._held.pop(name, None)
        self.summaries.let_go()
        self.responses.forget(name)
        self.engine.forget(self.version(name))

    def version(self, name: str | None = None, *parts: str) -> str:
        """What a prefix that was read once may be read again for: this base; with a name, this person; with parts, as they were then."""
        return "/".join((self.base.fingerprint, *((name, *parts, "") if name is not None else ())))

    async def warm(self) -> None:
        """Make now what the first turn with a person would wait for: what plain questions are like, and the sentence encoder."""

        def make() -> None:
            finder = finder_of(body_of(self.model), self.tokenizer)
            _ = finder.mean, finder.words, finder.plain, plain_meanings()

        await self.engine.call(make)

    async def change(self, name: str, f: Callable[[], T]) -> T:
        """Work on the model that writes to somebody: when nobody makes them forget, which holds their name for as long as it takes."""

        def write() -> T:
            # Here, where the work of all others waits: it must not wait for a job.
            if self.jobs.busy(name, "forget"):
                raise _BusyError
            return f()

        while True:
            with contextlib.suppress(_BusyError):
                return await self.engine.call(write)
            await asyncio.sleep(BRIEFLY)

    def expect_place(self) -> None:
        """Refuse a turn with a person while as many wait as may: to be read, to be written, or to be committed."""
        waiting = self.pending + self.engine.stats().queued
        if waiting >= self.settings.queue:
            raise QueueFullError(waiting, max(1.0, waiting * SECONDS_EACH))

    async def reading(self, f: Callable[[], T]) -> T:
        """Work on the model that is no turn, such as vectors and explanations: it waits where turns wait, and is refused as they are."""
        self.expect_place()
        return await self.in_turn(f)

    async def in_turn(self, f: Callable[[], T]) -> T:
        """Work on the model that belongs to a turn, counted while it waits and while it is done."""
        self.pending += 1
        try:
            return await self.engine.call(f)
        finally:
            self.pending -= 1

    async def aside(self, f: Callable[[], T]) -> T:
        """Work that touches no model (the store, files), off the event loop."""
        return await asyncio.to_thread(f)

    def close(self) -> None:
        for end in reversed(self.at_end):
            end()
        self.engine.close()


__all__ = ["Service"]
