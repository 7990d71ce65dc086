"""What is said because of who speaks, and not because anybody would say it.

    z = a + c · (a − b)      a, b log-probabilities of the next token, with what overrides the layers and with what stands beside it; |a − b| at most `BOUND`

Context-aware decoding (Shi et al. 2023, arXiv 2305.14739) for a memory instead of a text: a small model that has something before its eyes
still says half of the time what it would have said anyway. b is the model by itself, or, where an override says so (`beside`), the model with
nothing to speak of before its eyes: what it says because it reads at all ("The text suggests …") is then no reason either. `Contrasted` rows have
that one beside them, with the same text; both take a token in one step, so that every weight is read once for the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from torch import Tensor

from .rows import Overrides, Parts, Reading, Rows, Scored
from .sampling import Sampling

BOUND = 10.0
"""Nats that the two may differ by and be counted: what neither would say is not raised by how little the other would."""


def contrast_of(overrides: Overrides, sampling: Sampling, row: int = 0) -> float:
    """How far a row leans away from the model by itself: as was asked for, or as whoever speaks does."""
    reads = overrides.values()
    if not reads or any(read.alone for read in reads):
        return 0.0
    return max(read.leans(row) for read in reads) if sampling.contrast is None else sampling.contrast


def beside(overrides: Overrides) -> Overrides:
    """What overrides the layers of the row that words lean away from; nothing for the model by itself."""
    return {layer: other for layer, read in overrides.items() if (other := read.beside) is not None}


def contrasted(logits: Tensor, plain: Tensor, contrast: float) -> Tensor:
    """Logits (…, V) that lean away from others."""
    a, b = (x.float().log_softmax(-1) for x in (logits, plain))
    return a + contrast * (a - b).clamp(-BOUND, BOUND)


@dataclass
class Pair:
    """A row, and beside it the same text as it is read by whoever its words lean away from."""

    own: Any
    plain: Any = None
    contrast: float = 0.0

    @property
    def length(self) -> int:
        return self.own.length


class Contrasted(Rows[Pair]):
    """Rows that may be contrasted, over any others; one that is opened without a contrast is what it was, bit for bit."""

    def __init__(self, rows: Rows[Any]) -> None:
        self.rows = rows
        self.grain, self.steps_as_it_reads, self.reason = rows.grain, rows.steps_as_it_reads, rows.reason

    def open(self, overrides: Overrides, room: int, contrast: float = 0.0) -> Pair:
        own = self.rows.open(overrides, room)
        return Pair(own, self.rows.open(beside(overrides), room), contrast) if contrast and overrides else Pair(own)

    def read(self, row: Pair, tokens: Sequence[int], scored: Scored | None = None) -> Reading:
        logits = yield from self.rows.read(row.own, tokens, scored)
        if row.plain is None:
            return logits
        # The next reading may write where these stand.
        logits = logits.clone()
        return contrasted(logits, (yield from self.rows.read(row.plain, tokens)), row.contrast)

    def step(self, rows: Sequence[Pair], tokens: Sequence[int]) -> list[Tensor | Exception]:
        beside = [(row.plain, token) for row, token in zip(rows, tokens, strict=True) if row.plain is not None]
        results = self.rows.step([*(row.own for row in rows), *(p for p, _ in beside)], [*tokens, *(t for _, t in beside)])
        plains = iter(results[len(rows) :])
        return [
            x if row.plain is None else _either(x, next(plains), row.contrast) for row, x in zip(rows, results, strict=False)
        ]

    def copy(self, row: Pair, start: int, stop: int) -> Parts | None:
        """Those of both, one behind the other."""
        parts = [self.rows.copy(x, start, stop) for x in (row.own, row.plain) if x is not None]
        return None if None in parts else list(chain.from_iterable(cast(list[Parts], parts)))

    def restore(self, row: Pair, parts: Sequence[Parts], tokens: int) -> None:
        if row.plain is None:
            self.rows.restore(row.own, parts, tokens)
            return
        for x, half in ((row.own, slice(len(parts[0]) // 2)), (row.plain, slice(len(parts[0]) // 2, None))):
            self.rows.restore(x, [run[half] for run in parts], tokens)


def _either(own: Tensor | Exception, plain: Tensor | Exception, contrast: float) -> Tensor | Exception:
    if isinstance(own, Exception):
        return own
    return plain if isinstance(plain, Exception) else contrasted(own, plain, contrast)


__all__ = ["BOUND", "Contrasted", "Pair", "beside", "contrast_of", "contrasted"]
