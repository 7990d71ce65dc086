"""The driver: `python -m benchmarks [names…] [--quick]`, or `python -m benchmarks --device cuda [--dtype float16]`.

Measures the comparisons that are named, all by default, writes a JSON and a Markdown file for each, and puts the table of all
that have been measured into the README. `--quick` takes fewer turns and shorter rows, prints, and writes only where `--out` says.
`--device` measures the comparison of other devices alone, and writes it beside the others under the device's name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from . import devices, report
from .devices import TYPES
from .harness import Bench, Row, Settings, environment, pin_threads

NAMES = (
    "trace",
    "positions",
    "entmax",
    "picks",
    "walks",
    "beside",
    "iris",
    "memory",
    "training",
    "decoding",
    "opening",
    "guessing",
    "serving",
    "identity",
    "import_time",
)
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK = Settings(repeats=5, fewest=3, seconds=5, quick=True)

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None, settings: Settings | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure regard beside its peers.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer turns, shorter rows of memory; nothing is written")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    parser.add_argument("--device", help="measure attention on a device, such as cuda: against SDPA, FlexAttention and others")
    parser.add_argument("--dtype", choices=sorted(TYPES), help="with --device (default: bfloat16, float32 on cpu)")
    asked = parser.parse_args(arguments)
    if asked.device is not None:
        return on_device(parser, asked, settings)
    if asked.dtype is not None:
        parser.error("--dtype is for --device")
    unknown = [n for n in asked.names if n not in NAMES]
    if unknown:
        parser.error(f"no comparison is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    pin_threads()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > 1:
        print(
            f"load average {busy:.1f}: other processes run here, and threads that wait for each other pay twice",
            file=sys.stderr,
        )
    bench = Bench(settings or (QUICK if asked.quick else Settings()))
    out = asked.out or (None if asked.quick else RESULTS)
    names = [n for n in NAMES if n in (asked.names or NAMES)]
    rows = measure(bench, {n: importlib.import_module(f"benchmarks.{n}") for n in names}, out)
    print(report.table(rows))
    if out == RESULTS:
        for path in publish(out):
            print(f"wrote the table into {path.name}")
    return rows


def on_device(parser: argparse.ArgumentParser, asked: argparse.Namespace, settings: Settings | None) -> list[Row]:
    if asked.names:
        parser.error(f"--device measures a comparison of its own, without {', '.join(asked.names)}")
    if (why := devices.missing(asked.device)) is not None:
        parser.error(why)
    device = torch.device(asked.device)
    where = devices.Where(device, TYPES[asked.dtype or ("float32" if device.type == "cpu" else "bfloat16")])
    bench = Bench(settings or (QUICK if asked.quick else Settings()))
    out = asked.out or (None if asked.quick else RESULTS)
    rows: list[Row] = []
    todo = devices.cases(bench, where)
    with progress(len(todo)) as say:
        for case in todo:
            say(case.label)
            rows.append(case.measure())
    if out is not None:
        report.write(f"devices_{device.type}", devices.TITLE, rows, environment() | where.environment(), out)
    print(report.table(rows))
    return rows


def measure(bench: Bench, modules: dict[str, ModuleType], out: Path | None) -> list[Row]:
    todo = {name: module.cases(bench) for name, module in modules.items()}
    rows: list[Row] = []
    with progress(sum(len(cases) for cases in todo.values())) as say:
        for name, cases in todo.items():
            found: list[Row] = []
            for case in cases:
                say(case.label)
                found.append(case.measure())
            rows += found
            if out is not None:
                report.write(name, modules[name].TITLE, found, environment(), out)
    return rows


def publish(folder: Path) -> list[Path]:
    """The tables of the docs hold every comparison that has a result, measured now or before."""
    kept = [r for r in (report.read(n, folder) for n in NAMES) if r is not None]
    if not kept:
        return []
    return report.update_docs(ROOT, [row for rows, _ in kept for row in rows], kept[-1][1])


@contextlib.contextmanager
def progress(total: int) -> Iterator[Say]:
    """A bar on a terminal that can show one, otherwise a line for each row when it begins."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=total)
                begun = 0

                def advance(label: str) -> None:
                    nonlocal begun
                    bar.update(task, description=label, completed=begun)
                    begun += 1

                yield advance
                bar.update(task, description="done", completed=total)
            return
    started, count = time.perf_counter(), 0

    def line(label: str) -> None:
        nonlocal count
        count += 1
        print(f"[{count}/{total}] {time.perf_counter() - started:5.0f} s  {label}", file=sys.stderr, flush=True)

    yield line


if __name__ == "__main__":
    main()
