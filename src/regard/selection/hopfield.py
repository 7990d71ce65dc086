"""Modern Hopfield retrieval: ξ ← Σ softmax(β k·ξ) k, `steps` times, the last time reading v (Ramsauer et al. 2021).

    E(ξ) = −lse(β, kξ) + ½|ξ|² + log N/β + ½M²,  M = max|k|;   each step lowers E by at least ½|Δξ|²

`steps=1` is attention. β defaults to the geometry's own scale; given, it takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Given, Selection


@dataclass(frozen=True)
class Hopfield(Selection):
    name = "hopfield"
    beta: float | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        self.check_positive("beta")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise self.refuse("steps", "steps counts updates, so it is a whole number of at least 1")

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        """One update; the operator repeats it with the new state as query."""
        return torch.softmax(scores, dim=-1)


def hopfield_energy(lse: Tensor, beta: float, state: Tensor, count: Tensor, largest: Tensor) -> Tensor:
    """E(ξ) from the log-sum-exp of βkξ, ξ itself, the number of patterns N and their largest norm M."""
    return -lse / beta + 0.5 * state.square().sum(-1) + count.log() / beta + 0.5 * largest.square()
