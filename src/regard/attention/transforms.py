"""attend inside `torch.func`: `grad`, `vmap`, `jacrev` and their like take the registered operator through these two functions.

An operator's own gradient is not seen there: torch makes it of a function that its transforms refuse. What no kernel has, a derivative
along a direction (`jvp`, `jacfwd`) or a second one (`hessian`), is taken of the plain definition instead, which holds all Q × K scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import CombinationError
from .batched import batched, batched_backward

_functorch: Any = torch._C._functorch  # pyright: ignore


def needs_the_definition() -> bool:
    """True inside a derivative along a direction, or of a derivative."""
    if forward_ad._current_level >= 0:  # pyright: ignore
        return True
    stack = _functorch.get_interpreter_stack() or []
    kinds = [level.key() for level in stack]
    return kinds.count(_functorch.TransformType.Grad) > 1 or _functorch.TransformType.Jvp in kinds


class Call(NamedTuple):
    """What of a packed call is no tensor."""

    numbers: tuple[int, ...]
    line: str
    trains: str
    autocast: str


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(call: Call, q: Tensor, k: Tensor, v: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.regard.attend.default(q, k, v, tensors, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, q, k, v, *tensors = inputs
        out, read, lse, carry = output
        ctx.mark_non_differentiable(read, lse, carry)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out if lse.numel() and not read.numel() else read, lse, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad = grad_outputs[0]
        q, k, v, read, lse, *tensors = ctx.saved_tensors
        given, needs = (q, k, v, *tensors), ctx.needs_input_grad[1:]
        wanted = "".join("1" if n else "0" for x, n in zip(given, needs, strict=True) if x is not None)
        if grad is None or "1" not in wanted:
            return (None,) * (1 + len(needs))
        found = iter(AttendBackward.apply((ctx.call, wanted), grad, q, k, v, read, lse, *tensors))  # pyright: ignore
        return None, *(next(found) if n and x is not None else None for x, n in zip(given, needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        call, q, k, v, *tensors = args

        def again(q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], *rest: Any) -> Any:
            return Attend.apply(Call(*rest), q, k, v, *tensors)

        _, *first = in_dims[:4]
        return batched(again)(info, (*first, list(in_dims[4:])), q, k, v, tensors, *call)


class AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        asked: tuple[Call, str],
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        read: Tensor,
        lse: Tensor,
        *tensors: Tensor,
    ) -> Any:
        call, wanted = asked
        return tuple(torch.ops.regard.attend_backward.default(grad, q, k, v, list(tensors), read, lse, *call, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        return

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise CombinationError("attend has no second derivative of its kernels")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (call, wanted), grad, q, k, v, read, lse, *tensors = args
        dims = list(in_dims[1:])

        def again(
            grad: Tensor, q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], read: Tensor, lse: Tensor, *rest: Any
        ) -> Any:
            *call, wanted = rest
            return AttendBackward.apply((Call(*call), wanted), grad, q, k, v, read, lse, *tensors)

        ordered = (*dims[:4], dims[6:], *dims[4:6])
        outs, out_dims = batched_backward(again)(info, ordered, grad, q, k, v, tensors, read, lse, *call, wanted)
        return tuple(outs), tuple(out_dims)


__all__ = ["Attend", "Call", "needs_the_definition"]
