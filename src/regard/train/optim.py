"""AdamW with decoupled weight decay on matrices only, and a warmup into a cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .settings import OptimConfig


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; gains, biases and per-head numbers do not. A tied weight appears once."""
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, p in model.named_parameters():
        if p.requires_grad:
            # nGPT's gains (`raw`) may have a dimension for heads and are gains all the same.
            (matrices if p.ndim >= 2 and not name.endswith(".raw") else rest).append(p)
    both = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


def adamw(model: nn.Module, c: OptimConfig) -> torch.optim.AdamW:
    """One fused pass over all parameters, on the CPU too: 4 reads and 3 writes instead of a dozen small calls for each."""
    return torch.optim.AdamW(groups(model, c.weight_decay), lr=c.lr, betas=(c.beta_1, c.beta_2), eps=c.eps, fused=True)


def rate(c: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of step 0, 1, …: linear up to `lr` over the warmup, then half a cosine down to `lr · floor`."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    done = min(1.0, (step - c.warmup) / max(1, steps - 1 - c.warmup))
    return c.lr * (c.floor + (1 - c.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients to a norm of at most `limit` (0: never), and return the norm they had."""
    norm = nn.utils.clip_grad_norm_(list(parameters), limit or math.inf)
    # A sharded model's norm is a DTensor whose parts lie on the ranks.
    full: Any = getattr(norm, "full_tensor", None)
    return norm if full is None else full()
