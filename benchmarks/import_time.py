"""`import regard` beyond `import torch`, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

from .harness import THREADS, Bench, Case, Reach, Row, quartiles

TITLE = "import"
PROGRAM = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import regard; regard.attend, regard.nn  # names are found when they are asked for, so ask
print(middle - start, perf_counter() - middle)
"""


def cases(bench: Bench) -> list[Case]:
    return [Case("import regard", lambda: _import(bench))]


def once() -> tuple[float, float]:
    """Seconds of `import torch`, and of `import regard` after it."""
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=env)
    first, second = (float(x) for x in done.stdout.split())
    return first, second


def _import(bench: Bench) -> Row:
    once()
    times = [once() for _ in range(max(bench.settings.fewest, bench.settings.repeats // 2))]
    ours, theirs = [o for _, o in times], [t for t, _ in times]
    low, high = quartiles(ours)
    value = median(ours)
    return Row("import regard", "beyond import torch", "import torch", value, median(theirs), value, low, high,
               Reach(0.3, "seconds"), "seconds")  # fmt: skip
