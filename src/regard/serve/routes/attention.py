"""What a model attends to, which heads do what, and what of an identity moved an answer."""

from __future__ import annotations

from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ...errors import ShapeError
from ...identity.moved import moved_by
from ...identity.read.recall import recall
from ...identity.state import Identity
from ...identity.why import Why, why_answer
from ...identity.wording import word
from ..access import READ, SERVICE
from ..attention import MOST_TOKENS, AttentionReader
from ..errors import ApiError
from ..keys import Caller
from ..service import Service

router = APIRouter(prefix="/v1/attention", tags=["attention"])
MOST_TEXT = 1 << 17
ANSWER = 512
"""Tokens of an answer that is explained, at most."""
LEFT_OUT = 16
"""Imprints that `why` leaves out in turn."""
Text = Annotated[str, Field(max_length=MOST_TEXT)]


class Message(BaseModel):
    role: Annotated[str, Field(max_length=32)]
    content: Text


class Prompt(BaseModel):
    """A text, the messages of a chat, or tokens: one of the three."""

    text: Text | None = None
    messages: Annotated[list[Message], Field(max_length=256)] | None = None
    tokens: Annotated[list[int], Field(max_length=MOST_TOKENS)] | None = None

    def encoded(self, service: Service) -> tuple[int, ...]:
        given = [x for x in (self.text, self.messages, self.tokens) if x is not None]
        if len(given) != 1:
            raise ApiError(400, "give a text, messages or tokens: one of them", code="invalid_value", param="text")
        if self.tokens is not None:
            return tuple(self.tokens)
        if self.messages is not None:
            said = service.tokenizer.chat([m.model_dump() for m in self.messages])
            return tuple(service.tokenizer.encode(said))
        return reader_of(service).encode(self.text or "")


class AttentionRequest(Prompt):
    identity: str | None = None
    layer: int = 0
    heads: Annotated[list[int], Field(max_length=256)] | None = None
    rows: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """From (included) and to (not included)."""
    spec: Annotated[str, Field(max_length=500)] | None = None
    everywhere: bool = False
    """The mechanism in every layer, and not only in this one."""


class HeadsRequest(Prompt):
    spec: Annotated[str, Field(max_length=500)] | None = None


class AnswerRequest(Prompt):
    identity: str
    answer: Text = ""


class WhyRequest(AnswerRequest):
    token: int | None = None
    """Of the answer, counted from 1; the one that the identity moved most where it is left out."""


def reader_of(service: Service) -> AttentionReader:
    """One reader a service: what it has at hand is shared by all who ask for rows of one text."""
    if service not in _READERS:
        _READERS[service] = AttentionReader(service.model, service.tokenizer)
    return _READERS[service]


_READERS: WeakKeyDictionary[Service, AttentionReader] = WeakKeyDictionary()


def minded(service: Service, caller: Caller, name: str, tokens: tuple[int, ...]) -> tuple[Identity, str]:
    """Who somebody is as these tokens read them, and which commit that is."""
    head = service.head(caller, name)
    return recall(service.model, service.load(head.id), tokens, service.tokenizer), head.id


