"""Sleep of an identity in a store: over all that its journal tells of, committed if it helped, and gone on with after Ctrl-C.

done = sleep_over(store, "mara", model, tokenizer)
print(done)       slept over 3 conversations: 1 → 4 of 6 questions that were held back, 2.101 → 0.642 nats a token on them, …
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ...errors import StateError
from ...models.tokenizer import Tokenizer
from ..body import base_of
from ..speaking import living
from ..state import Identity
from ..store import IdentityStore, StaleError
from ..store.replay import Tell, history, sleep_event
from ..wording import several
from .consolidate import SleepCheckpoint, Slept, consolidate
from .resume import checkpoint_file, interrupted_over, read_checkpoint, write_checkpoint
from .rule import SleepRule


@dataclass(frozen=True)
class Sleep:
    """What a sleep did to an identity of a store."""

    name: str
    slept: Slept
    conversations: int
    commit: str | None
    """None where nothing was written: it did not help, or nothing better was found in the rest of an interrupted one."""
    resumed: bool = False

    @property
    def helped(self) -> bool:
        return self.slept.helped

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it; with resume it goes on."""
        return self.slept.interrupted

    def __str__(self) -> str:
        over = several(self.conversations, "conversation")
        if self.commit is not None:
            return f"slept over {over}: {_held(self.slept)}, best after step {self.slept.best_step}"
        if self.helped:
            return f"the rest of the night brought nothing better ({_held(self.slept)})"
        return f"slept over {over}, and nothing was changed: {self.slept.reason}"


def sleep_over(
    store: IdentityStore,
    name: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    steps: int | None = None,
    seed: int = 0,
    resume: bool = False,
    tell: Tell = lambda what, share: None,
) -> Sleep:
    """Consolidate `name` over its journal. Ctrl-C keeps the best so far, and where it stands; `resume` goes on with that."""
    head = store.head(name)
    store.sweep_drafts()
    start, rule, night = head.id, SleepRule(seed=seed), None
    if steps is not None:
        rule = replace(rule, steps=steps)
    if resume:
        start = interrupted_over(store, name)
        rule, night = read_checkpoint(checkpoint_file(store, start))
        rule = rule if steps is None else replace(rule, steps=max(steps, night.step))
        tell(f"going on after step {night.step} of {rule.steps}", None)
    before = store.load(start, base_of(model))
    past = history(store.journal(start), tokenizer)
    if not past:
        raise StateError(
            f"{name} has lived through nothing yet; imprint something first: regard imprint FILE --identity {name}, or tell()"
        )

    def keep(now: SleepCheckpoint) -> None:
        file = checkpoint_file(store, start)
        write_checkpoint(file, rule, now)
        # After it is written: whoever forgets removes the commit first and then looks for its night, so that one of the
        # two sees the other.
        if not store.holds(start):
            file.unlink(missing_ok=True)
            raise StateError(f"{name} was made to forget something, or deleted, while it slept; the night was not kept")

    with living(model, None):
        after, slept = consolidate(model, before, past, tokenizer, rule, tell=tell, night=night, on_step=keep)
    commit = _committed(store, name, start, head.id, after, rule, slept) if slept.helped else None
    if not slept.interrupted:
        checkpoint_file(store, start).unlink(missing_ok=True)
    return Sleep(name, slept, len(past), commit, resume)


def _committed(
    store: IdentityStore, name: str, start: str, head: str, after: Identity, rule: SleepRule, slept: Slept
) -> str | None:
    """The commit of a sleep over `start`, begun while `head` was the name's; None where the head holds that very state."""
    now = store.head(name)
    if now.digest == after.digest():
        return None
    if now.id != head:
        raise StaleError(
            f"{name!r} moved from {head[:12]} to {now.id[:12]} ({now.kind}, {now.message or 'no message'}) while it slept, and "
            "what was written since would be lost: nothing was changed; sleep again"
        )
    if head != start:
        # What the first part of the night wrote is part of the whole night: it must not count twice.
        head = store.rollback(name, start, message="the night goes on").id
    return store.commit(name, after, event=sleep_event(rule, slept), expected=head, message=_held(slept)).id


def _held(slept: Slept) -> str:
    before, after = slept.looks[0], slept.look
    return (
        f"{before.recalled} → {after.recalled} of {slept.questions} questions that were held back, "
        f"{before.loss:.3f} → {after.loss:.3f} nats a token on them"
    )


__all__ = ["Sleep", "sleep_over"]
