"""The selections that keep one key of a row, hard and gd, or a few, against SDPA."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

from .harness import Bench, Case, Reach, Row, inferred, qkv

TITLE = "hard, gd and top-k"


def cases(bench: Bench) -> list[Case]:
    return [Case(f"{s} against SDPA", lambda s=s, r=row: _against_sdpa(bench, s, *r)) for s, row in ROWS.items()]


def _against_sdpa(bench: Bench, spec: str, length: int, most: float) -> Row:
    x = qkv(bench.settings, length)
    return bench.compare(
        spec,
        f"forward, N={x[0].shape[2]}",
        "SDPA",
        inferred(lambda q, k, v: regard.attend(q, k, v, spec, allow=regard.Causal()), x),
        inferred(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), x),
        Reach(most, "times"),
        truth=inferred(TRUTH[spec], x),
    )


def _chosen(scores: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    best = scores.masked_fill_(hidden, float("-inf")).argmax(-1, keepdim=True)
    return v.gather(2, best.expand(-1, -1, -1, v.shape[-1]))


def largest_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _chosen(q @ k.mT, v)


def nearest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With one α for all keys, the key of least energy is the nearest key."""
    return _chosen(-torch.cdist(q.double(), k.double()), v)


def eight_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill_(hidden, float("-inf"))
    last = scores.topk(8, dim=-1).values[..., -1:]
    return torch.softmax(scores.masked_fill(scores < last, float("-inf")), dim=-1) @ v


ROWS = {"hard": (2048, 1.3), "gd": (2048, 1.3), "topk(8)": (1024, 1.5)}
"""Length, and how many times SDPA's time is asked at most."""
TRUTH: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hard": largest_product, "gd": nearest, "topk(8)": eight_largest,
}  # fmt: skip
