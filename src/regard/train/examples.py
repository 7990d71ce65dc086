"""What to learn from at each step: a pure function of the seed and the step, so that resuming needs nothing else.

The rows of a step are windows of running text, or pairs of a source and a target; the objective makes inputs and targets of them. Both are
the same on any number of ranks: ranks and accumulated parts take shares of one list of rows, and each row has a seed of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.objectives import END, IGNORED, MASK, PAD, Batch, Marks, NextToken, Objective, Row
from ..models.schema import ConfigError
from ..models.tokenizer import Tokenizer
from .corpus import DataError, numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[Any]
    """Tokens, or places among them."""

VALIDATION = 1 << 40
"""The step that validation draws its random numbers of, which no run reaches: a row is hidden alike each time."""


def seed_of(seed: int, step: int, part: int) -> int:
    """Another seed for every step and rank or row (odd multipliers keep them apart modulo 2⁶³)."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + part * 0x94D049BB133111EB) % (1 << 63)


@dataclass(frozen=True, eq=False)
class Drawing:
    """How many rows a step has, the seed they are drawn by, and what is made of them."""

    batch: int
    seed: int
    objective: Objective = field(default_factory=NextToken)
    marks: Marks = field(default_factory=lambda: Marks(1 << 32))
    """A token from its `vocabulary` on is damage that the digest of a large file, taken in samples, has missed."""


