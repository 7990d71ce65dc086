"""A turn of a conversation: the prompt, who reads it, what is remembered of it.

    asked = await ask(service, messages, who, began)         the prompt's tokens; with a person, what it brings to mind
    job = asked.job(sampling)
    …
    commit = await asked.remember(text, ending)              one commit, before the end is acknowledged

What the messages hold already is not brought to mind as well: it would count twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import CheckpointError
from ..identity.body import body_of
from ..identity.episodes import Episode
from ..identity.read.recall import recall
from ..identity.state import Identity, Recollection
from ..identity.store.imprinting import imprint_into
from ..identity.store.records import checked_source, unique_source
from ..identity.store.replay import content, imprint_event
from ..models.decode.sampling import Sampling
from ..models.tokenizer import Tokenizer
from .answer import Finish, out_of_time
from .choosing import Who, room_for
from .contract import Job
from .errors import ApiError, refuse
from .keys import Caller
from .schema import Message, Part
from .service import Service

Chat = list[dict[str, str]]
LONGEST_KEY = 256


@dataclass(eq=False)
class Asked:
    """A conversation that is to be answered."""

    service: Service
    messages: Chat
    prompt: tuple[int, ...]
    began: float
    who: Who | None = None
    mind: Identity | None = None
    """Who reads, with what the question brought to mind."""
    recalled: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    coherence: list[float] = field(default_factory=list[float])
    commit: str | None = None
    """What the turn wrote, once it did."""

    @property
    def deadline(self) -> float:
        return self.began + self.service.settings.deadline

    def job(self, sampling: Sampling) -> Job:
        return Job(self.prompt, sampling, self.mind, self.version, deadline=self.deadline)

    @property
    def version(self) -> str:
        """This base, this person at this commit, and with the same in mind."""
        if self.who is None:
            return self.service.version()
        brought = hashlib.sha256(json.dumps(self.recalled).encode()).hexdigest()[:16] if self.recalled else "nothing"
        return self.service.version(self.who.name, self.who.head.id, brought)

    @property
    def question(self) -> str | None:
        """What the user said last, if nobody has answered it yet."""
        last = self.messages[-1]
        return last["content"] if last["role"] == "user" and last["content"].strip() else None

    def penalised(self) -> tuple[int, ...]:
        """Only what was answered counts as repetition: an answer may take up the words of whoever asked."""
        encode = self.service.tokenizer.encode
        answers = (encode(m["content"], bos=False) for m in self.messages if m["role"] == "assistant")
        return tuple(sorted({t for ids in answers for t in ids}))

    def drawn(self, sampling: Sampling) -> Sampling:
        return sampling if sampling.repetition_penalty == 1 else replace(sampling, penalised=self.penalised())

    async def remember(self, text: str, ending: Finish, token: str | None = None) -> str | None:
        """Imprint the finished turn and commit it: of an answer that was cut off, what was asked; None where nothing is written."""
        if self.who is None or not self.who.remember or self.question is None:
            return None
        turn: Chat = [{"role": "user", "content": self.question}]
        if ending == "stop" and text.strip():
            turn.append({"role": "assistant", "content": text.strip()})
        service, name = self.service, self.who.name
        event = imprint_event(turn, source=self._source(), piece=body_of(service.model).piece)
        began = time.monotonic()

        def write() -> str | None:
            return imprint_into(
                service.store, name, service.model, service.tokenizer, event, again=True, base=service.base, token=token
            ).commit

        self.commit = await service.change(name, write)
        service.metrics.commit.observe(time.monotonic() - began)
        service.metrics.turns.inc()
        # Nobody reads as they were before this turn any more.
        service.engine.forget(service.version(name, self.who.head.id))
        return self.commit

    def _source(self) -> str:
        assert self.who is not None
        if self.who.source is not None:
            return checked_source(self.who.source)
        # One conversation of one day is one source: it begins with the same words.
        first = json.dumps(self.messages[: 1 + next(i for i, m in enumerate(self.messages) if m["role"] == "user")])
        return unique_source(time.strftime("chat-%Y-%m-%d", time.gmtime()), first)

    def told(self) -> dict[str, Any] | None:
        """What a response says of whoever answered."""
        if self.who is None:
            return None
        return {
            "identity": self.who.name, "commit": self.commit, "read_commit": self.who.head.id, "recalled": self.recalled,
            "coherence": self.coherence,
        }  # fmt: skip


def chat_of(service: Service, given: Sequence[Message]) -> Chat:
    """Messages as a template takes them; what is no text is refused by name."""
    if len(given) > service.settings.messages:
        raise refuse("messages", f"{len(given):,} messages; at most {service.settings.messages:,} here", "too_many_messages")
    return [{"role": _role(m.role), "content": text_of(m.content, i, m.tool_calls)} for i, m in enumerate(given)]


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def text_of(given: str | Sequence[Part] | None, i: int, calls: object = None) -> str:
    if calls:
        raise refuse(f"messages.{i}.tool_calls", "tools are not to be had here")
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    for part in given:
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise refuse(f"messages.{i}.content", f"a part of type {part.type!r:.40}; this model reads text only")
    return "".join(str(part.text) for part in given)


async def ask(service: Service, messages: Chat, who: Who | None, began: float) -> Asked:
    """The prompt, and whoever reads it."""

    def encode() -> tuple[int, ...]:
        try:
            return tuple(service.tokenizer.encode(service.tokenizer.chat(messages)))
        except CheckpointError as error:
            raise ApiError(400, str(error), code="invalid_messages", param="messages") from error

    asked = Asked(service, messages, await service.aside(encode), began, who)
    # Before anything is read: a prompt past the context is refused.
    room_for(service, len(asked.prompt), None)
    if who is not None:
        service.expect_place()
        name, commit = who.name, who.head
        identity = await service.aside(lambda: service.loaded(name, commit))
        last = next(
            (i for i in reversed(range(len(messages))) if messages[i]["role"] == "user" and messages[i]["content"].strip()),
            None,
        )
        said = [m["content"] for i, m in enumerate(messages) if i != last]
        about = None if last is None else messages[last]["content"]
        # Others may be before it: whoever waits too long is told so, and what has not begun does not begin.
        try:
            async with asyncio.timeout(max(0.0, asked.deadline - time.monotonic())):
                await call_to_mind(asked, identity, about, said)
        except TimeoutError:
            raise out_of_time(service.settings.deadline) from None
    return asked


async def call_to_mind(asked: Asked, identity: Identity, about: str | None, said: Sequence[str]) -> None:
    """Let the prompt bring to mind what the conversation does not hold already."""
    service = asked.service

    def read() -> tuple[Identity, list[Episode]]:
        fresh = [e for e in identity.episodes if not any(words_of(e, service.tokenizer) in text for text in said)]
        return recall(
            service.model, replace(identity, episodes=tuple(fresh)), asked.prompt, service.tokenizer, about=about
        ), fresh

    asked.mind, fresh = await service.in_turn(read)
    if isinstance(asked.mind, Recollection):
        asked.recalled = [
            {"text": words_of(e, service.tokenizer), "role": e.role, "source": e.source, "position": e.position}
            for e in (fresh[i] for i in asked.mind.chosen)
        ]
        asked.coherence = [round(c, 3) for c in asked.mind.coherence]


_WORDS: WeakKeyDictionary[Episode, str] = WeakKeyDictionary()
"""Of episodes that are in memory, and no longer than they are."""


def words_of(episode: Episode, tokenizer: Tokenizer) -> str:
    words = _WORDS.get(episode)
    if words is None:
        words = _WORDS[episode] = tokenizer.decode(episode.tokens.tolist()).strip()
    return words


def once_of(caller: Caller, who: Who | None, headers: Mapping[str, str]) -> str | None:
    """The token of a request with an `Idempotency-Key` that is to be remembered."""
    key = headers.get("idempotency-key")
    if key is None or who is None or not who.remember:
        return None
    if not 0 < len(key) <= LONGEST_KEY:
        raise ApiError(400, f"Idempotency-Key: 1 to {LONGEST_KEY} characters", code="invalid_header")
    return once_token(caller.id, who.name, key)


def once_token(caller: str, name: str, key: str) -> str:
    """What the store knows a write by: nobody's key is another's."""
    return hashlib.sha256(f"{caller}\0{name}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()


@contextlib.asynccontextmanager
async def once(asked: Asked, token: str | None) -> AsyncGenerator[str | None]:
    """The answer that was committed under this token, if there was one; no second turn runs beside the first."""
    if token is None:
        yield None
        return
    async with asked.service.once.turn(token):
        # Of an answer that was cut off only the question was committed: it is written again, and committed no more.
        yield await asked.service.aside(lambda: _earlier(asked, token)) or None


def _earlier(asked: Asked, token: str) -> str | None:
    store = asked.service.store
    commit = store.attempted(token)
    if commit is None:
        return None
    turn = next((content(e.text) for e in reversed(store.events(commit.id)) if e.text is not None), "")
    if isinstance(turn, str) or turn[0]["content"] != asked.question:
        raise ApiError(
            409, "this Idempotency-Key belongs to another turn; take a new one for a new question", code="idempotency_mismatch"
        )
    asked.commit = commit.id
    return turn[1]["content"] if len(turn) > 1 else ""


__all__ = ["Asked", "Chat", "ask", "call_to_mind", "chat_of", "once", "once_of", "once_token", "words_of"]
