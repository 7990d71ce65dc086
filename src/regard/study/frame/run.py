"""Run studies seed by seed: in this process, in several, or on a Ray cluster; whoever runs a seed, its record is the same.

for done in run([study("fossils")], "quick", Results(folder), workers=2): ...
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple

from ...errors import RegardError, SpecError, needs_extra
from .results import Line, Results, code_of, command, machine
from .study import Size, Study, study

WORKERS = 256


class Seed(NamedTuple):
    """One unit of work."""

    study: str
    seed: int
    size: Size


@dataclass(frozen=True)
class Failure:
    """A seed that could not be measured, and why."""

    seed: Seed
    why: str


def measured(unit: Seed, said: str) -> Line | Failure:
    """One seed, on one thread. A study's own error is a result too: the others go on."""
    from ... import __version__

    began = time.perf_counter()
    try:
        with one_thread():
            record = study(unit.study).run(unit.seed, unit.size)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, RegardError) else "".join(traceback.format_exception(error)[-3:])
        return Failure(unit, f"{type(error).__name__}: {text.strip()}")
    return {
        "study": unit.study,
        "seed": unit.seed,
        "size": unit.size,
        "version": __version__,
        "code": code_of(unit.study),
        "command": said,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 2),
        "record": record,
    }


@contextmanager
def one_thread() -> Generator[None]:
    """Sums of several threads come in another order, and another number of threads would give other numbers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    chosen: Sequence[Study], size: Size, results: Results, workers: int = 1, engine: str = "processes"
) -> Iterator[Line | Failure]:
    """Measure what is missing in the folder and write each line as it comes; studies whose packages are missing are passed over."""
    if not 1 <= workers <= WORKERS:
        raise SpecError(f"workers={workers}: 1 to {WORKERS} processes work side by side")
    if engine not in ENGINES:
        raise SpecError(f"engine={engine!r} is not one of {', '.join(ENGINES)}")
    for line in ENGINES[engine](missing(chosen, size, results), workers, command()):
        if not isinstance(line, Failure):
            try:
                results.append(line)
            except ValueError as error:
                unit = Seed(line["study"], line["seed"], line["size"])
                yield Failure(
                    unit, f"its record is no JSON: {error}; a record has finite numbers, texts, lists and dictionaries"
                )
                continue
        yield line


def missing(chosen: Sequence[Study], size: Size, results: Results) -> list[Seed]:
    """What is not measured yet: first seeds of all studies first, so that what breaks breaks early."""
    units = list[tuple[int, int, Seed]]()
    for order, each in enumerate(chosen):
        if not each.lacking:
            done = {line["seed"] for line in results.lines(each, size)}
            units += [(seed, order, Seed(each.name, seed, size)) for seed in each.seeds_of(size) if seed not in done]
    return [unit for _, _, unit in sorted(units)]


def _processes(units: Sequence[Seed], workers: int, said: str) -> Iterator[Line | Failure]:
    """Processes of this machine; one worker is this process itself."""
    if workers == 1 or len(units) < 2:
        yield from (measured(unit, said) for unit in units)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(min(workers, len(units)), mp_context=get_context("spawn"), initializer=_quiet_worker)
    yield from _as_they_come(pool, units, said)


def _as_they_come(pool: ProcessPoolExecutor, units: Sequence[Seed], said: str) -> Iterator[Line | Failure]:
    others = set(active_children())
    try:
        waiting: dict[Future[Line | Failure], Seed] = {pool.submit(measured, unit, said): unit for unit in units}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                unit = waiting.pop(future)
                error = future.exception()
                yield future.result() if error is None else Failure(unit, f"its process ended: {error}")
    finally:
        # Whoever stops listening (Ctrl-C) does not wait for seeds under way; they are measured again next time.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()


def _quiet_worker() -> None:
    """One thread, and Ctrl-C is the parent's to answer."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


def _ray(units: Sequence[Seed], workers: int, said: str) -> Iterator[Line | Failure]:
    """A Ray cluster: the one that RAY_ADDRESS names, or one started here with this many workers."""
    with needs_extra("ray"):
        ray: Any = importlib.import_module("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else workers, include_dashboard=False, log_to_driver=False)
    try:
        remote: Any = ray.remote(num_cpus=1)(measured)
        queue = iter(units)
        waiting: dict[Any, Seed] = {remote.remote(unit, said): unit for unit in itertools.islice(queue, workers)}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            unit = waiting.pop(ready)
            for more in itertools.islice(queue, 1):
                waiting[remote.remote(more, said)] = more
            try:
                yield ray.get(ready)
            except ray.exceptions.RayError as error:
                yield Failure(unit, f"its worker ended: {error}")
    finally:
        if started:
            ray.shutdown()


Engine = Callable[[Sequence[Seed], int, str], Iterator[Line | Failure]]
ENGINES: dict[str, Engine] = {"processes": _processes, "ray": _ray}
