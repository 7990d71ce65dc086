"""Checkpoints that are whole or absent, without pickle, and the same whoever wrote them: one process, DDP or FSDP2.

    checkpoints/step-00000300/
        config.json, model.safetensors, tokenizer.json, ...    a model folder, as `models.convert.save` writes it
        optimizer.safetensors   optimizer.<parameter>.exp_avg and .exp_avg_sq
        train.yaml              the settings of data, optimizer and training
        state.json              step, tokens, best loss, seed, how often each parameter was updated, what it learned from, and a
                                digest of every file here
    checkpoints/last, best      links to the two worth keeping

`models/runs.py` finds them, `models/convert` reads their models, `restore.py` the rest.

Random numbers need no tensor: each step seeds the generators from (seed, step, rank), so `seed` and `step` are their state.

A sharded model is written by `torch.distributed.checkpoint` with its safetensors writer, each rank its own part, and then
consolidated to the layout above. DCP's default writer was not taken because its `.metadata` file is a pickle; a gather on one
rank was not taken because that rank would have to hold the whole model. Reading cuts the same files for any number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..files import DRAFT, point, put, sweep, sync, write_text
from ..models.base import Model
from ..models.runs import FORMAT, STATE, file_digest, sealed, step_folder, steps, verify
from ..models.tokenizer import Tokenizer
from .distributed import Ranks
from .restore import SETTINGS, Progress, Source, check_shapes, fill, iter_metrics, read_progress, tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, eq=False)
class Store:
    """The checkpoints of one run."""

    run: Path
    ranks: Ranks
    tokenizer: Tokenizer | None = None
    settings: str = ""
    """What stands in a checkpoint's train.yaml."""

    @property
    def root(self) -> Path:
        return self.run / "checkpoints"

    def last(self) -> Path | None:
        """The checkpoint to go on from. One that was written whole while its link was not is the newest, and serves."""
        link = self.root / "last"
        if link.exists() and not link.is_symlink():
            raise CheckpointError(f"{link} is no link to one of the steps beside it; copy runs with their links: cp -a")
        return step_folder(self.root, "last") or next(reversed(steps(self.root)), None)

    def taken(self) -> bool:
        """True when something would be lost by starting anew here."""
        return bool(steps(self.root)) or any(os.path.lexists(self.root / n) for n in ("last", "best"))

    def save(self, model: Model, optimizer: torch.optim.Optimizer, progress: Progress, best: bool) -> Path:
        """Write this moment, then let `last` (and `best`) name it. What they named before stays until then."""
        name = f"step-{progress.step:08d}"
        target, draft = self.root / name, self.root / f"{DRAFT}{name}"
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
                # The links are on disk before what they named is gone.
                sync(self.root)
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
        whole = self.last()
        raise CheckpointError(
            f"cannot save to {self.root}: {problem or 'another rank failed'} (the last whole one: {whole.name if whole else 'none'})"
        )

    def _write(self, draft: Path, model: Model, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        ranks = self.ranks
        if ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        ranks.barrier()
        if ranks.first or ranks.spread == "fsdp":
            texts, files = _hf().contents(model)
            for name, held in {**files, OPTIMIZER: moments(model, optimizer)}.items():
                if ranks.spread == "fsdp":
                    _write_sharded(draft, name, held, ranks)
                else:
                    whole = {n: t.detach().contiguous().cpu() for n, t in held.items()}
                    _safetensors().save_file(whole, draft / name, metadata={"format": "pt"})
            if ranks.first:
                for name, text in {**texts, SETTINGS: self.settings}.items():
                    (draft / name).write_text(text, encoding="utf-8")
                assert self.tokenizer is not None
                self.tokenizer.save(draft)
                record = {"format": FORMAT, **asdict(replace(progress, updates=updates(model, optimizer)))}
                record["files"] = {p.name: file_digest(p) for p in sorted(draft.iterdir())}
                write_text(draft / STATE, json.dumps(sealed(record), indent=1))

    def load(self, model: Model, optimizer: torch.optim.Optimizer) -> Progress:
        """Fill the optimizer of a model, loaded from the last checkpoint, from there, too; nothing on disk changes."""
        folder = self.last()
        if folder is None:
            raise CheckpointError(f"{self.run} holds no checkpoint to resume from; start it without --resume")
        progress = read_progress(folder)
        verify(folder, (OPTIMIZER,))
        unknown = progress.updates.keys() - dict(model.named_parameters()).keys()
        if progress.step and not progress.updates:
            raise CheckpointError(f"{folder}/{STATE} is at step {progress.step} and counts no updates: it is not whole")
        if unknown:
            raise CheckpointError(f"{folder}/{STATE} counts updates of {min(unknown)}, which this model does not have")
        _prepare(model, optimizer, progress)
        held = moments(model, optimizer)
        with tensors(folder / OPTIMIZER) as file:
            check_shapes(folder / OPTIMIZER, file, held)
        if self.ranks.spread == "fsdp":
            dcp = _dcp()
            dcp.load(held, storage_reader=dcp.HuggingFaceStorageReader(str(folder.resolve())))
        else:
            fill(folder / OPTIMIZER, held)
        return progress

    def prune(self) -> None:
        """Remove checkpoints that no link names, and what a killed process left of one. Whoever calls it owns the run."""
        held = {os.readlink(self.root / n) for n in ("last", "best") if (self.root / n).is_symlink()}
        # `.step-….draft` is what earlier versions called a draft.
        for path in [*self.root.glob("step-*"), *self.root.glob(".step-*")]:
            if path.name not in held:
                shutil.rmtree(path, ignore_errors=True)
        sweep(self.root, older_than=-math.inf)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    averages: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        held = optimizer.state.get(p, {})
        averages |= {f"optimizer.{name}.{m}": held[m] for m in MOMENTS if m in held}
    return averages


def updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    steps = {name: optimizer.state.get(p, {}).get("step") for name, p in model.named_parameters()}
    return {name: int(step) for name, step in steps.items() if step is not None}


def _prepare(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Adam's state as it was, its averages still to be filled in."""
    for name, p in model.named_parameters():
        if name in progress.updates:
            step = torch.tensor(float(progress.updates[name]), dtype=torch.float32, device=p.device)
            optimizer.state[p] = {"step": step, **{m: torch.zeros_like(p, requires_grad=False) for m in MOMENTS}}


def _write_sharded(draft: Path, name: str, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    dcp = _dcp()
    folder = draft / f"{name}.parts"
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({n: t.detach() for n, t in tensors.items()}, storage_writer=writer)
    if ranks.first:
        (whole,) = folder.glob("*.safetensors")
        os.replace(whole, draft / name)
        shutil.rmtree(folder)
        sync(draft)
    ranks.barrier()


def _hf() -> Any:
    """Imported when it is needed, as it needs safetensors."""
    _safetensors()
    from ..models.convert import hf

    return hf


def _dcp() -> Any:
    """As a value without a type: its names are public in the documentation, not to a type checker."""
    import torch.distributed.checkpoint as module

    return module


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("checkpoints need safetensors: pip install 'regard[train]'") from error
    return safetensors.torch


__all__ = [
    "CheckpointError", "Progress", "Source", "Store", "iter_metrics", "read_progress", "updates",
]  # fmt: skip
