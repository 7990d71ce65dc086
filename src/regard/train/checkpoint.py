"""Checkpoints that are whole or absent, without pickle, and the same whoever wrote them: one process, DDP or FSDP2.

    checkpoints/step-00000300/
        model.safetensors       parameters and buffers by name; a tied weight once
        optimizer.safetensors   optimizer.<parameter>.exp_avg and .exp_avg_sq
        state.json              step, tokens, best loss, seed, how often each parameter was updated
        config.yaml, tokenizer.json
    checkpoints/last, best      links to the two worth keeping

Random numbers need no tensor: each step seeds the generators from (seed, step, rank), so `seed` and `step` are their state.

A sharded model is written by `torch.distributed.checkpoint` with its safetensors writer, each rank its own part, and then
consolidated to the layout above. DCP's default writer was not taken because its `.metadata` file is a pickle; a gather on one
rank was not taken because that rank would have to hold the whole model. Reading cuts the same files for any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..files import point, put, sync, write_text
from .config import config as make_config
from .config import read
from .distributed import Ranks
from .tokenizer import Tokenizer
from .tokenizer import load as load_tokenizer

FORMAT = "regard-checkpoint-1"
MOMENTS = ("exp_avg", "exp_avg_sq")


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


@dataclass(frozen=True, eq=False)
class Store:
    """The checkpoints of one run."""

    run: Path
    ranks: Ranks
    extras: dict[str, str] = field(default_factory=dict[str, str])
    """Small text files that make a checkpoint readable by itself."""

    @property
    def root(self) -> Path:
        return self.run / "checkpoints"

    def last(self) -> Path | None:
        path = self.root / "last"
        return path if (path / "state.json").exists() else None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, best: bool) -> Path:
        """Write this moment, then let `last` (and `best`) name it. What they named before stays until then."""
        name = f"step-{progress.step:08d}"
        target, draft = self.root / name, self.root / f".{name}.draft"
        problem = ""
        if not target.exists():
            try:
                self._write(draft, model, optimizer, progress)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self._agree(problem, draft)
        try:
            if self.ranks.first:
                if not target.exists():
                    put(draft, target)
                for link in ("last", "best") if best else ("last",):
                    point(self.root / link, name)
                self.prune()
        except OSError as error:
            problem = str(error)
        self._agree(problem, draft)
        return target

    def _agree(self, problem: str, draft: Path) -> None:
        """All ranks go on, or all stop with a message."""
        if self.ranks.total(float(bool(problem)))[0] == 0:
            return
        if self.ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        kept = os.readlink(self.root / "last") if self.last() else "none"
        raise CheckpointError(f"cannot save to {self.root}: {problem or 'another rank failed'} (the last whole one: {kept})")

    def _write(self, draft: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        ranks = self.ranks
        if ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        ranks.barrier()
        parts = {"model": weights(model), "optimizer": moments(model, optimizer)}
        for part, tensors in parts.items():
            if ranks.spread == "fsdp":
                _write_sharded(draft, part, tensors, ranks)
            elif ranks.first:
                _safetensors().save_file(
                    {n: t.detach().contiguous().cpu() for n, t in tensors.items()}, draft / f"{part}.safetensors"
                )
        if ranks.first:
            for name, text in self.extras.items():
                (draft / name).write_text(text, encoding="utf-8")
            record = {"format": FORMAT, **asdict(progress), "updates": updates(model, optimizer)}
            write_text(draft / "state.json", json.dumps(record, indent=1))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        folder = self.last()
        if folder is None:
            raise CheckpointError(f"{self.run} holds no checkpoint to resume from; start it without --resume")
        progress = read_progress(folder)
        _prepare(model, optimizer, progress)
        fill(folder, {**weights(model), **moments(model, optimizer)}, self.ranks.spread == "fsdp")
        if self.ranks.first:
            # A process killed between writing a folder and naming it leaves one that nothing points to.
            self.prune()
        self.ranks.barrier()
        return progress

    def prune(self) -> None:
        kept = {os.readlink(self.root / n) for n in ("last", "best") if (self.root / n).is_symlink()}
        for path in [*self.root.glob("step-*"), *self.root.glob(".step-*")]:
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        held = optimizer.state.get(p, {})
        found |= {f"optimizer.{name}.{m}": held[m] for m in MOMENTS if m in held}
    return found


def updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    steps = {name: optimizer.state.get(p, {}).get("step") for name, p in model.named_parameters()}
    return {name: int(step) for name, step in steps.items() if step is not None}


def _prepare(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Adam's state as it was, its averages still to be filled in."""
    for name, p in model.named_parameters():
        if name in progress.updates:
            step = torch.tensor(float(progress.updates[name]), dtype=torch.float32, device=p.device)
            optimizer.state[p] = {"step": step, **{m: torch.zeros_like(p, requires_grad=False) for m in MOMENTS}}


