"""How long a mechanism takes beside torch's own attention, on this machine, now.

Each round times both, one after the other, so that whatever else the machine does meets both alike; the ratio is the median
over rounds. Forward only, causal, float32.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.allow import Causal
from regard.attention.operator import attend, explain
from regard.state import State

HEADS, LENGTH, WIDTH = 8, 1024, 64
ROUNDS = 7
PATIENCE = 2.0
"""Seconds after which a mechanism gets no further rounds, of which it has three at least: the tour is to last a minute."""

SPECS = (
    "dot | softmax",
    "cosine | softmax",
    "euclidean | softmax",
    "trace | softmax",
    "dot | softmax | alibi",
    "dot | hard",
    "euclidean | gd",
    "dot | sparsemax",
    "dot | entmax(1.5)",
    "dot | topk(8)",
)


@dataclass(frozen=True)
class Timing:
    spec: str
    backend: str
    milliseconds: float
    sdpa: float
    ratio: float


def busy() -> bool:
    """Whether other work keeps the cores, before we add ours; unknown counts as no."""
    try:
        return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False


def _time(f: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    f()
    return 1000 * (time.perf_counter() - start)


def measure(tick: Callable[[], None] = lambda: None, length: int = LENGTH, rounds: int = ROUNDS) -> list[Timing]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=g) for _ in range(3))
    state = State(trace=torch.randn(HEADS, WIDTH, WIDTH, generator=g) * 0.01)

    def peer() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found: list[Timing] = []
    with torch.no_grad():
        for spec in SPECS:

            def ours(spec: str = spec) -> Tensor:
                return attend(q, k, v, spec, allow=Causal(), state=state)

            for warm in (peer, ours):
                warm()
            start, pairs = time.perf_counter(), list[tuple[float, float]]()
            while len(pairs) < rounds and (len(pairs) < 3 or time.perf_counter() - start < PATIENCE):
                pairs.append((_time(ours), _time(peer)))
            middle = [statistics.median(x) for x in zip(*pairs, strict=True)]
            ratio = statistics.median(a / b for a, b in pairs)
            backend = explain(q, k, v, spec, allow=Causal(), state=state).backend
            found.append(Timing(spec, backend, middle[0], middle[1], ratio))
            tick()
    return found
