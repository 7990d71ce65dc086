"""POST /v1/responses: a conversation that the server keeps, so that `previous_response_id` means what it says.

What is kept is bounded, in memory, and each key's own: an id that is not there any more, or is another's, is refused by name.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from ..access import READ, SERVICE, WRITE
from ..answer import Answer, begin, unless_gone, written
from ..asking import Asked, Chat, ask, chat_of, once, once_of
from ..choosing import chosen, room_for, sampling_of
from ..errors import ApiError, refuse, said
from ..kept import Kept
from ..keys import Caller
from ..models_listed import model_id
from ..schema import Drawing, Message, ResponseRequest
from ..service import Service
from ..wire import STREAMED, EventStream, event, started, usage_of

router = APIRouter(tags=["openai"])


@router.post("/v1/responses", response_model=None, responses=STREAMED)
async def respond(body: ResponseRequest, request: Request, service: Service = SERVICE, caller: Caller = READ) -> Response:
    """Answer the input, after the conversation that an earlier response ended."""
    refuse_unsupported(body)
    who = await service.aside(lambda: chosen(service, caller, body, request.headers))
    messages, token = messages_of(service, body, caller), once_of(caller, who, request.headers)
    began: float = request.scope["regard.began"]

    async def work() -> Response:
        first: Chat = [{"role": "system", "content": body.instructions}] if body.instructions else []
        asked = await ask(service, [*first, *messages], who, began)
        made = Responding(service, body, asked, messages, caller, token)
        if body.stream:
            return EventStream(await started(made.events()), body.warning())
        return JSONResponse(await made.whole(), headers=body.warning())

    return await unless_gone(request, work)


@router.get("/v1/responses/{id}")
def response(id: str, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """One that is still kept."""
    kept = service.responses.get(caller.id, id)
    if kept is None:
        raise _unknown(id, 404)
    return kept.response


@router.delete("/v1/responses/{id}")
def delete_response(id: str, service: Service = SERVICE, caller: Caller = WRITE) -> dict[str, Any]:
    """Keep it no longer. What a person remembers of it is theirs: see /v1/identities."""
    if not service.responses.drop(caller.id, id):
        raise _unknown(id, 404)
    return {"id": id, "object": "response", "deleted": True}


def _unknown(id: str, status: int) -> ApiError:
    return ApiError(
        status, f"there is no response {id!r:.80} here: it was not stored, or is no longer kept", code="previous_response_not_found",
        param="previous_response_id",
    )  # fmt: skip


def refuse_unsupported(body: ResponseRequest) -> None:
    if body.tools:
        raise refuse("tools", "tools are not to be had here; leave them out")
    if body.conversation is not None:
        raise refuse("conversation", "conversations are continued by previous_response_id here")
    if body.background:
        raise refuse("background", "a response is answered while it is asked for; use stream")
    form = cast(dict[str, Any], (body.text or {}).get("format") or {})
    if form and form.get("type", "text") != "text":
        raise refuse("text.format", f"{form.get('type')!r:.40}: answers are plain text here")


def messages_of(service: Service, body: ResponseRequest, caller: Caller) -> Chat:
    """What was said before, and the input."""
    before: Chat = []
    if body.previous_response_id:
        kept = service.responses.get(caller.id, body.previous_response_id)
        if kept is None:
            raise _unknown(body.previous_response_id, 400)
        before = kept.messages
    if isinstance(body.input, str):
        return [*before, {"role": "user", "content": body.input}]
    items: list[Message] = []
    for i, item in enumerate(body.input):
        if item.get("type", "message") != "message":
            raise refuse(f"input.{i}", f"an item of type {item.get('type')!r:.40}; messages are read here")
        try:
            items.append(Message.model_validate(item))
        except ValidationError as error:
            raise refuse(f"input.{i}", f"no message: {error.errors()[0]['msg']}", "invalid_value") from None
    if not items:
        raise refuse("input", "it is empty", "invalid_value")
    return [*before, *chat_of(service, items)]


class _Numbered:
    """Events of one stream, each with its number."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, kind: str, **more: Any) -> str:
        self.count += 1
        return event({"type": kind, "sequence_number": self.count - 1, **more}, kind)


