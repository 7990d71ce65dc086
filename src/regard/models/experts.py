"""Mixtures of experts: a router sends each token through a few of many feed-forward layers.

p = softmax(W x),  y = Σ_{i in top-k} p_i / Σ_top p · FFN_i(x)       (k = 1 keeps p_i itself, so that the router learns)
balance = E · Σ_i f_i P_i      f_i the share of tokens sent to expert i, P_i its mean probability (Fedus et al. 2021)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError
from .blocks import Activation, FeedForward


@dataclass(frozen=True)
class Route:
    """Where one layer sent its tokens, N = B · length of them."""

    chosen: Int[Tensor, "N k"]
    accepted: Bool[Tensor, "N k"]
    """False where an expert was full and the token passed it by."""
    balance: Float[Tensor, ""]
    load: Float[Tensor, " E"]
    """The share of choices that fell on each expert."""


class Experts(nn.Module):
    def __init__(
        self, width: int, hidden: int, experts: int, chosen: int, capacity: float | None = None, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ShapeError(f"chosen={chosen} of experts={experts}: a token goes through at least one and at most all")
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, hidden, activation) for _ in range(experts))
        self.chosen, self.capacity = chosen, capacity

    def forward(self, x: Float[Tensor, "B N M"]) -> tuple[Float[Tensor, "B N M"], Route]:
        flat = x.flatten(0, 1)
        probability = F.softmax(self.router(flat), dim=-1)
        weight, chosen = probability.topk(self.chosen, dim=-1)
        if self.chosen > 1:
            weight = weight / weight.sum(-1, keepdim=True)
        accepted = self._accepted(chosen)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, rank = torch.where((chosen == i) & accepted)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weight[token, rank].unsqueeze(-1))
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        balance = len(self.experts) * (load * probability.mean(0)).sum()
        return out.view_as(x), Route(chosen, accepted, balance, load)

    def _accepted(self, chosen: Tensor) -> Tensor:
        """First come, first served up to the capacity. Only in training: at use a token's answer is its own alone."""
        if self.capacity is None or not self.training:
            return torch.ones_like(chosen, dtype=torch.bool)
        room = math.ceil(self.capacity * chosen.numel() / len(self.experts))
        # First choices of all tokens queue before any second choice.
        queue = F.one_hot(chosen.T.flatten(), len(self.experts)).cumsum(0)
        place = queue.gather(1, chosen.T.reshape(-1, 1)).view(self.chosen, -1).T
        return place <= room
