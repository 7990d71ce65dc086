"""A metric's map of the keys in one pass of C: x M, x + x M and the dot of both, where torch takes three passes and fresh memory.

REGARD_NATIVE=0 turns it off; where it does not serve, `bent` gives None and torch's own calls do the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compiled import loaded

SOURCE = Path(__file__).with_name("bend.c")
WIDEST = 256
"""Above it a matrix leaves the cache next to the core, and torch's product is as fast."""
MOST = 1 << 40
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "bend": ([_P, _P, _P, _L, _P, _P, *[_L] * 4, ctypes.c_float, _I, _I], _I),
}


@cache
def library() -> tuple[Any, str | None]:
    """The compiled functions, or None and why."""
    return loaded(SOURCE, SIGNATURES)


def bent(x: Tensor, matrix: Tensor, half: float, onto: bool) -> tuple[Tensor, Tensor] | None:
    """y = x · matrix: x + y or y alone (B, G, K, D), and half · ⟨x, y⟩ (B, G, K). None where C does not serve them.

    x (B, G, K, D); matrix (#B, G, D, D), symmetric.
    """
    if not (_plain(x) and _plain(matrix)) or x.ndim != 4 or matrix.ndim not in (3, 4):
        return None
    B, G, K, D = x.shape
    batches = 1 if matrix.ndim == 3 else matrix.shape[0]
    if matrix.shape[-3:] != (G, D, D) or batches not in (1, B) or not 0 < D <= WIDEST or not 0 < B * G * K * D < MOST:
        return None
    c = library()[0]
    if c is None:
        return None
    if x.stride(3) != 1 or x.data_ptr() & 3:
        x = x.clone(memory_format=torch.contiguous_format)
    matrix = matrix.contiguous()
    out, bias = x.new_empty(B, G, K, D), x.new_empty(B, G, K)
    if type(out) is not Tensor:
        return None
    strides = (_L * 3)(*x.stride()[:3])
    failed = c.bend(
        x.data_ptr(), strides, matrix.data_ptr(), batches, out.data_ptr(), bias.data_ptr(), B, G, K, D, half, onto,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory is left for matrices of {tuple(matrix.shape)}")
    return out, bias


def _plain(x: Tensor) -> bool:
    """Float32 in this process's own memory that nobody differentiates, traces or maps."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.dtype is not torch.float32 or not x.is_cpu:
        return False
    if x.layout is not torch.strided or x.is_neg():
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        return False
    return not (x.requires_grad and torch.is_grad_enabled())
