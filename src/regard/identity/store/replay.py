"""An event as a write, and a journal as a life lived again.

    event = imprint_event("I am Mara.", source="diary", rule=Rule())
    mara = apply_event(model, tokenizer, mara, event)                the same write, whether it happens now or is replayed
    store.forget("mara", "diary", replay(model, tokenizer))       all that the diary did not write, made again from nothing

What an event wrote depends on the model, the identity before it and the event alone: texts are read by the model itself, with
nobody living in it, so that what one source wrote cannot hide in how another was read.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, cast

from torch import nn

from ...errors import RegardWarning, StateError
from ...models.tokenizer import Tokenizer
from ..body import base_of
from ..experience import Chat, chat_tokens, observe
from ..read.body import PIECE
from ..shock import checked_affect
from ..sleep.consolidate import SleepCheckpoint, Slept, consolidate
from ..sleep.rule import SleepRule
from ..speaking import living
from ..state import Identity
from ..write.rule import Rule, imprint
from . import Event

MOST_HISTORY = 3000
"""Tokens of a history that is slept over at most, the youngest: all of it has to stand in the model's context at once."""
Affect = float | Literal["estimated"]
Tell = Callable[[str, float | None], object]
LESSONS = "distilled"
"""What a night of this version learns from; events of nights that retold the history have no such word."""
RETOLD = frozenset(
    (
        "steps", "parts", "form", "rank", "rate", "self_rate", "value_rate", "anchor", "calm", "questions", "held_back",
        "look_every", "seed", "until",
    )
)  # fmt: skip
"""What the rule of such a night may say."""
BREAKS = (r"\n\s*\n", r"\n", r"[.!?。！？]\s*", r"\s+")
"""Where a text is cut, the best place first."""


def imprint_event(
    text: str | Chat, *, source: str, rule: Rule | None = None, affect: Affect = 1.0, piece: int = PIECE
) -> Event:
    """The event of an imprint, with all that is needed to let it happen again."""
    if not isinstance(text, str) and not any(m["content"].strip() for m in text):
        raise StateError(f"{text!r:.60} says nothing: there is nothing to imprint")
    if affect != "estimated":
        # Before it is an event: NaN could not be written down.
        checked_affect(affect)
    settings = {**(rule or Rule()).to_json(), "affect": affect, "piece": piece}
    return Event("imprint", source=source, text=event_text(text), rule=settings)


def event_text(text: str | Chat) -> str:
    """A text or a chat as an event keeps it; `content` reads it back."""
    return text if isinstance(text, str) else json.dumps([dict(m) for m in text], ensure_ascii=False)


def sleep_event(rule: SleepRule, slept: Slept) -> Event:
    """The event of a night that helped; `until` is the step whose state was kept."""
    return Event("sleep", rule={**sleep_fields(rule), "until": slept.best_step}, seed=rule.seed)


def apply_event(
    model: nn.Module,
    tokenizer: Tokenizer,
    identity: Identity,
    event: Event,
    before: Sequence[Event] = (),
    tell: Tell = lambda what, share: None,
) -> Identity:
    """The identity after an event; `before` is what had happened to it, which a night's sleep goes through again."""
    match event.kind:
        case "imprint":
            return _imprinted(model, tokenizer, identity, event, tell)
        case "sleep":
            return _slept(model, tokenizer, identity, event, before, tell)
        case _:
            # Forks, rollbacks and the like keep the books: they write nothing.
            return identity


def replay(
    model: nn.Module, tokenizer: Tokenizer, tell: Tell = lambda what, share: None
) -> Callable[[Identity, Sequence[Event]], Identity]:
    """Events to the identity that they make, for `IdentityStore.forget`."""

    def relive(identity: Identity, events: Sequence[Event]) -> Identity:
        identity.base.refuse(base_of(model))
        for i, event in enumerate(events):
            tell("replaying", i / len(events))
            identity = apply_event(model, tokenizer, identity, event, events[:i])
        return identity

    return relive


def _imprinted(model: nn.Module, tokenizer: Tokenizer, identity: Identity, event: Event, tell: Tell) -> Identity:
    settings = dict(event.rule)
    affect, piece = cast(Affect, settings.pop("affect", 1.0)), int(settings.pop("piece", PIECE))
    try:
        rule = Rule.from_json(settings)
    except TypeError as error:
        raise StateError(f"the rule of this event is not one that this version knows: {error}") from error
    if event.text is None:
        raise StateError(f"the event by {event.source!r} kept no text, and cannot happen again")
    pieces = cut(content(event.text), tokenizer, piece)
    # Whoever lives in the model now is not asked: an event means the same at every time.
    with living(model, None):
        for i, part in enumerate(pieces):
            tell("reading", i / len(pieces))
            seen = observe(model, part, tokenizer, affect=affect, source=event.source or "unknown")
            identity = imprint(identity, seen, rule)
    return identity


