"""Softmax through the fused kernels.

Three routes, from the plainest to the most general, all exact:

    sdpa     torch's own call, when scores are a bare dot product under no rule or the causal one
    flash    torch's CPU flash kernel with a bias per key, which a public call refuses together with causality
    chunks   the same kernel over chunks of query rows, whose masks and position biases are made chunk by chunk or, where they
             depend on how far apart two tokens stand, once for a single row (`band`)

The kernel returns the log-sum-exp of every row, and we differentiate through it: one more key with a score and a value, the
null slot of `abstain` or the self token, then needs no longer key tensor but a gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.base import Lowered
from . import band
from .allow import All, Causal, Tile, allowed_in
from .gradients import full_precision, only_once
from .private import OPERATOR
from .problem import Problem

_kernel, _kernel_backward = OPERATOR.forward, OPERATOR.backward

CHUNK = 1 << 21
"""Pairs per chunk of mask."""
FEW = 64
"""Keys up to which the kernel may give zeros for a row of NaN: those that do not fill a vector of the widest processor."""


def simple_rule(p: Problem) -> bool:
    """True when the kernel knows the rule itself: everything, or causal with queries and keys aligned at the start."""
    Q, K = p.q.shape[2], p.k.shape[2]
    sees_all = p.offset >= K - 1 if Q == 1 else p.offset == 0
    return isinstance(p.allow, All) or (isinstance(p.allow, Causal) and sees_all)


def is_causal(p: Problem) -> bool:
    return isinstance(p.allow, Causal) and p.q.shape[2] > 1


def sdpa(p: Problem, low: Lowered) -> tuple[Tensor, Tensor]:
    """torch's own call: the result, twice, since nothing is added to what the kernel gave. One query meets every key, so its group's heads can stand as rows and no key is repeated."""
    _, H, G, Q, _, D, E = p.sizes
    if p.memo is not None and p.q.device.type == "cpu" and not OPERATOR.missing:
        return _remembered(p, low)
    # With any other layout torch falls back to a path that writes all Q × K scores.
    q, k, v = adjacent(low.q), adjacent(low.k), adjacent(_padded(p.v, D))
    if Q == 1:
        out = one_row(q, k, v, low.scale)[..., :E]
        return out, out
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal(p), scale=low.scale, enable_gqa=H != G)[..., :E]
    return out, out


def _remembered(p: Problem, low: Lowered) -> tuple[Tensor, Tensor]:
    """The same by the kernel itself, which gives what backward begins with; under autocast as torch's own call rounds."""
    qkv = (low.q, low.k, p.v)
    if torch.is_autocast_enabled("cpu") and p.q.dtype != torch.float64:
        qkv = tuple(x.to(torch.get_autocast_dtype("cpu")) for x in qkv)
    with full_precision("cpu"):
        out, _ = Flash.apply(*qkv, None, low.scale, Cover(p, None, 1.0))  # pyright: ignore
    return out, out


