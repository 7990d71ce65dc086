"""Mixtures of experts: a router sends each token through a few of many feed-forward layers.

p = softmax(h),  y = Σ_{i in top-k} p_i / Σ_top p · FFN_i(x)       (k = 1 keeps p_i itself, so that the router learns)

    gate=plain   h = W x;  balance = E · Σ_i f_i P_i,  f_i the share of tokens sent to expert i, P_i its mean probability
                 (Fedus et al. 2021)
    gate=noisy   h = W x + ε · softplus(W_noise x), ε normal, in training;  balance = ½E · Σ_i (I_i² + L_i²),  I_i the share of
                 all weight that expert i gets, L_i its share of the expected load: the chance, with the token's noise for i
                 drawn again, that i is among its top k (Shazeer et al. 2017)

Both balances are 1 when experts are used evenly and E when one takes all. Since E · Σ shares² = 1 + CV², the second is, up to a
constant, half the sum of the paper's CV² losses of importance and load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from .blocks import Activation, FeedForward

Gate = Literal["plain", "noisy"]


@dataclass(frozen=True)
class Route:
    """Where one layer sent its tokens, N = B · length of them."""

    chosen: Int[Tensor, "N k"]
    accepted: Bool[Tensor, "N k"]
    """False where an expert was full and the token passed it by."""
    balance: Float[Tensor, ""]
    load: Float[Tensor, " E"]
    """The share of choices that fell on each expert."""


class Scored(NamedTuple):
    """The router's scores h (N, E), and for a noisy gate in training what they were made of: W x and the noise's spread."""

    noised: Tensor
    clean: Tensor
    spread: Tensor | None


class Experts(nn.Module):
    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        chosen: int,
        capacity: float | None = None,
        activation: Activation = "gelu",
        gate: Gate = "plain",
    ) -> None:
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ShapeError(f"chosen={chosen} of experts={experts}: a token goes through at least one and at most all")
        if gate not in ("plain", "noisy"):
            raise SpecError(f"gate={gate!r} is not one of plain, noisy")
        self.router = nn.Linear(width, experts, bias=False)
        self.noise = nn.Linear(width, experts, bias=False) if gate == "noisy" else None
        if self.noise is not None:
            # The paper's start: no preference, and noise alone spreads the tokens.
            nn.init.zeros_(self.router.weight)
            nn.init.zeros_(self.noise.weight)
        self.experts = nn.ModuleList(FeedForward(width, hidden, activation) for _ in range(experts))
        self.chosen, self.capacity = chosen, capacity

    def forward(self, x: Float[Tensor, "B N M"]) -> tuple[Float[Tensor, "B N M"], Route]:
        flat = x.flatten(0, 1)
        scored = self._scores(flat)
        probability = F.softmax(scored.noised, dim=-1)
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
        if self.noise is None:
            balance = len(self.experts) * (load * probability.mean(0)).sum()
        else:
            balance = self._noisy_balance(scored, torch.zeros_like(probability).scatter(-1, chosen, weight), load)
        return out.view_as(x), Route(chosen, accepted, balance, load)

    def _scores(self, flat: Tensor) -> Scored:
        clean = self.router(flat)
        if self.noise is None or not self.training:
            return Scored(clean, clean, None)
        spread = F.softplus(self.noise(flat))
        return Scored(clean + torch.randn_like(clean) * spread, clean, spread)

    def _noisy_balance(self, scored: Scored, weight: Tensor, load: Tensor) -> Tensor:
        """½E · Σ (I² + L²). The load is smooth in training, where noise makes it a probability; at use it is counted."""
        importance = weight.sum(0) / weight.sum()
        E = len(self.experts)
        if scored.spread is not None and self.chosen < E:
            # Expert i is among the top k when it beats the k-th largest of the others' scores.
            top = scored.noised.topk(self.chosen + 1, dim=-1).values
            inside = scored.noised >= top[:, self.chosen - 1 : self.chosen]
            rival = torch.where(inside, top[:, self.chosen :], top[:, self.chosen - 1 : self.chosen])
            chance = torch.special.ndtr((scored.clean - rival) / scored.spread)
            load = chance.sum(0) / chance.sum()
        return 0.5 * E * (importance.square().sum() + load.square().sum())

    def _accepted(self, chosen: Tensor) -> Tensor:
        """First come, first served up to the capacity. Only in training: at use a token's answer is its own alone."""
        if self.capacity is None or not self.training:
            return torch.ones_like(chosen, dtype=torch.bool)
        room = math.ceil(self.capacity * chosen.numel() / len(self.experts))
        # First choices of all tokens queue before any second choice.
        queue = F.one_hot(chosen.T.flatten(), len(self.experts)).cumsum(0)
        place = queue.gather(1, chosen.T.reshape(-1, 1)).view(self.chosen, -1).T
        return place <= room
