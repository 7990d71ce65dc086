"""Greedy answers: of questions after a chat, or of any token ids, with all that might have been said instead.

Where the model's rows can be written together (`models.decode.rows`), what texts begin with is read once, and rows of any length step
side by side; elsewhere those of one length do, and each text is read by itself. Both give the same numbers, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ...models.base import Model
from ...models.decode.cache import StaticCache, static_caches
from ...models.decode.prepare import prepare
from ...models.decode.rows import Together, Written, alone_because
from ...models.tokenizer import Tokenizer
from ...nn import Attention, overrides_in
from ..body import Body
from ..experience import Chat, chat_tokens
from .items import logs_at

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
    """Greedy continuations of `past` and each of its tails, what they all begin with read once; a row ends with one of `ends`, or
    where `enough` was said of it."""
    shared = _shared(tails)
    past, tails = [*past, *(tails[0][:shared] if tails else [])], [t[shared:] for t in tails]
    beside = _Beside.of(body)
    if beside is not None and all(tails):
        return beside.continued(past, tails, longest, ends, enough)
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


@torch.no_grad()
def logs_along(body: Body, texts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Log-probabilities at places of each text, (n, V), as `logs_at` has them; what all texts begin with is read once."""
    beside = _Beside.of(body)
    if beside is None or any(not len(at) or int(at.min()) < 1 for _, at in texts):
        return [logs_at(body, ids, at) for ids, at in texts]
    return beside.logs_along(texts)


class _Beside:
    """Rows that are written together, under whatever overrides the layers here."""

    def __init__(self, together: Together, body: Body) -> None:
        self.together, self.device = together, body.device
        self.overrides = overrides_in(body.model)

    @classmethod
    def of(cls, body: Body) -> _Beside | None:
        """None where rows of this model, or of who lives in it, are not written together."""
        if not isinstance(body.model, Model):
            return None
        decoder, overrides = prepare(body.model), overrides_in(body.model)
        if alone_because(decoder) is not None:
            return None
        if any(isinstance(m, Attention) and o.row_read(m) is None for m, o in overrides.items()):
            return None
        return cls(Together(decoder), body)

    def continued(
        self,
        past: list[int],
        tails: Sequence[list[int]],
        longest: int,
        ends: Sequence[int],
        enough: Callable[[int, list[int]], bool],
    ) -> list[Answer]:
        begin = self.begun(past, max(map(len, tails), default=0) + longest)
        rows, logits = list[Written](), list[Tensor]()
        for tail in tails:
            rows.append(begin())
            logits.append(self.read(rows[-1], tail))
        answers: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in tails]
        open_ = list(range(len(tails)))
        for n in range(longest):
            going = list[int]()
            for i in open_:
                logs = logits[i].float().log_softmax(-1)
                token = int(logs.argmax())
                answers[i][0].append(token)
                answers[i][1].append(logs)
                if token not in ends and not enough(i, answers[i][0]):
                    going.append(i)
            open_ = going
            if not open_ or n + 1 == longest:
                break
            for i, x in zip(open_, self.step([rows[i] for i in open_], [answers[i][0][-1] for i in open_]), strict=True):
                logits[i] = x
        return [Answer(line, torch.stack(logs)) for line, logs in answers]

    def logs_along(self, texts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        ids = [text.tolist() for text, _ in texts]
        # Of each text at least the token that says the first place is left to be read.
        shared = _shared([line[: int(at.min())] for line, (_, at) in zip(ids, texts, strict=True)])
        begin = self.begun(ids[0][:shared] if ids else [], max(map(len, ids), default=0))
        said = list[Tensor]()
        for line, (_, at) in zip(ids, texts, strict=True):
            row, first = begin(), int(at.min()) - 1
            pieces = list[Tensor]()
            if first > shared:
                self.read(row, line[shared:first])
            self.read(row, line[first : int(at.max())], pieces.append)
            said.append(torch.cat(pieces)[at - 1 - first].float().log_softmax(-1))
        return said

    def begun(self, past: list[int], room: int) -> Callable[[], Written]:
        """Reads `past` once; what comes back begins a row after it, as often as it is asked to."""
        first = self.together.open(self.overrides, len(past) + room)
        if not past:
            return lambda: self.together.open(self.overrides, room)
        self.read(first, past)
        parts = self.together.copy(first, 0, len(past))

        def begin() -> Written:
            row = self.together.open(self.overrides, len(past) + room)
            self.together.restore(row, [parts], len(past))
            return row

        return begin

    def read(self, row: Written, tokens: list[int], scored: Callable[[Tensor], object] | None = None) -> Tensor:
        way = self.together.read(row, tokens, None if scored is None else lambda x: scored(x.clone()))
        while True:
            try:
                next(way)
            except StopIteration as end:
                return end.value.clone()

    def step(self, rows: list[Written], tokens: list[int]) -> list[Tensor]:
        said = list[Tensor]()
        for x in self.together.step(rows, tokens):
            if isinstance(x, Exception):
                raise x
            said.append(x.clone())
        return said


def _shared(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with; each keeps at least one of its own."""
    n = 0
    while rows and all(len(r) > n + 1 for r in rows) and len({r[n] for r in rows}) == 1:
        n += 1
    return n


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


__all__ = ["ANSWER", "Answer", "continued", "greedy", "logs_along"]