@dataclass(eq=False)
class Responding:
    service: Service
    body: ResponseRequest
    asked: Asked
    messages: Chat
    """Without the instructions, which are not carried over."""
    caller: Caller
    token: str | None

    def __post_init__(self) -> None:
        self.id, self.created, self.item = f"resp_{uuid.uuid4().hex}", int(time.time()), f"msg_{uuid.uuid4().hex}"
        service, body = self.service, self.body
        room = room_for(service, len(self.asked.prompt), body.max_output_tokens, "max_output_tokens")
        drawing = Drawing.model_validate({"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed})
        sampling = sampling_of(service, drawing, max_tokens=room, penalty=service.settings.repetition_penalty)
        self.job = self.asked.job(self.asked.drawn(sampling))
        self.answer: Answer | None = None

    async def whole(self) -> dict[str, Any]:
        async with once(self.asked, self.token) as known, contextlib.aclosing(self._pieces(known)) as pieces:
            async for _ in pieces:
                pass
            return await self._finish()

    async def _pieces(self, known: str | None) -> AsyncGenerator[str]:
        """The text as it falls; of a turn that was committed before, all of it at once."""
        if known is not None:
            self.answer = Answer(None, self.asked.began, text=known, ending="stop")
            yield known
            return
        self.answer = begin(self.service, self.job, self.asked.began)
        async with contextlib.aclosing(written(self.service, self.answer)) as pieces:
            async for piece in pieces:
                yield piece.text

    async def _finish(self) -> dict[str, Any]:
        """Commit, then keep, then tell."""
        assert self.answer is not None
        assert self.answer.ending is not None
        if self.answer.run is not None:
            await self.asked.remember(self.answer.text, self.answer.ending, self.token)
        done = self._response("completed" if self.answer.ending == "stop" else "incomplete", self.answer)
        if self.body.store is not False:
            conversation: Chat = [*self.messages, {"role": "assistant", "content": self.answer.text}]
            name = None if self.asked.who is None else self.asked.who.name
            self.service.responses.keep(self.caller.id, Kept(conversation, done, name), self.service.settings.responses)
        return done

    async def events(self) -> AsyncGenerator[str]:
        told = _Numbered()
        where = {"item_id": self.item, "output_index": 0, "content_index": 0}
        try:
            async with once(self.asked, self.token) as known, contextlib.aclosing(self._pieces(known)) as pieces:
                async for text in pieces:
                    if not told.count:
                        yield told("response.created", response=self._response("in_progress"))
                        yield told("response.in_progress", response=self._response("in_progress"))
                        yield told("response.output_item.added", output_index=0, item=self._message("in_progress", None))
                        yield told("response.content_part.added", **where, part=_part(""))
                    if text:
                        yield told("response.output_text.delta", **where, delta=text, logprobs=[])
                done = await self._finish()
        except Exception as error:
            if not told.count:
                raise
            words = said(error).body["error"]
            failed = {**self._response("failed"), "error": {"code": words["code"], "message": words["message"]}}
            yield told("response.failed", response=failed)
            return
        item = done["output"][0]
        yield told("response.output_text.done", **where, text=item["content"][0]["text"], logprobs=[])
        yield told("response.content_part.done", **where, part=item["content"][0])
        yield told("response.output_item.done", output_index=0, item=item)
        yield told(f"response.{done['status']}", response=done)

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        parts = [] if text is None else [_part(text)]
        return {"id": self.item, "type": "message", "status": status, "role": "assistant", "content": parts}

    def _response(self, status: str, answer: Answer | None = None) -> dict[str, Any]:
        body = self.body
        usage = None
        if answer is not None:
            u = usage_of(len(self.asked.prompt), [answer])
            usage = {
                "input_tokens": u["prompt_tokens"], "input_tokens_details": u["prompt_tokens_details"], "output_tokens": u["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": u["total_tokens"],
            }  # fmt: skip
        told = self.asked.told() if answer is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model_id(self.service, self.asked.who),
            "output": [] if answer is None else [self._message(status, answer.text)],
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "metadata": body.metadata or {},
            "usage": usage,
            **({"regard": told} if told is not None else {}),
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
