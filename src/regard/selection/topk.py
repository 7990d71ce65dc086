"""Softmax among the k largest scores of a row. Ties at the k-th place go to the leftmost, so that exactly k stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Given, Selection


def keep_largest(scores: Tensor, k: int) -> Tensor:
    """True at the k largest of each row, leftmost first among equals; all of them where a row has fewer."""
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    last = scores.detach().topk(k, dim=-1, sorted=True).values[..., -1:]
    keep = scores >= last
    if int(keep.sum(-1).max()) > k:
        above = scores > last
        tied = keep & ~above
        room = k - above.sum(-1, keepdim=True)
        keep = above | (tied & (tied.cumsum(-1) <= room))
    return keep


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
        return torch.softmax(scores.masked_fill(~keep_largest(scores, self.k), float("-inf")), dim=-1), None

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        return -torch.logsumexp(scores.masked_fill(weights == 0, float("-inf")), dim=-1)
