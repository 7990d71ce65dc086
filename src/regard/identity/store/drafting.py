"""A commit before it is written: its record, sealed by the hash of all that it says."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from ..state import Identity
from .records import Commit, Event, checked_message, journal_hash, rows_of


def draft(
    identity: Identity, data: bytes, parent: Commit | None, events: Sequence[Event], message: str, token: str | None
) -> Commit:
    commit = Commit(
        id="", parent=parent and parent.id, origin=None, number=parent.number + 1 if parent else 0,
        kind=None, source=None, message=checked_message(message), time=0.0,
        digest=identity.digest(), blob=hashlib.sha256(data).hexdigest(), bytes=len(data),
        fingerprint=identity.base.fingerprint, journal="", token=token or uuid.uuid4().hex,
        sources=identity.sources, experiences=identity.life.experiences, tokens=identity.life.tokens,
        imprints=len(identity.imprints), episodes=len(identity.episodes), last_episode=_last(identity),
    )  # fmt: skip
    return sealed(commit, events)


def _last(identity: Identity) -> str | None:
    rows = rows_of(tuple(e.digest for e in identity.episodes))
    return rows[-1].id if rows else None


def sealed(commit: Commit, events: Sequence[Event]) -> Commit:
    """With its time, the hash of its events, and the id that follows from all of it."""
    last = events[-1] if events else None
    commit = replace(
        commit, time=time.time(), journal=journal_hash(events), kind=last and last.kind, source=last and last.source
    )
    return replace(commit, id=hashlib.sha256(commit.body().encode()).hexdigest())


__all__ = ["draft", "sealed"]
