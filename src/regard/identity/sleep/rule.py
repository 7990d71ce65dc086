"""How long an identity sleeps, and how firmly the base is held to meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...errors import SpecError

if TYPE_CHECKING:
    from ..state import Form

Part = Literal["self", "trace", "imprints"]


@dataclass(frozen=True)
class SleepRule:
    """How long and how firmly; the defaults were chosen on people of the training pool."""

    steps: int = 12
    parts: tuple[Part, ...] = ("self", "trace", "imprints")
    form: Form = "self_token"
    """Of the self, where there is none yet."""
    rank: int = 8
    """Of the trace, where there is none yet."""
    rate: float = 0.009
    """Adam's, for the trace; it falls to a fifth of this in the course of a night, as all of them do."""
    self_rate: float = 0.015
    """Adam's, for the self as a token; a key bias needs a fifth of it."""
    value_rate: float = 0.04
    """Adam's, for what imprints say, as a share of the spread of their numbers."""
    anchor: float = 1.5
    """How firmly the base is held to on strangers' conversations."""
    calm: float = 4.0
    """The same on neutral prose."""
    questions: int = 10
    """Of the interview, those where the history matters most."""
    held_back: int = 3
    """Of these, never trained on: they say when to stop."""
    look_every: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.look_every < 1 or not 0 < self.held_back < self.questions:
            raise SpecError(f"{self}: steps and look_every are at least 1, and some questions are held back, not all")
        if not self.parts or set(self.parts) - {"self", "trace", "imprints"}:
            raise SpecError(f"parts={self.parts}: choose from self, trace and imprints")
        if self.rank < 2 or self.rank % 2:
            raise SpecError(f"rank={self.rank}: half of it is for either sign, so it is even and at least 2")


ALONE = SleepRule(parts=("self", "trace"), steps=14, rate=0.05, self_rate=0.09, anchor=3.0, calm=3.0)
"""For a self or a trace without imprints: they act everywhere, so they learn faster and are held more firmly."""


__all__ = ["ALONE", "SleepRule"]
