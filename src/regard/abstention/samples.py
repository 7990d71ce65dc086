"""Scores and answers as they are given, checked and put in order: from the highest score down, equal scores together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import NumericsError, ShapeError

Numbers = Tensor | Sequence[float] | Sequence[int] | Sequence[bool]


class Groups(NamedTuple):
    """Distinct scores from the highest down; for each, how many have this score or a higher one, and how many of those are wrong."""

    scores: Tensor
    """(M,) float64"""
    counts: Tensor
    """(M,) long, rising; the last is the number of answers."""
    errors: Tensor
    """(M,) long"""

    @property
    def total(self) -> int:
        return int(self.counts[-1]) if len(self.counts) else 0


def as_scores(scores: Numbers) -> Tensor:
    """(n,) float64 on the CPU, without NaN; infinities are scores."""
    x = as_tensor(scores, "scores").flatten().double()
    if bool(x.isnan().any()):
        where = x.isnan().nonzero().flatten()[:5].tolist()
        raise NumericsError(f"scores are NaN at {where}; give −inf to what must never be accepted, or leave those answers out")
    return x


def as_flags(correct: Numbers, name: str = "correct") -> Tensor:
    """(n,) bool on the CPU, from booleans or from zeros and ones of any kind."""
    x = as_tensor(correct, name).flatten()
    strange = (x != 0) & (x != 1)
    if bool(strange.any()):
        raise NumericsError(f"{name} holds {x[strange][:5].tolist()}; each answer is right (True, 1) or wrong (False, 0)")
    return x == 1


def as_tensor(given: object, name: str) -> Tensor:
    """A tensor on the CPU; Python's floats stay as exact as they are, whatever the default dtype."""
    try:
        x = given.detach().cpu() if isinstance(given, Tensor) else torch.tensor(given)
        if x.is_floating_point() and isinstance(given, list | tuple):
            x = torch.tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{name} is {_short(given)}; give a tensor or a list of numbers") from error
    if x.is_complex() or x.is_sparse:
        raise ShapeError(f"{name} is a {'complex' if x.is_complex() else 'sparse'} tensor; give plain real numbers")
    return x


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}…"


def matched(scores: Numbers, flags: Numbers, name: str = "correct") -> tuple[Tensor, Tensor]:
    """Scores and flags, flat, one flag for each score."""
    shapes = [tuple(as_tensor(x, n).shape) for x, n in ((scores, "scores"), (flags, name))]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"scores are {shapes[0]} and {name} is {shapes[1]}; there is one score for each answer")
    return as_scores(scores), as_flags(flags, name)


def grouped(scores: Numbers, correct: Numbers) -> Groups:
    """One row per distinct score, from the highest down."""
    x, right = matched(scores, correct)
    values, group, sizes = x.unique(sorted=True, return_inverse=True, return_counts=True)
    wrong = torch.zeros(len(values), dtype=torch.long).index_add_(0, group, (~right).long())
    return Groups(values.flip(0), sizes.flip(0).cumsum(0), wrong.flip(0).cumsum(0))
