"""Products in C, compiled on the first use where a compiler is found; everything runs without them, only slower.

torch's products are made for many rows. For one to eight, on AVX2, these read weights at the memory's speed from one core
already, take int8 weights without rounding activations to bytes, and cost 3 µs to call. REGARD_NATIVE=0 turns them off, and
`reason()` says why they are not used. C checks nothing, so every shape, type and stride is checked here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from .compiled import compiled

ROWS = 8

_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "product": ([_P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _I, _I], _I),
    "checksum": ([_P, _L, _I], ctypes.c_uint64),
    "rms": ([_P, _P, _D, _P, _L, _L], None),
    "swiglu": ([_P, _P, _L, _L], None),
    "turn": ([_P, _P, _P, _L, _L, _L, _L, _L], None),
    "bend": ([_P, _P, _P, _P, _P, _P, _D, _P, _P, _P, *[_L] * 8], None),
}


def serves(x: Tensor) -> bool:
    """True where x (rows, in) can be multiplied here: one to eight rows of plain float32 on the CPU, and no gradient asked."""
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and x.ndim == 2
        and 0 < x.shape[0] <= ROWS
        and x.shape[1] > 0
        and not x.requires_grad
        and library() is not None
    )


class Matrices:
    """Weights (out, in), read where they lie, their outputs side by side: float32, or one of int8 with a scale per output."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scale: Tensor | None = None) -> None:
        kind = torch.float32 if scale is None else torch.int8
        inside = weights[0].shape[-1]
        for w, b in zip(weights, biases, strict=True):
            _require(w, "a weight", (w.shape[0], inside), kind)
            if b is not None:
                _require(b, "a bias", (w.shape[0],))
        if scale is not None:
            if len(weights) != 1:
                raise ShapeError(f"{len(weights)} int8 matrices; one is multiplied at a time")
            _require(scale, "the scale", (weights[0].shape[0],))
        if inside < 1:
            raise ShapeError(f"a weight is {tuple(weights[0].shape)}: there is nothing to multiply")
        # Detached aliases hold the memory for as long as its addresses are kept here.
        self.held = [x.detach() for x in (*weights, *biases, scale) if x is not None]
        self.inside, self.parts = inside, len(weights)
        outs = [w.shape[0] for w in weights]
        self.outside = sum(outs)
        self._weights = (_P * self.parts)(*(w.data_ptr() for w in weights))
        self._biases = (_P * self.parts)(*(None if b is None else b.data_ptr() for b in biases))
        self._outs = (_L * self.parts)(*outs)
        self.addresses = (
            *(ctypes.addressof(x) for x in (self._weights, self._biases, self._outs)),
            None if scale is None else scale.data_ptr(),
        )

def product(x: Tensor, matrices: Matrices, onto: Tensor | None = None) -> Tensor:
    """x (rows, in) with matrices (out, in); `onto` (rows, out) is added to, in place."""
    if not serves(x) or x.shape[1] != matrices.inside:
        raise ShapeError(f"x is {_said(x)}; these products take 1 to {ROWS} float32 rows of width {matrices.inside} on the CPU")
    rows, inside = x.shape
    total = matrices.outside
    # A negated view is contiguous too, and its memory holds the opposite.
    x = x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
    source = x.data_ptr()
    if onto is None:
        y = torch.empty(rows, total)
    else:
        y = onto
        if not readable(y) or y.shape != (rows, total) or y.dtype is not torch.float32 or y.requires_grad:
            raise ShapeError(f"onto is {_said(y)}; it is written in place, and has to be ({rows}, {total}), contiguous float32")
        target = y.data_ptr()
        if source < target + 4 * rows * total and target < source + 4 * rows * inside:
            x = x.clone()
            source = x.data_ptr()
    weights, biases, outs, scale = matrices.addresses
    failed: int = library().product(
        source, weights, biases, outs, scale, y.data_ptr(), matrices.parts, rows, inside, total, onto is not None,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory is left for a copy of {rows} rows of width {inside}")
    return y


def checksum(x: Tensor) -> int:
    """A number that changes with any byte of x and with their order."""
    if not readable(x):
        raise ShapeError(f"x is {_said(x)}; a sum over memory needs a contiguous tensor on the CPU")
    return library().checksum(x.data_ptr(), x.numel() * x.element_size(), torch.get_num_threads())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean of x² + eps) · weight, row by row."""
    _require(x, "x", (x.shape[0], x.shape[-1]))
    _require(weight, "weight", (x.shape[1],))
    y = torch.empty_like(x)
    library().rms(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), *x.shape)
    return y


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times the second."""
    rows, hidden = x.shape[0], x.shape[-1] // 2
    _require(x, "x", (rows, 2 * hidden))
    y = torch.empty(rows, hidden)
    library().swiglu(x.data_ptr(), y.data_ptr(), rows, hidden)
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> None:
    """The first heads of each row, in place, all by the same angles (1, pairs)."""
    rows, stride, pairs = x.shape[0], x.shape[-1], cos.shape[-1]
    _require(x, "x", (rows, stride))
    _require_angles(cos, sin, width)
    if heads < 0 or heads * width > stride:
        raise ShapeError(f"x is {_said(x)}: there are no {heads} heads of width {width} in it")
    library().turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, stride, heads, width, pairs)


