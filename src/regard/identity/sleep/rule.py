"""How long an identity sleeps, what it is asked, and how firmly the base is held to meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...errors import SpecError

if TYPE_CHECKING:
    from ..state import Form

Part = Literal["self", "trace", "imprints"]
Unrelated = Literal["everyday", "unanswered", "stranger"]
"""What is not about the person: everyday questions, personal ones that this life does not answer, what others are told."""


@dataclass(frozen=True)
class SleepRule:
    """How long and how firmly; the defaults were chosen on a person of the training pool and a few that were written by hand."""

    steps: int = 16
    parts: tuple[Part, ...] = ("imprints",)
    form: Form = "self_token"
    """Of the self, where there is none yet."""
    rank: int = 8
    """Of the trace, where there is none yet."""
    rate: float = 0.009
    """Adam's, for the trace; it falls to a fifth of this in the course of a night, as all of them do."""
    self_rate: float = 0.015
    """Adam's, for the self as a token; a key bias needs a fifth of it."""
    value_rate: float = 0.06
    """Adam's, for what imprints say, as a share of the spread of their numbers."""
    batch: int = 3
    """Answers about the person in a step, and as many items that are not about them."""
    anchor: float = 1.0
    """How firmly the base is held to on everyday questions, unanswerable ones and strangers' conversations."""
    unrelated: tuple[Unrelated, ...] = ("everyday", "unanswered", "everyday", "stranger")
    """What comes in turn among the items that are not about the person."""
    firm: float = 0.0
    """How firmly the surprise at what strangers are told is held where it was, either way."""
    calm: float = 2.0
    """The same on neutral prose."""
    still: float = 0.97
    """Of what unrelated texts read in the imprints, the share whose directions are held still."""
    statements: int = 40
    """Of the person's, the youngest, that are asked about."""
    each: int = 3
    """Questions about one statement at most."""
    held_back: int = 6
    """Questions that are never trained on: they say when to stop."""
    look_every: int = 8
    words: float = 0.0
    """Of the probability of an answer's first token, the share that is given to the words that are the person's (`finder.py`), instead of the
    teacher's answers; a self that is not there yet then starts as a second sink of the last layers (`sayable.py`)."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.steps, self.look_every, self.held_back, self.statements, self.each)
        if least < 1 or self.batch < 2:
            raise SpecError(f"{self}: steps, look_every, held_back, statements and each are at least 1, and batch 2")
        if not 0 <= self.still < 1:
            raise SpecError(f"still={self.still}: it is a share of what unrelated texts read, from 0 to below 1")
        if not 0 <= self.words < 1 or (self.words and self.parts != ("self",)):
            raise SpecError(f"words={self.words}, parts={self.parts}: a share from 0 to below 1, and above 0 for a self alone")
        if not self.parts or set(self.parts) - {"self", "trace", "imprints"}:
            raise SpecError(f"parts={self.parts}: choose from self, trace and imprints")
        if not self.unrelated or set(self.unrelated) - {"everyday", "unanswered", "stranger"}:
            raise SpecError(f"unrelated={self.unrelated}: choose from everyday, unanswered and stranger")
        if self.rank < 2 or self.rank % 2:
            raise SpecError(f"rank={self.rank}: half of it is for either sign, so it is even and at least 2")


ALONE = SleepRule(
    parts=("self", "trace"),
    steps=8,
    rate=0.02,
    self_rate=0.09,
    anchor=3.0,
    calm=3.0,
    unrelated=("stranger", "unanswered", "stranger", "everyday"),
    firm=3.0,
)
"""For a trace without imprints, or with a self beside it: they act everywhere, so they learn faster and are held more firmly, above all to what the base says to
others who ask about themselves: what all of these have in common is a manner, and nobody's."""

ALONE_SELF = SleepRule(
    parts=("self",),
    steps=48,
    self_rate=0.02,
    batch=4,
    calm=2.0,
    unrelated=("stranger", "everyday", "stranger", "unanswered"),
    words=0.08,
)
"""For a self without imprints: it learns which words are the person's, and to say them where something personal is answered."""


__all__ = ["ALONE", "ALONE_SELF", "Part", "SleepRule"]
