"""Two selections made of another: `pointer(inner)` returns the choice itself, `abstain(inner, …)` may refuse to choose."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .base import Given, Selection
from .softmax import Softmax


@dataclass(frozen=True)
class Pointer(Selection):
    """Pointer networks (Vinyals et al. 2015): the result is the distribution over keys, (B, H, Q, K); v is not read."""

    name = "pointer"
    inner: Selection = field(default_factory=Softmax)

    def __post_init__(self) -> None:
        _check_inner(self)

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return self.inner.plain(scores, given)


@dataclass(frozen=True)
class Abstain(Selection):
    """The reject option inside attention.

    `null_logit` adds a slot with that score and value 0: what falls on it is lost, and the row counts as accepted while the
    real keys hold at least half of the weight. `threshold` refuses a row outright when its largest score is below it.
    """

    name = "abstain"
    sums_to_one = False
    inner: Selection = field(default_factory=Softmax)
    null_logit: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        _check_inner(self)
        if (self.null_logit is None) == (self.threshold is None):
            raise self.refuse("inner", "give exactly one of null_logit and threshold")
        for p in ("null_logit", "threshold"):
            value = getattr(self, p)
            if value is not None and (not isinstance(value, int | float) or value != value):
                raise self.refuse(p, f"{p} must be a number")
        if self.null_logit == float("inf"):
            raise self.refuse("null_logit", "a slot that takes everything leaves nothing; it must be below infinity")

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return self.inner.plain(scores, given)


_NOT_ROW_MAPS = {
    "gd": "gd refuses by its own coherence",
    "monotonic": "monotonic walks along the keys, and a refusal has no place on the way; its hard mode refuses by itself",
    "hopfield": "hopfield repeats its step; refuse before it or after it",
    "energy": "energy is a gradient and not a choice",
    "pointer": "write pointer(abstain(...))",
    "abstain": "abstain is already one; nest it the other way round",
}


def _check_inner(outer: Selection) -> None:
    inner: Selection = getattr(outer, "inner")  # noqa: B009
    if not isinstance(inner, Selection):
        raise outer.refuse("inner", "the first argument is a selection, as in abstain(entmax(1.5), null_logit=0)")
    if isinstance(outer, Pointer) and inner.name not in ("hopfield", "energy", "pointer"):
        return
    if inner.name in _NOT_ROW_MAPS:
        raise outer.refuse("inner", _NOT_ROW_MAPS[inner.name])


def unwrap(selection: Selection) -> tuple[Selection, Abstain | None, bool]:
    """The row map inside, the refusal around it, and whether the weights themselves are the result."""
    points = isinstance(selection, Pointer)
    inner = selection.inner if points else selection
    return (inner.inner, inner, points) if isinstance(inner, Abstain) else (inner, None, points)
