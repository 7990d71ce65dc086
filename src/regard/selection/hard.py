"""Unique hard attention: the whole weight on the largest score, ties to the left or to the right (Hahn 2020).

The choice has no derivative. Backward is straight-through: the gradient of softmax in place of the argmax's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Given, Kernel, Selection, one_hot


@dataclass(frozen=True)
class Hard(Selection):
    name = "hard"
    cost = 2
    tie: Literal["left", "right"] = "left"

    def __post_init__(self) -> None:
        self.check_choice("tie", ("left", "right"))

    @property
    def picks(self) -> bool:
        return True

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        largest = scores == scores.amax(-1, keepdim=True)
        side = 1 if self.tie == "left" else -1
        order = torch.arange(scores.shape[-1], device=scores.device) * -side
        first = torch.where(largest, order, -scores.shape[-1] - 1).argmax(-1)
        soft = torch.softmax(scores, dim=-1)
        return one_hot(first, scores) + (soft - soft.detach())

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        hard = one_hot(self.index(scores.detach(), given)[0], scores)
        if not torch.is_grad_enabled():
            return hard, None
        soft = torch.softmax(scores, dim=-1)
        return hard + (soft - soft.detach()), None

    def index(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        if self.tie == "left":
            return scores.argmax(-1), None
        return scores.shape[-1] - 1 - scores.flip(-1).argmax(-1), None

    def kernel(self, distance: tuple[float, float] | None) -> Kernel:
        return Kernel("picks", right=self.tie == "right")

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        return -scores.amax(-1)
