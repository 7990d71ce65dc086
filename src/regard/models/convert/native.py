"""Models that Hugging Face has no word for are saved as they are: our names, and the config's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...attention.spec import parse
from ...position import Position
from .fields import Fields
from .layout import Layout, Place

CONFIGS: dict[str, type[Any]] = {}


class _Same(Mapping[str, Place]):
    """Every name to itself."""

    def __getitem__(self, key: str) -> Place:
        return Place(key)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def get(self, key: str, default: Any = None) -> Place:
        return Place(key)


def layout(config: Any) -> Layout:
    return Layout(_Same())


def write(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {n: str(v) if isinstance(v, Position) else v for n, v in values.items()}


def read(own: Fields) -> Any:
    """The config of the family that the file names; positions are written as specs."""
    cls = CONFIGS[own.word("family", tuple(CONFIGS))]
    values = own.part("config")
    if values is None:
        raise own.refuse("config", "a family of regard's own keeps its fields there")
    usual = cls()
    given: dict[str, Any] = {}
    for name, value in values.values.items():
        if not hasattr(usual, name):
            raise values.refuse(name, f"{cls.__name__} has no such field")
        kept = getattr(usual, name)
        if isinstance(kept, Position):
            given[name] = parse(str(value)).position
        elif isinstance(kept, int) and not isinstance(kept, bool):
            given[name] = values.size(name)
        elif isinstance(kept, bool):
            given[name] = values.flag(name, kept)
        else:
            given[name] = tuple(value) if isinstance(value, list) else value
    return cls(**given)
