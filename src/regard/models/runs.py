"""Where the models of `regard train` lie: a run is a folder of checkpoints, and a checkpoint is a model folder like any other.

    runs/mine/checkpoints/step-00000300/    config.json, model.safetensors, tokenizer.json, ...; state.json with a digest of each
    runs/mine/checkpoints/last, best        links to the two worth keeping

Whoever takes a model folder takes a run, too, and reads its best checkpoint. A link leads to a step beside it and nowhere else,
and a file that is not, byte for byte, what was written is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError
from ..files import read_plain, reading, require_plain

FORMAT, EARLIER = "regard-checkpoint-2", "regard-checkpoint-1"
STATE, STEP = "state.json", "step-"
LARGEST_STATE = 1 << 26
"""Bytes of a state.json; each parameter has a line in it."""


def checkpoint_folder(path: Path) -> Path:
    """The model folder that a path means: of a run its best checkpoint, else its last; any other path is its own."""
    root = path / "checkpoints"
    if not root.is_dir() or (path / "config.json").exists():
        return path
    folder = step_folder(root, "best") or step_folder(root, "last") or next(reversed(steps(root)), None)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint yet")
    return folder


def step_folder(root: Path, link: str) -> Path | None:
    """The folder that `last` or `best` names; None if there is no such link. It names a step beside it, and nothing else."""
    path = root / link
    if not path.is_symlink():
        # A run that was copied without its links has folders in their places.
        return path if (path / STATE).is_file() else None
    target = os.readlink(path)
    if os.path.basename(target) != target or not target.startswith(STEP):
        raise CheckpointError(f"{path} points to {target!r:.80}, not to one of the steps beside it")
    folder = root / target
    if folder.is_symlink() or not (folder / STATE).is_file():
        raise CheckpointError(f"{path} points to {target}, which is not there or not whole{_others(root, target)}")
    return folder


def steps(root: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first: a folder has this name only once it is written."""
    with reading(root):
        folders = [p for p in root.glob(f"{STEP}*") if not p.is_symlink() and (p / STATE).is_file()]
        return sorted(folders, key=lambda p: (len(p.name), p.name))


def _others(root: Path, but: str) -> str:
    names = [p.name for p in steps(root) if p.name != but]
    return f"; whole ones: {', '.join(names)} (make the link name one: ln -sfn {names[-1]} {root}/last)" if names else ""


def read_record(folder: Path) -> dict[str, Any]:
    """What state.json says of a checkpoint, found to match its own digest."""
    path = folder / STATE
    with reading(path):
        record: Any = json.loads(read_plain(path, LARGEST_STATE).decode("utf-8"))
        form: Any = cast(dict[str, Any], record).get("format") if isinstance(record, dict) else None
        if form == EARLIER:
            raise CheckpointError(
                f"{folder} was written by an earlier version, whose checkpoints were no model folders: go on with it there, "
                "or train anew into another folder (--out)"
            )
        if form != FORMAT:
            raise CheckpointError(f"{folder} is not a checkpoint of regard; `format` in {STATE} should be {FORMAT}")
        check = record.pop("check", None)
        if check != digest(_canonical(record)):
            raise CheckpointError(f"{path} is damaged: it does not match its own digest")
        files: Any = record.get("files")
        if not isinstance(files, dict) or not all(isinstance(x, str) for pair in files.items() for x in pair):
            raise CheckpointError(f"{path} is damaged: `files` has no digest of each file")
        return record


def verify(folder: Path, names: Iterable[str]) -> None:
    """Refuse files of a checkpoint that are not what it says it wrote; a folder without a state.json is no checkpoint of a run."""
    if not os.path.lexists(folder / STATE):
        return
    files = read_record(folder)["files"]
    for name in names:
        if files.get(name) != (file_digest(folder / name) if os.path.lexists(folder / name) else None):
            raise CheckpointError(f"{folder / name} is damaged: it does not match its digest in {STATE}")


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with a digest of itself."""
    return {**record, "check": digest(_canonical(record))}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    with open(require_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


__all__ = [
    "FORMAT", "STATE", "checkpoint_folder", "digest", "file_digest", "read_record", "sealed", "step_folder", "steps", "verify",
]  # fmt: skip
