"""What lists and logs say of a commit's state: read once, for a commit never changes."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..identity.store import Commit, IdentityStore
from ..identity.write.trace import dense

Summary = tuple[int, float | None, float | None, Tensor | None]
"""Sleeps, the self's norm, the trace's largest spectral norm, and the self."""


class Summaries:
    """Of the last few thousand states."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._by_blob: OrderedDict[str, Summary] = OrderedDict()
        self._sleeps: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def sleeps(self, store: IdentityStore, commit: Commit) -> int:
        """How often it has slept; a list of many asks for nothing else."""
        with self._lock:
            known = self._sleeps.get(commit.blob)
        if known is None:
            known = store.state_of(commit).life.sleeps
            with self._lock:
                self._sleeps[commit.blob] = known
                while len(self._sleeps) > self._most:
                    self._sleeps.popitem(last=False)
        return known

    def of(self, store: IdentityStore, commit: Commit) -> Summary:
        with self._lock:
            known = self._by_blob.get(commit.blob)
        if known is not None:
            return known
        state = store.state_of(commit)
        me = None if state.self is None else state.self.s.flatten().float()
        trace = None if state.trace is None else dense(state.trace).double()
        largest = None if trace is None or not trace.numel() else finite(torch.linalg.eigvalsh(trace).abs().max())
        summary = state.life.sleeps, None if me is None else finite(me.norm()), largest, me
        with self._lock:
            self._by_blob[commit.blob] = summary
            while len(self._by_blob) > self._most:
                self._by_blob.popitem(last=False)
        return summary

    def let_go(self) -> None:
        """Of everybody: after a removal nothing of it is held."""
        with self._lock:
            self._by_blob.clear()
            self._sleeps.clear()


def finite(x: Any) -> float:
    """As JSON has it: no infinity, and 0 where there is no number."""
    value = float(x)
    return 0.0 if value != value else max(-1e308, min(1e308, value)) if math.isinf(value) else value


__all__ = ["Summaries", "finite"]
