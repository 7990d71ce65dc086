"""The expected walk of monotonic attention in C, with its gradient; where it does not serve, torch walks in logs.

REGARD_NATIVE=0 turns it off. C checks nothing, so every shape, type and stride is checked here.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compiled import loaded

SOURCE = Path(__file__).with_name("walk.c")
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_KINDS = {torch.float32: "float", torch.float64: "double"}
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    f"walk{back}_{kind}": ([_P] * (7 if back else 5) + [_L, _L, _L, _I], _I)
    for back in ("", "_back")
    for kind in _KINDS.values()
}
MOST = 1 << 40


@cache
def library() -> tuple[Any, str | None]:
    """The compiled functions, or None and why."""
    return loaded(SOURCE, SIGNATURES)


def walked(scores: Tensor, before: Tensor, empty: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Weights like scores (B, H, R, C), and where the last row stops, like before (B, H, C). None where C does not serve them.

    `empty` (#B, #H, R) are rows that are not there: they weigh nothing, and leave the reader where it stood.
    """
    B, H, R, C = scores.shape
    if not (_plain(scores) and _plain(before)) or before.dtype != scores.dtype or before.shape != (B, H, C):
        return None
    if not 0 < B * H * R * C < MOST or library()[0] is None:
        return None
    gone = scores.new_zeros(B, H, R, dtype=torch.uint8)
    if type(gone) is not Tensor:
        return None
    if empty is not None:
        gone += empty
    if torch.is_grad_enabled() and (scores.requires_grad or before.requires_grad):
        return _Walk.apply(scores, before, gone)  # pyright: ignore
    return _forward(scores, before, gone)


def _forward(scores: Tensor, before: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    scores, before = scores.contiguous(), before.contiguous()
    weights, after = torch.empty_like(scores), torch.empty_like(before)
    _call("walk", scores, [scores, before, gone, weights, after])
    return weights, after


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, before: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
        scores, before = scores.contiguous(), before.contiguous()
        ctx.save_for_backward(scores, before, gone)
        return _forward(scores, before, gone)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, before, gone = ctx.saved_tensors
        d_weights, d_after = (g.contiguous() for g in grads)
        d_scores, d_before = torch.empty_like(scores), torch.empty_like(before)
        _call("walk_back", scores, [scores, before, gone, d_weights, d_after, d_scores, d_before])
        return d_scores, d_before, None


def _call(name: str, scores: Tensor, tensors: list[Tensor]) -> None:
    B, H, R, C = scores.shape
    f = getattr(library()[0], f"{name}_{_KINDS[scores.dtype]}")
    if f(*(x.data_ptr() for x in tensors), B * H, R, C, torch.get_num_threads()):
        raise MemoryError(f"no memory is left for rows of {C} keys")


def _plain(x: Tensor) -> bool:
    """Float32 or float64 in this process's own memory that nobody traces or maps."""
    if type(x) is not Tensor or x.dtype not in _KINDS or not x.is_cpu or x.layout is not torch.strided or x.is_neg():
        return False
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x))  # pyright: ignore
