"""Reading how far a run is: every value is checked before anything is made of it. Its model is read as any other (models/convert)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, RegardError
from ..files import reading, require_plain
from ..models.base import Model
from ..models.runs import STATE, read_record, verify
from ..models.schema import shown
from .settings import FROM_DATA, Config, read
from .settings import config as make_config

SETTINGS = "train.yaml"
LARGEST_LINE = 1 << 20
"""Bytes of a line of metrics.jsonl."""


@dataclass(frozen=True)
class Source:
    """What a run learns from, so that a resumed one notices that it changed."""

    text: str
    """A hash of the text."""
    tokens: int


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of training, over all sessions."""
    best: float | None = None
    """The lowest validation loss; None before the first."""
    best_step: int = 0
    waited: int = 0
    """Validations since the best one."""
    seed: int = 0
    updates: dict[str, int] = field(default_factory=dict[str, int])
    """How often each parameter was updated; Adam corrects its averages by it."""
    source: Source | None = None
    """None in checkpoints of versions that did not record it."""


def read_progress(folder: Path) -> Progress:
    """A checkpoint's progress."""
    return _progress(read_record(folder), folder / STATE)


def _progress(record: dict[str, Any], path: Path) -> Progress:
    def count(name: str, given: Mapping[str, Any]) -> int:
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise CheckpointError(f"{name}={shown(value)} in {path} is no count")
        return value

    def real(name: str, given: Mapping[str, Any]) -> float:
        value = given.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{name}={shown(value)} in {path} is no number")
        return float(value)

    with reading(path):
        source: Any = record.get("source")
        if source is not None and (not isinstance(source, dict) or source.keys() != {f.name for f in fields(Source)}):
            raise CheckpointError(f"source={shown(source)} in {path} does not say what the run learned from")
        return Progress(
            step=count("step", record),
            tokens=count("tokens", record),
            seconds=real("seconds", record),
            best=None if record.get("best") is None else real("best", record),
            best_step=count("best_step", record),
            waited=count("waited", record),
            seed=count("seed", record),
            updates={n: count(n, record["updates"]) for n in _names(record.get("updates", {}), f"updates in {path}")},
            source=None if source is None else Source(str(source["text"]), count("tokens", source)),
        )


def _names(value: object, where: str) -> list[str]:
    """The names in a map of names to whole numbers."""
    names = [k for k, v in value.items() if isinstance(k, str) and isinstance(v, int)] if isinstance(value, dict) else []
    if not isinstance(value, dict) or len(names) != len(value):
        raise CheckpointError(f"{where}: {shown(value)} is no map of names to int")
    return names


@contextlib.contextmanager
def tensors(path: Path) -> Generator[Any]:
    """A safetensors file, open; what it raises while it is read is ours."""
    from safetensors import safe_open

    with reading(path), safe_open(str(require_plain(path)), "pt") as file:
        yield file


def check_shapes(path: Path, file: Any, targets: Mapping[str, Tensor]) -> None:
    """Refuse a file whose names, shapes or types are not the targets'."""
    present = set(file.keys())
    for problem, names in (("lacks", targets.keys() - present), ("has an unknown", present - targets.keys())):
        if names:
            raise CheckpointError(f"{path} {problem} {min(names)} ({len(names)} in all): another model's checkpoint?")
    for name, target in targets.items():
        part = file.get_slice(name)
        shape, kind = tuple(part.get_shape()), part.get_dtype()
        if shape != tuple(target.shape):
            raise CheckpointError(f"{name} is {shape} in {path} and {tuple(target.shape)} in this model")
        if kind != (wanted := _DTYPES.get(target.dtype, kind)):
            raise CheckpointError(f"{name} is {kind} in {path} and {wanted} in this model")


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def fill(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into these, after all names, shapes and types were compared."""
    with tensors(path) as file:
        check_shapes(path, file, targets)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))


def read_config(folder: Path, model: Model) -> Config:
    """What a checkpoint was trained as: its settings, and its model's own config."""
    verify(folder, (SETTINGS,))
    try:
        settings = make_config({**read(folder / SETTINGS), "model": {"family": model.family}})
    except RegardError as error:
        raise CheckpointError(f"{folder / SETTINGS}: {error}") from error
    return replace(settings, model=model.config, given=frozenset(FROM_DATA))


def iter_metrics(run: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a killed process left unfinished is passed over."""
    path = require_plain(Path(run) / "metrics.jsonl")
    with open(path, "rb") as file:
        while line := file.readline(LARGEST_LINE):
            record: object = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict):
                yield {str(k): v for k, v in record.items()}