def one_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query per head against every key. Scores that are NaN, or all overflow, give NaN and never zeros among few keys."""
    (B, H, _, D), G, K = q.shape, k.shape[1], k.shape[2]
    q = q if H == G else q.reshape(B, G, H // G, D)
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    # Every text begins among few keys, or with a prompt that `run` looks at: longer ones need not pay for the look.
    if K <= FEW and out.is_cpu and may_hide(out, Lowered(q, k, scale)):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = (torch.softmax(q.to(wide) @ k.to(wide).mT * scale, -1) @ v.to(wide)).to(q.dtype)
    return out if H == G else out.view(B, H, 1, -1)


def adjacent(x: Tensor) -> Tensor:
    """x itself, or a copy whose rows are adjacent numbers: the kernel never asks for the last stride, and reads as if it were 1.

    A row stride below the width (expanded or overlapping rows) is copied too: BLAS does not promise to take it.
    """
    row, last = x.stride()[-2:]
    return x if last == 1 and row >= x.shape[-1] else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Cover:
    """The rule and the position bias of a problem, given chunk by chunk as one additive mask."""

    problem: Problem
    table: Tensor | None
    temperature: float

    def whole(self) -> bool:
        return simple_rule(self.problem) and not self.problem.spec.position.biases

    @cached_property
    def band(self) -> band.Band | None:
        """The masks of all chunks, where keys then stand in reverse order; None where each chunk has its own."""
        p = self.problem
        return band.band(p, p.q, self.table, self.temperature) if band.serves(p) else None

    def order(self, x: Tensor) -> Tensor:
        """Keys (B, H, K, …) in the order of the masks, or back."""
        return x if self.band is None else x.flip(2)

    def keys(self, t: Tile) -> slice:
        """Where the keys of a chunk stand in that order."""
        K = self.problem.k.shape[2]
        return slice(t.lo, t.hi) if self.band is None else slice(K - t.hi, K - t.lo)

    def chunks(self) -> Iterator[Tile]:
        p = self.problem
        _, H, _, Q, K, _, _ = p.sizes
        heads = H if p.spec.position.biases else 1
        rows = max(16, min(512, CHUNK // max(1, K * heads)))
        rows = Q if self.whole() else rows if self.band is None else band.ROWS
        for start in range(0, Q, rows):
            stop = min(start + rows, Q)
            span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
            yield Tile(start, stop, span.lo, span.hi, p.offset, p.q.device)

    def mask(self, t: Tile, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The additive mask of a chunk (None: nothing to add), and which rows have nothing allowed."""
        p = self.problem
        if self.whole():
            return None, None
        if self.band is not None:
            return self.band.mask(t), None
        bias: Tensor | None = None
        if p.spec.position.biases:
            bias = p.spec.position.bias(t.q_at().squeeze(-1), t.k_at(), like, self.table).unsqueeze(0)
            bias = bias if self.temperature == 1.0 else bias / self.temperature
        span = p.allow.span(t.start + t.offset, t.stop - 1 + t.offset, p.k.shape[2]).clip(p.k.shape[2])
        if (span.sure_lo, span.sure_hi) == (t.lo, t.hi):
            return bias, None
        allowed = allowed_in(p.allow, t)
        empty = None
        if span.sure_hi <= span.sure_lo:
            empty = ~allowed.expand(*allowed.shape[:2], t.stop - t.start, t.hi - t.lo).any(-1)
            # A row of −inf would be NaN in the kernel: it meets everything there and is set to zero after.
            allowed = allowed | empty.unsqueeze(-1)
            empty = empty if bool(empty.any()) else None
        bias = bias if bias is not None else like.new_zeros(1)
        return torch.where(allowed, bias, float("-inf")), empty


