"""A trace bends the metric: what that costs over SDPA on the same q, k, v, and over the published prototype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

from .harness import Bench, Case, Reach, Row, inferred, qkv, trained

TITLE = "trace + softmax"
GAMMA = 0.3


def cases(bench: Bench) -> list[Case]:
    found: list[Case] = []
    for length in (1024, 2048):
        found.append(Case(f"trace forward N={length}", lambda n=length: _forward(bench, n)))
    for length in (1024, 2048):
        found.append(Case(f"trace forward + backward N={length}", lambda n=length: _both(bench, n)))
    found.append(Case("trace against the published prototype", lambda: _prototype(bench)))
    return found


def ours(q: Tensor, k: Tensor, v: Tensor, T: Tensor) -> Tensor:
    return regard.attend(q, k, v, f"trace(gamma={GAMMA})", allow=regard.Causal(), state=regard.State(trace=T))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, T: Tensor) -> Tensor:
    """q·k/√D − γ(q−k)ᵀT(q−k) without its constant per row, all N × N scores at once."""
    metric = q @ (T + T.mT) @ k.mT - ((k @ T) * k).sum(-1).unsqueeze(-2)
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + GAMMA * metric).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v


def published(q: Tensor, k: Tensor, v: Tensor, T: Tensor) -> Tensor:
    """The prototype's form, softmax(−(q−k)ᵀT(q−k))V for (b, N, d), through its (b, N, N, d) tensor of differences."""
    delta = q.unsqueeze(2) - k.unsqueeze(1)
    return torch.softmax(-((delta @ T) * delta).sum(-1), dim=-1) @ v


def metric(heads: int, width: int) -> Tensor:
    """A full, not symmetric T whose share of a score is about that of the dot product."""
    draw = torch.Generator().manual_seed(2)
    return torch.randn(heads, width, width, generator=draw) / width


def _forward(bench: Bench, length: int) -> Row:
    q, k, v = qkv(bench.settings, length)
    T = metric(8, 64)
    return bench.compare(
        "trace",
        f"forward, N={q.shape[2]}",
        "SDPA",
        inferred(ours, (q, k, v, T)),
        inferred(sdpa, (q, k, v)),
        Reach(1.1, "times"),
        truth=inferred(spelled_out, (q, k, v, T)),
    )


def _both(bench: Bench, length: int) -> Row:
    q, k, v = qkv(bench.settings, length, grad=True)
    T = metric(8, 64).requires_grad_()
    return bench.compare(
        "trace",
        f"forward + backward, N={q.shape[2]}",
        "SDPA",
        trained(ours, (q, k, v, T)),
        trained(sdpa, (q, k, v)),
        Reach(1.35, "times"),
        truth=trained(spelled_out, (q, k, v, T)),
        note="trace, forward + backward: gradients of q, k, v and of T; SDPA's are of q, k, v.",
    )


def _prototype(bench: Bench) -> Row:
    q, k, v = qkv(bench.settings, 512, heads=1)
    T = metric(1, 64)
    state = regard.State(trace=T)
    return bench.compare(
        "trace(base=none)",
        f"forward, H=1, N={q.shape[2]}, all pairs",
        "published prototype",
        inferred(lambda: regard.attend(q, k, v, "trace(base=none)", state=state).squeeze(1), ()),
        inferred(published, (q.squeeze(1), k.squeeze(1), v.squeeze(1), T.squeeze(0))),
        Reach(150, "faster"),
    )
