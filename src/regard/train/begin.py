"""What has to hold before a run begins or goes on; all of it is asked before anything is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CheckpointError, RegardError
from ..models.base import Model
from ..models.generation_info import GenerationInfo
from ..models.schema import ConfigError, shown
from ..models.tokenizer import Tokenizer
from .examples import Examples
from .restore import Progress, read_config
from .settings import FROM_DATA, LIVE, Config

if TYPE_CHECKING:
    from .distributed import Ranks

BYTES = 16
"""Of memory for each parameter: the weight, its gradient and AdamW's two averages, four bytes each."""
Start = tuple[Model, Tokenizer]
"""What training goes on from: a run's last checkpoint, or any model."""


class TrainError(RegardError):
    """A run that cannot begin or go on."""


def same_run(c: Config, folder: Path, model: Model, then: Progress, text: str, new_data: bool) -> None:
    """Refuse to go on as another model, or with other data than the run has learned from, and say what changed."""
    was, run = read_config(folder, model), folder.parents[1]
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
    watched = ["data.context", "data.validation", *sorted(n for n in {*mine, *theirs} if n.startswith("objective."))]
    changed += [f"{n}={mine.get(n)} ({theirs.get(n)} then)" for n in watched if mine.get(n) != theirs.get(n)]
    if changed and not new_data:
        raise TrainError(
            f"{run} has learned from other data; what changed: {'; '.join(changed)}. "
            "--resume --new-data goes on with it, cut by the run's own tokenizer; --out names another folder"
        )


def carried_on(c: Config, model: Model) -> Config:
    """Settings with the config of a model that training goes on from; what acts in training only stays as it is set."""
    live = {n: getattr(c.model, n) for n in LIVE if hasattr(c.model, n)}
    return replace(c, model=replace(model.config, **live), family=model.family, given=frozenset(FROM_DATA))


def flat(c: Config) -> dict[str, object]:
    """Settings by their dotted names, one level deep."""
    return {f"{section}.{n}": value for section, part in c.tree().items() for n, value in part.items()}


def built(c: Config, ranks: Ranks, examples: Examples, start: Start | None, tokenizer: Tokenizer) -> Model:
    """The model, once its size fits and before anything is written; it has read a few tokens."""
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in c.model.build().parameters())
        need, have = count * BYTES, memory(ranks.device)
        if need // (ranks.world if ranks.spread == "fsdp" else 1) > have:
            raise ConfigError(
                f"{count:,} parameters need {need / 1e9:,.1f} GB with gradients and averages, and this machine has {have / 1e9:,.1f}"
            )
        torch.manual_seed(c.train.seed)
        model: Model = c.model.build() if start is None else start[0].with_config(c.model)
        for p in model.parameters():
            # Memory of its own: what was loaded may be a part of the file.
            p.data = p.data.clone()
        if start is None:
            own = tokenizer.special
            ids: dict[str, int | list[int] | None] = {"bos_token_id": own.bos, "eos_token_id": own.eos}
            ids |= {f"{n}_token_id": i for n, i in (("pad", own.pad), ("mask", own.mask)) if i is not None}
            model.generation_info = GenerationInfo(ids)
        model = model.to(ranks.device)
        with torch.no_grad():
            c.objective.outputs(model.eval(), examples.tried().to(ranks.device).inputs)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from error
    except CheckpointError:
        raise
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
    fcntl = module
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
