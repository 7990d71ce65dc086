"""As many threads as there are free cores, looked at again while a run goes on.

A step is hundreds of parallel regions, and at the end of each all threads wait for the last. A thread without a core of its own lets
the others wait for the scheduler: two threads beside one busy process take longer than one. What other processes use is what the
cores that this process may use have worked (/proc/stat) less what it did itself, over the last seconds. Other cores do not count: on
a shared host they are busy with what is never met here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

EVERY = 2.0
"""Seconds between two looks: hundreds of the scheduler's slices."""
FREE = -1
"""`train.threads` for this, the default: while nobody else works, there are as many threads as torch has by itself."""
_STAT = Path("/proc/stat")


class FreeCores:
    """Sets torch's threads when `look` finds more or fewer free cores; never more than there were threads at the start."""

    def __init__(
        self, worked: Callable[[], float | None] | None = None, own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.most = torch.get_num_threads()
        self.worked, self.own, self.clock = worked or seconds_worked, own, clock
        self.seen: tuple[float, float, float] | None = None

    def look(self) -> int:
        """The threads from now on. Between two looks, and where the system does not say what its cores do, they stay as they are."""
        now = self.clock()
        if self.seen is not None and now - self.seen[0] < EVERY:
            return torch.get_num_threads()
        worked = self.worked()
        if worked is None:
            return torch.get_num_threads()
        before, self.seen = self.seen, (now, worked, self.own())
        if before is not None:
            others = ((worked - before[1]) - (self.seen[2] - before[2])) / (now - before[0])
            threads = max(1, min(self.most, len(cores()) - int(others + 0.5)))
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        return torch.get_num_threads()


def cores() -> frozenset[int]:
    """The cores that this process may use, by number."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0) if affinity is not None else range(os.cpu_count() or 1))


def seconds_worked() -> float | None:
    """What our cores have worked since the machine started; None where that is not said."""
    try:
        lines = (line.split() for line in _STAT.read_text(encoding="ascii").splitlines())
        said = {fields[0]: fields[1:8] for fields in lines if fields}
        ticks = 0
        for core in cores():
            user, nice, system, _, _, irq, softirq = map(int, said[f"cpu{core}"])
            ticks += user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, KeyError, AttributeError):
        return None


__all__ = ["FREE", "FreeCores"]
