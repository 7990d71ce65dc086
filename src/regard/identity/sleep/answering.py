"""Greedy answers: of questions after a chat, or of any token ids, with all that might have been said instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ...models.base import Model
from ...models.decode.cache import StaticCache, static_caches
from ...models.decode.prepare import prepare
from ...models.tokenizer import Tokenizer
from ..body import Body
from ..experience import Chat, chat_tokens

ANSWER = 16
"""Tokens of an answer at most."""


class Answer(NamedTuple):
    """What was said, and the log-probabilities of everything that might have been said instead."""

    tokens: list[int]
    logs: Float[Tensor, "n V"]


def greedy(body: Body, tokenizer: Tokenizer, history: Chat, questions: Sequence[str], longest: int = ANSWER) -> list[Answer]:
    """Greedy answers with the history in context, which is read once."""
    past = chat_tokens([dict(m) for m in history], tokenizer)[0] if len(history) else []
    asked = [
        tokenizer.encode(tokenizer.chat([*map(dict, history), {"role": "user", "content": q}]))[len(past) :] for q in questions
    ]
    return continued(body, past, asked, longest, tokenizer.eos_ids)


@torch.no_grad()
def continued(
    body: Body,
    past: list[int],
    tails: Sequence[list[int]],
    longest: int,
    ends: Sequence[int],
    enough: Callable[[int, list[int]], bool] = lambda row, tokens: False,
) -> list[Answer]:
    """Greedy continuations of `past` and each of its tails, those of one length together; a row ends with one of `ends`, or
    where `enough` was said of it."""
    begin = _reader(body, past, max(map(len, tails), default=0) + longest)
    answers: dict[int, tuple[list[int], list[Tensor]]] = {i: ([], []) for i in range(len(tails))}
    for length in sorted({len(t) for t in tails}):
        rows = [i for i, t in enumerate(tails) if len(t) == length]
        step, open_ = begin(len(rows)), set(rows)
        tokens = torch.tensor([tails[i] for i in rows], device=body.device)
        for _ in range(longest):
            logs = step(tokens).float().log_softmax(-1)
            tokens = logs.argmax(-1, keepdim=True)
            for i, row, token in zip(rows, logs, tokens[:, 0].tolist(), strict=True):
                if i in open_:
                    answers[i][0].append(token)
                    answers[i][1].append(row)
                    if token in ends or enough(i, answers[i][0]):
                        open_.discard(i)
            if not open_:
                break
    return [Answer(line, torch.stack(logs)) for line, logs in answers.values()]


Step = Callable[[Tensor], Tensor]
"""The next tokens of some rows to the logits after them."""


def _reader(body: Body, past: list[int], room: int) -> Callable[[int], Step]:
    """Reads `past` once; what comes back begins any number of rows after it, as often as it is asked to."""
    if not isinstance(body.model, Model):
        return _their_reader(body, past)
    decoder = prepare(body.model)
    empty = static_caches(decoder.depth, len(past) + room)
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


__all__ = ["ANSWER", "Answer", "continued", "greedy"]
