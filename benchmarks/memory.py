"""Memory above inputs and outputs, forward and backward, of every selection: does it grow with N or with N²?

Every allocation of torch's CPU allocator is counted, through the profiler's memory events: unlike tensors counted at the
dispatcher, these include what a kernel allocates inside itself. The peak of the running sum, less the output and the gradients
that the call returns, is what the call needs beside its inputs and outputs; q, k, v and the upstream gradient are made before.
A buffer that a BLAS library packs its operands into is not seen; it does not depend on N.

No N × N tensor: no single allocation, outputs aside, may reach N² bytes, so that even a mask with a byte for each pair would
show (4 N² below N = 4096, where an input itself weighs N²). Only `pointer` returns weights, N × N of them by its nature: they are its output.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import regard
from regard.selection import SELECTIONS

from .harness import Bench, Case, Reach, Row, qkv, trained

TITLE = "memory above inputs and outputs"


@dataclass(frozen=True)
class Subject:
    spec: str
    heads: int = 8
    length: int = 4096
    state: regard.State | None = None
    values: bool = True


SUBJECTS = (
    Subject("softmax"),
    Subject("sparsemax"),
    Subject("entmax(1.5)"),
    Subject("entmax(learned)", state=regard.State(alpha=torch.linspace(1.25, 2.0, 8))),
    Subject("topk(8)"),
    Subject("hard"),
    Subject("pointer", heads=2, values=False),
    Subject("linear(map=elu)"),
    Subject("monotonic"),
    Subject("hopfield(steps=3)"),
    Subject("energy", values=False),
    Subject("gd"),
    Subject("gd(coherence=1, keep=all)"),
    Subject("selective"),
    Subject("abstain(softmax, null_logit=0)"),
    Subject("abstain(entmax(1.5), threshold=0)"),
)


@dataclass(frozen=True)
class Footprint:
    peak: int
    """Bytes allocated at the worst moment, beyond what was there before and what is returned."""
    largest: int
    """The largest single allocation that is not returned."""


def cases(bench: Bench) -> list[Case]:
    missing = set(SELECTIONS) - {s.spec.partition("(")[0] for s in SUBJECTS}
    if missing:
        raise AssertionError(f"no memory row for {', '.join(sorted(missing))}: add one to SUBJECTS")
    return [Case(f"memory of {s.spec}", lambda s=s: _grows(bench, s)) for s in SUBJECTS]


def footprint(call: Callable[[], Sequence[Tensor]]) -> Footprint:
    gc.collect()
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        returned = call()
    live = peak = 0
    sizes: list[int] = []
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # pyright: ignore
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
        sizes.append(event.nbytes())
    for x in returned:
        size = x.untyped_storage().nbytes()
        peak -= size
        # Rounding by the allocator is none on CPU, so a returned storage is among the allocations byte for byte.
        if size in sizes:
            sizes.remove(size)
    return Footprint(peak, max(sizes, default=0))


def _grows(bench: Bench, subject: Subject) -> Row:
    length = subject.length // 2 if bench.settings.quick else subject.length
    lengths = bench.settings.size(length), bench.settings.size(2 * length)
    found: list[int] = []
    for n in lengths:
        x = qkv(bench.settings, n * bench.settings.shrink, heads=subject.heads, grad=True)
        seen = footprint(trained(lambda *inputs: attend(subject, *inputs), x if subject.values else x[:2]))
        found.append(seen.peak)
        if seen.largest >= n * n * pair_bytes(n):
            raise AssertionError(f"{subject.spec} at N={n} allocates {seen.largest:,} bytes at once: an N × N tensor")
    size = "" if subject.heads == 8 else f", H={subject.heads}"
    return Row(
        subject.spec,
        f"memory, N={lengths[1]}{size}",
        f"itself at N={lengths[0]}",
        found[1],
        found[0],
        found[1] / found[0],
        reach=Reach(2.3, "times"),
        unit="B",
        note=_note(subject),
    )


def pair_bytes(length: int) -> float:
    """What a pair weighs in the N × N tensor looked for. Short rows fit into a tile, where nothing can be told from its size."""
    return 1 if length >= 4096 else 4 if length >= 1024 else float("inf")


def _note(subject: Subject) -> str:
    if subject.spec == "pointer":
        return "pointer: two heads, since its output is N × N; the output is not counted, as for all."
    return ""


def attend(subject: Subject, q: Tensor, k: Tensor, v: Tensor | None = None) -> Tensor:
    return regard.attend(q, k, v, subject.spec, allow=regard.Causal(), state=subject.state)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The profiler writes a line to the process's stderr when it starts and when it stops, past Python's own stream."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
