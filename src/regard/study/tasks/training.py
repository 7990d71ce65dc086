"""One training loop for the small models of all studies: AdamW, warm-up, cosine decay, clipped gradients, its own random numbers.

model = built(0, lambda: LlamaConfig(vocabulary=64, width=64, depth=2, heads=2, key_heads=2, hidden=128).build())
curve = fit(model, lambda g: recall(g, rows=32, pairs=8), steps=300)
share = accuracy(model, recall(generator(1), rows=256, pairs=8))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
IGNORED = -100
"""A target that does not count."""


class Batch(NamedTuple):
    """Tokens, and what should come out at each place; IGNORED where nothing is asked."""

    tokens: Tensor
    targets: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def built(seed: int, make: Callable[[], M]) -> M:
    """A model whose first weights depend on the seed alone; nobody else's random numbers move."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a model says, whether it gives back logits or an object that has them."""
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = logits_of(model, batch.tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED)


def fit(
    model: nn.Module,
    batch: Callable[[torch.Generator], Batch],
    steps: int,
    lr: float = 3e-3,
    seed: int = 0,
    warmup: float = 0.1,
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of,
    clip: float | None = 1.0,
) -> list[float]:
    """Train on fresh batches; the loss of every step comes back. A loss that is not finite ends the training there."""
    g, optimizer = generator(seed), torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    begin = max(1, round(warmup * steps))
    curve: list[float] = []
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(steps):
            share = (
                (step + 1) / begin
                if step < begin
                else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - begin) / max(1, steps - begin)))
            )
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            value = loss(model, batch(g))
            curve.append(float(value.detach()))
            if not math.isfinite(curve[-1]):
                break
            optimizer.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    model.eval()
    return curve


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of asked places where the likeliest token is the right one."""
    asked = batch.targets != IGNORED
    return float((logits_of(model, batch.tokens).argmax(-1)[asked] == batch.targets[asked]).float().mean())


@torch.no_grad()
def nats(model: nn.Module, batch: Batch) -> float:
    """Mean cross-entropy of the asked places."""
    return float(loss_of(model, batch))
