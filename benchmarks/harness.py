"""How a comparison is measured.

Ours and the peer take turns in one process, so that whatever else the machine does falls on both. A pair of turns gives one
ratio; a row reports the median of the ratios and their quartiles. No time is ever asserted: a row says whether its reach is met.
Results are asserted equal to the peer's, or to `truth` where the peer is a yardstick that computes something else.
"""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
from torch import Tensor

THREADS = 2
TURN = 0.02
"""Seconds that one turn lasts at least: shorter calls are repeated within it, so that the clock's grain does not count."""

Kind = Literal["times", "faster", "seconds"]
Unit = Literal["s", "B"]


UNWRITTEN = (3,)
"""A token that SmolLM2 never writes (the name of a repository): rows that end there are never shorter than was asked for."""


@dataclass(frozen=True)
class Reach:
    """A target. `times`: ours / peer at most; `faster`: peer / ours at least; `seconds`: ours at most."""

    bound: float
    kind: Kind

    def met(self, value: float) -> bool:
        return value >= self.bound if self.kind == "faster" else value <= self.bound

    def __str__(self) -> str:
        sign, unit = ("≥", " × faster") if self.kind == "faster" else ("≤", " s" if self.kind == "seconds" else " ×")
        return f"{sign} {self.bound:,g}{unit}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` is what the reach is about, `low` and `high` are its quartiles."""

    what: str
    run: str
    peer: str
    ours: float
    theirs: float
    value: float
    low: float | None = None
    high: float | None = None
    reach: Reach | None = None
    kind: Kind = "times"
    unit: Unit = "s"
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.reach is None else self.reach.met(self.value)

    def record(self) -> dict[str, Any]:
        """For JSON, rounded so that a new measurement changes few characters."""
        return {
            "what": self.what, "run": self.run, "peer": self.peer, "unit": self.unit, "kind": self.kind,
            "ours": rounded(self.ours), "theirs": rounded(self.theirs), "value": rounded(self.value),
            "low": rounded(self.low), "high": rounded(self.high),
            "reach": None if self.reach is None else self.reach.bound, "met": self.met, "note": self.note,
        }  # fmt: skip

    @staticmethod
    def read(record: dict[str, Any]) -> Row:
        fields = {n: record[n] for n in record if n != "met"}
        reach = None if record["reach"] is None else Reach(record["reach"], record["kind"])
        return Row(**(fields | {"reach": reach}))


@dataclass(frozen=True)
class Settings:
    repeats: int = 25
    fewest: int = 5
    seconds: float = 30.0
    """How long the pairs of one row may take; `fewest` pairs are measured whatever they take."""
    quick: bool = False
    shrink: int = 1
    """Divides the lengths of sequences, for trying a comparison out."""

    def size(self, n: int) -> int:
        return max(8, n // self.shrink)


@dataclass(frozen=True)
class Case:
    """A row to be measured."""

    label: str
    measure: Callable[[], Row]


@dataclass(frozen=True)
class Pairs:
    """Seconds of ours and the peer's, turn by turn."""

    ours: Sequence[float]
    theirs: Sequence[float]

    def ratios(self, kind: Kind) -> list[float]:
        both = zip(self.ours, self.theirs, strict=True)
        return [t / o for o, t in both] if kind == "faster" else [o / t for o, t in both]


@dataclass
class Bench:
    settings: Settings = field(default_factory=Settings)

    def compare(
        self,
        what: str,
        run: str,
        peer: str,
        ours: Callable[[], Any],
        theirs: Callable[[], Any],
        reach: Reach | None,
        *,
        truth: Callable[[], Any] | None = None,
        tolerance: float = 1e-4,
        per: int = 1,
        note: str = "",
    ) -> Row:
        """Check, then time. Times are shown divided by `per`, the number of queries in a call where one is meant."""
        agree(ours(), (truth or theirs)(), tolerance, f"{what}, {run}")
        pairs = take_turns(ours, theirs, self.settings)
        kind: Kind = "faster" if reach is None else reach.kind
        ratios = pairs.ratios(kind)
        low, high = quartiles(ratios)
        return Row(
            what, run, peer, median(pairs.ours) / per, median(pairs.theirs) / per, median(ratios), low, high, reach, kind,
            note=note,
        )  # fmt: skip


def pin_threads() -> None:
    torch.set_num_threads(THREADS)


def environment() -> dict[str, str | int]:
    return {"torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model(), "threads": THREADS}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def take_turns(ours: Callable[[], Any], theirs: Callable[[], Any], settings: Settings) -> Pairs:
    """Pairs of turns, the order within a pair changing each time."""
    calls = [warm(ours), warm(theirs)]
    seconds: tuple[list[float], list[float]] = ([], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for n in range(settings.repeats):
            for side in (0, 1) if n % 2 == 0 else (1, 0):
                seconds[side].append(turn((ours, theirs)[side], calls[side]))
            if n + 1 >= settings.fewest and time.perf_counter() - started > settings.seconds:
                break
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return Pairs(*seconds)


def warm(f: Callable[[], Any]) -> int:
    """How many calls fill a turn, found after a first call that warms caches and allocators up."""
    f()
    once = turn(f, 1)
    return max(1, math.ceil(TURN / max(once, 1e-9)))


def turn(f: Callable[[], Any], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        f()
    return (time.perf_counter() - started) / calls


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def agree(found: Any, wanted: Any, tolerance: float, label: str) -> None:
    """Outputs, and gradients where a call returns them too, relative to the largest value wanted."""
    for n, (a, b) in enumerate(zip(tensors(found), tensors(wanted), strict=True)):
        if a.shape != b.shape:
            raise AssertionError(f"{label}: result {n} is {tuple(a.shape)} and should be {tuple(b.shape)}")
        scale = max(float(b.detach().abs().max()), 1e-30)
        error = float((a.detach() - b.detach()).abs().max()) / scale
        if not error <= tolerance:
            raise AssertionError(f"{label}: result {n} differs by {error:.2g} of the largest value; {tolerance:g} is allowed")


def tensors(x: Any) -> Iterable[Tensor]:
    return (x,) if isinstance(x, Tensor) else x


def qkv(settings: Settings, length: int, heads: int = 8, width: int = 64, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of every row: B=1, float32, standard normal, from one seed."""
    draw = torch.Generator().manual_seed(0)
    shape = (1, heads, settings.size(length), width)
    q, k, v = (torch.randn(shape, generator=draw).requires_grad_(grad) for _ in range(3))
    return q, k, v


def trained(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs f forward and backward, and returns the output and the gradients of all inputs."""
    with torch.no_grad():
        shape = f(*inputs).shape
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=inputs[0].dtype)

    def call() -> tuple[Tensor, ...]:
        out = f(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream)

    return call


def inferred(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call that runs f forward only."""

    def call() -> Tensor:
        with torch.no_grad():
            return f(*inputs)

    return call


def rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")
