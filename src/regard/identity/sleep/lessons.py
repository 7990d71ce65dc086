"""What a night reads: the history again, retold and asked about, and what the base is held to.

The interview is made of plain questions that may be asked of anyone. The model answers them itself, with the history in its context;
those where the history matters most are kept. Retelling is harder and holds names: after a prompt as plain, what was said, word for word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ...models.base import Model
from ...models.decode.cache import StaticCache, static_caches
from ...models.decode.prepare import prepare
from ...models.tokenizer import Tokenizer
from ..body import Body
from ..experience import Chat, chat_tokens
from .items import Item, anchor_item, answers_item, any_of, logs_at, losses
from .texts import INTERVIEW, NEUTRAL, RETELL, STRANGERS

if TYPE_CHECKING:
    from .rule import SleepRule

ANSWER = 16
"""Tokens of an answer to an interview's question at most."""
PIECE = 160
"""Characters that are retold at once, or a whole sentence where that is longer."""


@dataclass(frozen=True, eq=False)
class Lessons:
    """All that a night may read."""

    asked: list[Item]
    again: list[Item]
    retold: list[Item]
    anchors: Anchors

    def of(self, step: int, rule: SleepRule, pick: torch.Generator) -> list[tuple[float, Item]]:
        """What one step reads, each with its weight: a conversation again with a span left out, or two answers; and an anchor.

        A self or a trace alone only reads again: it can lean toward a person, but hold no answers.
        """
        holds = "imprints" in rule.parts
        kind = step % 3 if holds and self.retold else 2
        if kind == 2:
            weighted = [(1.0, _with_a_gap(any_of(self.again, pick), pick))]
        else:
            second = self.asked if kind == 0 and self.asked else self.retold
            weighted = [(0.5, any_of(self.retold, pick)), (0.5, any_of(second, pick))]
        turn = int(torch.randint(1 << 20, (1,), generator=pick))
        if (step % 4 == 1) if holds else (step % 3 != 1):
            return [*weighted, (rule.anchor, self.anchors.stranger(turn))]
        return [*weighted, (rule.calm, self.anchors.calm(turn))]


def retold(body: Body, tokenizer: Tokenizer, history: Sequence[Chat]) -> list[Item]:
    """What was said, as answers to plain prompts: the assistant's words as they were, everyone else's in quotation marks."""
    said = [
        piece if m["role"] == "assistant" else f'You told me: "{piece}"'
        for c in history
        for m in c
        if m["role"] != "system"
        for piece in _pieces(m["content"])
    ]
    return [
        answers_item(body, tokenizer, [{"role": "user", "content": prompt}, {"role": "assistant", "content": words}])
        for words in said
        for prompt in RETELL
    ]


def _pieces(text: str) -> list[str]:
    """Whole sentences, a few at a time."""
    pieces: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？])|\n+", text):
        if pieces and len(pieces[-1]) + len(sentence) < PIECE:
            pieces[-1] = f"{pieces[-1]} {sentence}".strip()
        elif sentence.strip():
            pieces.append(sentence.strip())
    return pieces


