"""Sparse blending, against SDPA and against the package `entmax` put in softmax's place."""

from __future__ import annotations

from collections.abc import Callable

import entmax as package
import torch
import torch.nn.functional as F
from torch import Tensor

import regard

from .harness import Bench, Case, Reach, Row, inferred, qkv, trained

TITLE = "sparsemax and entmax"
LENGTH = 1024
ROW_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"sparsemax": package.sparsemax, "entmax(1.5)": package.entmax15}


def cases(bench: Bench) -> list[Case]:
    found: list[Case] = []
    for spec in ROW_MAPS:
        found.append(Case(f"{spec} against SDPA", lambda s=spec: _against_sdpa(bench, s)))
    for spec in ROW_MAPS:
        found.append(Case(f"{spec} forward against the package", lambda s=spec: _against_package(bench, s, False)))
        found.append(Case(f"{spec} forward + backward against the package", lambda s=spec: _against_package(bench, s, True)))
    found.append(Case("learned alpha against SDPA", lambda: _learned(bench, "SDPA")))
    found.append(Case("learned alpha against entmax_bisect", lambda: _learned(bench, "entmax_bisect")))
    return found


def ours(spec: str, state: regard.State | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: regard.attend(q, k, v, spec, allow=regard.Causal(), state=state)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def composed(row_map: Callable[[Tensor], Tensor], length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """row_map(QKᵀ/√D)V, causal by −inf; the mask is made once, outside the clock."""
    hidden = torch.full((length, length), float("-inf")).triu(1)
    return lambda q, k, v: row_map(q @ k.mT * q.shape[-1] ** -0.5 + hidden) @ v


def _against_sdpa(bench: Bench, spec: str) -> Row:
    x = qkv(bench.settings, LENGTH)
    length = x[0].shape[2]
    return bench.compare(
        spec,
        f"forward, N={length}",
        "SDPA",
        inferred(ours(spec), x),
        inferred(sdpa, x),
        Reach(1.6, "times"),
        truth=inferred(composed(lambda s: ROW_MAPS[spec](s, dim=-1), length), x),
    )


def _against_package(bench: Bench, spec: str, train: bool) -> Row:
    x = qkv(bench.settings, LENGTH, grad=train)
    length = x[0].shape[2]
    call = trained if train else inferred
    return bench.compare(
        spec,
        f"forward{' + backward' * train}, N={length}",
        "package entmax",
        call(ours(spec), x),
        call(composed(lambda s: ROW_MAPS[spec](s, dim=-1), length), x),
        Reach(4, "faster") if train else None,
    )


def _learned(bench: Bench, peer: str) -> Row:
    x = qkv(bench.settings, LENGTH)
    length = x[0].shape[2]
    alpha = torch.linspace(1.25, 2.0, 8)
    bisect = inferred(composed(lambda s: package.entmax_bisect(s, alpha.view(-1, 1, 1), dim=-1), length), x)
    return bench.compare(
        "entmax(learned)",
        f"forward, N={length}",
        peer,
        inferred(ours("entmax(learned)", regard.State(alpha=alpha)), x),
        bisect if peer == "entmax_bisect" else inferred(sdpa, x),
        Reach(20, "faster") if peer == "entmax_bisect" else Reach(4, "times"),
        truth=bisect,
        note="entmax(learned): one alpha per head, from 1.25 to 2.",
    )
