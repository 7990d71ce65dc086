"""Two selections made of another: `pointer(inner)` returns the choice itself, `abstain(inner, …)` may refuse to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from .base import Given, Refusal, Selection
from .softmax import Softmax


@dataclass(frozen=True)
class Pointer(Selection):
    """Pointer networks (Vinyals et al. 2015): the result is the distribution over keys, (B, H, Q, K); v is not read."""

    name = "pointer"
    not_in_abstain = not_in_pointer = "write pointer(abstain(...))"
    inner: Selection = field(default_factory=Softmax)

    def __post_init__(self) -> None:
        _check_inner(self, self.inner, lambda inner: inner.not_in_pointer)

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return self.inner.plain(scores, given)

    def unwrap(self) -> tuple[Selection, Refusal | None, bool]:
        return *self.inner.unwrap()[:2], True


@dataclass(frozen=True)
class Abstain(Selection):
    """The reject option inside attention.

    `null_logit` adds a slot with that score and value 0: what falls on it is lost, and the row counts as accepted while the
    real keys hold at least half of the weight. `threshold` refuses a row outright when its largest score is below it.
    """

    name = "abstain"
    not_in_abstain = "abstain is already one; nest it the other way round"
    sums_to_one = False
    inner: Selection = field(default_factory=Softmax)
    null_logit: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        _check_inner(self, self.inner, lambda inner: inner.not_in_abstain)
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

    def unwrap(self) -> tuple[Selection, Refusal | None, bool]:
        return self.inner, Refusal(self.null_logit, self.threshold), False


def _check_inner(outer: Selection, inner: object, why_not: Callable[[Selection], str | None]) -> None:
    if not isinstance(inner, Selection):
        raise outer.refuse("inner", "the first argument is a selection, as in abstain(entmax(1.5), null_logit=0)")
    if (why := why_not(inner)) is not None:
        raise outer.refuse("inner", why)
