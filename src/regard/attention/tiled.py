"""Any geometry, selection, position and rule, in tiles of query rows.

A tile of scores is made, turned into weights and used up before the next one is made; backward makes it again instead of
keeping it. So memory above inputs and outputs is O(tile × K) in training too, and no Q × K tensor ever exists. Tiles whose
keys `allow` rules out are never made; where it allows a whole range of keys, no mask is made either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..geometry.base import Lowered, Slot
from ..selection.base import Given
from . import native
from .allow import Tile, allowed_in
from .gradients import only_once
from .problem import Problem, not_finite

MOST_ROWS = 128
TILE = 1 << 21
"""Rows of a tile, and scores in it: large enough for the matrix product, small enough for the caches."""

_ROWS, _KEYS, _WHOLE = "rows", "keys", "whole"
_AXES = {
    "q": _ROWS, "row_bias": _ROWS, "slot_score": _ROWS, "k": _KEYS, "v": _KEYS, "key_bias": _KEYS,
}  # fmt: skip
"""Which of a tile's two axes a tensor is cut along (always its third dimension); the others are whole in every tile."""


@dataclass(frozen=True)
class TileOut:
    pieces: tuple[Tensor, ...]
    weights: Tensor
    scores: Tensor
    carry: Tensor | None
    empty: Tensor | None
    given: Given