def bend(
    x: Tensor, angles: tuple[Tensor, Tensor] | None, heads: tuple[int, int, int], wide: int, scale: float,
    left: Tensor | None, signs: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values of one token per row, turned and `wide` columns wide, as an identity bends them.

    x (rows, (H + 2G)·D) is not turned yet; left is (G, R, D), signs (R), bias (G, D)."""
    rows, (H, G, D) = x.shape[0], heads
    R = 0 if left is None else left.shape[-2]
    if G < 1 or H % G or D < 1:
        raise ShapeError(f"{H} query heads over {G} key heads of width {D}: H is a multiple of G")
    _require(x, "x", (rows, (H + 2 * G) * D))
    if left is not None:
        _require(left, "left", (G, R, D))
        if signs is None:
            raise ShapeError(f"left is {_said(left)} without signs; each of its {R} columns has one")
        _require(signs, "signs", (R,))
    if bias is not None:
        _require(bias, "bias", (G, D))
    if angles is not None:
        _require_angles(*angles, D)
    if wide < D + R + 1:
        raise ShapeError(
            f"the cache keeps keys {wide} wide, and this identity reads {D + R + 1} columns (heads of {D}, {R} of the trace, 1): "
            "a cache is read by whoever filled it"
        )
    if scale == 0:
        raise ShapeError("scale=0: scores of this scale say nothing")
    cos, sin = angles or (None, None)
    q, k, v = torch.empty(rows, H, 1, wide), torch.empty(rows, G, 1, wide), torch.empty(rows, G, 1, wide)
    library().bend(
        x.data_ptr(), *(None if t is None else t.data_ptr() for t in (cos, sin, left, signs, bias)), scale,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), rows, x.shape[1], H, G, D, 0 if cos is None else cos.shape[-1], R, wide,
    )  # fmt: skip
    return q, k, v


@cache
def library() -> Any:
    """The compiled library, or None where it cannot be had."""
    return _loaded()[0]


def reason() -> str | None:
    """Why torch multiplies instead; None where C does."""
    return None if library() is not None else _loaded()[1] or "it was turned off"


def bound(path: str) -> Any:
    """The library in a file, with the types of its functions."""
    loaded = ctypes.CDLL(path)
    for name, (arguments, result) in _SIGNATURES.items():
        f = getattr(loaded, name)
        f.argtypes, f.restype = arguments, result
    return loaded


@cache
def _loaded() -> tuple[Any, str | None]:
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "REGARD_NATIVE=0 turns it off"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None, f"it is written for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        return None, f"it needs AVX2, and torch sees {capability}"
    try:
        return bound(str(compiled())), None
    except (OSError, AttributeError) as error:
        return None, str(error)


def readable(x: Tensor) -> bool:
    """True where C can read x as it lies."""
    # Subclasses (DTensor, functional and fake tensors) have no memory of their own, and a negated view holds the opposite.
    return type(x) in _PLAIN and x.is_cpu and x.is_contiguous() and not x.is_neg() and not x.data_ptr() % x.element_size()


_PLAIN = (Tensor, nn.Parameter)


def _require(x: Tensor, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> None:
    if x.shape != shape or x.dtype is not kind or not readable(x):
        raise ShapeError(f"{name} is {_said(x)}; C reads ({', '.join(map(str, shape))}) of {kind}, contiguous, on the CPU")


def _require_angles(cos: Tensor, sin: Tensor, width: int) -> None:
    pairs = cos.shape[-1]
    _require(cos, "cos", (1, pairs))
    _require(sin, "sin", (1, pairs))
    if 2 * pairs > width:
        raise ShapeError(f"{pairs} pairs of angles for heads of width {width}; at most {width // 2} fit")


def _said(x: Tensor) -> str:
    strides = "" if x.layout is not torch.strided or x.is_contiguous() else f" with strides {tuple(x.stride())}"
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}{strides}"
