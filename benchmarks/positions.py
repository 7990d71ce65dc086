"""Positions that add a bias to each pair, against SDPA without one on the same q, k, v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.position.alibi import slopes

from .harness import Bench, Case, Reach, Row, inferred, qkv, trained

TITLE = "ALiBi and the relative bias"
BUCKETS = 32


def cases(bench: Bench) -> list[Case]:
    return [
        Case("alibi forward", lambda: _forward(bench, "alibi", 1024, Reach(1.15, "times"))),
        Case("alibi forward, long", lambda: _forward(bench, "alibi", 4096, Reach(1.15, "times"))),
        Case("alibi forward + backward", lambda: _both(bench, 1024, Reach(1.35, "times"))),
        Case("relative forward", lambda: _forward(bench, "relative(direction=past)", 1024, Reach(1.15, "times"))),
    ]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor, spec: str, state: regard.State) -> Tensor:
    return regard.attend(q, k, v, f"dot | softmax | {spec}", allow=regard.Causal(), state=state)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, spec: str, table: Tensor) -> Tensor:
    """All N × N scores at once."""
    at = torch.arange(q.shape[2])
    if spec == "alibi":
        bias = (at - at.unsqueeze(-1)) * torch.tensor(slopes(q.shape[1])).view(-1, 1, 1)
    else:
        bias = table[regard.position.Relative(direction="past").bucket(at, at)].permute(2, 0, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(at > at.unsqueeze(-1), float("-inf"))
    return torch.softmax(scores, -1) @ v


def _table(heads: int) -> Tensor:
    return torch.randn(BUCKETS, heads, generator=torch.Generator().manual_seed(3))


def _forward(bench: Bench, spec: str, length: int, reach: Reach | None) -> Row:
    x = qkv(bench.settings, length)
    table = _table(8)
    state = regard.State(relative=table)
    return bench.compare(
        spec,
        f"forward, N={x[0].shape[2]}",
        "SDPA",
        inferred(lambda q, k, v: ours(q, k, v, spec, state), x),
        inferred(sdpa, x),
        reach,
        truth=inferred(lambda q, k, v: spelled_out(q, k, v, spec, table), x),
    )


def _both(bench: Bench, length: int, reach: Reach | None) -> Row:
    x = qkv(bench.settings, length, grad=True)
    table = _table(8)
    return bench.compare(
        "alibi",
        f"forward + backward, N={x[0].shape[2]}",
        "SDPA",
        trained(lambda q, k, v: ours(q, k, v, "alibi", regard.State()), x),
        trained(sdpa, x),
        reach,
        truth=trained(lambda q, k, v: spelled_out(q, k, v, "alibi", table), x),
    )