@dataclass(frozen=True, eq=False)
class Job:
    """Everything about a problem that is not a differentiable tensor, and how one tile of it is computed."""

    problem: Problem
    scale: float
    pair: Callable[..., Tensor] | None
    width: int
    names: tuple[str, ...]
    slots: int
    null_slots: int

    def tiles(self) -> Iterator[Tile]:
        p = self.problem
        _, _, _, Q, K, _, _ = p.sizes
        rows = rows_per_tile(p, None if self.pair is None else self.width)
        reach = 0 if p.state.carry is None else p.state.carry.shape[-1]
        for start in range(0, Q, rows):
            stop = min(start + rows, Q)
            span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
            # A carry lives on all keys up to the furthest one met, here or in an earlier call, so none of these may be cut off.
            reach = max(reach, span.hi)
            lo, hi = (0, reach) if p.inner.carries else (span.lo, span.hi)
            yield Tile(start, stop, lo, hi, p.offset, p.q.device)

    def segments(self) -> list[list[Tile]]:
        """The tiles in runs. At the door of each run a carry is kept for backward, which makes those within it again.

        There are as many runs as a tile has rows, so that what is kept weighs as much as the scores of one tile, at any length.
        """
        tiles = list(self.tiles())
        apart = -(-len(tiles) // max(1, tiles[0].stop)) if tiles else 1
        return [tiles[n : n + apart] for n in range(0, len(tiles), apart)]

    def compute(
        self, t: Tile, x: dict[str, Tensor], carry: Tensor | None, weigh: bool = False, scratch: Tensor | None = None
    ) -> TileOut:
        """One tile from tensors that are cut to it. A selection that picks skips its weights unless it is to `weigh`.

        Scores go into `scratch` if it is given: fresh memory for every tile costs as much as a pass over it.
        """
        p = self.problem
        B, H, _, _ = x["q"].shape
        rows, columns = t.stop - t.start, t.hi - t.lo
        scores = self._scores(x, scratch).view(B, H, rows, columns)
        if "key_bias" in x:
            bias = x["key_bias"]
            grouped = scores.view(B, bias.shape[1], -1, rows, columns)
            scores = grouped.add_(bias[:, :, None, None, :]).view(B, H, rows, columns)
        if p.inner.absolute and "row_bias" in x:
            scores = scores.add_(x["row_bias"].unsqueeze(-1))
        if p.spec.position.biases:
            like = x["q"]
            scores = scores.add_(p.spec.position.bias(t.q_at().squeeze(-1), t.k_at(), like, x.get("table")))
        empty = self._mask(scores, t)
        if self.slots:
            score = x["slot_score"]
            if "row_bias" in x and not p.inner.absolute:
                score = score - x["row_bias"].unsqueeze(-1)
            scores = torch.cat([scores, score], dim=-1)
        given = Given(
            at=t.q_at().squeeze(-1),
            empty=empty,
            slots=self.slots,
            carry=None if carry is None else carry[..., :columns],
            row_bias=x.get("row_bias"),
            distance=p.geometry.distance(p.q.shape[-1]),
            params={n: x[f"param.{n}"] for n in p.inner.reads},
        )
        if p.inner.weighs_vectors:
            root = self.scale**0.5
            given = replace(given, q=x["q"] * root, k=x["k"] * root)
        if p.inner.picks and not (weigh or torch.is_grad_enabled() or self.slots or p.points or p.refusal):
            index, accepted = p.inner.index(scores, given)
            if not bool(torch.isfinite(scores.gather(-1, index.unsqueeze(-1))).all()):
                raise not_finite(p)
            piece = _gather(x["v"], index)
            piece = piece if accepted is None else piece * accepted.unsqueeze(-1)
            return TileOut((_zero(piece, empty),), scores, scores, None, empty, given)
        weights, carry = p.inner.rows(scores, given)
        weights = self._refuse(weights, scores, x, columns)
        weights = _zero(weights, empty)
        return TileOut(self._pieces(weights, x, columns), weights, scores, carry, empty, given)

    def _scores(self, x: dict[str, Tensor], scratch: Tensor | None) -> Tensor:
        q, k = x["q"], x["k"]
        if self.pair is not None:
            return self.pair(q, k, *(x[n] for n in self.names if n.startswith("pair.")))
        B, G, columns, width = k.shape
        q = (q * self.scale).reshape(B * G, -1, width)
        into = None if scratch is None else scratch[: q.shape[0] * q.shape[1] * columns].view(q.shape[0], -1, columns)
        return torch.bmm(q, k.reshape(B * G, columns, width).mT, out=into)

    def _mask(self, scores: Tensor, t: Tile) -> Tensor | None:
        """Fill −inf where pairs may not meet; which rows have nothing left, and a placeholder 0 in those.

        Done by value, outside the gradient: a weight of 0 has a gradient of 0 in every selection.
        """
        p = self.problem
        span = p.allow.span(t.start + t.offset, t.stop - 1 + t.offset, p.k.shape[2]).clip(p.k.shape[2])
        parts: list[Tensor] = []
        with torch.no_grad():
            for lo, hi in ((t.lo, span.lo), (max(span.hi, t.lo), t.hi)):
                if hi > lo:
                    scores[..., lo - t.lo : hi - t.lo] = float("-inf")
            for lo, hi in span.open_parts():
                allowed = allowed_in(p.allow, replace(t, lo=lo, hi=hi))
                parts.append(allowed)
                scores[..., lo - t.lo : hi - t.lo].masked_fill_(~allowed, float("-inf"))
            if span.sure_hi > span.sure_lo:
                return None
            # Asked of the rule and not of the scores: a row whose scores overflow to −inf is not a row with nothing allowed.
            empty = scores.new_ones(1, 1, t.stop - t.start, dtype=torch.bool)
            for part in parts:
                empty = empty & ~part.any(-1)
            if not bool(empty.any()):
                return None
            scores.masked_fill_(empty.unsqueeze(-1), 0)
            return empty

    def _refuse(self, weights: Tensor, scores: Tensor, x: dict[str, Tensor], columns: int) -> Tensor:
        refusal = self.problem.refusal
        if refusal is None or refusal.threshold is None:
            return weights
        top = scores[..., :columns].detach().amax(-1)
        # An absolute selection's scores have the bias of their row already.
        top = top + x["row_bias"].detach() if "row_bias" in x and not self.problem.inner.absolute else top
        return weights * (top >= refusal.threshold).unsqueeze(-1)

    def _pieces(self, weights: Tensor, x: dict[str, Tensor], columns: int) -> tuple[Tensor, ...]:
        p = self.problem
        if p.points:
            return (weights[..., :columns],)
        if p.inner.both_sides:
            return weights @ x["k"], weights.mT @ x["q"]
        B, H, rows, _ = weights.shape
        v = x["v"]
        real = weights[..., :columns] if self.slots else weights
        out = torch.matmul(real.reshape(B, v.shape[1], -1, columns), v).view(B, H, rows, v.shape[-1])
        if self.slots and "slot_value" in x:
            out = out + weights[..., columns:] @ x["slot_value"]
        return (out,)

    def places(self, t: Tile, width: int) -> tuple[tuple[slice, slice], ...]:
        """Where the pieces of a tile go in the output's last two dimensions."""
        rows = slice(t.start, t.stop)
        if self.problem.points:
            return ((rows, slice(t.lo, t.hi)),)
        if self.problem.inner.both_sides:
            return (rows, slice(0, width // 2)), (slice(t.lo, t.hi), slice(width // 2, width))
        return ((rows, slice(0, width)),)


def rows_per_tile(p: Problem, pair_width: int | None = None) -> int:
    """How many query rows one tile takes; a geometry that is no dot product holds `pair_width` numbers per pair."""
    B, H, _, _, K, _, _ = p.sizes
    held = B * H * K * (pair_width or 1) * max(4, p.inner.cost)
    return max(1 if pair_width else 16, min(MOST_ROWS, 4 * TILE // max(1, held)))


def out_width(p: Problem) -> int:
    if p.points:
        return p.k.shape[2]
    return 2 * p.q.shape[-1] if p.inner.both_sides else p.v.shape[-1]


def cut(x: Tensor, name: str, t: Tile) -> Tensor:
    match _AXES.get(name, _WHOLE):
        case "rows":
            return x[:, :, t.start : t.stop]
        case "keys":
            return x[:, :, t.lo : t.hi]
        case _:
            return x


def walk(job: Job, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """All rows: the output, the last carry, and the carry at the door of each segment of tiles."""
    whole = dict(zip(job.names, tensors, strict=True))
    if native.takes(job.problem, tensors):
        return native.attend(job.problem, whole, job.scale), None, []
    return _walk(job, whole)


@torch.no_grad()
def _walk(job: Job, whole: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """All tiles in turn."""
    p = job.problem
    segments = job.segments()
    q = whole["q"]
    width = out_width(p)
    out = q.new_zeros(*q.shape[:3], width)
    carry = p.start_carry()
    doors: list[Tensor | None] = []
    most = max((t.stop - t.start) * (t.hi - t.lo) for part in segments for t in part)
    scratch = q.new_empty(q.shape[0] * q.shape[1] * most)
    for part in segments:
        doors.append(carry)
        for t in part:
            if t.hi == t.lo:
                continue
            tile = job.compute(t, {n: cut(x, n, t) for n, x in whole.items()}, carry, scratch=scratch)
            for piece, (rows, columns) in zip(tile.pieces, job.places(t, width), strict=True):
                out[..., rows, columns] += piece
            carry = p.widen(tile.carry) if p.inner.carries else None
    return out, carry, doors


@torch.no_grad()
def _doors(job: Job, part: Sequence[Tile], whole: dict[str, Tensor], door: Tensor | None) -> list[tuple[Tile, Tensor | None]]:
    """The tiles of a segment from the last to the first, each with the carry at its door, which is made again from the first one's."""
    doors = [door]
    for t in part[:-1]:
        carry = doors[-1]
        if t.hi > t.lo and job.problem.inner.carries:
            carry = job.problem.widen(job.compute(t, {n: cut(x, n, t) for n, x in whole.items()}, carry).carry)
        doors.append(carry)
    return list(zip(part, doors, strict=True))[::-1]


class Tiled(torch.autograd.Function):
    """Forward keeps the inputs and, for selections that carry, the carry at some tiles' doors. Backward makes tiles again."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        p = job.problem
        if p.memo is not None and p.memo.again and not p.inner.carries:
            # Backward reads no result, so that any number may stand for it.
            out = tensors[0].new_zeros(1).expand(*p.q.shape[:3], out_width(p))
            carry, ctx.doors = None, []
        else:
            out, carry, ctx.doors = walk(job, tensors)
        ctx.job = job
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if carry is not None:
            ctx.mark_non_differentiable(carry)
        return out, carry

    @staticmethod
    @only_once
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_out = grad_outputs[0]
        job: Job = ctx.job
        whole = dict(zip(job.names, ctx.saved_tensors, strict=True))
        if grad_out is None:
            return (None,) * (1 + len(whole))
        if native.differentiates(job.problem, ctx.saved_tensors):
            found = native.gradients(job.problem, whole, job.scale, grad_out)
            return (
                None,
                *(found.get(n) if need else None for n, need in zip(job.names, ctx.needs_input_grad[1:], strict=True)),
            )
        wanted = [n for n, need in zip(job.names, ctx.needs_input_grad[1:], strict=True) if need]
        grads = {n: torch.zeros_like(whole[n]) for n in wanted}
        grad_carry: Tensor | None = None
        segments = job.segments()
        doors = ctx.doors or [None] * len(segments)
        runs = zip(reversed(segments), reversed(doors), strict=True)
        for t, door in (pair for part, first in runs for pair in _doors(job, part, whole, first)):
            if t.hi == t.lo:
                continue
            parts = {n: cut(x, n, t).detach() for n, x in whole.items()}
            for n in wanted:
                parts[n].requires_grad_()
            carry = None if door is None else door.detach().requires_grad_()
            with torch.enable_grad():
                tile = job.compute(t, parts, carry)
            outs = list(tile.pieces)
            upstream = [grad_out[..., rows, columns] for rows, columns in job.places(t, grad_out.shape[-1])]
            if grad_carry is not None and tile.carry is not None:
                outs.append(tile.carry)
                upstream.append(grad_carry[..., : tile.carry.shape[-1]])
            alive = [(o, g) for o, g in zip(outs, upstream, strict=True) if o.requires_grad]
            if not alive:
                continue
            leaves = [parts[n] for n in wanted] + ([] if carry is None else [carry])
            given = torch.autograd.grad([o for o, _ in alive], leaves, [g for _, g in alive], allow_unused=True)
            for n, g in zip(wanted, given, strict=False):
                if g is not None:
                    cut(grads[n], n, t).add_(g)
            grad_carry = given[-1] if carry is not None else None
        return (None, *(grads.get(n) for n in job.names))


def job_for(p: Problem, lowered: Lowered, need_rows: bool = False) -> tuple[Job, list[Tensor]]:
    """The job of a lowered problem, and its tensors in the order of `job.names`."""
    H = p.q.shape[1]
    k, v = lowered.k, p.v
    if lowered.pair is not None or k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    slots = p.slots(lowered)
    q, bias = lowered.q, lowered.key_bias
    if bias is not None and bias.shape[1] == k.shape[1] and native.why_not(p) is not None:
        # One more dimension in the product is cheaper than one more pass over its scores.
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        k = torch.cat([k, (bias / lowered.scale).unsqueeze(-1).expand(*k.shape[:3], 1)], dim=-1)
        bias = None
    x: dict[str, Tensor] = {"q": q, "k": k, "v": v}
    if bias is not None:
        x["key_bias"] = bias
    thresholds = p.refusal is not None and p.refusal.threshold is not None
    if lowered.row_bias is not None and (
        need_rows or slots or thresholds or p.inner.reads_row_bias(training=trains(lowered.q, k, v))
    ):
        x["row_bias"] = lowered.row_bias()
    if slots:
        x["slot_score"] = torch.stack([s.score for s in slots], dim=-1)
        if any(s.value is not None for s in slots):
            x["slot_value"] = torch.stack([_value(s, v, H) for s in slots], dim=-2)
    table = p.spec.position.table(p.state)
    if table is not None:
        x["table"] = table
    x |= {f"param.{n}": w for n, w in p.parameters().items()}
    x |= {f"pair.{i}": w for i, w in enumerate(lowered.params)}
    null = sum(s.value is None for s in slots)
    return Job(p, lowered.scale, lowered.pair, lowered.q.shape[-1], tuple(x), len(slots), null), list(x.values())


def trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _value(slot: Slot, v: Tensor, H: int) -> Tensor:
    return v.new_zeros(v.shape[0], H, v.shape[-1]) if slot.value is None else slot.value.expand(v.shape[0], H, -1)


def _gather(v: Tensor, index: Tensor) -> Tensor:
    B, H, rows = index.shape
    flat = index.view(B, v.shape[1], -1, 1).expand(-1, -1, -1, v.shape[-1])
    return v.gather(2, flat).view(B, H, rows, v.shape[-1])


def _zero(x: Tensor, empty: Tensor | None) -> Tensor:
    return x if empty is None else x * ~empty.unsqueeze(-1)
