"""Softmax among the k largest scores of a row. Ties at the k-th place go to the leftmost, so that exactly k stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Given, Kernel, Selection

_BELOW_ZERO = -1e-37


def keep_leftmost(scores: Tensor, k: int) -> Tensor:
    """True at the k largest of each row, leftmost first among equals."""
    last = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > last
    tied = scores == last
    return above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


@dataclass(frozen=True)
class TopK(Selection):
    name = "topk"
    cost = 3
    k: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise self.refuse("k", "k counts keys, so it is a whole number of at least 1")

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.k]
        keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        return torch.softmax(scores.masked_fill(~keep, float("-inf")), dim=-1)

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        if self.k >= scores.shape[-1]:
            return torch.softmax(scores, dim=-1), None
        largest = scores.detach().topk(self.k + 1, dim=-1).values
        # The last one kept; a row with fewer than k keys allowed keeps all of them.
        last = largest[..., :-1].masked_fill(largest[..., :-1] == float("-inf"), float("inf")).amin(-1, keepdim=True)
        if bool((last == largest[..., -1:]).any()):
            dropped = ~keep_leftmost(scores.detach(), self.k)
            return torch.softmax(scores.masked_fill(dropped, float("-inf")), dim=-1), None
        # A comparison and a fill are slow passes; a shift and a threshold are fast ones, and softmax ignores the shift.
        return torch.softmax(F.threshold(scores - last, _BELOW_ZERO, float("-inf")), dim=-1), None

    def kernel(self, distance: tuple[float, float] | None) -> Kernel:
        return Kernel("topk", keep=self.k)

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        return -torch.logsumexp(scores.masked_fill(weights == 0, float("-inf")), dim=-1)
