"""POST /v1/completions: texts continued; with `echo` and `logprobs`, how likely the prompt's own tokens are."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...identity.state import Identity
from ..access import READ, SERVICE
from ..answer import Answer, together, unless_gone
from ..asking import Asked, call_to_mind
from ..choosing import Who, choices, chosen, room_for, sampling_of
from ..contract import Job, Piece, Score
from ..errors import refuse
from ..keys import Caller
from ..models_listed import model_id
from ..schema import CompletionRequest
from ..service import Service
from ..wire import DONE, STREAMED, EventStream, Words, event, started, text_logprobs, usage_of

router = APIRouter(tags=["openai"])
USUAL = 16
"""Tokens that a completion has where the client names no number, as OpenAI's."""


@router.post("/v1/completions", response_model=None, responses=STREAMED)
async def completions(body: CompletionRequest, request: Request, service: Service = SERVICE, caller: Caller = READ) -> Response:
    """Continue texts or token ids."""
    if body.suffix:
        raise refuse("suffix", "this model continues texts, and does not fill gaps")
    if (body.best_of or 1) > 1:
        raise refuse("best_of", "each choice that is drawn is given; use n")
    if body.remember:
        raise refuse("remember", "a continuation is no turn of a conversation; POST /v1/chat/completions remembers")
    who = await service.aside(lambda: chosen(service, caller, body, request.headers, remember=False))
    began: float = request.scope["regard.began"]

    async def work() -> Response:
        prompts = await service.aside(lambda: prompts_of(service, body.prompt))
        made = Completion(service, body, who, prompts)
        await made.read(began)
        if body.stream:
            return EventStream(await started(made.events()), body.warning())
        return JSONResponse(await made.whole(), headers=body.warning())

    return await unless_gone(request, work)


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    text: str


def prompts_of(service: Service, given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[Prompt]:
    """Whatever form they came in: a text, texts, token ids, or lists of them."""
    if isinstance(given, str):
        rows: list[str | list[int]] = [given]
    elif given and isinstance(given[0], int):
        rows = [cast(list[int], given)]
    else:
        rows = cast(list[str | list[int]], list(given))
    if not 0 < len(rows) <= service.settings.prompts:
        raise refuse("prompt", f"{len(rows)} prompts; 1 to {service.settings.prompts} at a time", "invalid_value")
    return [_prompt(service, row) for row in rows]


def _prompt(service: Service, row: str | list[int]) -> Prompt:
    tokenizer, vocabulary = service.tokenizer, int(service.model.config.vocabulary)
    tokens = tokenizer.encode(row) if isinstance(row, str) else row
    if not tokens:
        # A model needs a token to start from; of a text that begins with nothing this is what stands there.
        start = tokenizer.special.bos if tokenizer.special.bos is not None else tokenizer.special.eos
        if start is None:
            raise refuse("prompt", "it is empty, and this model has no token that begins a text", "invalid_value")
        tokens = [start]
    bad = next((t for t in tokens if t >= vocabulary), None)
    if bad is not None:
        raise refuse("prompt", f"{bad} is no token; this model knows 0 to {vocabulary - 1}", "invalid_value")
    return Prompt(tuple(tokens), row if isinstance(row, str) else tokenizer.decode(tokens))


@dataclass(eq=False)
class Completion:
    """One call: its prompts, their choices, and the words in which they are told."""

    service: Service
    body: CompletionRequest
    who: Who | None
    prompts: list[Prompt]

    def __post_init__(self) -> None:
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.answers: dict[int, Answer] = {}
        self.words = Words(self.service.tokenizer)
        self.jobs: list[Job] = []
        self.asked: list[Asked] = []
        self.n = self.body.n or 1
        # Nothing is to be written: one token is, because the prompt is scored on the way to it, and is not told.
        self.mute = self.body.max_tokens == 0

    async def read(self, began: float) -> None:
        """Make the jobs: who reads each prompt, and how each choice is drawn."""
        service, body = self.service, self.body
        self.began = began
        identity: Identity | None = None
        if self.who is not None:
            name, head = self.who.name, self.who.head
            identity = await service.aside(lambda: service.loaded(name, head))
        for prompt in self.prompts:
            wanted = 1 if self.mute else USUAL if body.max_tokens is None else body.max_tokens
            room = room_for(service, len(prompt.tokens), None if body.max_tokens is None and not self.mute else wanted)
            asked = Asked(service, [], prompt.tokens, began, self.who)
            if identity is not None:
                await call_to_mind(asked, identity, None, ())
            self.asked.append(asked)
            sampling = sampling_of(service, body, max_tokens=min(room, wanted), logprobs=body.logprobs)
            scored = body.logprobs if body.echo else None
            self.jobs += [replace(asked.job(s), prompt_logprobs=scored) for s in choices(service, body, sampling)]

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(together(self.service, self.jobs, self.began, self.answers)) as pieces:
            async for _ in pieces:
                pass
        return {
            **self._head(),
            "choices": [self._choice(i) for i in range(len(self.jobs))],
            "usage": self._usage(),
            **self._told(),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        answer, prompt = self.answers[index], self.prompts[index // self.n]
        text = ("" if self.mute else answer.text) if not self.body.echo else prompt.text + ("" if self.mute else answer.text)
        return {
            "index": index, "text": text, "logprobs": self._logprobs(answer, prompt),
            "finish_reason": "length" if self.mute else answer.ending,
        }  # fmt: skip

    def _logprobs(self, answer: Answer, prompt: Prompt) -> dict[str, Any] | None:
        """Also of a token that ended the text: whoever asks for one token with them gets one."""
        if self.body.logprobs is None:
            return None
        scores: list[Score | Piece] = list(answer.prompt_scores) if self.body.echo else []
        pieces: list[Piece] = [] if self.mute else answer.pieces
        return text_logprobs(self.words, [*scores, *pieces], self.body.logprobs, 0 if self.body.echo else len(prompt.text))

    async def events(self) -> AsyncGenerator[str]:
        begun: dict[int, int] = {}
        async with contextlib.aclosing(together(self.service, self.jobs, self.began, self.answers)) as pieces:
            async for fallen in pieces:
                i, piece, prompt = fallen.index, fallen.piece, self.prompts[fallen.index // self.n]
                if i not in begun:
                    begun[i] = len(prompt.text)
                    if self.body.echo:
                        scores = self.answers[i].prompt_scores
                        yield self._chunk(i, prompt.text, None, scores, 0)
                written: Sequence[Piece] = [] if self.mute else [piece]
                text = "" if self.mute else piece.text
                ending = "length" if self.mute else piece.ending
                if text or ending or self.body.logprobs is not None:
                    yield self._chunk(i, text, ending, written, begun[i])
                begun[i] += len(text)
        if self.body.usage_in_stream:
            yield event({**self._head(), "choices": [], "usage": self._usage(), **self._told()})
        yield DONE

    def _chunk(self, index: int, text: str, ending: str | None, tokens: Sequence[Score | Piece], at: int) -> str:
        most = self.body.logprobs
        logprobs = None if most is None else text_logprobs(self.words, tokens, most, at)
        choice: Mapping[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ending}
        return event({**self._head(), "choices": [choice], **({"usage": None} if self.body.usage_in_stream else {})})

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": model_id(self.service, self.who),
                "system_fingerprint": f"fp_{self.service.base.fingerprint[:12]}"}  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        return usage_of(sum(len(p.tokens) for p in self.prompts), self.answers.values(), 0 if self.mute else None)

    def _told(self) -> dict[str, Any]:
        told = self.asked[0].told() if len(self.asked) == 1 else None
        return {} if told is None else {"regard": told}
