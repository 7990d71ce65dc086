"""Rows that are written side by side: each has its own text, its own overrides and its own cache, and gets the numbers it would get alone.

    rows = OneByOne(prepare(model))
    row = rows.open(overrides, room=200)
    reading = rows.read(row, tokens)              # a generator: every `next` is a bounded piece of work
    logits = rows.step([row, other], [5, 9])      # one token each; what went wrong with a row is in its place

`OneByOne` is the plain definition: every row is decoded as `generate` would decode it. `Together` reads every weight once for all rows:
in C a row's products, norms and scores are the same bits whoever is beside it (`products.c`, `meeting.h`), so its tokens are too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from ...attention.allow import Causal
from ...errors import CombinationError, StateError
from ...nn import Attention, AttentionOverride, Cache, Owner, RowRead, bound
from ..base import CausalModel
from . import native
from .cache import StaticCache
from .int8_cache import Bytes
from .prepare import Decoder, Layer, Stack
from .rooms import PREFILL, CacheKind, caches_of

Overrides = Mapping[nn.Module, AttentionOverride]
Reading = Generator[None, None, Tensor]
"""Stops between pieces of work, and gives the logits (V) behind the last token."""
Scored = Callable[[Tensor], object]
"""Takes logits (n, V) behind every token of a piece, in order."""
R = TypeVar("R")


def finished(reading: Reading) -> Tensor:
    """The logits at the end of a reading, without a stop."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value.clone()


class Part(NamedTuple):
    """Keys and values of some places of one layer, as they were kept, and who filled them."""

    k: native.Room
    v: native.Room
    owner: Owner | None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


Parts = list[Part]
"""Layer by layer."""


PIECE = 64
"""Tokens of a text that `Together` reads at a time; between its layers others may have their turn."""


class Rows(ABC, Generic[R]):
    """How rows are written; R is what it knows of one of them."""

    grain: int
    """Whoever goes on from a beginning whose length is a multiple of this gets the numbers of one who began at the start."""
    steps_as_it_reads: bool = False
    """True where a token leaves the same bits behind whether it was read or written: then answers are kept as prompts are."""
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

    def __init__(self, decoder: Decoder, reason: str = "they are decoded one by one", cache: CacheKind = "float32") -> None:
        self.decoder, self.reason, self.rooms = decoder, reason, caches_of(cache)
        self.device = next(decoder.model.parameters()).device

    def open(self, overrides: Overrides, room: int) -> Alone:
        return Alone(overrides, self.rooms(self.decoder.depth, room))

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
            parts.append(Part(*cast(StaticCache, c).part(first, last), c.owner))
        return parts

    def restore(self, row: Alone, parts: Sequence[Parts], tokens: int) -> None:
        restored: list[Cache] = []
        for i, cache in enumerate(row.caches):
            cache = cast(StaticCache, cache)
            for run in parts:
                cache = cache.grown(cast(Tensor, run[i].k), cast(Tensor, run[i].v))
            # Whoever filled it is named, so that the layer refuses it to anybody else.
            restored.append(replace(cache, lead=cache.length - tokens, owner=parts[0][i].owner))
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


class Written:
    """A row of `Together`: what overrides its layers, and room for its keys and values."""

    def __init__(self, stack: Stack, overrides: Overrides, room: int, cache: CacheKind = "float32") -> None:
        self.reads = [_row_read(overrides.get(layer.attention), layer.attention) for layer in stack.layers]
        self.length = 0
        """Tokens that it has."""
        self.rooms: list[tuple[native.Room, native.Room]] = []
        self.texts: list[native.Text] = []
        for layer, read in zip(stack.layers, self.reads, strict=True):
            a, lead = layer.attention, 0 if read is None else read.lead
            shape = a.key_heads, lead + room, a.head_width if read is None else read.width
            k, v = (_room(shape, cache) for _ in range(2))
            if read is not None and read.slots is not None:
                _put(k, 0, read.slots[0][0])
                _put(v, 0, read.slots[1][0])
            self.rooms.append((k, v))
            self.texts.append(layer.text(k, v, read))

    def owner(self, layer: Layer, i: int) -> Owner:
        read = self.reads[i]
        return layer.attention.owner if read is None else read.owner


