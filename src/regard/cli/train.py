"""`regard train`: a config, dotted overrides, a folder for the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..train.loop import Result

RUNS = Path("runs")


def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, e.g. model.width=384 train.steps=100")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file; overrides come after it")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the run's folder [default: a new one in runs/]")] = None,
    init: Annotated[
        str | None, typer.Option("--init", help="begin with the weights and the tokenizer of a model, by name, folder or run")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out, or the newest one in runs/")] = False,
    new_data: Annotated[bool, typer.Option("--new-data", help="with --resume: the text may be another than it was")] = False,
    show: Annotated[bool, typer.Option("--show", help="print the resolved config and stop")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress; metrics.jsonl is written all the same")] = False,
) -> None:
    """Train a language model.

    With no arguments: a small LLaMA on TinyShakespeare, character by character, in a few minutes on two cores.

    \b
    regard train
    regard train data.source=my.txt data.tokenizer=bpe model.family=gpt2
    regard train model.attention="cosine | entmax(1.5)" train.steps=300
    regard train --init smollm2 data.source=my.txt data.context=256 train.steps=100
    regard train --resume
    regard generate -m runs/text-llama "ROMEO:"
    regard train --resume --out runs/mine --new-data data.source=more.txt
    torchrun --nproc-per-node 2 -m regard.cli.train train.parallel=fsdp
    """
    # Threads that spin for long while they wait slow a shared machine down (figures in docs/training.md). Only before torch
    # is imported can this be said.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from ..errors import RegardError
    from ..models.downloads import open_model
    from ..train import config as make_config
    from ..train import train as run_training
    from ..train.distributed import from_environment
    from ..train.settings import dump, read

    try:
        out = out or newest() if resume else out
        config = out / "config.yaml" if resume and out is not None and config is None else config
        tree = {} if config is None else read(config)
        initial = None if init is None else open_model(init)
        chosen = make_config(tree, overrides or (), initial=None if initial is None or resume else initial[0])
        if show:
            typer.echo(dump(chosen.tree()), nl=False)
            return
        out = out or fresh(Path(chosen.data.source.removeprefix("hf:")).stem, chosen.family)
        result = run_training(chosen, out, resume=resume, new_data=new_data, initial=initial, quiet=quiet)
        rank = from_environment("RANK", 0)
    except KeyboardInterrupt:
        typer.echo("interrupted; what was saved before is whole", err=True)
        raise typer.Exit(130) from None
    except (RegardError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if rank == 0:
        _report(result)


def _report(result: Result) -> None:
    best = "no validation yet" if result.validation is None else f"best validation loss {result.validation:.4f}"
    typer.echo(f"{result.stopped} at step {result.progress.step}: {best} at step {result.progress.best_step}, in {result.run}")
    if result.stopped == "interrupted":
        typer.echo(f"saved; go on with: regard train --resume --out {result.run}", err=True)
        raise typer.Exit(130)


def fresh(source: str, family: str) -> Path:
    """A folder that no run has: runs/<source>-<family>, or with the first free number behind it.

    Every rank of a group has to find the same one, so under `torchrun` the name carries the group's id instead.
    """
    group = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # A folder's name has at most 255 bytes, and a source may be a long path or a link to the hub.
    name = f"{source[:80]}-{family}" + (f"-{group}" if "RANK" in os.environ and group != "none" else "")
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        return RUNS / name
    number = 1
    while (RUNS / (name if number == 1 else f"{name}-{number}") / "config.yaml").exists():
        number += 1
    return RUNS / (name if number == 1 else f"{name}-{number}")


def newest() -> Path:
    from ..train import CheckpointError

    metrics = sorted(RUNS.glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime)
    if not metrics:
        raise CheckpointError(f"there is no run in {RUNS}/ to resume; name one with --out")
    return metrics[-1].parent


if __name__ == "__main__":
    # What torchrun calls: it starts a module once for each rank. A rank ends at once, without Python's own shutdown: gloo's
    # threads, if they still run then, abort the process, and everything is on disk already.
    try:
        typer.run(train)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