def read_progress(folder: Path) -> Progress:
    try:
        record: Any = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/state.json cannot be read: {error}") from error
    if record.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of regard; `format` in state.json should be {FORMAT}")
    known = {f.name for f in fields(Progress)}
    return Progress(**{k: v for k, v in record.items() if k in known})


def fill(folder: Path, targets: dict[str, Tensor], sharded: bool = False, ignore: tuple[str, ...] = ()) -> None:
    """Copy a checkpoint's tensors into these, after all names and shapes have been found to agree."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = stack.enter_context(_safetensors().safe_open(str(path), "pt"))
            found |= {n: file for n in file.keys() if not n.startswith(ignore or ("\0",))}  # noqa: SIM118
        for problem, names in (("lacks", targets.keys() - found.keys()), ("has an unknown", found.keys() - targets.keys())):
            if names:
                raise CheckpointError(f"{folder} {problem} {min(names)} ({len(names)} in all): another model's checkpoint?")
        for name, target in targets.items():
            shape = tuple(found[name].get_slice(name).get_shape())
            if shape != tuple(target.shape):
                raise CheckpointError(f"{name} is {shape} in {folder} and {tuple(target.shape)} in this model")
        if not sharded:
            with torch.no_grad():
                for name, target in targets.items():
                    target.copy_(found[name].get_tensor(name))
            return
    dcp = _dcp()
    dcp.load({n: t.detach() for n, t in targets.items()}, storage_reader=dcp.HuggingFaceStorageReader(str(folder.resolve())))


def _write_sharded(draft: Path, part: str, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    dcp = _dcp()
    folder = draft / f"{part}.parts"
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({n: t.detach() for n, t in tensors.items()}, storage_writer=writer)
    if ranks.first:
        (whole,) = folder.glob("*.safetensors")
        os.replace(whole, draft / f"{part}.safetensors")
        shutil.rmtree(folder)
        sync(draft)
    ranks.barrier()


def load_run(path: str | Path) -> tuple[Any, Tokenizer]:
    """The model and the tokenizer of a run (its best checkpoint, else its last) or of one checkpoint folder."""
    folder = next((f for f in (Path(path) / "checkpoints" / n for n in ("best", "last")) if f.exists()), Path(path))
    if not (folder / "state.json").exists():
        raise CheckpointError(f"{path} is neither a run nor a checkpoint: there is no state.json")
    model = make_config(read(folder / "config.yaml")).model.build()
    fill(folder, weights(model), ignore=("optimizer.",))
    return model.eval(), load_tokenizer(folder / "tokenizer.json")


def iter_metrics(run: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a killed process left unfinished is passed over."""
    for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _dcp() -> Any:
    """As a value without a type: its names are public in the documentation, not to a type checker."""
    import torch.distributed.checkpoint as module

    return module


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("checkpoints need safetensors: pip install 'regard[train]'") from error

    class Both:
        save_file = staticmethod(safetensors.torch.save_file)
        safe_open = safetensors.safe_open

    return Both
