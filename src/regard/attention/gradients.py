"""What the hand-written gradients share: the precision of their tensors, and an error where they are differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..errors import CombinationError


def full_precision(device: str) -> AbstractContextManager[Any]:
    """Inside, autocast rounds nothing: scores and sums have the dtype of their tensors, in backward as in forward."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def only_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward whose result is an error to differentiate.

    torch's own `once_differentiable` leaves out whatever is not on a path from `grad_outputs`: a gradient penalty would be
    computed without attention's share, and nothing would be said.
    """

    @wraps(backward)
    def once(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        with torch.no_grad(), full_precision(next(x for x in saved if x is not None).device.type):
            first = backward(_Context(ctx, saved), *grad_outputs)
        if not torch.is_grad_enabled():
            return first
        grads = [g for g in first if g is not None]
        reads = [x for x in (*saved, *grad_outputs) if x is not None and x.requires_grad]
        ends = iter(_End.apply(len(grads), *grads, *reads))  # pyright: ignore
        return tuple(None if g is None else next(ends) for g in first)

    return once


class _Context:
    """What a backward is given, its tensors taken out once: under `torch.utils.checkpoint` they are not there a second time."""

    def __init__(self, ctx: Any, saved: tuple[Tensor | None, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _End(torch.autograd.Function):
    """The first `count` tensors as they are, and no way back."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise CombinationError(
            "attend has no second derivative: its gradient was asked for one (create_graph=True, a gradient penalty, a Hessian)"
        )


__all__ = ["full_precision", "only_once"]
