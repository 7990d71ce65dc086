"""What a family learns from text: which of its tokens are hidden or cut out, what has to be said, and how the model is asked.

    next_token   t_1 … t_n            →  t_2 … t_{n+1}                          one text, read from the left
    masked       t_1 <mask> … t_n     →  the tokens that were hidden            BERT (Devlin et al. 2019), the energy transformer
    spans        t_1 <extra_id_0> t_n →  <extra_id_0> t_2 … <|end|>             T5's span corruption (Raffel et al. 2020)
    pairs        task: source         →  target                                 text to text

A model names its objectives (`Model.objectives`), the first of them the usual one. An objective is frozen, and its fields are settings of a run
(`objective.rate=0.3`). What it draws at random comes from a seed for each row, so that a row is the same whoever asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.allow import Padding

if TYPE_CHECKING:
    from .base import Output

IGNORED = -100
"""A target that does not count."""
END, PAD, MASK, SENTINEL = "<|end|>", "<pad>", "<mask>", "<extra_id_{}>"
"""Tokens that are no text, as a tokenizer learned here writes them."""
Row = tuple[Tensor, ...]
"""What one example is made of: a window of tokens, or a source and a target."""


class Batch(NamedTuple):
    inputs: dict[str, Tensor]
    targets: Tensor
    """(B, N), IGNORED where nothing is asked."""
    asked: float | None = None
    """Targets of the whole step, divided by its parts; None where every row asks for as many."""

    def to(self, device: torch.device) -> Batch:
        return Batch({n: t.to(device) for n, t in self.inputs.items()}, self.targets.to(device), self.asked)


@dataclass(frozen=True)
class Marks:
    """The ids of tokens that are no text, in one tokenizer."""

    vocabulary: int
    mask: int = -1
    pad: int = -1
    end: int = -1
    start: int = -1
    """What a decoder starts from."""
    sentinels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Objective(ABC):
    """How rows become inputs and targets. A new one is a class here and a name in the `objectives` of a model."""

    @property
    def pair_fields(self) -> tuple[str, str, str] | None:
        """Where source, target and task stand in a line of a file of pairs; None where it learns from running text."""
        return None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens that are no text and that it needs."""
        return ()

    @abstractmethod
    def batch(self, rows: Sequence[Row], marks: Marks, seeds: Sequence[int]) -> Batch:
        """Inputs and targets of these rows; each draws its random numbers from its own seed."""

    def outputs(self, model: nn.Module, inputs: dict[str, Tensor]) -> Output:
        """The model's answer to a batch."""
        return model(**inputs)


@dataclass(frozen=True)
class NextToken(Objective):
    """Every token but the first is guessed from those before it."""

    def batch(self, rows: Sequence[Row], marks: Marks, seeds: Sequence[int]) -> Batch:
        whole = torch.stack([row[0] for row in rows])
        return Batch({"tokens": whole[:, :-1].contiguous()}, whole[:, 1:].contiguous())


@dataclass(frozen=True)
class Masked(Objective):
    """A share of the tokens is hidden and guessed from both sides.

    Of the hidden ones `replaced` stand as <mask>, half of the others as a token drawn at random and half as they are, so that the model cannot
    trust what it sees. Every row hides equally many.
    """

    rate: float = 0.15
    replaced: float = 0.8

    @property
    def tokens(self) -> tuple[str, ...]:
        return (MASK,)

    def batch(self, rows: Sequence[Row], marks: Marks, seeds: Sequence[int]) -> Batch:
        made = [self._hidden(row[0][:-1], marks, generator(seed)) for row, seed in zip(rows, seeds, strict=True)]
        return Batch({"tokens": torch.stack([x for x, _ in made])}, torch.stack([y for _, y in made]))

    def _hidden(self, window: Tensor, marks: Marks, g: torch.Generator) -> tuple[Tensor, Tensor]:
        count = max(1, round(self.rate * len(window)))
        chosen = torch.randperm(len(window), generator=g)[:count]
        targets = torch.full_like(window, IGNORED)
        targets[chosen] = window[chosen]
        drawn = torch.randint(marks.vocabulary, (count,), generator=g)
        fate = torch.rand(count, generator=g)
        shown = torch.where(
            fate < self.replaced, marks.mask, torch.where(fate < (1 + self.replaced) / 2, drawn, window[chosen])
        )
        hidden = window.clone()
        hidden[chosen] = shown
        return hidden, targets


