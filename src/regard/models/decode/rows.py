"""Rows that are written side by side: each has its own text, its own overrides and its own cache, and gets the numbers it would get alone.

    rows = OneByOne(prepare(model))
    row = rows.open(overrides, room=200)
    reading = rows.read(row, tokens)              # a generator: every `next` is a bounded piece of work
    logits = rows.step([row, other], [5, 9])      # one token each; what went wrong with a row is in its place

`OneByOne` is the plain definition: every row is decoded as `generate` would decode it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...nn import AttentionOverride, Cache, Owner, bound
from .cache import static_caches
from .generate import PREFILL
from .prepare import Decoder

Overrides = Mapping[nn.Module, AttentionOverride]
Reading = Generator[None, None, Tensor]
"""Stops between pieces of work, and gives the logits (V) behind the last token."""
Scored = Callable[[Tensor], object]
"""Takes logits (n, V) behind every token of a piece, in order."""
R = TypeVar("R")


class Part(NamedTuple):
    """Keys and values of some places of one layer, and who filled them."""

    k: Tensor
    v: Tensor
    owner: Owner | None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


Parts = list[Part]
"""Layer by layer."""


class Rows(ABC, Generic[R]):
    """How rows are written; R is what it knows of one of them."""

    grain: int
    """Whoever goes on from a beginning whose length is a multiple of this gets the numbers of one who began at the start."""
    reason: str | None = None
    """Why rows do not share the reading of weights; None where they do."""

    @abstractmethod
    def open(self, overrides: Overrides, room: int) -> R:
        """A row without a token yet, for `room` of them."""

    @abstractmethod
    def read(self, row: R, tokens: Sequence[int], scored: Scored | None = None) -> Reading:
        """More of a text whose tokens are known."""

    @abstractmethod
    def step(self, rows: Sequence[R], tokens: Sequence[int]) -> list[Tensor | Exception]:
        """One token more in every row: logits (V) of each, or what went wrong with it alone."""

    @abstractmethod
    def copy(self, row: R, start: int, stop: int) -> Parts | None:
        """Keys and values of tokens start..stop, with what stands before the first; None where they are not kept one by one."""

    @abstractmethod
    def restore(self, row: R, parts: Sequence[Parts], tokens: int) -> None:
        """Put what `copy` gave, run by run, at the start of a row that has read nothing."""


@dataclass
class Alone:
    """A row of `OneByOne`."""

    overrides: Overrides
    caches: tuple[Cache, ...]


class OneByOne(Rows[Alone]):
    grain = PREFILL

    def __init__(self, decoder: Decoder, reason: str = "they are decoded one by one") -> None:
        self.decoder, self.reason = decoder, reason
        self.device = next(decoder.model.parameters()).device

    def open(self, overrides: Overrides, room: int) -> Alone:
        return Alone(overrides, static_caches(self.decoder.depth, room))

    def read(self, row: Alone, tokens: Sequence[int], scored: Scored | None = None) -> Reading:
        logits: Tensor | None = None
        for at in range(0, len(tokens), PREFILL):
            logits = yield from self._chunk(row, tokens[at : at + PREFILL], scored)
            yield
        assert logits is not None
        return logits

    def step(self, rows: Sequence[Alone], tokens: Sequence[int]) -> list[Tensor | Exception]:
        results: list[Tensor | Exception] = []
        for row, token in zip(rows, tokens, strict=True):
            try:
                with bound(row.overrides):
                    logits, row.caches = self.decoder(self._tensor([token]), row.caches)
                results.append(logits[0])
            except Exception as error:
                results.append(error)
        return results

    def copy(self, row: Alone, start: int, stop: int) -> Parts | None:
        if self.decoder.stack is None or any(c.k is None or c.carry is not None or c.written for c in row.caches):
            return None
        parts: Parts = []
        for c in row.caches:
            # What stands before the first token goes with it.
            first, last = (c.lead + start if start else 0), c.lead + stop
            k, v = (x[:, :, first:last].clone() for x in (c.keys(), c.values()))
            parts.append(Part(k, v, c.owner))
        return parts

    def restore(self, row: Alone, parts: Sequence[Parts], tokens: int) -> None:
        restored: list[Cache] = []
        for i, cache in enumerate(row.caches):
            for run in parts:
                cache = cache.grown(run[i].k, run[i].v)
            # Whoever filled it is named, so that the layer refuses it to anybody else.
            restored.append(replace(cache, lead=cache.keys().shape[2] - tokens, owner=parts[0][i].owner))
        row.caches = tuple(restored)

    def _chunk(self, row: Alone, tokens: Sequence[int], scored: Scored | None) -> Reading:
        ids, stack = self._tensor(tokens), self.decoder.stack
        if stack is None:
            with bound(row.overrides):
                every, row.caches = self.decoder(ids, row.caches, every=True)
            if scored is not None:
                scored(every[0])
            return every[0, -1]
        way = stack.walk(ids, row.caches)
        while True:
            try:
                # What overrides the layers is bound to each piece of work, and to nothing between them.
                with bound(row.overrides):
                    next(way)
            except StopIteration as end:
                x, row.caches = end.value
                break
            yield
        if scored is not None:
            scored(stack.logits(x))
        return stack.logits(x[-1:])[0]

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)


__all__ = ["OneByOne", "Overrides", "Part", "Parts", "Reading", "Rows", "Scored"]
