"""A configuration that came with a file, read field by field: every value is checked before anything is built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError

LARGEST = 1 << 30
"""No width, depth or vocabulary is beyond this; a larger number is damage, and products of two stay below 2⁶³."""
JSON_BYTES = 64 << 20

Config = TypeVar("Config")


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

    def word(self, key: str, choices: Mapping[str, str] | tuple[str, ...], default: str | None = None) -> str:
        """One of the words that are known here; a mapping also says what ours for it is."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(key, f"known here: {', '.join(choices)}")
        return choices[value] if isinstance(choices, Mapping) else value

    def part(self, key: str) -> Fields | None:
        """A nested group of fields, or None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "it must be an object")
        return Fields(value, f"{self.origin}, {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.origin}: {key} is missing")
        return value


def read_json(path: Path) -> Fields:
    """The object in a JSON file."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent.name}: it has no {path.name}")
    if path.stat().st_size > JSON_BYTES:
        raise CheckpointError(f"{path.name} has {path.stat().st_size} bytes; no configuration is that large")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}; it must be an object")
    return Fields(value, path.name)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with the caller's fields in place of the file's."""
    known = [f.name for f in fields(config)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f": {', '.join(known)}"
            raise CheckpointError(f"{name!r} is not a field of {type(config).__name__}{hint}")
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in changes.items()}
    return replace(config, **given)  # type: ignore[type-var]
