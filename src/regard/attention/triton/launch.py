"""The kernels behind one differentiable call each. Imports triton, so it is imported where a kernel runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...geometry.base import Lowered
from ...selection.base import Kernel
from ..gradients import only_once
from ..problem import Problem
from . import kernels
from .choice import interpreted
from .rule import Range, ranged

# Their arguments are typed by triton's compiler, not by Python.
_kernels: Any = kernels
ROWS, KEYS = 64, 64
"""Of a block, where heads are narrow. Never tuned on a device."""
_STEPS = 100


@dataclass(frozen=True, eq=False)
class Job:
    """What a kernel reads beside q, k, v and the bias."""

    kernel: Kernel
    rule: Range
    scale: float
    offset: int
    position: Tensor | None
    floor: Tensor | None
    alpha: Tensor
    """(H): entmax's own, or the sharpness of a softmax."""
    closed: int
    """Which of the kernels' row maps: softmax, sparsemax, entmax at 1.5, or any."""
    learned: bool

    def grid(self, length: int, block: int, heads: int) -> tuple[int, int]:
        """Programs: heads first, of which a device takes billions, then blocks, of which it takes thousands."""
        return heads, -(-length // block)


def attend(p: Problem, low: Lowered, dtype: torch.dtype) -> Tensor:
    """The result of a problem that a kernel takes; products in `dtype`, sums in float32 or float64."""
    made = p.kernel
    assert made is not None
    real = torch.promote_types(dtype, torch.float32)
    H, G = low.q.shape[1], low.k.shape[1]
    q, k, v = (x.to(dtype) for x in (low.q, low.k, p.v))
    v = v if v.shape[1] == G else v.repeat_interleave(G // v.shape[1], dim=1)
    alpha, closed = _alpha(p, made, H, real)
    job = Job(
        made, ranged(p), low.scale, p.offset, p.bias_by_distance(real), _floor(made, low, real), alpha.detach(), closed,
        made.alpha == "learned",
    )  # fmt: skip
    bias = None if low.key_bias is None else low.key_bias.to(real).expand(q.shape[0], -1, -1)
    out, most = Attend.apply(job, q, k, v, bias, alpha)  # pyright: ignore
    return _refused(p, made, low, out, most)


def _alpha(p: Problem, made: Kernel, H: int, real: torch.dtype) -> tuple[Tensor, int]:
    """(H), and which row map it makes: 0 softmax, 1 sparsemax, 2 entmax at 1.5, 3 entmax."""
    if made.alpha == "learned":
        return p.parameters()["alpha"].to(real), 3
    closed = {2.0: 1, 1.5: 2}.get(float(made.alpha), 3) if made.kind == "entmax" else 0
    return torch.full((H,), float(made.alpha), dtype=real, device=p.q.device), closed


def _row_bias(low: Lowered, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if low.row_bias is None else low.row_bias().detach().to(like.dtype)


@torch.no_grad()
def _floor(made: Kernel, low: Lowered, real: torch.dtype) -> Tensor | None:
    """(B, H, Q): the least of the kernel's scores, which lack the row's bias, that is accepted."""
    if made.kind != "relaxed" or made.least is None:
        return None
    return (made.least - _row_bias(low, low.q[..., 0].to(real))).contiguous()


def _refused(p: Problem, made: Kernel, low: Lowered, out: Tensor, most: Tensor) -> Tensor:
    """Rows whose largest score is too low give zeros: by `abstain(threshold)`, or by the selection's own bound."""
    least = p.refusal.threshold if p.refusal is not None else made.least if made.kind == "picks" else None
    if least is None:
        return out
    return out.masked_fill((most + _row_bias(low, most) < least).unsqueeze(-1), 0)


def _there(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


class Attend(torch.autograd.Function):
    """out, and the largest score of each row (0 where there is none), which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        with _there(q):
            return Attend._forward(ctx, job, q, k, v, bias)

    @staticmethod
    def _forward(ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        bias = None if bias is None else bias.contiguous()
        (B, H, Q, _), G, E = q.shape, k.shape[1], v.shape[-1]
        real = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(B, H, Q, E)
        most, tau, total = (q.new_empty(B, H, Q, dtype=real) for _ in range(3))
        sizes, flags = _common(job, q, k, v, bias)
        block = _block(q, v)
        grid = job.grid(Q, block["M"], B * H)
        made, kept = job.kernel, list[Tensor]()
        if made.kind == "entmax":
            _kernels.entmax_forward[grid](
                q, k, v, out, most, tau, total, job.alpha, job.rule.lo, job.rule.hi, *_extras(job, bias, q), *sizes,
                1e-6 if real == torch.float32 else 1e-13, _STEPS, **flags, KIND=job.closed, **block,
            )  # fmt: skip
        elif made.kind == "topk":
            keep = min(made.keep, k.shape[2])
            index = q.new_empty(B, H, Q, keep, dtype=torch.int32)
            weight = q.new_empty(B, H, Q, keep, dtype=real)
            _kernels.topk_forward[grid](
                q, k, v, out, most, index, weight, job.rule.lo, job.rule.hi, *_extras(job, bias, q), *sizes,
                **flags, KEEP=keep, ROOM=1 << (keep - 1).bit_length(), **block,
            )  # fmt: skip
            kept = [index, weight]
        else:
            index = q.new_empty(B, H, Q, dtype=torch.int32)
            _kernels.softmax_forward[grid](
                q, k, v, out, most, tau, index, job.alpha, job.rule.lo, job.rule.hi, *_extras(job, bias, q), *sizes,
                **flags, PICKS=made.kind == "picks", RIGHT=made.right, **block,
            )  # fmt: skip
            total.fill_(1)
            kept = [index]
        ctx.job, ctx.groups = job, G
        ctx.save_for_backward(q, k, v, bias, most, tau, total, *kept)
        ctx.mark_non_differentiable(most)
        ctx.set_materialize_grads(False)
        return out, most

    @staticmethod
    @only_once
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad_outputs[0] is None:
            return (None,) * 6
        with _there(grad_outputs[0]):
            return Attend._backward(ctx, grad_outputs[0])

    @staticmethod
    def _backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        q, k, v, bias, most, tau, total, *kept = ctx.saved_tensors
        grad = given.to(q.dtype).contiguous()
        (B, H, Q, _), (_, G, K, _) = q.shape, k.shape
        real = most.dtype
        block = _block(q, v)
        rows, by_keys = job.grid(Q, block["M"], B * H), job.grid(K, block["N"], B * G)
        dq = torch.empty_like(q)
        dbias = None if bias is None else most.new_zeros(B, H, K)
        dalpha = None
        if job.kernel.kind == "topk":
            dk, dv = torch.zeros_like(k, dtype=real), torch.zeros_like(v, dtype=real)
            block = {n: block[n] for n in ("M", "WIDE", "VALUE", "REAL", "enable_fp_fusion")}
            _kernels.topk_backward[rows](
                q, k, v, grad, *kept, dq, dk, dv, q if dbias is None else dbias,
                job.scale, Q, K, H, G, q.shape[-1], v.shape[-1], BIAS=bias is not None, KEEP=kept[0].shape[-1], **block,
            )  # fmt: skip
        else:
            sizes, flags = _common(job, q, k, v, bias)
            extras, picks = _extras(job, bias, q), job.kernel.kind == "picks"
            mean = torch.empty_like(most)
            by_row = torch.empty_like(most) if job.learned else mean
            saved = (q, k, v, grad, most, tau, total, job.alpha, job.rule.lo, job.rule.hi)
            _kernels.backward_rows[rows](
                *saved, dq, mean, by_row, *extras, *sizes, **flags, KIND=job.closed, LEARNED=job.learned, **block
            )
            dk, dv = torch.empty_like(k), torch.zeros_like(v, dtype=real) if picks else torch.empty_like(v)
            _kernels.backward_keys[by_keys](
                *saved, mean, dk, dv, q if dbias is None else dbias, *extras, *sizes,
                **flags, KIND=job.closed, PICKS=picks, **block,
            )  # fmt: skip
            if picks:
                # The value that was read gets the gradient; a row that read none has index −1.
                index = kept[0].view(B, G, -1, 1).long()
                rows_given = grad.view(B, G, -1, v.shape[-1]).to(real).masked_fill(index < 0, 0)
                dv.scatter_add_(2, index.clamp_min(0).expand_as(rows_given), rows_given)
            dalpha = by_row.sum((0, 2)) if job.learned else None
        if dbias is not None and bias is not None:
            dbias = dbias.view(B, bias.shape[1], -1, K).sum(2)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), dbias, dalpha


def _block(q: Tensor, v: Tensor) -> dict[str, Any]:
    D, E = q.shape[-1], v.shape[-1]
    wide, value = (max(16, 1 << (n - 1).bit_length()) for n in (D, E))
    real = _kernels.tl.float64 if q.dtype == torch.float64 else _kernels.tl.float32
    # Wider rows in shorter blocks: what a program shares has to fit where the smallest devices keep 100 KB.
    bytes_held = max(wide, value) * q.element_size()
    short = 1 if bytes_held <= 128 else 2 if bytes_held <= 512 else 4
    return {
        "M": max(16, ROWS // short), "N": max(16, KEYS // short), "WIDE": wide, "VALUE": value, "REAL": real,
        "WIDEN": interpreted() and q.dtype == torch.bfloat16,
        # A score that is made again has to be the same number.
        "enable_fp_fusion": False,
    }  # fmt: skip


def _common(job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """The numbers and switches that all passes over the scores read, in their order."""
    (_, H, Q, D), (_, G, K, _), E = q.shape, k.shape, v.shape[-1]
    rule, mask = job.rule, _mask(job, q, K)
    ids_step = 0 if rule.ids is None or rule.ids.ndim == 1 or rule.ids.shape[0] == 1 else K
    sizes = (
        job.scale, Q, K, H, G, D, E, job.offset, Q if rule.lo.shape[0] > 1 else 0,
        0 if bias is None else bias.shape[1], 0 if bias is None else bias.shape[1] * K, ids_step,
        *((0, 0, 0, 0) if mask is None else mask.stride()),
    )  # fmt: skip
    flags = {
        "BIAS": bias is not None, "POSITION": job.position is not None, "MASK": mask is not None, "IDS": rule.ids is not None,
        "FLOOR": job.floor is not None,
    }  # fmt: skip
    return sizes, flags


def _mask(job: Job, q: Tensor, K: int) -> Tensor | None:
    mask = job.rule.mask
    return None if mask is None else mask.expand(*q.shape[:3], K)


def _extras(job: Job, bias: Tensor | None, q: Tensor) -> tuple[Tensor, ...]:
    """Pointers that a switch may leave unread; q stands for what is not there."""
    mask, ids = job.rule.mask, job.rule.ids
    # The strides are those of the expanded mask, over the same numbers.
    mask = None if mask is None else mask.view(torch.uint8)
    given = (bias, job.position, mask, None if ids is None else ids.contiguous(), job.floor)
    return tuple(q if x is None else x for x in given)


__all__ = ["Attend", "Job", "attend"]