def _slept(
    model: nn.Module, tokenizer: Tokenizer, identity: Identity, event: Event, before: Sequence[Event], tell: Tell
) -> Identity:
    past = history(before, tokenizer)
    if not past:
        return identity
    old = event.rule.get("lessons") != LESSONS
    if old:
        warnings.warn(
            "a night of an earlier version retold the history; it is slept again by today's rule, and so is not what it was",
            RegardWarning,
            stacklevel=4,
        )
    until: int = 1 << 62 if old else event.rule.get("until", 1 << 62)

    def wake(night: SleepCheckpoint) -> None:
        # A night is left where the first one was best, as Ctrl-C leaves it: later steps changed nothing.
        if night.step >= until:
            raise KeyboardInterrupt

    with living(model, None):
        return consolidate(model, identity, past, tokenizer, sleep_rule(event.rule), tell=tell, on_step=wake)[0]


def sleep_fields(rule: SleepRule) -> dict[str, Any]:
    """A rule as JSON; `sleep_rule` reads it back."""
    return {**asdict(rule), "lessons": LESSONS}


def sleep_rule(fields: Mapping[str, Any]) -> SleepRule:
    """A rule from the JSON of an event. Of a night that retold, what it wrote into and its seed; the rest says nothing today."""
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    if known.pop("lessons", None) != LESSONS:
        if unknown := known.keys() - RETOLD:
            raise StateError(
                f"the rule of this night is not one that this version knows: {', '.join(sorted(unknown))}; "
                "a later version wrote it, and can replay it"
            )
        known = {k: known[k] for k in ("parts", "form", "rank", "seed") if k in known}
    known.pop("until", None)
    try:
        return SleepRule(**known)
    except TypeError as error:
        raise StateError(f"the rule of this night is not one that this version knows: {error}") from error


def history(events: Sequence[Event], tokenizer: Tokenizer, most: int = MOST_HISTORY) -> list[list[dict[str, str]]]:
    """What was said in these events, as chats, oldest first; where it is longer than `most` tokens, the youngest of it."""
    chats: list[list[dict[str, str]]] = []
    room = most
    for event in reversed(events):
        if event.kind != "imprint" or event.text is None:
            continue
        for part in reversed(cut(content(event.text), tokenizer, int(event.rule.get("piece", PIECE)))):
            chat = [{"role": "user", "content": part}] if isinstance(part, str) else [dict(m) for m in part]
            room -= len(chat_tokens(chat, tokenizer)[0])
            if room < 0 and chats:
                return chats[::-1]
            chats.append(chat)
    return chats[::-1]


def content(text: str) -> str | Chat:
    """An event's text: a chat where it is a JSON list of messages, and otherwise what it says."""
    if text.lstrip()[:1] != "[":
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(messages, list) or not messages:
        return text
    for message in cast(list[Any], messages):
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                return text
    return cast(Chat, messages)


def cut(text: str | Chat, tokenizer: Tokenizer, most: int = PIECE) -> list[str | Chat]:
    """Pieces of at most about `most` tokens: of a text between paragraphs, lines, sentences or words; of a chat between
    messages, and inside one only where it is too long by itself. What has fewer than two tokens is no experience."""
    if isinstance(text, str):
        return [p for p in _cut_text(text, tokenizer, most) if len(tokenizer.encode(p)) > 1]
    pieces: list[str | Chat] = []
    now: list[Mapping[str, str]] = []
    room = most
    for message in text:
        for words in _cut_text(message["content"], tokenizer, most) or [""]:
            size = len(tokenizer.encode(words, bos=False))
            if now and size > room:
                pieces.append(now)
                now, room = [], most
            now.append({**message, "content": words})
            room -= size
    return [*pieces, now] if now else pieces


def _cut_text(text: str, tokenizer: Tokenizer, most: int) -> list[str]:
    parts: list[str] = []
    # No token of a text that people write is longer than this on average, so that one look ahead is enough.
    far = 8 * most
    while text.strip():
        if len(text) <= far and len(tokenizer.encode(text)) <= most:
            parts.append(text.strip())
            break
        low, high = 1, min(len(text), far)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(tokenizer.encode(text[:middle])) <= most else (low, middle - 1)
        at = _break(text[:low])
        if text[:at].strip():
            parts.append(text[:at].strip())
        text = text[at:]
    return parts


def _break(text: str) -> int:
    """The last good place in the second half of a text; its end where there is none."""
    for pattern in BREAKS:
        ends = [m.end() for m in re.finditer(pattern, text) if m.end() > len(text) // 2]
        if ends:
            return ends[-1]
    return len(text)


__all__ = [
    "MOST_HISTORY",
    "PIECE",
    "apply_event",
    "content",
    "cut",
    "event_text",
    "history",
    "imprint_event",
    "replay",
    "sleep_event",
    "sleep_fields",
    "sleep_rule",
]
