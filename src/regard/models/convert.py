"""Checkpoints in and out: Hugging Face folders and names, GGUF files, llama2.c exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .base import Model


def load(source: str | Path, **changes: Any) -> Model:
    raise NotImplementedError


def save(model: Model, folder: str | Path) -> None:
    raise NotImplementedError