def computed(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, scale: float, cover: Cover) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of every row."""
    H = q.shape[1]
    E, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    qw, kw, vw = _wide(q, width, H), cover.order(_wide(k, width, H)), cover.order(_wide(v, width, H))
    bias = None if key_bias is None else cover.order(_heads(key_bias, H)).unsqueeze(-2)
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for t in cover.chunks():
        rows, keys = slice(t.start, t.stop), cover.keys(t)
        if t.hi == t.lo:
            outs.append(q.new_zeros(*q.shape[:2], t.stop - t.start, E))
            sums.append(q.new_full(outs[-1].shape[:3], float("-inf")))
            continue
        mask, empty = cover.mask(t, q)
        mask = _plus(mask, bias, keys)
        o, m = _kernel(
            qw[:, :, rows], kw[:, :, keys], vw[:, :, keys], 0.0, _causal(cover), attn_mask=_like(mask, q), scale=scale
        )
        o, m = o[..., :E], m.view(o.shape[:3])
        if empty is not None:
            o, m = o.masked_fill(empty.unsqueeze(-1), 0), m.masked_fill(empty, float("-inf"))
        outs.append(o)
        sums.append(m)
    # One copy at the end: each is a region of its own for the threads.
    out, lse = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in (outs, sums))
    if (memo := cover.problem.memo) is not None:
        memo.read, memo.lse = out, lse
    return out, lse


class Flash(torch.autograd.Function):
    """out, lse = softmax attention under a cover, with gradients of q, k, v, the key bias, and through lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, scale: float, cover: Cover
    ) -> tuple[Tensor, Tensor]:
        memo = cover.problem.memo
        if memo is not None and memo.again and memo.read is not None and memo.lse is not None:
            out, lse = memo.read.to(q.dtype).detach(), memo.lse.detach()
        else:
            out, lse = computed(q, k, v, key_bias, scale, cover)
        return Flash.kept(ctx, (q, k, v, key_bias, out, lse), scale, cover)

    @staticmethod
    def kept(ctx: Any, saved: tuple[Tensor | None, ...], scale: float, cover: Cover) -> Any:
        ctx.scale, ctx.cover = scale, cover
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return saved[-2:]

    @staticmethod
    @only_once
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse = grad_outputs
        q, k, v, key_bias, out, lse = ctx.saved_tensors
        cover: Cover = ctx.cover
        if d_out is None and d_lse is None:
            return (None,) * 6
        (B, H, _, D), G, K, E = q.shape, k.shape[1], k.shape[2], v.shape[-1]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        bias_grad = key_bias is not None and ctx.needs_input_grad[3]
        bias = None if key_bias is None else cover.order(_heads(key_bias, H)).unsqueeze(-2)
        widened = bias_grad or d_lse is not None
        width = -(-(max(D, E) + 1) // 8) * 8 if widened else max(D, E)
        qw, gw = _wide(q, width, H), _wide(d_out, width, H)
        kw, vw = cover.order(_wide(k, width, H)), cover.order(_wide(v, width, H))
        if widened:
            # The kernel gives no gradient of a bias, but it gives that of k: one more dimension, 1 in q and the bias in k, has
            # it. The last step of a softmax's gradient, −dO·O per row, goes into one more dimension of v in the same way: the
            # gradient of lse can join it there, and the output need not be widened.
            share = torch.linalg.vecdot(d_out, out)
            vw[..., E] = 1
            gw[..., E] = -share if d_lse is None else d_lse - share
            ow = q.new_zeros(1, 1, 1, width).expand(*q.shape[:3], width)
        else:
            ow = _wide(out, width, H)
        if bias is not None and bias_grad:
            qw[..., D] = 1
            kw[..., D] = bias.squeeze(-2) / ctx.scale
            bias = None
        sums: list[Tensor] = []
        for t in cover.chunks():
            if t.hi == t.lo:
                continue
            rows, keys = slice(t.start, t.stop), cover.keys(t)
            mask, empty = cover.mask(t, q)
            mask = _plus(mask, bias, keys)
            g, m = gw[:, :, rows], lse[:, :, rows]
            if empty is not None:
                # exp(score − ∞) = 0 whatever the score; any finite number could overflow to ∞, and 0 · ∞ is NaN.
                g, m = g.masked_fill(empty.unsqueeze(-1), 0), m.masked_fill(empty, float("inf"))
            a, b, c = _kernel_backward(
                g, qw[:, :, rows], kw[:, :, keys], vw[:, :, keys], ow[:, :, rows], m, 0.0, _causal(cover),
                attn_mask=_full(mask, q, t), scale=ctx.scale,
            )  # fmt: skip
            if cover.whole() and t.hi - t.lo == K:
                sums = [a, b, c]
                break
            # The first queries of a causal call may stand before most of the keys, which then are not in its only chunk either.
            sums = sums or [torch.zeros_like(x) for x in (qw, kw, vw)]
            for x, part, piece in zip(sums, (rows, keys, keys), (a, b, c), strict=True):
                x[:, :, part] += piece
        dq, dk, dv = sums or [torch.zeros_like(x) for x in (qw, kw, vw)]
        dk, dv = cover.order(dk), cover.order(dv)
        d_bias = None
        if key_bias is not None and bias_grad:
            d_bias = dk[..., D] / ctx.scale
            d_bias = d_bias.view(B, key_bias.shape[1], -1, K).sum(2).sum_to_size(key_bias.shape)
        dk, dv = (x if G == H else x.view(B, G, H // G, K, -1).sum(2) for x in (dk, dv))
        return dq[..., :D], dk[..., :D], dv[..., :E], d_bias, None, None


def flash(p: Problem, low: Lowered, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Attention under any rule, and what the kernel gave before the slots were mixed in.

    A slot has a share of the whole, which the log-sum-exp tells.
    """
    table = p.spec.position.table(p.state)
    cover = Cover(p, None if table is None else table.detach(), 1.0 if isinstance(temperature, Tensor) else temperature)
    v = p.v if p.v.shape[1] == low.k.shape[1] else p.v.repeat_interleave(low.k.shape[1] // p.v.shape[1], dim=1)
    inputs = low.q, low.k, v, low.key_bias
    # Where nothing trains, a node of autograd is a good part of a small call.
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    read, lse = Flash.apply(*inputs, low.scale, cover) if trains else computed(*inputs, low.scale, cover)  # pyright: ignore
    out = read
    for slot in p.slots(low, temperature):
        met = lse > float("-inf")
        score = slot.score if low.row_bias is None else slot.score - low.row_bias()
        safe = torch.where(met, lse, 0)
        real = torch.sigmoid(safe - score).unsqueeze(-1)
        out = out * real
        if slot.value is not None:
            out = out + (1 - real) * slot.value.unsqueeze(-2)
        out = out * met.unsqueeze(-1)
        lse = torch.where(met, torch.logaddexp(safe, score), lse)
    return out, read


def may_hide(read: Tensor, low: Lowered) -> bool:
    """True when a row of zeros may stand for scores that are NaN or overflow: the kernel gives zeros where no score counts.

    A first column without zeros rules it out, and so do inputs too small to overflow: the usual call pays one small pass.
    """
    read = read.detach()
    first = read[..., 0]
    if int(torch.count_nonzero(first)) == first.numel() or bool((read != 0).any(-1).all()):
        return False
    reach = _largest(low.q) * _largest(low.k) * low.q.shape[-1] * low.scale
    reach += 0.0 if low.key_bias is None else _largest(low.key_bias)
    # Sums are float32 for half precision too. NaN compares as False.
    return not reach < torch.finfo(torch.promote_types(read.dtype, torch.float32)).max / 4


def _largest(x: Tensor) -> float:
    least, most = x.detach().aminmax()
    return float(torch.maximum(-least, most))


def _wide(x: Tensor, width: int, heads: int) -> Tensor:
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
    return adjacent(_padded(x, width))


def _padded(x: Tensor, width: int) -> Tensor:
    """At least `width` wide. F.pad keeps the order of x in memory, so the result need not be adjacent."""
    return x if x.shape[-1] >= width else F.pad(x, (0, width - x.shape[-1]))


def _heads(bias: Tensor, heads: int) -> Tensor:
    return bias if bias.shape[1] == heads else bias.repeat_interleave(heads // bias.shape[1], dim=1)


def _plus(mask: Tensor | None, bias: Tensor | None, keys: slice) -> Tensor | None:
    if bias is None:
        return mask
    bias = bias[..., keys]
    return bias if mask is None else mask + bias


def _like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(q.dtype)


def _full(mask: Tensor | None, q: Tensor, t: Tile) -> Tensor | None:
    return None if mask is None else mask.to(q.dtype).expand(-1, -1, t.stop - t.start, -1)


def _causal(cover: Cover) -> bool:
    return cover.whole() and is_causal(cover.problem)
