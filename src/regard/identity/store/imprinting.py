"""A text into an identity of a store: one committed event, whoever else writes; a text that it went through already is recognised.

done = imprint_into(store, "mara", model, tokenizer, "My cat is called Mochi.", source="cat")
print(done)                                             kept 6 of 9 tokens from cat: Mochi, cat
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from torch import nn

from ...models.tokenizer import Tokenizer
from ..body import base_of
from ..state import Base, Identity
from ..wording import clean, several, words
from . import Commit, Event, IdentityStore, StaleError, StoreError
from .replay import Tell, apply_event

SHOWN = 12
"""Words of what was kept that are printed."""


@dataclass(frozen=True)
class Imprinted:
    """What an identity kept of a text."""

    name: str
    source: str
    """What to forget it by."""
    commit: str | None
    """None where the same text was imprinted before, and nothing was written."""
    count: int
    """Tokens of it that were kept as imprints."""
    tokens: int
    """Tokens of it that were read."""
    words: tuple[str, ...]
    """What was kept, the worthiest first."""
    since: float
    """When it was written, in seconds; where it was recognised, when that was the first time."""
    begun: bool = False
    """True where there was nobody of this name before."""

    def __str__(self) -> str:
        source = clean(self.source)
        if self.commit is None:
            day = time.strftime("%Y-%m-%d", time.gmtime(self.since))
            return f"{self.name} has lived through this text already, as {source} on {day}: nothing was written"
        shown = f": {', '.join(self.words[:SHOWN])}" if self.words else ""
        return f"kept {self.count} of {several(self.tokens, 'token')} from {source}{shown}"


class _RecognisedError(Exception):
    """Out of a write that has nothing to write."""

    def __init__(self, known: Imprinted) -> None:
        self.known = known


def recognised(store: IdentityStore, name: str, text: str, at: str | None = None) -> Imprinted | None:
    """Where `name`, as it is now or at a commit, went through this text of an event before, whatever its source was called."""
    if at is None and name not in store:
        return None
    known = next((e for e in store.journal(at or name) if e.kind == "imprint" and e.text == text), None)
    return None if known is None else Imprinted(name, str(known.source), None, 0, 0, (), known.time)


def imprint_into(
    store: IdentityStore,
    name: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    event: Event,
    *,
    again: bool = False,
    base: Base | None = None,
    token: str | None = None,
    tell: Tell = lambda what, share: None,
) -> Imprinted:
    """Let an event of `imprint_event` happen to `name`, which is begun where there is none; writers of one name take turns.

    `again` writes also what was imprinted before; `base` names the model in an identity that is begun. A `token`
    names the attempt, as in `IdentityStore.update`: with the same one nothing is written twice.
    """
    start = end = Identity.new(base or base_of(model))

    def write(me: Identity) -> Identity:
        nonlocal start, end
        me.base.refuse(base_of(model))
        # In this writer's turn, so that two who tell the same at once are one.
        if me.parent is not None and not again and (known := recognised(store, name, str(event.text), me.parent)) is not None:
            raise _RecognisedError(known)
        start, end = me, apply_event(model, tokenizer, me, event, tell=tell)
        return end

    begun = name not in store
    try:
        commit = _begin(store, name, write(start), event, token) if begun else None
        begun = commit is not None
        commit = commit or store.update(name, write, event=event, token=token)
    except _RecognisedError as error:
        return error.known
    fresh = [i for i, p in enumerate(end.imprints.position.tolist()) if p >= start.life.tokens]
    worded = tuple(words(end, tokenizer, fresh))
    return Imprinted(
        name, str(event.source), commit.id, len(fresh), end.life.tokens - start.life.tokens, worded, event.time, begun
    )


def _begin(store: IdentityStore, name: str, identity: Identity, event: Event, token: str | None) -> Commit | None:
    """A new name and its first write: after the text was read, so that a text which cannot be leaves nobody behind. None where
    somebody else began it meanwhile."""
    try:
        first = store.new(name, Identity.new(identity.base))
        return store.commit(name, replace(identity, parent=first.id), event=event, token=token)
    except (StoreError, StaleError):
        if name not in store:
            raise
        return None


__all__ = ["Imprinted", "imprint_into", "recognised"]
