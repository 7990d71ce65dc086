"""Between which values a setting makes sense, one row for each number that can be set.

The ends are where training breaks (a rate of 0 learns nothing, a beta of 1 never forgets), or far beyond any machine: a size that
nobody means is refused here, before anything is allocated or written.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import RegardError


class ConfigError(RegardError):
    """A setting that does not exist, has another type, or makes no sense beside the others."""


class RangeError(ConfigError):
    """A number where training breaks or no machine is large enough."""


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    above: bool = False
    """`low` itself is outside."""
    below: bool = False
    """`high` itself is outside."""

    def holds(self, x: float) -> bool:
        """False for nan, too."""
        return (self.low < x if self.above else self.low <= x) and (x < self.high if self.below else x <= self.high)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:,g} and {'below' if self.below else 'at most'} {number(self.high)}"


def number(x: float) -> str:
    return f"{int(x):,}" if x == int(x) else f"{x:g}"


SIZE = 1 << 24
"""Tokens of a vocabulary, a context or a window."""
COUNT = 10**9
"""Steps, and what is counted in steps."""
POSITIVE = Range(0, 1e12, above=True)
SHARE = Range(0, 1, above=True, below=True)

RANGES: dict[str, Range] = {
    "data.vocabulary": Range(257, SIZE),
    "data.context": Range(1, SIZE),
    "data.validation": SHARE,
    "optim.lr": Range(0, 100, above=True),
    "optim.floor": Range(0, 1),
    "optim.warmup": Range(0, COUNT),
    "optim.beta_1": Range(0, 1, below=True),
    "optim.beta_2": Range(0, 1, below=True),
    "optim.eps": Range(0, 1, above=True),
    "optim.weight_decay": Range(0, 1000),
    "optim.clip": Range(0, 1e12),
    "train.steps": Range(1, COUNT),
    "train.batch": Range(1, 1 << 20),
    "train.accumulate": Range(1, 1 << 20),
    "train.seed": Range(0, (1 << 63) - 1),
    "train.threads": Range(0, 4096),
    "train.log_every": Range(1, COUNT),
    "train.validate_every": Range(1, COUNT),
    "train.save_every": Range(1, COUNT),
    "train.patience": Range(0, COUNT),
    "model.vocabulary": Range(1, SIZE),
    "model.context": Range(1, SIZE),
    "model.window": Range(1, SIZE),
    "model.width": Range(1, 1 << 16),
    "model.depth": Range(1, 1024),
    "model.heads": Range(1, 1 << 12),
    "model.key_heads": Range(1, 1 << 12),
    "model.head_width": Range(1, 1 << 16),
    "model.hidden": Range(1, 1 << 20),
    "model.experts": Range(1, 1 << 12),
    "model.chosen": Range(1, 1 << 12),
    "model.capacity": Range(0, 1e6, above=True),
    "model.clusters": Range(1, 1 << 16),
    "model.kernel": Range(1, 1 << 12),
    "model.eps": Range(0, 1, above=True),
    "model.alpha": Range(0, 1, above=True),
    "model.dropout": Range(0, 1, below=True),
    "model.rope.base": POSITIVE,
    "model.rope.fraction": Range(0, 1, above=True),
    "model.rope.factor": POSITIVE,
    "model.rope.original": Range(1, SIZE),
    "model.rope.low": POSITIVE,
    "model.rope.high": POSITIVE,
    "model.rope.stretch": POSITIVE,
}


def check_range(name: str, value: float) -> None:
    allowed = RANGES.get(name)
    if allowed is not None and not allowed.holds(value):
        raise RangeError(f"{name}={shown(value)} is out of range: it should be {allowed}")
    if allowed is None and not (isinstance(value, int) or math.isfinite(value)):
        raise RangeError(f"{name}={shown(value)} is no finite number")


def check_ranges(part: Any, prefix: str) -> None:
    """Every number of a config, as it was built."""
    for name, value in numbers(part, prefix):
        check_range(name, value)


def numbers(part: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for f in fields(part):
        value: Any = getattr(part, f.name)
        if is_dataclass(value):
            yield from numbers(value, f"{prefix}{f.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{f.name}", value


def shown(value: Any) -> str:
    """A value in an error, at a length that a person reads, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # Python refuses to write out a number of more than 4,300 digits.
        return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 6
_SHORT.maxlevel = 3
