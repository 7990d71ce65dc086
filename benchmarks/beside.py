"""What other work costs: each call alone, and beside one process that never rests.

The other process is of this terminal's session, or of one of its own: Linux shares the cores out between sessions first, so that a
process started elsewhere weighs as much as all threads of this one. It is stopped and continued, so that both kinds of turns
alternate; a turn is half a second of calls, and its mean is taken, since the scheduler's slices are long. A training run follows the
free cores, so its turns begin when it has had the time to look. A turn in which third parties used the machine says nothing: it is
taken again, a few times at most. A row that another module can measure better is a line of `CALLS`: a function that gives the work.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import regard
from regard.models import downloads as hub
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import Weights, prepare
from regard.train.threads import EVERY, FreeCores, seconds_worked

from . import trace, training
from .harness import Bench, Case, Reach, Row, inferred, qkv, quartiles, turn

TITLE = "beside other work"
REACH = Reach(2.2, "times")
SECONDS = 0.5
"""Of a turn: many of the scheduler's slices."""
PAIRS = 6
THIRD_PARTIES = 0.15
"""Cores that others than the two of us may use in a turn that counts."""
AGAIN = 8
"""Turns that may be taken again in a row's measurement."""
OWN_THREADS = "GPT 6 × 384, torch's own threads"
ELSEWHERE = {"a process of this session": False, "a process of another session": True}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    run: str
    call: Call
    notices: float = 0.0
    """Seconds in which a call that adapts has seen that other work began or ended."""
    seconds: float = SECONDS


def cases(bench: Bench) -> list[Case]:
    return [Case(f"{what} beside {where}", lambda w=what, p=where: _row(bench, w, p)) for what in CALLS for where in ELSEWHERE]


def _chosen(spec: str, length: int) -> Callable[[Bench], Work]:
    def make(bench: Bench) -> Work:
        x = qkv(bench.settings, length)
        state = regard.State(alpha=torch.linspace(1.25, 2.0, 8)) if "learned" in spec else None
        call = inferred(lambda q, k, v: regard.attend(q, k, v, spec, allow=regard.Causal(), state=state), x)
        return Work(f"forward, N={x[0].shape[2]}", call)

    return make


def _sdpa(bench: Bench) -> Work:
    x = qkv(bench.settings, 1024)
    return Work(f"forward, N={x[0].shape[2]}", inferred(trace.sdpa, x))


def _trace(bench: Bench) -> Work:
    x = qkv(bench.settings, 1024)
    return Work(f"forward, N={x[0].shape[2]}", inferred(trace.ours, (*x, trace.metric(8, 64))))


def _training(follows: bool) -> Callable[[Bench], Work]:
    """A step as `regard train` makes it, which looks for free cores before each one; or with torch's threads as they are."""

    def make(bench: Bench) -> Work:
        draw = torch.Generator().manual_seed(0)
        length, batch = bench.settings.size(training.LENGTH), 2 if bench.settings.quick else training.BATCH
        x, y = (torch.randint(0, training.VOCABULARY, (batch, length), generator=draw) for _ in range(2))
        torch.manual_seed(0)
        sizes = (training.VOCABULARY, training.WIDTH, training.DEPTH, training.HEADS)
        model = training.GPT2Config(*sizes, context=training.LENGTH).build()
        optimizer = training.adamw(model, training.OptimConfig(lr=training.RATE))
        free = FreeCores() if follows else None

        def step() -> None:
            if free is not None:
                free.look()
            F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # A look is over the seconds since the last one, of which the first may lie in the turn before.
        notices = 2 * EVERY if follows and not bench.settings.quick else 0.0
        return Work(f"training step, {batch} × {length} tokens", step, notices, 4 * SECONDS)

    return make


def _decoding(weights: Weights) -> Callable[[Bench], Work]:
    def make(bench: Bench) -> Work:
        hub.get("smollm2")
        model, _ = hub.open_model("smollm2")
        decoder = prepare(model, weights)
        _, caches = decoder(torch.arange(100, 132).unsqueeze(0), static_caches(decoder.depth, 64))
        token = torch.tensor([[7]])
        # Always from the same caches: every call is the same work.
        return Work("a token after 32, SmolLM2", lambda: decoder(token, [c.reopened() for c in caches]))  # pyright: ignore

    return make


CALLS: dict[str, Callable[[Bench], Work]] = {
    "sparsemax": _chosen("sparsemax", 1024),
    "entmax(1.5)": _chosen("entmax(1.5)", 1024),
    "entmax(learned)": _chosen("entmax(learned)", 1024),
    "topk(8)": _chosen("topk(8)", 1024),
    "hard": _chosen("hard", 2048),
    "gd": _chosen("gd", 2048),
    "trace": _trace,
    "SDPA itself": _sdpa,
    "GPT 6 × 384": _training(follows=True),
    OWN_THREADS: _training(follows=False),
    "decoding, float32": _decoding("float32"),
    "decoding, int8": _decoding("int8"),
    "decoding, q4": _decoding("q4"),
}


def _row(bench: Bench, what: str, where: str) -> Row:
    threads = torch.get_num_threads()
    try:
        work, quiet, busy = _turns(bench, what, where)
    finally:
        torch.set_num_threads(threads)
    ratios = [b / q for b, q in zip(busy, quiet, strict=True)]
    low, high = quartiles(ratios)
    reach = None if what in ("SDPA itself", OWN_THREADS) else REACH
    return Row(
        what, f"{work.run}, beside {where}", "alone", median(busy), median(quiet), median(ratios), low, high, reach, "times"
    )


def _turns(bench: Bench, what: str, where: str) -> tuple[Work, list[float], list[float]]:
    """Seconds of a call, turn by turn: alone, and beside the other process."""
    work = CALLS[what](bench)
    seconds = 0.02 if bench.settings.quick else work.seconds
    again = 0 if bench.settings.quick else AGAIN
    found: dict[bool, list[float]] = {False: [], True: []}
    with neighbour(apart=ELSEWHERE[where]) as other:
        work.call()
        count = max(1, math.ceil(seconds / max(turn(work.call, 1), 1e-9)))
        for n in range(2 if bench.settings.quick else PAIRS):
            for works in (False, True) if n % 2 == 0 else (True, False):
                other.send_signal(signal.SIGCONT if works else signal.SIGSTOP)
                time.sleep(0.05)
                while True:
                    _for(work.notices, work.call)
                    taken, others = _watched(work.call, count)
                    if again == 0 or others - works < THIRD_PARTIES:
                        break
                    again -= 1
                found[works].append(taken)
    return work, found[False], found[True]


def _for(seconds: float, call: Call) -> None:
    """Calls until so many seconds are over, one at least."""
    began = time.perf_counter()
    call()
    while time.perf_counter() - began < seconds:
        call()


def _watched(call: Call, count: int) -> tuple[float, float]:
    """Seconds of a call, and the cores that other processes used meanwhile; none where the system does not say."""
    began, worked, own = time.perf_counter(), seconds_worked(), time.process_time()
    taken = turn(call, count)
    ended = seconds_worked()
    if worked is None or ended is None:
        return taken, 0.0
    return taken, (ended - worked - (time.process_time() - own)) / (time.perf_counter() - began)


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