@router.post("")
async def attention(asked: AttentionRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """The weights of some rows and heads of one layer; keys of an identity come first, and `slots` are their words."""
    tokens, reader = asked.encoded(service), reader_of(service)
    reader.check(tokens, asked.layer, asked.heads, None)
    first, last = asked.rows or (0, len(tokens))
    if not 0 <= first <= last <= len(tokens):
        raise ShapeError(f"rows={asked.rows}: this text has rows 0 to {len(tokens)}, the last not included")

    def read() -> dict[str, Any]:
        who, version = (None, "") if asked.identity is None else minded(service, caller, asked.identity, tokens)
        seen = reader.read(tokens, asked.layer, spec=asked.spec, everywhere=asked.everywhere, identity=who, version=version)
        heads = list(range(seen.heads)) if asked.heads is None else asked.heads
        rows = list(range(first, last))
        got = seen.rows(rows, heads)
        weights, accepted = got.weights[0].double().round(decimals=5).tolist(), got.accepted[0].tolist()
        return {
            "object": "attention",
            "tokens": [{"id": i, "text": t} for i, t in zip(tokens, reader.words(tokens), strict=True)],
            "layer": asked.layer,
            "layers": len(reader.layers),
            "heads": seen.heads,
            "spec": seen.spec,
            "causal": causal,
            "slots": list(seen.slots),
            "rows": [
                {
                    "query": row,
                    "heads": [
                        {"head": h, "weights": weights[j][i][: len(seen.slots) + row + 1] if causal else weights[j][i], "accepted": accepted[j][i]}
                        for j, h in enumerate(heads)
                    ],
                }
                for i, row in enumerate(rows)
            ],
        }  # fmt: skip

    causal = reader.causal
    return await service.reading(read)


@router.post("/heads")
async def heads(asked: HeadsRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Of each layer and head: the mean weight on the token before, on what followed the same token, and on the first token."""
    tokens, reader = asked.encoded(service), reader_of(service)
    scores = await service.reading(lambda: reader.head_scores(tokens, asked.spec))
    return {
        "object": "heads",
        "layers": len(reader.layers),
        "scores": {name: x.double().round(decimals=4).tolist() for name, x in scores.items()},
    }


@router.post("/why")
async def why(asked: WhyRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """What of an identity moved one token of an answer, or the token after a prompt."""
    prompt, answer = _exchange(asked, service)

    def explain() -> Why:
        who, _ = minded(service, caller, asked.identity, prompt)
        return why_answer(service.model, who, prompt, answer, asked.token, most=LEFT_OUT, tokenizer=service.tokenizer)

    said = await service.reading(explain)
    likely = zip(said.words, said.likely, strict=True)
    return {
        "object": "why",
        "token": said.token,
        "nats": said.base,
        "parts": said.parts,
        "layers": list(said.layers),
        "imprints": [
            {"index": i, "nats": x, "word": (m := said.moments[i]).word, "shock": m.shock, "source": m.source}
            for i, x in said.imprints.items()
        ],
        "likely": [{"text": text, "with": p, "without": q} for text, (_, p, q) in likely],
    }


@router.post("/moved")
async def moved(asked: AnswerRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Of each token of an answer: how far it is from the model itself, in nats, and what of the identity moved it most."""
    prompt, answer = _exchange(asked, service)
    if not answer:
        raise ApiError(400, "answer: give the answer whose tokens are asked about", code="invalid_value", param="answer")

    def explain() -> dict[str, Any]:
        who, _ = minded(service, caller, asked.identity, prompt)
        seen = moved_by(service.model, who, prompt, answer, tokenizer=service.tokenizer)
        words = reader_of(service).words([*prompt[-1:], *answer])[-len(answer) :]
        return {
            "object": "moved",
            "identity": asked.identity,
            "kept": [
                word(service.tokenizer, [int(who.imprints.token[i]) for i in m.imprints]) for m in seen.movers if m.imprints
            ],
            "tokens": [
                {
                    "id": t,
                    "text": text,
                    "nats": round(seen.nats[i], 6),
                    "by": [
                        {"words": m.words, "kind": m.kind, "source": m.source, "nats": round(m.nats[i], 6)}
                        for m in sorted(seen.movers, key=lambda m: -m.nats[i])[:3]
                        if m.nats[i] > 0
                    ],
                }
                for i, (t, text) in enumerate(zip(answer, words, strict=True))
            ],
        }

    return await service.reading(explain)


def _exchange(asked: AnswerRequest, service: Service) -> tuple[tuple[int, ...], list[int]]:
    """The prompt's tokens and the answer's."""
    prompt, answer = asked.encoded(service), service.tokenizer.encode(asked.answer, bos=False) if asked.answer else []
    if not prompt or len(prompt) + len(answer) > MOST_TOKENS:
        raise ShapeError(f"a prompt and an answer of {len(prompt) + len(answer):,} tokens: give 1 to {MOST_TOKENS:,} of them")
    if len(answer) > ANSWER:
        raise ShapeError(f"an answer of {len(answer)} tokens: {ANSWER} are explained at once; give a part of it")
    return prompt, answer
