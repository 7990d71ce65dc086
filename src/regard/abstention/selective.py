"""SelectiveNet's head (Geifman & El-Yaniv 2019, arXiv:1901.09192): a model that learns what to refuse while it learns to answer.

On the features of any body stand three heads: f answers, g ∈ (0, 1) says whether to give the answer, h answers everything and
takes part in the training only. With ℓ the loss of one answer, φ = mean g the coverage and c the coverage that is asked for,

    L = α·( mean(ℓ(f)·g) / φ + λ·max(0, c − φ)² ) + (1 − α)·mean ℓ(h),

so that f is trained on what g lets through, g must let c of it through, and h makes the body see the rest too. λ = 32 and α = ½ as published; g is a hidden layer with ReLU, normalised over its width instead of
over the batch, so that one row answers as it does in company.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShapeError, SpecError


class Selective(NamedTuple):
    """What the three heads say of each row."""

    logits: Tensor
    """(…, C): f, the answer."""
    selection: Tensor
    """(…): g between 0 and 1, larger where the answer is more to be trusted; a score for `calibrate`."""
    auxiliary: Tensor
    """(…, C): h, for training alone."""


class SelectiveHead(nn.Module):
    """Features (…, M) to an answer, whether to give it, and the auxiliary answer.

    head = SelectiveHead(64, classes=10)
    loss = selective_loss(head(features), labels, coverage=0.8)
    """

    def __init__(self, width: int, classes: int, hidden: int | None = None) -> None:
        super().__init__()
        for name, n in (("width", width), ("classes", classes), ("hidden", hidden)):
            if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
                raise ShapeError(f"{name}={n!r}; it must be a whole number of at least 1")
        hidden = hidden or width
        self.answer, self.auxiliary = nn.Linear(width, classes), nn.Linear(width, classes)
        self.select = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 1))

    def forward(self, features: Tensor) -> Selective:
        if features.shape[-1:] != (self.answer.in_features,):
            raise ShapeError(
                f"the features are {tuple(features.shape)}; this head takes (…, M) with M={self.answer.in_features}"
            )
        selection = torch.sigmoid(self.select(features)).squeeze(-1)
        return Selective(self.answer(features), selection, self.auxiliary(features))


def selective_loss(
    out: Selective, targets: Tensor, *, coverage: float = 0.8, penalty: float = 32.0, weight: float = 0.5
) -> Tensor:
    """The loss above for classes (…): `coverage` is c, `penalty` λ, `weight` α. With g ≡ 1 and α = 1 it is the cross-entropy."""
    if not 0 < coverage <= 1 or not penalty >= 0 or not 0 <= weight <= 1:
        raise SpecError(
            f"coverage={coverage!r}, penalty={penalty!r}, weight={weight!r}; "
            "coverage is above 0 and at most 1, penalty 0 or more, weight between 0 and 1"
        )
    if targets.shape != out.selection.shape or not targets.numel():
        raise ShapeError(
            f"targets are {tuple(targets.shape)} for {tuple(out.selection.shape)} rows; give one class per row, one row or more"
        )
    labels, selection = targets.flatten(), out.selection.flatten()
    loss = F.cross_entropy(out.logits.flatten(0, -2), labels, reduction="none")
    given = selection.mean()
    answered = (loss * selection).mean() / given.clamp_min(torch.finfo(given.dtype).tiny)
    lacking = (coverage - given).clamp_min(0)
    every = F.cross_entropy(out.auxiliary.flatten(0, -2), labels)
    return weight * (answered + penalty * lacking**2) + (1 - weight) * every
