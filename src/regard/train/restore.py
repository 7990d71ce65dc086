"""Reading what a run wrote: every file is checked against what it should be before anything is built from it.

A checkpoint's `state.json` holds a digest of each file beside it and of itself, so a flipped bit is found; sizes that a config
claims are compared with the tensors in the file before a model of that size is made. Checkpoints of earlier versions have no
digests and are held to everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, RegardError
from ..files import read_plain, reading, require_plain
from .limits import shown
from .settings import Config, read
from .settings import config as make_config
from .tokenizer import Tokenizer
from .tokenizer import load as load_tokenizer

FORMAT = "regard-checkpoint-1"
LARGEST_STATE = 1 << 26
"""Bytes of a state.json; each parameter has a line in it."""
LARGEST_LINE = 1 << 20
"""Bytes of a line of metrics.jsonl."""
STEP = "step-"


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
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    """Validations since the best one."""
    seed: int = 0
    updates: dict[str, int] = field(default_factory=dict[str, int])
    """How often each parameter was updated; Adam corrects its averages by it."""
    source: Source | None = None
    """None in checkpoints of versions that did not record it."""


def step_folder(root: Path, link: str) -> Path | None:
    """The folder that `last` or `best` names; None if there is no such link. It names a step beside it, and nothing else."""
    path = root / link
    if not path.is_symlink():
        # A run that was copied without its links has folders in their places.
        return path if (path / "state.json").is_file() else None
    target = os.readlink(path)
    if os.path.basename(target) != target or not target.startswith(STEP):
        raise CheckpointError(f"{path} points to {shown(target)}, not to one of the steps beside it")
    folder = root / target
    if folder.is_symlink() or not (folder / "state.json").is_file():
        raise CheckpointError(f"{path} points to {target}, which is not there or not whole{_others(root, target)}")
    return folder


def steps(root: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first: a folder has this name only once it is written."""
    with reading(root):
        found = [p for p in root.glob(f"{STEP}*") if not p.is_symlink() and (p / "state.json").is_file()]
        return sorted(found, key=lambda p: (len(p.name), p.name))


def _others(root: Path, but: str) -> str:
    found = [p.name for p in steps(root) if p.name != but]
    return f"; whole ones: {', '.join(found)} (make the link name one: ln -sfn {found[-1]} {root}/last)" if found else ""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    with open(require_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with a digest of itself."""
    return {**record, "check": digest(_canonical(record))}


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def read_state(folder: Path) -> tuple[Progress, dict[str, str]]:
    """A checkpoint's progress, and the digests of its files."""
    path = folder / "state.json"
    with reading(path):
        record: Any = json.loads(read_plain(path, LARGEST_STATE).decode("utf-8"))
    if not isinstance(record, dict) or cast(dict[str, Any], record).get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of regard; `format` in state.json should be {FORMAT}")
    record = cast(dict[str, Any], record)
    check = record.pop("check", None)
    with reading(path):
        if check is not None and check != digest(_canonical(record)):
            raise CheckpointError(f"{path} is damaged: it does not match its own digest")
    files = _map(record.get("files", {}), f"files in {path}", str)
    return _progress(record, path), files


def read_progress(folder: Path) -> Progress:
    return read_state(folder)[0]


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
            updates={n: count(n, record["updates"]) for n in _map(record.get("updates", {}), f"updates in {path}", int)},
            source=None if source is None else Source(str(source["text"]), count("tokens", source)),
        )


def _map(found: Any, name: str, kind: type) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, kind) for k, v in found.items()):
        raise CheckpointError(f"{name}: {shown(found)} is no map of names to {kind.__name__}")
    return cast(dict[str, Any], found)


def verify(folder: Path, files: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Refuse files that are not, byte for byte, what the checkpoint says it wrote."""
    for name in names:
        if files and (name not in files or file_digest(folder / name) != files[name]):
            raise CheckpointError(f"{folder / name} is damaged: it does not match its digest in state.json")


@contextlib.contextmanager
def tensors(path: Path) -> Generator[Any]:
    """A safetensors file, open; what it raises while it is read is ours."""
    from safetensors import safe_open

    with reading(path), safe_open(str(require_plain(path)), "pt") as file:
        yield file


def check_shapes(path: Path, file: Any, targets: Mapping[str, Tensor]) -> None:
    """Refuse a file whose names, shapes or types are not the targets'."""
    found = set(file.keys())
    for problem, names in (("lacks", targets.keys() - found), ("has an unknown", found - targets.keys())):
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
    """Copy a file's tensors into these, after all names, shapes and types have been found to agree."""
    with tensors(path) as file:
        check_shapes(path, file, targets)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}


def outline(model_config: Any) -> nn.Module:
    """The model without its numbers: names and shapes, at no memory."""
    with torch.device("meta"):
        return model_config.build()


def read_config(folder: Path) -> Config:
    try:
        return make_config(read(folder / "config.yaml"))
    except RegardError as error:
        raise CheckpointError(f"{folder}/config.yaml: {error}") from error


def load_run(path: str | Path) -> tuple[Any, Tokenizer]:
    """The model and the tokenizer of a run (its best checkpoint, else its last) or of one checkpoint folder."""
    path = Path(path)
    with reading(path):
        root = path / "checkpoints"
        folder = step_folder(root, "best") or step_folder(root, "last") or next(reversed(steps(root)), path)
        if not (folder / "state.json").is_file():
            raise CheckpointError(f"{path} is neither a run nor a checkpoint: there is no state.json")
        _, files = read_state(folder)
        verify(folder, files, ("config.yaml", "tokenizer.json", "model.safetensors"))
        c = read_config(folder)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        if len(tokenizer) > c.model.vocabulary:
            raise CheckpointError(
                f"{folder} holds a tokenizer of {len(tokenizer):,} tokens and a model of model.vocabulary={c.model.vocabulary:,}"
            )
        with tensors(folder / "model.safetensors") as file:
            if c.model.depth > len(file.keys()):
                raise CheckpointError(f"{folder}/config.yaml says model.depth={c.model.depth}; the file has fewer tensors")
            check_shapes(folder / "model.safetensors", file, weights(outline(c.model)))
        model = c.model.build()
        fill(folder / "model.safetensors", weights(model))
    return model.eval(), tokenizer


def iter_metrics(run: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a killed process left unfinished is passed over."""
    path = require_plain(Path(run) / "metrics.jsonl")
    with open(path, "rb") as file:
        while line := file.readline(LARGEST_LINE):
            record: Any = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict):
                yield cast(dict[str, Any], record)
