"""What `vmap` asks of the registered operators: one more axis of batch on some of their tensors.

Rows of a batch never meet, so the new axis is folded into them where every tensor that has it can have rows. Numbers per head and
tables cannot: then each of the batch runs by itself, as torch does for whatever it knows no rule for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .packed import lines

Dims = Sequence[Any]
Rule = Callable[..., tuple[Any, Any]]


def batched(op: Callable[..., tuple[Tensor, ...]]) -> Rule:
    """The rule of `attend(q, k, v, tensors, numbers, line, …)`."""

    def rule(info: Any, in_dims: Dims, *given: Any) -> tuple[Any, Any]:
        q, k, v, tensors, numbers, line, *rest = given
        dims, N = [*in_dims[:3], *(in_dims[3] or [None] * len(tensors))], info.batch_size
        flat = [q, k, v, *tensors]
        rows = _folded(flat, dims, ["Rows"] * 3 + _owners(line), N)
        if rows is None:
            results = [op(*_restored(one), numbers, line, *rest) for one in _each(flat, dims, N)]
            outs = tuple(map(torch.stack, zip(*results, strict=True)))
        else:
            outs = tuple(_unfolded(x, N) for x in op(*_restored(rows), numbers, line, *rest))
        return outs, (0,) * len(outs)

    return rule


def batched_backward(op: Callable[..., list[Tensor]]) -> Rule:
    """The rule of `attend_backward(grad, q, k, v, tensors, read, lse, numbers, line, …, wanted)`."""

    def rule(info: Any, in_dims: Dims, *given: Any) -> tuple[Any, Any]:
        grad, q, k, v, tensors, read, lse, numbers, line, *rest = given
        N = info.batch_size
        first, last = list(in_dims[:4]), list(in_dims[5:7])
        dims = [*first, *last, *(in_dims[4] or [None] * len(tensors))]
        flat = [grad, q, k, v, read, lse, *tensors]
        # What all rows share has a gradient for each of the new batch, and not one for all of it.
        shared = "1" in rest[-1][2 if v is None else 3 :]
        rows = None if shared else _folded(flat, dims, ["Rows"] * 4 + ["Kept"] * 2 + _owners(line), N)

        def one(x: Sequence[Any]) -> list[Tensor]:
            return op(x[0], *_restored((*x[1:4], *x[6:])), x[4], x[5], numbers, line, *rest)

        if rows is None:
            outs = list(map(torch.stack, zip(*(one(x) for x in _each(flat, dims, N)), strict=True)))
        else:
            outs = [_unfolded(x, N) for x in one(rows)]
        return outs, [0] * len(outs)

    return rule


def one_by_one(op: Callable[..., Sequence[Tensor]]) -> Rule:
    """The rule of an operator whose tensors have no rows to be folded into."""

    def rule(info: Any, in_dims: Dims, *given: Any) -> tuple[Any, Any]:
        def at(x: Any, d: Any, n: int) -> Any:
            if isinstance(d, list | tuple):
                return [at(y, e, n) for y, e in zip(x, d, strict=True)]
            return x if d is None else x.select(d, n)

        results = [op(*(at(x, d, n) for x, d in zip(given, in_dims, strict=True))) for n in range(info.batch_size)]
        outs = list(map(torch.stack, zip(*results, strict=True)))
        return (outs, [0] * len(outs)) if isinstance(results[0], list) else (tuple(outs), (0,) * len(outs))

    return rule


def _owners(line: str) -> list[str]:
    return list(lines(line).owners)


def _restored(flat: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, *tensors = flat
    return q, k, v, tensors


def _each(flat: Sequence[Tensor | None], dims: Dims, N: int) -> list[list[Tensor | None]]:
    return [[x if x is None or d is None else x.select(d, n) for x, d in zip(flat, dims, strict=True)] for n in range(N)]


def _folded(flat: Sequence[Tensor | None], dims: Dims, owners: Sequence[str], N: int) -> list[Tensor | None] | None:
    """The same call with the new axis among its rows; None where a tensor that has the axis can have no rows."""
    q = flat[owners.index("Rows")]
    assert q is not None
    B = q.shape[0] if dims[0] is None else q.movedim(dims[0], 0).shape[1]
    folded: list[Tensor | None] = []
    for x, d, owner in zip(flat, dims, owners, strict=True):
        if x is None:
            folded.append(None)
            continue
        ndim = x.ndim - (d is not None)
        if owner == "Kept" and ndim == 1:
            # Nothing was kept, for none of the batch.
            folded.append(x if d is None else x.select(d, 0))
            continue
        rows = _has_rows(owner, ndim)
        if d is None and (not rows or (x.shape[0] == 1 and owner not in ("Rows", "Kept"))):
            folded.append(x)
        elif rows is None:
            return None
        else:
            whole = x.unsqueeze(0) if d is None else x.movedim(d, 0)
            whole = whole if rows else whole.unsqueeze(1)
            folded.append(whole.expand(N, B, *whole.shape[2:]).reshape(N * B, *whole.shape[2:]))
    return folded


def _has_rows(owner: str, ndim: int) -> bool | None:
    """True where the first axis of a tensor is the batch, False where it may be given one, None where all rows share it."""
    match owner:
        case "Rows" | "Kept" | "carry" | "Padding" | "Mask":
            return True
        case "trace":
            return ndim == 4
        case "self.s" | "Document":
            return ndim == 2
        case "trace.left" | "trace.right":
            return True if ndim == 4 else None
        case _:
            return None


def _unfolded(x: Tensor, N: int) -> Tensor:
    """An empty result is one that is not kept, and there is none for each."""
    return x.unflatten(0, (N, -1)) if x.numel() else x.new_empty(N, *x.shape)
