"""`regard bench`: the comparisons of the source tree, run from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, verb


@verb
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="which comparisons; all by default")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer turns; nothing is written")] = False,
    device: Annotated[str | None, typer.Option(help="measure attention on a device instead, such as cuda")] = None,
    dtype: Annotated[str | None, typer.Option(help="with --device: float32, bfloat16 or float16")] = None,
) -> None:
    """Measure regard beside its peers, in turns, in one process.

    \b
    regard bench decoding
    regard bench trace entmax --quick
    regard bench --device cuda --dtype float16
    """
    root = checkout()
    if root is None:
        fail("the comparisons and their peers belong to the source tree: go to a checkout of regard and run `make bench` there")
    where = [*(["--device", device] if device else []), *(["--dtype", dtype] if dtype else [])]
    command = [sys.executable, "-m", "benchmarks", *(names or []), *(["--quick"] if quick else []), *where]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def checkout() -> Path | None:
    """The source tree that this folder belongs to."""
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / "benchmarks" / "harness.py").is_file()), None)