@dataclass(frozen=True)
class TextToText(Objective):
    """A source is read, a target is written. A pair that names a task has it before its source: `translate: a house`."""

    source: str = "source"
    target: str = "target"
    task: str = "task"
    """The fields of a pair; a task may be left out."""

    @property
    def pair_fields(self) -> tuple[str, str, str] | None:
        return self.source, self.target, self.task

    @property
    def tokens(self) -> tuple[str, ...]:
        return (PAD, END)

    def batch(self, rows: Sequence[Row], marks: Marks, seeds: Sequence[int]) -> Batch:
        return _pairs([(source, target) for source, target in rows], marks)

    def outputs(self, model: nn.Module, inputs: dict[str, Tensor]) -> Output:
        return model(inputs["tokens"], source=inputs["source"], source_allow=Padding(inputs["lengths"]))


@dataclass(frozen=True)
class Spans(Objective):
    """Spans of about `span` tokens, `rate` of all, are cut out of the source, each for a sentinel, and written in order."""

    rate: float = 0.15
    span: float = 3.0
    sentinels: int = 32
    """Spans of a window at most."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return (PAD, END, *(SENTINEL.format(i) for i in range(self.sentinels)))

    def batch(self, rows: Sequence[Row], marks: Marks, seeds: Sequence[int]) -> Batch:
        return _pairs([self._cut(row[0][:-1], marks, generator(seed)) for row, seed in zip(rows, seeds, strict=True)], marks)

    def outputs(self, model: nn.Module, inputs: dict[str, Tensor]) -> Output:
        # All windows are of one length, and so are what is left of them and what is cut out.
        return model(inputs["tokens"], source=inputs["source"])

    def _cut(self, window: Tensor, marks: Marks, g: torch.Generator) -> tuple[Tensor, Tensor]:
        n = len(window)
        noise = min(max(1, round(self.rate * n)), max(1, n - 1))
        count = min(max(1, round(noise / self.span)), noise, max(1, n - noise), len(marks.sentinels))
        left_lengths, cut_lengths = _lengths(n - noise, count, g), _lengths(noise, count, g)
        end = window.new_tensor([marks.end])
        source, target = list[Tensor](), list[Tensor]()
        at = 0
        for left, out, sentinel in zip(left_lengths, cut_lengths, marks.sentinels, strict=False):
            mark = window.new_tensor([sentinel])
            source += [window[at : at + left], mark]
            target += [mark, window[at + left : at + left + out]]
            at += left + out
        return torch.cat([*source, end]), torch.cat([*target, end])


def _lengths(total: int, parts: int, g: torch.Generator) -> list[int]:
    """`total` cut into this many parts of at least one token, all ways equally likely; a window of one token leaves nothing."""
    if total < parts:
        return [total] * parts
    cuts = torch.randperm(total - 1, generator=g)[: parts - 1].add(1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _pairs(pairs: Sequence[tuple[Tensor, Tensor]], marks: Marks) -> Batch:
    """Sources and targets, filled up on the right; a decoder sees its start and every token of the target but the last."""
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    start = targets[0].new_tensor([marks.start])
    written = [torch.cat([start, t[:-1]]) for t in targets]
    return Batch(
        {
            "tokens": _filled(written, marks.pad),
            "source": _filled(sources, marks.pad),
            "lengths": torch.tensor([len(s) for s in sources]),
        },
        _filled(targets, IGNORED),
    )


def _filled(rows: Sequence[Tensor], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


__all__ = [
    "END", "IGNORED", "MASK", "PAD", "SENTINEL", "Batch", "Marks", "Masked", "NextToken", "Objective", "Row", "Spans", "TextToText",
]  # fmt: skip
