"""From numbers to a verdict: intervals, checks with their controls, and the one rule that joins them.

A check is a number per seed (or per person, item, resample), a side of a threshold on which the whole 95% interval must lie, and the
same number for the control. A check whose control passes as well shows nothing, and counts as failed:

    holds            every check passes
    holds only if …  some pass: their conditions are named
    does not hold    none passes, or the control of a check that must pass does as well
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...errors import ShapeError, SpecError

Kind = Literal["holds", "holds only if", "does not hold"]
DRAWS = 4000
SHORT = 110
"""Letters of a verdict's conditions in a table."""
KINDS: dict[Kind, tuple[str, str]] = {
    "holds": ("✓", "成り立つ"),
    "holds only if": ("◐", "条件付き"),
    "does not hold": ("✗", "成り立たない"),
}
"""A sign for each verdict, and its name in Japanese."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        digits = 3 if max(abs(self.low), abs(self.high)) < 10 else 1
        if self.low == self.high:
            return f"{self.mean:.{digits}g}"
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def interval(values: Sequence[float], draws: int = DRAWS) -> Interval:
    """The mean and its 95% interval: Student's t for fewer than 20 values (a bootstrap of five is too narrow), else the bootstrap."""
    x = torch.tensor(list(values), dtype=torch.float64)
    if not len(x) or not bool(x.isfinite().all()):
        raise ShapeError(f"an interval is made of finite numbers, one or more; these are {list(values)[:8]}")
    mean = float(x.mean())
    if len(x) == 1 or bool((x == x[0]).all()):
        return Interval(mean, mean, mean, len(x))
    if len(x) < 20:
        half = _STUDENT[len(x) - 1] * float(x.std()) / math.sqrt(len(x))
        return Interval(mean, mean - half, mean + half, len(x))
    picks = torch.randint(len(x), (draws, len(x)), generator=torch.Generator().manual_seed(0))
    low, high = x[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(mean, low, high, len(x))


_STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101)  # fmt: skip
"""The 97.5% quantile by degrees of freedom."""


@dataclass(frozen=True)
class Check:
    """One thing that must be seen. Give `above`, `below`, or both for a band; the control must not pass the same bounds."""

    what: str
    values: Sequence[float]
    above: float | None = None
    below: float | None = None
    control: Sequence[float] | None = None
    """The same number measured on what must not show it."""
    condition: str = ""
    """In words after "holds only if", when this check passes and others do not."""
    needed: bool = False
    """Without this one there is no verdict better than "does not hold"."""

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise SpecError(f"the check {self.what!r} has no bound; give above, below, or both")

    def _inside(self, x: Interval) -> bool:
        # A bound itself is inside, so that what is exactly zero may be asked for.
        return (self.above is None or x.low >= self.above) and (self.below is None or x.high <= self.below)

    @property
    def measured(self) -> Interval:
        return interval(self.values)

    @property
    def seen(self) -> bool:
        """The values are inside the bounds, whatever the control does."""
        return self._inside(self.measured)

    @property
    def control_passes(self) -> bool:
        return self.control is not None and self._inside(interval(self.control))

    @property
    def passed(self) -> bool:
        return self.seen and not self.control_passes

    def __str__(self) -> str:
        bounds = " and ".join([*([f"≥ {self.above:g}"] if self.above is not None else []), *([f"≤ {self.below:g}"] if self.below is not None else [])])  # fmt: skip
        said = f"{self.what}: {self.measured}, asked {bounds}"
        if self.control is not None:
            said += f"; control {interval(self.control)}"
        return said


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    because: str
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.because}" if self.kind == "holds only if" else self.kind

    @property
    def short(self) -> str:
        """For a line of a table: the first conditions, and how many checks passed where there are more."""
        if self.kind != "holds only if":
            return self.kind
        conditions = self.because.split("; ")
        shown = [c for n, c in enumerate(conditions) if not n or len("; ".join(conditions[: n + 1])) <= SHORT]
        more = (
            f"; … ({sum(c.passed for c in self.checks)} of {len(self.checks)} checks)" if len(shown) < len(conditions) else ""
        )
        return f"{self.kind} {'; '.join(shown)}{more}"


def judged(*checks: Check) -> Verdict:
    """The verdict of these checks."""
    if not checks:
        raise SpecError("a verdict needs a check")
    spoiled = [c for c in checks if c.seen and c.control_passes]
    missed = [c for c in checks if not c.passed]
    if not missed:
        return Verdict("holds", "every check passes, and no control does", checks)
    if spoiled and (any(c.needed for c in spoiled) or len(spoiled) == len(checks)):
        return Verdict("does not hold", f"the control shows it too: {'; '.join(c.what for c in spoiled)}", checks)
    needed = [c for c in missed if c.needed]
    passed = [c for c in checks if c.passed]
    if needed or not passed:
        return Verdict("does not hold", "; ".join(c.what for c in needed or missed), checks)
    return Verdict("holds only if", "; ".join(dict.fromkeys(c.condition or c.what for c in passed)), checks)
