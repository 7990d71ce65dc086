"""Models that Hugging Face has no word for are saved as they are: our names, and the config's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...attention.spec import parse
from ...position import Position
from .fields import DEEPEST, LARGEST, Fields
from .layout import TensorLayout, TensorPlace

COUNTS = {"depth": DEEPEST, "experts": 1 << 16, "chosen": 1 << 16, "steps": 1 << 16}
"""How far the fields go that say how often something is built or done."""


class _Same(Mapping[str, TensorPlace]):
    """Every name to itself."""

    def __getitem__(self, key: str) -> TensorPlace:
        return TensorPlace(key)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def get(self, key: str, default: Any = None) -> TensorPlace:
        return TensorPlace(key)


def layout(config: Any) -> TensorLayout:
    return TensorLayout(_Same())


def write(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {n: str(v) if isinstance(v, Position) else v for n, v in values.items()}


def read(own: Fields, cls: type[Any]) -> Any:
    """The config of a family from its own fields; positions are written as specs."""
    values = own.part("config")
    if values is None:
        raise own.refuse("config", "a family of regard's own keeps its fields there")
    usual = cls()
    attention = values.values.get("attention")
    if isinstance(attention, list) and len(attention) > DEEPEST:
        raise values.refuse("attention", f"no model has more than {DEEPEST} layers")
    for name in values.values:
        if not hasattr(usual, name):
            raise values.refuse(name, f"{cls.__name__} has no such field")
    return cls(**{name: _checked(values, name, getattr(usual, name)) for name in values.values})


def _checked(values: Fields, name: str, usual: Any) -> Any:
    """A value of the kind that the field has by default; where that is None, a number above 0 or a spec."""
    value = values.values[name]
    if isinstance(usual, Position):
        return parse(str(value)).position
    if isinstance(usual, bool):
        return values.flag(name, usual)
    if isinstance(usual, float) and value == 0:
        return 0.0
    if value is None and usual is None:
        return None
    if isinstance(usual, int) or (usual is None and isinstance(value, int)):
        return values.size(name, largest=COUNTS.get(name, LARGEST))
    if isinstance(usual, float) or isinstance(value, float):
        return values.number(name)
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise values.refuse(name, "it must be a word, or a list of them")
    return tuple(lines) if isinstance(value, list) else value
