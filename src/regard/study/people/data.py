"""What people may be called and how they talk, kept as data: `words.json` and `phrases.json`, in pools that share nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from ...identity.sleep.texts import NEUTRAL as SLEEP_NEUTRAL

Pool = Literal["train", "test"]


@dataclass(frozen=True)
class Phrases:
    """One kind of fact: told in three lengths, repeated by the listener in a clause, asked for later in other words."""

    tells: tuple[str, str, str]
    echo: str
    asks: tuple[tuple[str, str], tuple[str, str]]
    question: str
    more: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Style:
    """How a person writes: the length of what they tell, how they begin, go on, end, and come back."""

    length: int
    greetings: tuple[str, ...]
    links: tuple[str, ...]
    endings: tuple[str, ...]
    returns: tuple[str, ...]


def _read(name: str) -> Any:
    return json.loads(files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8"))


def _frozen(x: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(x, list):
        return tuple(_frozen(y) for y in x)
    return {key: _frozen(y) for key, y in x.items()} if isinstance(x, dict) else x


def frozen_json(name: str) -> Any:
    """A file of this folder, with tuples for lists."""
    return _frozen(_read(name))


_WORDS, _PHRASES = frozen_json("words.json"), frozen_json("phrases.json")

VALUES: dict[Pool, dict[str, tuple[str, ...]]] = _WORDS["values"]
NEUTRAL: dict[Pool, tuple[str, ...]] = {**_WORDS["neutral"], "train": SLEEP_NEUTRAL}
"""Those of the training pool are the anchors of sleep, and are stored with its texts."""
PHRASES: dict[Pool, dict[str, Phrases]] = {
    pool: {key: Phrases(**phrases) for key, phrases in kinds.items()} for pool, kinds in _PHRASES["phrases"].items()
}
STYLES: dict[Pool, tuple[Style, ...]] = {
    pool: tuple(Style(**style) for style in styles) for pool, styles in _PHRASES["styles"].items()
}
REPLIES: dict[Pool, tuple[str, ...]] = _PHRASES["replies"]
ALONE: tuple[frozenset[str], ...] = tuple(frozenset(group) for group in _PHRASES["alone"])
"""Kinds of facts of which a person has one only."""

__all__ = ["ALONE", "NEUTRAL", "PHRASES", "REPLIES", "STYLES", "VALUES", "Phrases", "Pool", "Style", "frozen_json"]
