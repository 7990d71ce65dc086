"""Checkpoints in and out: Hugging Face folders and names, GGUF files, llama2.c exports. Nothing here reads pickle.

model = load("smollm2/")                              # a Hugging Face folder
model = load("model.gguf", attention="entmax(1.5)")   # any field of the config may be changed on the way in
save(model, "folder")                                 # the family's Hugging Face layout, and the attention specs
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ...errors import CheckpointError, RegardError
from ...files import reading, require_plain
from ..base import Files, Model
from ..runs import checkpoint_folder
from .layout import Share

HUB = "hub:"
HUB_NAME = rf"(\w[\w.-]*/|{HUB}(\w[\w.-]*/)?)\w[\w.-]*"
"""A name without an owner is more often a misspelt one than a model on the hub: those are asked for with `hub:`."""


def load(
    source: str | Path, *, dtype: torch.dtype = torch.float32, progress: Share = lambda share: None, **changes: object
) -> Model:
    """The model in a folder, a run (its best checkpoint), a `.gguf` file, a llama2.c `.bin`, or under a Hugging Face hub name:
    `owner/name`, or `hub:name`."""
    path = Path(source)
    # A name of its own in the error, and no more of it than a screen shows: a source may be any text.
    # What our own checks say of a change that the caller asked for stays as it is.
    with reading(f"{path.name:.80}", passes=RegardError if changes else CheckpointError):
        return _load(source, path, dtype, changes, progress)


def _load(source: str | Path, path: Path, dtype: torch.dtype, changes: Mapping[str, object], progress: Share) -> Model:
    if path.is_dir():
        from .hf import load_folder

        return load_folder(checkpoint_folder(path), dtype, changes, progress)
    if path.suffix == ".gguf" and path.exists():
        from .gguf import load_gguf

        return load_gguf(require_plain(path), dtype, changes, progress)
    if path.suffix == ".bin" and path.exists():
        from .llama2c import load_bin

        return load_bin(require_plain(path), dtype, changes, progress)
    if path.exists():
        raise CheckpointError(f"{path.name}: a checkpoint is a folder with config.json, a .gguf file or a llama2.c .bin")
    if path.suffix in (".gguf", ".bin") or not re.fullmatch(HUB_NAME, str(source)):
        raise CheckpointError(f"{source}: there is no such file or folder, and a hub name is owner/name or hub:name")
    from .hf import fetch, load_folder

    return load_folder(fetch(str(source).removeprefix(HUB)), dtype, changes, progress)


def save(model: Model, folder: str | Path) -> None:
    """Write config.json and model.safetensors, each under a temporary name that is renamed when it is whole."""
    from .hf import save_folder

    save_folder(model, Path(folder))


Model.files = Files(load, save)

__all__ = ["load", "save"]