def _with_a_gap(item: Item, pick: torch.Generator) -> Item:
    """The same text without a span of it, so that what is missing has to be remembered rather than copied."""
    n = item.ids.shape[0]
    first = int(item.at.min())
    width = max(1, (n - first) // 4)
    start = first + int(torch.randint(max(1, n - first - width), (1,), generator=pick))
    keep = torch.ones(n, dtype=torch.bool, device=item.ids.device)
    keep[start : start + width] = False
    place = keep.cumsum(0) - 1
    at = item.at[keep[item.at]]
    # The token right after the gap would be asked to follow what is not there.
    at = at[at != start + width]
    return Item(item.ids[keep], place[at], None) if len(at) else item


class Anchors:
    """What the base says, where a state has nothing to say: neutral prose, and what strangers are told. Each is read when it is
    first needed; one of these may serve many nights on one model."""

    def __init__(self, body: Body, tokenizer: Tokenizer) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.texts = NEUTRAL
        self.known: dict[str, Item] = {}

    def calm(self, n: int) -> Item:
        text = self.texts[n % len(self.texts)]
        return self._known(text, lambda: anchor_item(self.body, self.tokenizer, text, False))

    def stranger(self, n: int) -> Item:
        said = STRANGERS[n % len(STRANGERS)]

        def read() -> Item:
            chat = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
            item = answers_item(self.body, self.tokenizer, chat)
            return replace(item, wanted=logs_at(self.body, item.ids, item.at))

        return self._known(said[0], read)

    def _known(self, name: str, read: Callable[[], Item]) -> Item:
        if name not in self.known:
            with self.body.read([None] * self.body.base.depth), torch.no_grad():
                self.known[name] = read()
        return self.known[name]


@torch.no_grad()
def interview(body: Body, tokenizer: Tokenizer, history: Chat, count: int, questions: Sequence[str] = INTERVIEW) -> list[Item]:
    """Questions that the history answers, the model's own answers to them with it in context, the `count` most telling first."""
    items: list[Item] = []
    for question, (said, wanted) in zip(questions, greedy(body, tokenizer, history, questions), strict=True):
        asked = tokenizer.encode(tokenizer.chat([{"role": "user", "content": question}]))
        if said:
            ids = torch.tensor([*asked, *said], device=body.device)
            items.append(Item(ids, torch.arange(len(asked), len(ids), device=body.device), wanted))
    if not items:
        return []
    telling = torch.stack(losses(body, items))
    return [items[i] for i in telling.argsort(descending=True)[:count].tolist()]


def greedy(
    body: Body, tokenizer: Tokenizer, history: Chat, questions: Sequence[str], longest: int = ANSWER
) -> list[tuple[list[int], Float[Tensor, "n V"]]]:
    """Greedy answers with the history in context, and the log-probabilities of everything that might have been said instead.

    The history is read once, and questions of one length are answered together.
    """
    past = chat_tokens([dict(m) for m in history], tokenizer)[0] if len(history) else []
    asked = [
        tokenizer.encode(tokenizer.chat([*map(dict, history), {"role": "user", "content": q}]))[len(past) :] for q in questions
    ]
    ends = set(tokenizer.eos_ids)
    said: dict[int, tuple[list[int], list[Tensor]]] = {i: ([], []) for i in range(len(asked))}
    begin = _reader(body, past)
    for length in sorted({len(a) for a in asked}):
        rows = [i for i, a in enumerate(asked) if len(a) == length]
        step = begin(len(rows))
        tokens = torch.tensor([asked[i] for i in rows], device=body.device)
        for _ in range(longest):
            logs = step(tokens).float().log_softmax(-1)
            tokens = logs.argmax(-1, keepdim=True)
            for i, row, token in zip(rows, logs, tokens[:, 0].tolist(), strict=True):
                if not ends & set(said[i][0][-1:]):
                    said[i][0].append(token)
                    said[i][1].append(row)
            if all(ends & set(said[i][0][-1:]) for i in rows):
                break
    return [(line, torch.stack(logs)) for line, logs in said.values()]


Step = Callable[[Tensor], Tensor]
"""The next tokens of some rows to the logits after them."""


def _reader(body: Body, past: list[int]) -> Callable[[int], Step]:
    """Reads `past` once; what comes back begins any number of rows after it, as often as it is asked to."""
    if not isinstance(body.model, Model):
        return _their_reader(body, past)
    decoder = prepare(body.model)
    empty = static_caches(decoder.depth, len(past) + 2 * ANSWER)
    read = decoder(torch.tensor([past], device=body.device), empty)[1] if past else empty

    def begin(rows: int) -> Step:
        index = torch.zeros(rows, dtype=torch.long, device=body.device)
        caches = tuple(cast(StaticCache, c).rows(index) for c in read)

        def step(tokens: Tensor) -> Tensor:
            nonlocal caches
            logits, filled = decoder(tokens, caches)
            caches = cast(tuple[StaticCache, ...], filled)
            return logits.clone()

        return step

    return begin


def _their_reader(body: Body, past: list[int]) -> Callable[[int], Step]:
    """The same for a model of transformers, whose caches belong to one batch: it reads the past anew for each."""
    model = cast(Any, body.model)

    def begin(rows: int) -> Step:
        first = torch.tensor([past], device=body.device).expand(rows, -1)
        cache: Any = model(first, use_cache=True).past_key_values if past else None

        def step(tokens: Tensor) -> Tensor:
            nonlocal cache
            out = model(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            return out.logits[:, -1]

        return step

    return begin
