"""Dense blending: p ∝ exp(s/τ) (Vaswani et al. 2017). Its entropy-regularised value is τ·logsumexp(s/τ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..part import Learned, PerHead
from .base import Given, Selection, per_head


@dataclass(frozen=True)
class Softmax(Selection):
    name = "softmax"
    temperature: float | Learned = 1.0

    def __post_init__(self) -> None:
        self.check_positive("temperature")

    @property
    def per_head(self) -> tuple[PerHead, ...]:
        return (PerHead("temperature", start=1.0),) if self.temperature == "learned" else ()

    @property
    def softmax_temperature(self) -> float | Learned:
        return self.temperature

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return torch.softmax(self._cooled(scores, given), dim=-1)

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        t = self._temperature(given)
        return -(t * torch.logsumexp(scores / t, dim=-1, keepdim=True)).squeeze(-1)

    def _cooled(self, scores: Tensor, given: Given) -> Tensor:
        t = self._temperature(given)
        if not isinstance(t, Tensor):
            return scores if t == 1.0 else scores / t
        # −inf has a gradient of 0, and 0 · −inf would make the temperature's gradient NaN.
        hidden = scores == float("-inf")
        return (scores.masked_fill(hidden, 0) / t).masked_fill(hidden, float("-inf"))

    def _temperature(self, given: Given) -> float | Tensor:
        return per_head(given.params["temperature"]) if self.temperature == "learned" else self.temperature
