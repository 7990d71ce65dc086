"""What has to hold before a run begins or goes on; all of it is asked before anything is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError, RegardError
from .data import Windows
from .limits import shown
from .restore import Progress, outline, read_config, read_state, verify
from .settings import Config, ConfigError
from .tokenizer import Tokenizer
from .tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from .distributed import Ranks

BYTES = 16
"""Of memory for each parameter: the weight, its gradient and AdamW's two averages, four bytes each."""
TRIED = 64
"""Tokens that a new model is tried with."""
LIVE = ("dropout", "capacity")
"""Settings of a model that may change in the middle of a run: they act in training only."""


class TrainError(RegardError):
    """A run that cannot begin or go on."""


def same_run(c: Config, folder: Path, then: Progress, text: str, new_data: bool) -> Tokenizer:
    """Refuse to go on as another model, or with other data than the run has learned from, and say what changed.

    Gives back the run's own tokenizer, with which it goes on."""
    verify(folder, read_state(folder)[1], ("config.yaml", "tokenizer.json"))
    was, run = read_config(folder), folder.parents[1]
    mine, theirs = flat(c), flat(was)
    # Only what was given or recorded can differ: the data decides the rest, and the data is compared below.
    names = [n for n in theirs if n.startswith("model.") and n.removeprefix("model.") not in LIVE and n in mine]
    names += ["data.tokenizer"] + ["data.vocabulary"] * (was.data.tokenizer == "bpe")
    other = [f"{n}={shown(mine[n])} here, {shown(theirs[n])} in the run" for n in names if mine[n] != theirs[n]]
    if other:
        raise CheckpointError(f"{run} cannot go on as another model: {'; '.join(other)}. --out names another folder")
    if c.train.steps < then.step:
        raise TrainError(f"train.steps={c.train.steps}, but {run} is at step {then.step} already; give more to go on")
    changed: list[str] = []
    if then.source is not None and text != then.source.text:
        changed.append(f"the text of data.source={c.data.source} ({then.source.tokens:,} tokens then)")
    changed += [f"{n}={mine[n]} ({theirs[n]} then)" for n in ("data.context", "data.validation") if mine[n] != theirs[n]]
    if changed and not new_data:
        raise TrainError(
            f"{run} has learned from other data; what changed: {'; '.join(changed)}. "
            "--resume --new-data goes on with it, cut by the run's own tokenizer; --out names another folder"
        )
    return load_tokenizer(folder / "tokenizer.json")


def flat(c: Config) -> dict[str, Any]:
    """Settings by their dotted names, one level deep."""
    return {f"{section}.{n}": value for section, part in c.tree().items() for n, value in part.items()}


def built(c: Config, ranks: Ranks, windows: Windows) -> nn.Module:
    """The model, after its size was found to fit and before anything is written; it has read a few tokens."""
    try:
        count = sum(p.numel() for p in outline(c.model).parameters())
        need, have = count * BYTES, memory(ranks.device)
        if need // (ranks.world if ranks.spread == "fsdp" else 1) > have:
            raise ConfigError(
                f"{count:,} parameters need {need / 1e9:,.1f} GB with gradients and averages, and this machine has {have / 1e9:,.1f}"
            )
        torch.manual_seed(c.train.seed)
        model: nn.Module = c.model.build().to(ranks.device)
        with torch.no_grad():
            model.eval()(windows.cut([0])[0][:, :TRIED].to(ranks.device))
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from error
    except (ValueError, TypeError, RuntimeError, ArithmeticError, IndexError, MemoryError) as error:
        raise ConfigError(f"this model cannot be built: {error}") from error
    return model


def memory(device: torch.device) -> int:
    """Bytes of it, or more than there can be where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


@contextlib.contextmanager
def locked(run: Path) -> Generator[None]:
    """Nobody else trains in this folder meanwhile. The lock is on the folder itself and goes with the process, however it ends."""
    try:
        import fcntl as module
    except ImportError:
        yield
        return
    fcntl: Any = module
    handle = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainError(f"another process trains in {run}; wait for it, or name another folder with --out") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
