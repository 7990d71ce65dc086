"""What other work costs: each call alone, and beside one process that never rests.

The other process is of this terminal's session, or of one of its own: Linux shares the cores out between sessions first, so that a
process started elsewhere weighs as much as all threads of this one. It is stopped and continued, so that both kinds of turns
alternate; a turn is half a second of calls, and its mean is taken, since the scheduler's slices are long. A row that another module
can measure better is a line of `CALLS`: a function that gives the call.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import regard
from regard.models import downloads as hub
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import Weights, prepare

from . import trace, training
from .harness import Bench, Case, Reach, Row, inferred, qkv, quartiles, turn

TITLE = "beside other work"
REACH = Reach(2.2, "times")
SECONDS = 0.5
"""Of a turn: many of the scheduler's slices."""
PAIRS = 6
ELSEWHERE = {"a process of this session": False, "a process of another session": True}

Call = Callable[[], Any]


def cases(bench: Bench) -> list[Case]:
    return [Case(f"{what} beside {where}", lambda w=what, p=where: _row(bench, w, p)) for what in CALLS for where in ELSEWHERE]


def _chosen(spec: str, length: int) -> Callable[[Bench], tuple[str, Call]]:
    def make(bench: Bench) -> tuple[str, Call]:
        x = qkv(bench.settings, length)
        state = regard.State(alpha=torch.linspace(1.25, 2.0, 8)) if "learned" in spec else None
        call = inferred(lambda q, k, v: regard.attend(q, k, v, spec, allow=regard.Causal(), state=state), x)
        return f"forward, N={x[0].shape[2]}", call

    return make


def _sdpa(bench: Bench) -> tuple[str, Call]:
    x = qkv(bench.settings, 1024)
    return f"forward, N={x[0].shape[2]}", inferred(trace.sdpa, x)


def _trace(bench: Bench) -> tuple[str, Call]:
    x = qkv(bench.settings, 1024)
    return f"forward, N={x[0].shape[2]}", inferred(trace.ours, (*x, trace.metric(8, 64)))


def _training(bench: Bench) -> tuple[str, Call]:
    draw = torch.Generator().manual_seed(0)
    length, batch = bench.settings.size(training.LENGTH), 2 if bench.settings.quick else training.BATCH
    x, y = (torch.randint(0, training.VOCABULARY, (batch, length), generator=draw) for _ in range(2))
    torch.manual_seed(0)
    sizes = (training.VOCABULARY, training.WIDTH, training.DEPTH, training.HEADS)
    model = training.GPT2Config(*sizes, context=training.LENGTH).build()
    optimizer = training.adamw(model, training.OptimConfig(lr=training.RATE))

    def step() -> None:
        F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return f"training step, {batch} × {length} tokens", step


def _decoding(weights: Weights) -> Callable[[Bench], tuple[str, Call]]:
    def make(bench: Bench) -> tuple[str, Call]:
        hub.get("smollm2")
        model, _ = hub.open_model("smollm2")
        decoder = prepare(model, weights)
        _, caches = decoder(torch.arange(100, 132).unsqueeze(0), static_caches(decoder.depth, 64))
        token = torch.tensor([[7]])
        # Always from the same caches: every call is the same work.
        return "a token after 32, SmolLM2", lambda: decoder(token, [c.reopened() for c in caches])  # pyright: ignore

    return make


CALLS: dict[str, Callable[[Bench], tuple[str, Call]]] = {
    "sparsemax": _chosen("sparsemax", 1024),
    "entmax(1.5)": _chosen("entmax(1.5)", 1024),
    "entmax(learned)": _chosen("entmax(learned)", 1024),
    "topk(8)": _chosen("topk(8)", 1024),
    "hard": _chosen("hard", 2048),
    "gd": _chosen("gd", 2048),
    "trace": _trace,
    "SDPA itself": _sdpa,
    "GPT 6 × 384": _training,
    "decoding, float32": _decoding("float32"),
    "decoding, int8": _decoding("int8"),
    "decoding, q4": _decoding("q4"),
}


def _row(bench: Bench, what: str, where: str) -> Row:
    run, call = CALLS[what](bench)
    seconds = 0.02 if bench.settings.quick else SECONDS
    quiet: list[float] = []
    busy: list[float] = []
    with neighbour(apart=ELSEWHERE[where]) as other:
        call()
        count = max(1, math.ceil(seconds / max(turn(call, 1), 1e-9)))
        for n in range(2 if bench.settings.quick else PAIRS):
            for works in (False, True) if n % 2 == 0 else (True, False):
                other.send_signal(signal.SIGCONT if works else signal.SIGSTOP)
                time.sleep(0.05)
                call()
                (busy if works else quiet).append(turn(call, count))
    ratios = [b / q for b, q in zip(busy, quiet, strict=True)]
    low, high = quartiles(ratios)
    reach = None if what == "SDPA itself" else REACH
    return Row(what, f"{run}, beside {where}", "alone", median(busy), median(quiet), median(ratios), low, high, reach, "times")


@contextlib.contextmanager
def neighbour(apart: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A process that never rests, stopped until it is told to go on."""
    code = "import signal, os; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code], start_new_session=apart)
    try:
        yield other
    finally:
        other.kill()
        other.wait()
