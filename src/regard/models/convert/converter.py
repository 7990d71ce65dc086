"""How Hugging Face writes a family: its configuration, in and out, and where its tensors stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .fields import Fields
from .layout import TensorLayout


@dataclass(frozen=True)
class Converter:
    model_types: tuple[str, ...]
    """What Hugging Face calls it in config.json."""
    read: Callable[[Fields, Collection[str]], Any]
    """Their fields, and the names of the tensors that are there, to our frozen config."""
    write: Callable[[Any], Mapping[str, Any]]
    """Our config to their fields; refuses what they cannot express."""
    layout: Callable[[Any], TensorLayout]
