"""Modern Hopfield retrieval: ξ ← Σ softmax(β k·ξ) k, `steps` times, the last time reading v (Ramsauer et al. 2021).

    E(ξ) = −lse(β, kξ) + ½|ξ|² + log N/β + ½M²,  M = max|k|;   each step lowers E by at least ½|Δξ|²

`steps=1` is attention. β defaults to the geometry's own scale; given, it takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry.base import Geometry
from .base import Given, Selection
from .softmax import Softmax


@dataclass(frozen=True)
class Hopfield(Selection):
    name = "hopfield"
    not_in_abstain = not_in_pointer = "hopfield repeats its step; refuse before it or after it"
    beta: float | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        self.check_positive("beta")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise self.refuse("steps", "steps counts updates, so it is a whole number of at least 1")

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        """One update; the operator repeats it with the new state as query."""
        return torch.softmax(scores, dim=-1)

    @property
    def softmax_temperature(self) -> float:
        return 1.0

    def repeats(self, geometry: Geometry) -> tuple[Geometry, Selection, int]:
        scaled = None if self.beta is None else geometry.with_scale(self.beta)
        return scaled or geometry, Softmax(), self.steps

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        if self.beta is not None and geometry.with_scale(self.beta) is None:
            return f"hopfield(beta) takes the place of a scale, and {geometry.name} has none; leave beta out"
        if self.steps > 1 and not geometry.lowers:
            return f"hopfield's state moves among the keys, and {geometry.name} has no such space"
        return None

    def retrieval_energy(self, lse: Tensor, beta: float, state: Tensor, count: Tensor, largest: Tensor) -> Tensor:
        """E(ξ), with N = `count` and M = `largest`."""
        return -lse / beta + 0.5 * state.square().sum(-1) + count.log() / beta + 0.5 * largest.square()
