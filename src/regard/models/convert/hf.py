"""Hugging Face folders: config.json and safetensors, whole or in shards, in and out.

The `regard` key of config.json holds what Hugging Face has no word for: the attention specs. Tensors that a spec trains
stand in a file of their own, regard.safetensors, so that transformers finds exactly what it expects in the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, needs_extra
from ...files import replacing, require_plain, write_text
from ..base import Model
from ..families import FAMILIES
from ..runs import verify
from . import native
from .fields import INDEX_BYTES, Fields, changed, read_generation_info, read_json
from .layout import Share, TensorLayout, assemble, own_names, spread

with needs_extra("models"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

VERSION = 1
WEIGHTS, INDEX, OWN = "model.safetensors", "model.safetensors.index.json", "regard.safetensors"
CONFIG, GENERATION = "config.json", "generation_config.json"


class Tensors:
    """The tensors of safetensors files, shapes first; data is mapped, and read when it is asked for."""

    def __init__(self, paths: Mapping[str, Path] | Path, stack: ExitStack, origin: str) -> None:
        self.origin = origin
        self._open: dict[str, Any] = {}
        files = {paths} if isinstance(paths, Path) else set(paths.values())
        for path in sorted(files):
            try:
                # Opening a pipe would wait for whoever writes to it.
                opened = stack.enter_context(safe_open(require_plain(path), framework="pt"))
                names = list(opened.keys())
            except (SafetensorError, OSError, UnicodeError) as error:
                raise CheckpointError(f"{path.name} is not a whole safetensors file: {error}") from error
            self._open |= {n: opened for n in names if isinstance(paths, Path) or paths.get(n) == path}
        if not isinstance(paths, Path):
            lost = sorted(set(paths) - set(self._open))
            if lost:
                raise CheckpointError(f"{INDEX} says that {paths[lost[0]].name} has {lost[0]}, and it has not")
        self.shapes: dict[str, tuple[int, ...]] = {n: tuple(f.get_slice(n).get_shape()) for n, f in self._open.items()}

    def read(self, name: str) -> Tensor:
        return self._open[name].get_tensor(name)


def load_folder(folder: Path, dtype: torch.dtype, changes: Mapping[str, object], progress: Share) -> Model:
    verify(folder, (CONFIG, GENERATION, WEIGHTS, OWN))
    c = read_json(folder / CONFIG)
    if "quantization_config" in c:
        raise c.refuse("quantization_config", "quantised Hugging Face weights are not read; use the plain ones, or a GGUF")
    own = c.part("regard") or Fields({}, c.origin)
    if own.size("version", VERSION) > VERSION:
        raise own.refuse("version", f"this regard reads {VERSION}; install a newer one")
    info = read_generation_info(c, folder / GENERATION)
    with ExitStack() as stack:
        stored = Tensors(_shards(folder), stack, folder.name)
        config, layout_of = _read_config(c, own, stored.shapes)
        config = changed(config, {**_attention(own), **changes})
        layout = layout_of(config)
        model = assemble(config, layout, stored, dtype, progress)
        own_here = own_names(model, layout)
        if (folder / OWN).exists() and own_here:
            trained = Tensors(folder / OWN, stack, OWN)
            for name in own_here:
                if trained.shapes.get(name) == tuple(model.get_parameter(name).shape):
                    model.get_parameter(name).data.copy_(trained.read(name))
    model.generation_info = info
    return model.to(dtype)


def _attention(own: Fields) -> dict[str, str | list[str]]:
    """The specs that the file names: one for all layers, or one each."""
    given = own.values.get("attention")
    if given is None:
        return {}
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(line, str) for line in given)):
        raise own.refuse("attention", "it must be a spec, or a list of them")
    return {"attention": given}


def _read_config(c: Fields, own: Fields, names: Collection[str]) -> tuple[Any, Callable[[Any], TensorLayout]]:
    name = own.values.get("family")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is not None and (family.converter is None or c.values.get("model_type") == f"regard-{name}"):
        return native.read(own, family.config), native.layout
    converters = {kind: f.converter for f in FAMILIES.values() if f.converter for kind in f.converter.model_types}
    converter = converters[c.word("model_type", tuple(converters))]
    return native.with_fields(converter.read(c, names), own.part("config")), converter.layout


def _shards(folder: Path) -> Mapping[str, Path] | Path:
    if (folder / WEIGHTS).exists():
        return folder / WEIGHTS
    if not (folder / INDEX).exists():
        pickled = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
        hint = f"; {pickled[0]} is pickle, which runs code when read: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{folder.name} has no {WEIGHTS}{hint}")
    shards = read_json(folder / INDEX, INDEX_BYTES).part("weight_map")
    if shards is None:
        raise CheckpointError(f"{INDEX} has no weight_map")
    for name, file in shards.values.items():
        # A name with a path in it would read outside the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: {name} is in {file!r:.80}, which is no safetensors file of this folder")
    return {name: folder / file for name, file in shards.values.items()}


def described(model: Model) -> tuple[dict[str, object], TensorLayout]:
    """config.json and the layout of a model's tensors: its family's at Hugging Face, or ours where that has no word for it."""
    c = model.config
    own: dict[str, object] = {"version": VERSION, "family": model.family}
    converter = FAMILIES[model.family].converter if model.family in FAMILIES else None
    whole: dict[str, object] | None = None
    if converter is not None:
        try:
            whole = dict(converter.write(c))
        except CheckpointError:
            # A config that Hugging Face has no words for is written in ours.
            whole = None
    if converter is None or whole is None:
        return {"model_type": f"regard-{model.family}", "regard": {**own, "config": native.write(c)}}, native.layout(c)
    layout = converter.layout(c)
    names = [place.name for n, _ in model.named_parameters() if (place := layout.place(n))]
    lost = native.lost(c, converter.read(Fields(whole, "config.json"), names))
    return {**whole, "regard": {**own, "attention": c.attention, **({"config": lost} if lost else {})}}, layout


def contents(model: Model) -> tuple[dict[str, str], dict[str, dict[str, Tensor]]]:
    """The files of a model's folder, by name: those of text, and the tensors of the others."""
    whole, layout = described(model)
    tensors = {WEIGHTS: spread(model, layout)}
    own = {n: model.get_parameter(n).detach().clone() for n in own_names(model, layout)}
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors[WEIGHTS].values()}
    # What the checkpoint said of its tokens goes over what a family writes by default.
    whole |= {**model.generation_info.ids, "dtype": dtypes.pop() if len(dtypes) == 1 else "float32", "regard": whole["regard"]}
    texts = {} if model.generation_info.config is None else {GENERATION: model.generation_info.config}
    # The configuration comes last: a folder that has one has everything.
    texts = {**texts, CONFIG: whole}
    return {n: json.dumps(v, indent=2) + "\n" for n, v in texts.items()}, {**tensors, **({OWN: own} if own else {})}


def save_folder(model: Model, folder: Path) -> None:
    texts, files = contents(model)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        with replacing(folder / name) as draft:
            save_file(tensors, draft, metadata={"format": "pt"})
    for name, text in texts.items():
        write_text(folder / name, text)


def fetch(name: str) -> Path:
    """The folder of a model on the Hugging Face hub, downloaded once."""
    with needs_extra("models"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except Exception as error:
        raise CheckpointError(
            f"{name} is no folder here and could not be fetched from the hub ({type(error).__name__}); "
            "a folder with config.json and model.safetensors, or a .gguf file, works without a network"
        ) from error