class Examples(ABC):
    """Rows to draw from."""

    drawing: Drawing

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows that are drawn from."""

    @property
    @abstractmethod
    def step_tokens(self) -> int:
        """About how many tokens a step reads."""

    @abstractmethod
    def rows(self, picked: Sequence[int]) -> list[Row]: ...

    @abstractmethod
    def in_turn(self) -> Sequence[int]:
        """Rows that meet everything once."""

    def asked(self, picked: Sequence[int]) -> int | None:
        """How many targets these rows have together; None where all have equally many."""
        return None

    def at(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """The batch of a step, or one of its parts (B / parts, N). The parts, whoever takes them, join to the whole batch in order."""
        d = self.drawing
        picked = numpy().random.default_rng([d.seed, step]).integers(0, self.count, size=d.batch).tolist()
        share = d.batch // parts
        mine = range(part * share, (part + 1) * share)
        made = d.objective.batch(self.rows([picked[i] for i in mine]), d.marks, [seed_of(d.seed, step, i + 1) for i in mine])
        asked = self.asked(picked)
        return made if asked is None else made._replace(asked=asked / parts)

    def tried(self) -> Batch:
        """The first row, to try a new model with."""
        return self.drawing.objective.batch(self.rows([0]), self.drawing.marks, [0])

    def in_order(self, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Everything once, in batches; a rank takes its share of each.

        All ranks take equally many batches, as sharded models need: what is missing in the last is a row whose targets are
        IGNORED, which the loss passes over.
        """
        d, turn = self.drawing, self.in_turn()
        share = max(1, d.batch // world)
        for first in range(0, len(turn), share * world):
            mine = range(first + rank * share, first + (rank + 1) * share)
            picked = [turn[min(i, len(turn) - 1)] for i in mine]
            made = d.objective.batch(self.rows(picked), d.marks, [seed_of(d.seed, VALIDATION, i) for i in mine])
            made.targets[torch.tensor([i >= len(turn) for i in mine])] = IGNORED
            yield made


@dataclass(frozen=True, eq=False)
class Windows(Examples):
    """`context + 1` tokens of running text from any place."""

    values: Values
    context: int
    drawing: Drawing

    @property
    def count(self) -> int:
        return len(self.values) - self.context

    @property
    def step_tokens(self) -> int:
        return self.drawing.batch * self.context

    def in_turn(self) -> Sequence[int]:
        return range(0, (len(self.values) - 1) // self.context * self.context, self.context)

    def rows(self, picked: Sequence[int]) -> list[Row]:
        np = numpy()
        cut = self.values[np.asarray(picked)[:, None] + np.arange(self.context + 1)]
        return [(row,) for row in whole(cut, self.drawing.marks.vocabulary)]

    @classmethod
    def split(cls, values: Values, validation: float, context: int, drawing: Drawing) -> tuple[Examples, Examples]:
        """The first part to train on and the last to validate on; each holds at least one window."""
        n = len(values)
        cut = n - max(int(n * validation), min(context + 1, n))
        if cut < context + 1:
            raise DataError(
                f"{n} tokens are too few: training and validation each need a window of data.context + 1 = {context + 1}"
            )
        return cls(values[:cut], context, drawing), cls(values[cut:], context, drawing)


@dataclass(frozen=True, eq=False)
class Pairs(Examples):
    """Sources and targets: documents in turn, each closed by the token that ends a text."""

    values: Values
    ends: Values
    """Where each document ends, its last token included; pair i is documents 2i and 2i + 1."""
    begin: int
    drawing: Drawing

    @property
    def count(self) -> int:
        return len(self.ends) // 2

    @property
    def step_tokens(self) -> int:
        return self.drawing.batch * (int(self.ends[-1]) - self.begin) // self.count

    def in_turn(self) -> Sequence[int]:
        return range(self.count)

    def bounds(self, i: int) -> tuple[int, int, int]:
        """Where pair i begins, where its target begins, and where it ends."""
        return int(self.ends[2 * i - 1]) if i else self.begin, int(self.ends[2 * i]), int(self.ends[2 * i + 1])

    def rows(self, picked: Sequence[int]) -> list[Row]:
        size = self.drawing.marks.vocabulary
        bounds = [self.bounds(i) for i in picked]
        return [(whole(self.values[a:b], size), whole(self.values[b:c], size)) for a, b, c in bounds]

    def asked(self, picked: Sequence[int]) -> int | None:
        return sum(c - b for _, b, c in map(self.bounds, picked))

    @classmethod
    def split(cls, values: Values, validation: float, context: int, drawing: Drawing) -> tuple[Examples, Examples]:
        """The first pairs to train on and the last to validate on; each part has at least one."""
        np = numpy()
        ends = np.flatnonzero(np.asarray(values) == drawing.marks.end) + 1
        if len(ends) % 2 or not len(ends) or ends[-1] != len(values):
            raise DataError(
                "the token file is no file of pairs: a text in it spells the token that ends one, or it is damaged; remove data.cache, and it is made again"
            )
        longest = np.diff(ends, prepend=0)
        if longest.max() > context:
            i = int(longest.argmax())
            raise DataError(
                f"the {'target' if i % 2 else 'source'} of pair {i // 2 + 1} has {int(longest[i])} tokens, its end included; data.context={context} is too small"
            )
        count = len(ends) // 2
        cut = 2 * (count - max(1, int(count * validation)))
        if cut < 2:
            raise DataError(f"{count} pair is too few: training and validation each need one")
        return cls(values, ends[:cut], 0, drawing), cls(values, ends[cut:], int(ends[cut - 1]), drawing)


def whole(cut: Values, vocabulary: int) -> Tensor:
    """Tokens of a file, each of them one of this vocabulary."""
    np = numpy()
    if cut.size and int(cut.max()) >= vocabulary:
        raise DataError(
            f"the token file holds token {int(cut.max())} of a vocabulary of {vocabulary}: it is damaged; "
            "remove data.cache, and it is made again"
        )
    return torch.from_numpy(cut.astype(np.int64))


def marks_of(objective: Objective, tokenizer: Tokenizer, vocabulary: int, start: int | None = None) -> Marks:
    """The ids of the tokens that an objective needs, under whatever names the tokenizer has them; one that it lacks is named."""
    special = tokenizer.special
    roles = {MASK: special.mask, PAD: special.pad, END: special.eos}
    ids = {name: roles[name] if name in roles else tokenizer.id_of(name) for name in objective.tokens}
    missing = [name for name, i in ids.items() if i is None]
    if missing:
        raise ConfigError(
            f"this tokenizer has no token {missing[0]}, which the objective needs; a run that begins anew learns one"
        )
    known = {name: i for name, i in ids.items() if i is not None}
    mask, pad, end = (known.get(name, -1) for name in roles)
    sentinels = tuple(i for name, i in known.items() if name not in roles)
    return Marks(vocabulary, mask, pad, end, pad if start is None else start, sentinels)


__all__ = ["Drawing", "Examples", "Pairs", "Windows", "marks_of", "seed_of"]
