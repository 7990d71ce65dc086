"""Selective attention (Leviathan et al. 2025): a token can decide that another is no longer needed by the tokens after it.

The scores of the first head, positive part only, say how strongly token l masks token j. Token i sees the sum of what all
tokens before it decided: s_ij − Σ_{l<i} [s⁰_lj]₊. Nobody masks itself nor the first token. The running sum is the carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Given, Selection


@dataclass(frozen=True)
class Selective(Selection):
    name = "selective"
    carries = True
    absolute = True
    cost = 4

    def carry_shape(self, B: int, H: int, K: int) -> tuple[int, ...]:
        """What all heads see is decided by one."""
        return B, K

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        decided = self._decided(scores, given)
        before = decided.cumsum(-2) - decided
        if given.carry is not None:
            before = before + F.pad(given.carry, (0, given.slots)).unsqueeze(-2)
        return torch.softmax(scores - before.unsqueeze(1), dim=-1)

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        total = self._decided(scores, given).sum(-2)[..., : scores.shape[-1] - given.slots]
        return self.plain(scores, given), total if given.carry is None else given.carry + total

    def _decided(self, scores: Tensor, given: Given) -> Tensor:
        """(B, R, C): how strongly each row masks each column for the rows after it."""
        # relu and not clamp: at the placeholder 0 of a row with nothing allowed the gradient must be 0.
        first = torch.relu(scores[:, 0])
        columns = torch.arange(scores.shape[-1], device=scores.device)
        spared = (columns == given.at.unsqueeze(-1)) | (columns == 0) | (columns >= scores.shape[-1] - given.slots)
        return first.masked_fill(spared, 0)