def _room(shape: tuple[int, int, int], cache: CacheKind) -> native.Room:
    return Bytes.empty(*shape) if cache == "int8" else torch.empty(shape, dtype=torch.float32, device="cpu")


def _put(room: native.Room, at: int, new: native.Room) -> None:
    if isinstance(room, Bytes):
        room.write(at, new if isinstance(new, Bytes) else Bytes.of(new))
    else:
        assert isinstance(new, Tensor)
        room[:, at : at + new.shape[1]] = new


def _taken(room: native.Room, start: int, stop: int) -> native.Room:
    """A copy of places start..stop."""
    return (room.places(start, stop) if isinstance(room, Bytes) else room[:, start:stop]).clone()


def _row_read(override: AttentionOverride | None, attention: Attention) -> RowRead | None:
    if override is None:
        return None
    read = override.row_read(attention)
    if read is None:
        raise CombinationError(
            f"a {type(override).__name__} that is for several rows, or refuses slots, is not read beside others"
        )
    return read


class Together(Rows[Written]):
    grain = 16
    steps_as_it_reads = True

    def __init__(self, decoder: Decoder, cache: CacheKind = "float32") -> None:
        if (why := alone_because(decoder)) is not None:
            raise CombinationError(f"rows of this model are not written together: {why}")
        assert decoder.stack is not None
        caches_of(cache)
        self.cache: CacheKind = cache
        self.stack, self.model = decoder.stack, decoder.stack.model
        self._joined: tuple[list[ref[Written]], tuple[native.Texts, list[int]] | None] = [], None

    def open(self, overrides: Overrides, room: int) -> Written:
        return Written(self.stack, overrides, room, self.cache)

    def read(self, row: Written, tokens: Sequence[int], scored: Scored | None = None) -> Reading:
        x: Tensor | None = None
        for at in range(0, len(tokens), PIECE):
            x = yield from self._walk([row], [tokens[at : at + PIECE]])
            if scored is not None:
                scored(self.stack.logits(x))
            yield
        assert x is not None
        return self.stack.logits(x[-1:])[0]

    def step(self, rows: Sequence[Written], tokens: Sequence[int]) -> list[Tensor | Exception]:
        try:
            if self.stack.whole is not None and len(rows) <= native.NEAR:
                return list(self._at_once(rows, tokens, self.stack.whole))
            way = self._walk(rows, [[t] for t in tokens])
            while True:
                next(way)
        except StopIteration as end:
            return list(self.stack.logits(end.value))
        except Exception as error:
            if len(rows) == 1:
                return [error]
            # No row has moved yet: whoever can go on alone does.
            return [result for row, token in zip(rows, tokens, strict=True) for result in self.step([row], [token])]

    def copy(self, row: Written, start: int, stop: int) -> Parts:
        parts: Parts = []
        for i, (layer, (k, v), text) in enumerate(zip(self.stack.layers, row.rooms, row.texts, strict=True)):
            first, last = (text.lead + start if start else 0), text.lead + stop
            parts.append(Part(_taken(k, first, last), _taken(v, first, last), row.owner(layer, i)))
        return parts

    def restore(self, row: Written, parts: Sequence[Parts], tokens: int) -> None:
        for i, (layer, room) in enumerate(zip(self.stack.layers, row.rooms, strict=True)):
            if any(run[i].owner != row.owner(layer, i) for run in parts):
                raise StateError("keys and values belong to who filled them, and these were filled by another")
            at = 0
            for run in parts:
                count = run[i].k.shape[1]
                for whole, part in zip(room, run[i][:2], strict=True):
                    _put(whole, at, part)
                at += count
        row.length = tokens

    def _at_once(self, rows: Sequence[Written], tokens: Sequence[int], whole: native.Whole) -> Tensor:
        """One token more of every row in one call of C."""
        counts, lengths = [1] * len(rows), [row.length for row in rows]
        places = torch.tensor(lengths) if self.model.has_place_table else None
        x = self.model.start(torch.tensor([tokens]), 0, places).reshape(len(rows), -1)
        board, turned = self._texts(rows)
        board.place(counts, lengths)
        angles = [self._angles(self.stack.layers[i], rows, i, counts) for i in turned]
        logits = native.step(whole, x, angles, board, range(len(rows)))
        if logits is None:
            logits = self.stack.logits(x)
        for row in rows:
            row.length += 1
        return logits

    def _walk(self, rows: Sequence[Written], tokens: Sequence[Sequence[int]]) -> Generator[None, None, Tensor]:
        """What the last block leaves of new tokens of some rows; it stops before every block."""
        counts, lengths = [len(t) for t in tokens], [row.length for row in rows]
        ids = torch.tensor([[t for some in tokens for t in some]])
        places = torch.cat([torch.arange(at, at + n) for at, n in zip(lengths, counts, strict=True)])
        x = self.model.start(ids, 0, places if self.model.has_place_table else None).reshape(ids.shape[1], -1)
        angles: dict[int, tuple[Tensor, Tensor] | None] = {}
        board, turned = self._texts(rows)
        for i, layer in enumerate(self.stack.layers):
            yield
            a = layer.attention
            turn = turned[board.turns[i]]
            if turn not in angles:
                angles[turn] = self._angles(self.stack.layers[turn], rows, turn, counts)
            flat = layer.project(x)
            heads = a.heads, a.key_heads, a.head_width
            x = layer.rest(x, native.meet(flat, angles[turn], board.layer(i), counts, lengths, heads, layer.scale))
        for row, n in zip(rows, counts, strict=True):
            row.length += n
        return x

    def _angles(self, layer: Layer, rows: Sequence[Written], i: int, counts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        each = [layer.angles(row.length, row.length + n, row.reads[i]) for row, n in zip(rows, counts, strict=True)]
        pairs = [x for x in each if x is not None]
        if not pairs:
            return None
        return pairs[0] if len(pairs) == 1 else (torch.cat([c for c, _ in pairs]), torch.cat([s for _, s in pairs]))

    def _texts(self, rows: Sequence[Written]) -> tuple[native.Texts, list[int]]:
        """The rows as C reads them side by side, and a layer of each kind of turn; of those who stepped together last, as it was."""
        before, board = self._joined
        # Without holding them: a row that has left takes its keys with it.
        if board is None or len(before) != len(rows) or any(a() is not b for a, b in zip(before, rows, strict=True)):
            kinds: dict[object, int] = {}
            turned, turns = list[int](), list[int]()
            for i, layer in enumerate(self.stack.layers):
                reads = tuple(None if (r := row.reads[i]) is None else (r.behind, r.off) for row in rows)
                key = layer.attention.spec.position, layer.attention.head_width, reads
                if key not in kinds:
                    kinds[key] = len(turned)
                    turned.append(i)
                turns.append(kinds[key])
            board = native.Texts(list(zip(*(row.texts for row in rows), strict=True)), turns), turned
            self._joined = [ref(row) for row in rows], board
        return board


def alone_because(decoder: Decoder) -> str | None:
    """Why rows of a model are decoded one by one; None where they can be written together."""
    stack = decoder.stack
    if native.library() is None:
        return f"nothing is compiled here ({native.reason()})"
    if stack is None:
        return f"a {type(decoder.model).__name__} decodes through its own forward"
    model = stack.model
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        return "its weights are not all float32 on the CPU"
    if any(product.matrices is None for product in stack.products):
        return "its weights do not lie as C reads them"
    strange = next((x.attention.spec for x in stack.layers if not x.meets), None)
    if strange is not None:
        return f"a layer is {strange}, and only scaled dot products under softmax meet in C"
    if type(model.rule()) is not Causal:
        return f"its rule is {model.rule()}, and only causal texts meet in C"
    if type(model).start is not CausalModel.start and not model.has_place_table:
        return f"a {type(model).__name__} starts from more than its tokens"
    return None


def rows_of(decoder: Decoder, cache: CacheKind = "float32") -> Rows[Any]:
    """Together where that is possible, one by one elsewhere, with the reason."""
    why = alone_because(decoder)
    return Together(decoder, cache) if why is None else OneByOne(decoder, why, cache)


__all__ = ["OneByOne", "Overrides", "Part", "Parts", "Reading", "Rows", "Scored", "Together", "Written", "finished", "rows_of"]
