"""POST /v1/chat/completions: an answer, whole or as a stream; with a person, remembered before its end is acknowledged."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..access import READ, SERVICE
from ..answer import Answer, Fallen, together, unless_gone
from ..asking import Asked, ask, chat_of, once, once_of
from ..choosing import choices, chosen, room_for, sampling_of
from ..contract import Piece
from ..errors import refuse
from ..keys import Caller
from ..models_listed import model_id
from ..schema import ChatRequest
from ..service import Service
from ..wire import DONE, STREAMED, EventStream, Words, chat_logprobs, event, started, usage_of

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request, service: Service = SERVICE, caller: Caller = READ) -> Response:
    """Answer a conversation, as the model itself or as an identity on it."""
    refuse_unsupported(body)
    who = await service.aside(lambda: chosen(service, caller, body, request.headers))
    if who is not None and who.remember and (body.n or 1) > 1:
        raise refuse("n", "one turn is remembered, and there would be several: remember=false, or n=1", "invalid_value")
    token = once_of(caller, who, request.headers)
    messages = chat_of(service, body.messages)
    began: float = request.scope["regard.began"]

    async def work() -> Response:
        asked = await ask(service, messages, who, began)
        turn = Turn(service, body, asked, token)
        headers = body.warning()
        if body.stream:
            return EventStream(await started(turn.events()), headers)
        return JSONResponse(await turn.whole(), headers=headers)

    return await unless_gone(request, work)


def refuse_unsupported(body: ChatRequest) -> None:
    if body.tools or body.functions:
        raise refuse("tools" if body.tools else "functions", "tools are not to be had here; leave them out")
    form = (body.response_format or {}).get("type", "text")
    if form != "text":
        raise refuse("response_format", f"{form!r:.40}: answers are plain text here")
    if body.audio is not None or (body.modalities and body.modalities != ["text"]):
        raise refuse("modalities", "this model reads and writes text only")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "it needs logprobs=true", "invalid_value")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens", "max_tokens and max_completion_tokens say different things; give one", "invalid_value")


@dataclass(eq=False)
class Turn:
    """One call: its choices, and the words in which they are told."""

    service: Service
    body: ChatRequest
    asked: Asked
    token: str | None

    def __post_init__(self) -> None:
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.answers: dict[int, Answer] = {}
        self.words = Words(self.service.tokenizer)
        body, asked, settings = self.body, self.asked, self.service.settings
        wanted = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        room = room_for(self.service, len(asked.prompt), wanted)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        first = sampling_of(self.service, body, max_tokens=room, penalty=settings.repetition_penalty, logprobs=logprobs)
        self.jobs = [asked.job(s) for s in choices(self.service, body, asked.drawn(first))]

    async def whole(self) -> dict[str, Any]:
        async with once(self.asked, self.token) as said:
            if said is None:
                async with self._pieces() as pieces:
                    async for _ in pieces:
                        pass
                await self._remember()
                shown = [(a.text, str(a.ending), self._logprobs(a.said)) for _, a in sorted(self.answers.items())]
            else:
                shown = [(said, "stop", None)]
        return {
            **self._head("chat.completion"),
            "choices": [
                {"index": i, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs, "finish_reason": ending}
                for i, (text, ending, logprobs) in enumerate(shown)
            ],
            "usage": self._usage(),
            **self._told(),
        }  # fmt: skip

    async def events(self) -> AsyncGenerator[str]:
        async with once(self.asked, self.token) as said:
            if said is not None:
                yield self._chunk(0, {"role": "assistant", "content": said})
                yield self._chunk(0, {}, "stop", last=True)
            else:
                async with contextlib.aclosing(self._streamed()) as texts:
                    async for text in texts:
                        yield text
        if self.body.usage_in_stream:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        yield DONE

    async def _streamed(self) -> AsyncGenerator[str]:
        begun: set[int] = set()
        async with self._pieces() as pieces:
            async for fallen in pieces:
                i, piece, answer = fallen.index, fallen.piece, self.answers[fallen.index]
                if i not in begun:
                    begun.add(i)
                    yield self._chunk(i, {"role": "assistant", "content": ""})
                if piece.text or (self.body.logprobs and not answer.ends(piece)):
                    yield self._chunk(i, {"content": piece.text}, pieces=[] if answer.ends(piece) else [piece])
                if piece.ending and len(self.jobs) > 1:
                    yield self._chunk(i, {}, piece.ending)
        if len(self.jobs) == 1:
            # The end is what acknowledges a turn: it is committed before.
            await self._remember()
            yield self._chunk(0, {}, self.answers[0].ending, last=True)

    def _pieces(self) -> contextlib.aclosing[AsyncGenerator[Fallen]]:
        """What falls, of all choices; left early, it stops them."""
        return contextlib.aclosing(together(self.service, self.jobs, self.asked.began, self.answers))

    async def _remember(self) -> None:
        answer = self.answers[0]
        if len(self.jobs) == 1 and answer.ending is not None:
            await self.asked.remember(answer.text, answer.ending, self.token)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": model_id(self.service, self.asked.who),
            "system_fingerprint": f"fp_{self.service.base.fingerprint[:12]}",
        }  # fmt: skip

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        ending: str | None = None,
        *,
        pieces: list[Piece] | None = None,
        last: bool = False,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(pieces), "finish_reason": ending}
        usage = {"usage": None} if self.body.usage_in_stream else {}
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **usage, **(self._told() if last else {})})

    def _logprobs(self, pieces: list[Piece] | None) -> dict[str, Any] | None:
        if not self.body.logprobs or pieces is None:
            return None
        return {"content": chat_logprobs(self.words, pieces, self.body.top_logprobs or 0), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return usage_of(len(self.asked.prompt), self.answers.values())

    def _told(self) -> dict[str, Any]:
        told = self.asked.told()
        return {} if told is None else {"regard": told}
