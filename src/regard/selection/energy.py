"""The Energy Transformer's update: the tokens descend E = −(1/β) Σ_i log Σ_j exp(β q_i·k_j) (Hoover et al. 2023).

    −∂E/∂q_i = Σ_j P_ij k_j           what the token attends to
    −∂E/∂k_j = Σ_i P_ij q_i           who attends to the token

The result is both, side by side: (B, H, N, 2D), for the module to map back through W_Qᵀ and W_Kᵀ. There is no v. A token's
update depends on tokens after it, so there is no decoding step by step. The paper forbids i = j: `allow=~Window(1)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry.base import Geometry
from .base import Given, Selection


@dataclass(frozen=True)
class Energy(Selection):
    name = "energy"
    both_sides = True
    cost = 2
    not_in_abstain = not_in_pointer = "energy is a gradient and not a choice"

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        return None if geometry.is_dot else f"energy is the gradient of dot's log-sum-exp, not of {geometry.name}'s; use dot"

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        return -torch.logsumexp(scores, dim=-1)
