"""A configuration that came with a file, read field by field: every value is checked before anything is built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import CheckpointError
from ...files import read_plain
from ..generation_info import ID_FIELDS, GenerationInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 1 << 30
"""No width or vocabulary is beyond this; a larger number is damage, and products of two stay below 2⁶³."""
DEEPEST = 1 << 12
"""No model has more layers: a layer costs tens of kilobytes before it holds a number, and a file can announce one in a byte."""
JSON_BYTES, INDEX_BYTES = 8 << 20, 64 << 20
"""Parsed JSON takes about twenty times its bytes."""
MOST_IDS = 1 << 10

Config = TypeVar("Config", bound="DataclassInstance")
Word = TypeVar("Word", bound=str)


class Fields:
    """`fields.size("hidden_size")` is a whole number above 0, or an error that names the file and the key."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def refuse(self, key: str, want: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: {key} is {self.values.get(key)!r:.80}; {want}")

    def size(self, key: str, default: int | None = None, largest: int = LARGEST) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise self.refuse(key, f"it must be a whole number in 1..{largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refuse(key, "it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def word(self, key: str, choices: Mapping[str, Word] | tuple[Word, ...], default: str | None = None) -> Word:
        """One of the words that are known here; a mapping also says what ours for it is."""
        value = self._get(key, default)
        ours = choices if isinstance(choices, Mapping) else {str(w): w for w in choices}
        if not isinstance(value, str) or value not in ours:
            raise self.refuse(key, f"known here: {', '.join(ours)}")
        return ours[value]

    def text(self, key: str) -> str:
        value = self._get(key, None)
        if not isinstance(value, str):
            raise self.refuse(key, "it must be text")
        return value

    def ids(self, key: str) -> int | list[int] | None:
        """The number of a token, a list of them, or None; -1 means none to Hugging Face."""
        value = self.values.get(key)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if len(given) > MOST_IDS or not all(
            isinstance(i, int) and not isinstance(i, bool) and -1 <= i <= LARGEST for i in given
        ):
            raise self.refuse(key, "it must be a token's number, a list of them, or null")
        return value

    def part(self, key: str) -> Fields | None:
        """A nested group of fields, or None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "it must be an object")
        return Fields(value, f"{self.origin}, {key}")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.origin}: {key} is missing")
        return value


def read_json(path: Path, limit: int = JSON_BYTES) -> Fields:
    """The object in a JSON file."""
    if not path.exists():
        raise CheckpointError(f"{path.parent.name}: it has no {path.name}")
    data = read_plain(path, limit, follow=True)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}; it must be an object")
    return Fields(value, path.name)


def read_generation_info(c: Fields, generation: Path) -> GenerationInfo:
    """The token ids of config.json, and generation_config.json where it is there."""
    ids = {key: c.ids(key) for key in ID_FIELDS if key in c.values}
    if not generation.exists():
        return GenerationInfo(ids)
    g = read_json(generation)
    for key in ID_FIELDS:
        g.ids(key)
    return GenerationInfo(ids, g.values)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with the caller's fields in place of the file's."""
    known = [f.name for f in fields(config)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f": {', '.join(known)}"
            raise CheckpointError(f"{name!r} is not a field of {type(config).__name__}{hint}")
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in changes.items()}
    return replace(config, **given)
