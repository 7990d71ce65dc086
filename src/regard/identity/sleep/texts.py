"""The texts of a night, kept as data in `texts.json`."""

from __future__ import annotations

import json
from importlib.resources import files

_TEXTS = json.loads(files(__name__.rpartition(".")[0]).joinpath("texts.json").read_text(encoding="utf-8"))

ASKED: tuple[tuple[str, str], ...] = tuple((question, beginning) for question, beginning in _TEXTS["asked"])
"""Plain questions that may be asked of anyone, and how their answers begin."""
SAID_BACK: tuple[str, ...] = tuple(_TEXTS["said_back"])
"""Questions that whatever a person said is an answer to."""
SECOND_PERSON: dict[str, str] = _TEXTS["second_person"]
"""How words that a person says of themselves are said to them."""
EVERYDAY: tuple[str, ...] = tuple(_TEXTS["everyday"])
"""Questions that are about nobody."""
STRANGERS: tuple[tuple[str, ...], ...] = tuple(tuple(turns) for turns in _TEXTS["strangers"])
"""What others are told: a state that belongs to one person has nothing to say to it."""
NEUTRAL: tuple[str, ...] = tuple(_TEXTS["neutral"])
"""Prose about the world that says nothing about anybody."""

__all__ = ["ASKED", "EVERYDAY", "NEUTRAL", "SAID_BACK", "SECOND_PERSON", "STRANGERS"]
