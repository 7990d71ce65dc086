"""First weights for small models: each matrix drawn with a standard deviation of fan-in^−½.

GPT-2's 0.02 is about fan-in^−½ at its width of 768. At a width of 16 it is twelve times too small, and a run spends its first hundreds of
steps near zero: sizes would be compared by how long they take to leave their start.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def fan_in_start(model: M, seed: int) -> M:
    """The model with its matrices drawn anew: fan-in^−½ for products, width^−½ for embeddings; norms and biases stay."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[1] ** -0.5)
    return model


__all__ = ["fan_in_start"]
