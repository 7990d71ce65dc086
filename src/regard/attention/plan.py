"""Which backend runs a problem, what it costs and why: the one place where that is decided, and what `explain` prints."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ..values import readable
from . import band, chunked, columns, flex, native, triton
from .fused import simple_rule
from .private import OPERATOR
from .problem import Problem
from .tiled import rows_per_tile

Backend = Literal["sdpa", "flash", "columns", "flex", "triton", "tiled", "chunked"]

_preferred: Backend | None = None


@contextmanager
def preferring(backend: Backend) -> Generator[None]:
    """Inside, a backend that usually serves other devices is chosen wherever it can compute the call; for tests."""
    global _preferred
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


OPERATOR_NAME = "regard::attend"


@dataclass(frozen=True)
class Plan:
    """The exact backend that `attend` picks for these inputs."""

    spec: str
    backend: Backend
    reasons: tuple[str, ...]
    flops: int
    bytes: int
    pairs: float
    """Share of the Q × K pairs whose tiles are computed at all."""

    def __str__(self) -> str:
        lines = [
            f"{self.spec}",
            f"  backend  {self.backend}",
            f"  cost     {_human(self.flops, 1000, 'FLOP')} forward, {_human(self.bytes, 1024, 'B')} beyond inputs and output",
            f"  pairs    {self.pairs:.0%} of Q × K computed",
            f"  traced   as one operator, {OPERATOR_NAME}, with this backend inside (torch.compile, torch.export, torch.func)",
        ]
        return "\n".join([*lines, *(f"  because  {r}" for r in self.reasons)])


def plan(p: Problem) -> Plan:
    backend, reasons = choose(p)
    if not readable(p.q):
        reasons.append("these tensors have no numbers (fake, meta or traced): what depends on values is decided when it runs")
    B, H, G, Q, K, D, E = p.sizes
    if backend == "chunked":
        F, size = p.inner.features_for(D), 8 if p.q.dtype == torch.float64 else 4
        pairs = Q * min(chunked.CHUNK, K) / (Q * K) if Q * K else 0.0
        held = B * (H * Q + G * K) * F * size
        return Plan(str(p.spec), backend, tuple(reasons), chunked.flops(p), held, pairs)
    rows = rows_per_tile(p)
    computed = 0
    for start in range(0, Q, rows):
        stop = min(start + rows, Q)
        span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
        computed += (stop - start) * (span.hi - span.lo)
    width = p.geometry.lowered_width(D, p.spec.position.turns, p.state)
    per_pair = 2 * width + 2 * E + 8 * p.inner.cost
    repeated = p.inner.repeats(p.geometry)
    flops = B * H * computed * per_pair * (1 if repeated is None else repeated[2]) + B * G * p.geometry.lowering_flops(K, D)
    size = p.q.element_size() if p.q.dtype in (torch.float32, torch.float64) else 4
    scratch = B * H * Q * size if backend != "tiled" else B * H * rows * K * size * p.inner.cost
    if not p.geometry.is_dot:
        scratch += B * (H * Q + G * K) * width * size
    share = computed / (Q * K) if Q * K else 0.0
    return Plan(str(p.spec), backend, tuple(reasons), flops, scratch, share)


def choose(p: Problem) -> tuple[Backend, list[str]]:
    """The backend, and the reason of each choice on the way to it."""
    why: list[str] = []
    inner, refusal, geometry, position = p.inner, p.refusal, p.geometry, p.spec.position
    half = p.q.dtype in (torch.bfloat16, torch.float16)
    if p.bypassed:
        why.append(f"{p.spec.geometry.name} is idle (its state is zero and needs no gradient): bypassed, bit-identical to dot")
    if half:
        why.append(f"{p.q.dtype} inputs: scores and sums are float32 unless torch's own kernel takes them")
    temperature = inner.softmax_temperature
    if inner.weighs_vectors:
        return _written(p, why)
    if _preferred == "tiled":
        return "tiled", [*why, "tiles were asked for"]
    if temperature is None:
        why_not = triton.refusal(p, asked=_preferred == "triton")
        if why_not is None:
            why.append(f"{inner.name} has a kernel of our own, online over blocks of keys; its speed was never measured by us")
            return "triton", why
        if p.q.device.type == "cuda":
            why.append(f"no kernel of our own: {why_not}")
        if inner.picks:
            why.append(f"{inner.name} keeps one key per row: tiles of scores, then a gather, no second product")
        elif inner.both_sides:
            why.append(f"{inner.name} returns both sides of a gradient: tiles that add to rows and to columns")
        else:
            why.append(f"{inner.name} is no softmax: tiles of query rows, made again in backward")
        if p.kernel is not None:
            left = native.why_not(p)
            why.append(
                "blocks of rows in C, whose scores stay in a core's cache" if left is None else f"tiles are torch's: {left}"
            )
        return "tiled", why
    if p.points:
        return "tiled", [*why, "pointer returns the weights themselves, which no fused kernel gives"]
    if refusal is not None and refusal.threshold is not None:
        return "tiled", [*why, "abstain(threshold) needs each row's largest score, which no fused kernel gives"]
    if not geometry.lowers:
        return "tiled", [*why, f"{geometry.name} is no dot product: its scores are made tile by tile"]
    learned, simple = temperature == "learned", simple_rule(p)
    # A query or key that was changed in half precision is rounded once more than torch's own call rounds it.
    exact = _preferred not in ("columns", "flex") and geometry.bare and (geometry.is_dot or not half)
    if exact and simple and not position.biases and refusal is None and not learned and p.v.shape[-1] <= p.q.shape[-1]:
        why.append(f"{geometry.name} lowers to a bare dot product and the rule is the kernel's own: torch's fused call")
        return "sdpa", why
    if p.q.device.type != "cpu" or OPERATOR.missing or _preferred in ("columns", "flex"):
        return _anywhere(p, why)
    if position.biases:
        table = position.table(p.state)
        if table is not None and table.requires_grad and torch.is_grad_enabled():
            return "tiled", [
                *why,
                f"{position.name}'s table is being trained, and the fused kernel gives no gradient of a mask",
            ]
        if learned:
            return "tiled", [*why, "a learned temperature divides the position bias too, so the bias needs a gradient"]
        if band.serves(p):
            why.append(f"{position.name} and the rule go by distance: one row of numbers, of which every mask is a view")
        else:
            why.append(f"{position.name} adds a bias to each pair: made for chunks of rows, never for all")
    if not geometry.bare:
        why.append(f"{geometry.name} lowers to a dot product, a bias per key{' and a slot' if geometry.slotted else ''}")
    if refusal is not None:
        why.append("the null slot is a gate on the row's log-sum-exp: no longer keys")
    if not simple and not (position.biases and band.serves(p)):
        why.append("the rule becomes masks for chunks of rows; chunks it empties are skipped")
    if native.softens(p):
        return "flash", [*why, "nothing is trained: blocks of rows in C, whose scores stay in a core's cache"]
    return "flash", [*why, "torch's CPU flash kernel, with causality and a bias in one call"]


def _anywhere(p: Problem, why: list[str]) -> tuple[Backend, list[str]]:
    """Softmax where the CPU's private kernel is not: torch's public call, with what is added to a product as columns of it."""
    position, device = p.spec.position, p.q.device.type
    if device == "cpu" and OPERATOR.missing:
        why.append(f"{OPERATOR.missing}: without it, torch's public call")
    if device != "cpu" and p.q.dtype == torch.float64:
        return "tiled", [*why, f"no fused kernel of torch takes float64 on {device}: tiles"]
    line = columns.past(p)
    if not columns.whole(p) or _preferred == "flex":
        why_not = flex.refusal(p, asked=_preferred == "flex")
        if why_not is None:
            why += _lowering(p)
            why.append("the rule is a function of a pair, whose blocks are known beforehand; a bias is a table by distance")
            return "flex", [*why, f"torch's FlexAttention on {device}"]
        if device != "cpu":
            why.append(f"no FlexAttention: {why_not}")
    if position.biases and not line:
        table = position.table(p.state)
        if table is not None and table.requires_grad and torch.is_grad_enabled():
            return "tiled", [*why, f"{position.name}'s table is being trained, and a fused kernel gives no gradient of a mask"]
        why.append(f"{position.name} adds a bias to each pair: made for chunks of rows, never for all")
    if line:
        why.append(
            f"{position.name} on rows that meet no later key is a line in j: one column, since what depends on i cancels"
        )
    why += _lowering(p)
    if not columns.whole(p):
        why.append("the rule becomes masks for chunks of rows; chunks it empties are skipped")
    return "columns", [*why, f"torch's public fused call on {device}, by extra columns"]


def _lowering(p: Problem) -> list[str]:
    """What becomes columns."""
    why: list[str] = []
    if not p.geometry.bare:
        why.append(f"{p.geometry.name} lowers to a dot product and a bias per key, which is one more column of it")
    if p.geometry.slotted or p.refusal is not None:
        why.append("a slot is one more key, whose score stands in a column of its own")
    if p.q.dtype in columns.HALF and columns.dtype_for(p) == p.q.dtype:
        why.append(f"{p.q.dtype} holds each bias as the sum of three columns, which is float32's")
    return why


def _written(p: Problem, why: list[str]) -> tuple[Backend, list[str]]:
    inner = p.inner
    if chunked.order(p.allow) is None:
        why.append(f"under this rule each row of {inner.name} writes keys of its own: tiles of their weights")
        return "tiled", why
    F, E = inner.features_for(p.q.shape[-1]), p.v.shape[-1]
    why.append(
        f"all rows of {inner.name} write the same keys into a matrix ({F} × {E} a key head), in chunks: no Q × K weights"
    )
    if inner.ordered:
        why.append("later writes fade or correct earlier ones, so that the order of the keys counts")
    return "chunked", why


def _human(n: float, base: int, unit: str) -> str:
    for prefix in ("", "K", "M", "G", "T"):
        if n < base:
            return f"{n:.3g} {prefix}{'i' if base == 1024 and prefix else ''}{unit}"
        n /= base
    return f"{n:.3g} P{unit}"
