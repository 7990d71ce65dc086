"""The phrases and values of natural people, one file for each pool (`natural_<pool>.json`), read when the pool is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from ...errors import RegardError
from .data import frozen_json

NaturalPool = Literal["train", "choose", "test", "final", "fresh", "guest", "visitor"]
FactKind = Literal["plain", "passing", "third", "negated", "number", "update", "correction"]
ListenerKind = Literal["silent", "natural", "wrong"]
POOLS: tuple[NaturalPool, ...] = get_args(NaturalPool)
LISTENER = "> "
"""A line of a frame that begins so is the listener's, not the person's."""


class UnknownPool(RegardError):
    """A pool that there is not."""


@dataclass(frozen=True)
class Subject:
    """One subject that people tell something about: its values, and the frames around them.

    In a frame {v} is the value and {a} the value with its article, {o} and {b} the same of the value that is no longer right, {w} and
    {c} of one that was never right, {r} what the slot says ("sister", "dentist"), and {n} the person's own name.
    """

    values: tuple[str, ...]
    """Each with other spellings behind "|"."""
    tells: tuple[tuple[str, ...], ...]
    """The kind of telling, then the lines: the person's, and the listener's after "> "."""
    replies: tuple[str, ...]
    wrong: tuple[str, ...]
    questions: tuple[str, ...]
    asks: tuple[tuple[str, str], ...]
    diary: tuple[str, ...]
    later: tuple[str, ...]
    slot: tuple[str, ...] = ()
    inverse: str = ""
    """A question that names the value and asks for the slot: who is who."""

    def told_as(self, kind: FactKind) -> bool:
        return any(tell[0] == kind for tell in self.tells)


@dataclass(frozen=True)
class Register:
    """How a person writes."""

    name: str
    weight: int
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    returns: tuple[str, ...]
    lower: bool = False
    """Without capitals."""
    replace: tuple[tuple[str, str], ...] = ()
    """Words of the frames that this register says otherwise."""


@dataclass(frozen=True)
class DiaryPhrases:
    openings: tuple[str, ...]
    between: tuple[str, ...]
    later_openings: tuple[str, ...]


@dataclass(frozen=True)
class Scenes:
    """Frames with three slots, for as much talk about nobody as a long life needs."""

    frames: tuple[str, ...]
    x: tuple[str, ...]
    y: tuple[str, ...]
    z: tuple[str, ...]


@dataclass(frozen=True)
class Phrasebook:
    """All that a pool can say."""

    about: str
    join: float
    """How often two things are told in one message, and"""
    breath: int
    """how many at most."""
    closing: float
    """How often a conversation has a last word."""
    listeners: Mapping[ListenerKind, int]
    """Weights of the kinds of listeners."""
    silent: tuple[str, ...]
    remarks: tuple[str, ...]
    denies: tuple[str, ...]
    """What the person may say to a wrong listener, and the listener to that."""
    apologies: tuple[str, ...]
    registers: tuple[Register, ...]
    talk: tuple[str, ...]
    tasks: tuple[tuple[str, ...], ...]
    asks_world: tuple[tuple[str, ...], ...]
    never: tuple[str, ...]
    diary: DiaryPhrases
    everyday: tuple[str, ...]
    scenes: Scenes
    sums: tuple[tuple[str, str], ...]
    """{x} and {y} added, and {z} said."""
    subjects: Mapping[str, Subject] = field(default_factory=dict[str, Subject])


@cache
def phrasebook(pool: str) -> Phrasebook:
    """The phrases of a pool; no other pool's file is opened."""
    if pool not in POOLS:
        raise UnknownPool(f"pool is {pool!r}; natural people come from {', '.join(POOLS)}")
    read: dict[str, Any] = frozen_json(f"natural_{pool}.json")
    subjects = {key: Subject(**known) for key, known in read.pop("subjects").items()}
    registers = tuple(Register(**register) for register in read.pop("registers"))
    diary = DiaryPhrases(**read.pop("diary"))
    scenes = Scenes(**read.pop("scenes"))
    return Phrasebook(**read, registers=registers, diary=diary, scenes=scenes, subjects=subjects)


__all__ = [
    "LISTENER",
    "POOLS",
    "DiaryPhrases",
    "FactKind",
    "ListenerKind",
    "NaturalPool",
    "Phrasebook",
    "Register",
    "Scenes",
    "Subject",
    "UnknownPool",
    "phrasebook",
]
