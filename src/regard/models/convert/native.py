"""Models that Hugging Face has no word for are saved as they are: our names, and the config's own fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ...errors import CheckpointError
from ...position import Position
from ..schema import ConfigError, build, check_ranges
from .fields import DEEPEST, Fields
from .layout import TensorLayout, TensorPlace


class _Same(Mapping[str, TensorPlace]):
    """Every name to itself."""

    def __getitem__(self, key: str) -> TensorPlace:
        return TensorPlace(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def get(self, key: str, default: object = None) -> TensorPlace:
        return TensorPlace(key)


def layout(config: object) -> TensorLayout:
    return TensorLayout(_Same())


def write(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {n: str(v) if isinstance(v, Position) else v for n, v in values.items()}


def read(own: Fields, cls: type[Any]) -> Any:
    """The config of a family from its own fields; positions are written as specs."""
    values = own.part("config")
    if values is None:
        raise own.refuse("config", "a family of regard's own keeps its fields there")
    return with_fields(cls(), values)


def with_fields(config: Any, values: Fields | None) -> Any:
    """A config with the fields of a file, each of its type and within its range."""
    if values is None:
        return config
    attention = values.values.get("attention")
    if isinstance(attention, list) and len(attention) > DEEPEST:
        raise values.refuse("attention", f"no model has more than {DEEPEST} layers")
    try:
        whole = build(type(config), {**{f.name: getattr(config, f.name) for f in fields(config)}, **values.values}, "model.")
        check_ranges(whole, "model.")
    except ConfigError as error:
        raise CheckpointError(f"{values.origin}: {error}") from error
    return whole


def lost(config: Any, back: Any) -> dict[str, Any]:
    """The fields of a config that did not come back from somebody else's; dropout acts in training only, and attention is written
    beside them."""
    wrong = [f.name for f in fields(config) if getattr(back, f.name) != getattr(config, f.name)]
    return {n: v for n, v in write(config).items() if n in wrong and n not in ("attention", "dropout")}
