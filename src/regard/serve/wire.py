"""What clients read: tokens as text and bytes, log-probabilities, usage, and events of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from functools import cached_property
from typing import Any

from ..errors import needs_extra

with needs_extra("serve"):
    from fastapi.responses import StreamingResponse

from ..models.byte_level import byte_characters
from ..models.sentencepiece import Pieces
from ..models.subwords import Subwords
from ..models.tokenizer import Tokenizer
from .answer import Answer, closed, pinged
from .contract import Piece, Score
from .errors import GoneError, said, where

LOG = logging.getLogger("regard.serve")
PING = 15.0
"""Seconds of silence after which a stream says that it still lives."""
DONE = "data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer; with `stream`, as events",
        "content": {"text/event-stream": {}},
    }
}
"""For the OpenAPI document: that a route may answer with events."""


class Words:
    """How the tokens of a tokenizer are written, each alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> dict[str, int] | None:
        """How a byte-level vocabulary spells its bytes; None where the vocabulary is another."""
        coder = self.tokenizer.coder
        if not isinstance(coder, Subwords) or type(coder.inner.decoder).__name__ != "ByteLevel":
            return None
        return {c: b for b, c in enumerate(byte_characters())}

    def bytes(self, token: int) -> bytes:
        coder = self.tokenizer.coder
        if isinstance(coder, Pieces):
            return coder.bytes_of(token)
        spelled = self.tokenizer.text_of(token)
        if self._bytes is not None and all(c in self._bytes for c in spelled):
            return bytes(self._bytes[c] for c in spelled)
        # Special tokens, and vocabularies of whole words.
        text = self.tokenizer.coder.decode([token], special=True)
        return (text or spelled).encode("utf-8", errors="replace")

    def text(self, token: int) -> str:
        """As text; bytes that are no character by themselves are named, so that two tokens are never written alike for that."""
        raw = self.bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


# -- log-probabilities -----------------------------------------------------------------------------------------------------


def chat_logprobs(words: Words, pieces: Iterable[Piece], most: int) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": words.text(token), "logprob": logprob, "bytes": list(words.bytes(token))}

    return [{**entry(p.token, p.logprob or 0.0), "top_logprobs": [entry(t, x) for t, x in p.top[:most]]} for p in pieces]


def text_logprobs(words: Words, tokens: Sequence[Score | Piece], most: int, start: int = 0) -> dict[str, Any]:
    """As /v1/completions gives them: four lists of one length."""
    texts = [words.text(t.token) for t in tokens]
    offsets, at = list[int](), start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_top(words, t, most) for t in tokens],
        "text_offset": offsets,
    }


def _top(words: Words, t: Score | Piece, most: int) -> dict[str, float] | None:
    if t.logprob is None:
        return None
    top = {words.text(token): x for token, x in reversed(t.top[:most])}
    # The token itself is always there, likely or not.
    return dict(reversed(top.items())) | {words.text(t.token): t.logprob}


# -- usage -----------------------------------------------------------------------------------------------------------------


def usage_of(prompt: int, answers: Iterable[Answer], written: int | None = None) -> dict[str, Any]:
    answers = list(answers)
    count = sum(len(a.pieces) for a in answers) if written is None else written
    cached = sum(a.cached_tokens for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


# -- streams ---------------------------------------------------------------------------------------------------------------


def event(value: object, name: str | None = None) -> str:
    # ASCII only: a line or paragraph separator inside a text would end a line for some readers.
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=True)}\n\n"


class EventStream(StreamingResponse):
    """Events as they come. What goes wrong in the middle is an event of its own; whoever hangs up ends what makes them."""

    def __init__(self, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        self._events = _safely(events)
        super().__init__(self._events, headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await closed(self._events)


async def _safely(events: AsyncIterator[str]) -> AsyncGenerator[str]:
    source = pinged(events, PING)
    try:
        async for text in source:
            yield ": ping\n\n" if text is None else text
    except GoneError:
        return
    except Exception as error:
        what = said(error)
        if what.code == "internal":
            LOG.error("a stream failed: %s", where(error))
        yield event({"error": {**what.body["error"], "status": what.status}})
        yield DONE
    finally:
        await closed(source)


async def started(events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """The same events, after the first of them is there: what is refused before it is a response with its own status."""
    first = await anext(events, None)

    async def rest() -> AsyncGenerator[str]:
        try:
            if first is not None:
                yield first
                async for text in events:
                    yield text
        finally:
            await closed(events)

    return rest()


__all__ = ["DONE", "STREAMED", "EventStream", "Words", "chat_logprobs", "event", "started", "text_logprobs", "usage_of"]
