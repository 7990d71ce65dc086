"""Products in C, compiled on the first use where a compiler is found; everything runs without them, only slower.

torch's products are made for many rows. For a few, on AVX2, these read weights at the memory's speed from one core already, take
int8 weights without rounding activations to bytes, and cost 3 µs to call; for many they are as fast. A row's numbers are the same bits
however many rows there are. REGARD_NATIVE=0 turns them off, and `reason()` says why they are not used. C checks nothing, so every
shape, type and stride is checked here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import ShapeError
from .compiled import compiled

ROWS = 1 << 20
"""Rows at most, so that no product of sizes overflows."""
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""As meeting.h counts them."""
_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "product": ([_P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _I, _I], _I),
    "use_wide": ([_I], _I),
    "checksum": ([_P, _L, _I], ctypes.c_uint64),
    "rms": ([_P, _P, _D, _P, _L, _L], None),
    "act": ([_P, _P, _L, _L, _I, _I], None),
    "meet": ([_P, _P, _P, _P, _P, *[_L] * 6, _D, _I], _I),
}


class Text(ctypes.Structure):
    """A text and its new tokens as meeting.h reads them; whoever keeps it keeps the tensors that its addresses are of."""

    _fields_: ClassVar = [(n, _P) for n in ("left", "signs", "bias", "k", "v")] + [
        (n, _L) for n in ("first", "tokens", "length", "capacity", "lead", "head", "R", "W")
    ]


def serves(x: Tensor) -> bool:
    """True where C takes x (rows, in): plain float32 on the CPU, and no gradient asked."""
    if type(x) is not Tensor or x.dtype is not _F32 or not x.is_cpu or x.requires_grad or library() is None:
        return False
    shape = x.shape
    return len(shape) == 2 and 0 < shape[0] <= ROWS and shape[1] > 0


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


def product(x: Tensor, matrices: Matrices, onto: Tensor | None = None) -> Tensor | None:
    """x (rows, in) with matrices (out, in); `onto` (rows, out) is added to, in place. None where C does not serve x."""
    # `serves`, written out: this runs a hundred times and more for every token.
    if type(x) is not Tensor or x.dtype is not _F32 or not x.is_cpu or x.requires_grad or (c := library()) is None:
        return None
    shape = x.shape
    if len(shape) != 2:
        return None
    rows, inside = shape
    if not 0 < rows <= ROWS:
        return None
    total = matrices.outside
    if inside != matrices.inside:
        raise ShapeError(f"x is {_said(x)}; these weights take rows of width {matrices.inside}")
    source = x.data_ptr()
    if source & 3 or not x.is_contiguous() or x.is_neg():
        # A negated view is contiguous too, and its memory holds the opposite.
        x = x.resolve_neg().clone(memory_format=torch.contiguous_format)
        source = x.data_ptr()
    if onto is None:
        y = torch.empty((rows, total))
        y = y if y.dtype is _F32 and y.is_cpu else x.new_empty((rows, total))
        target = y.data_ptr()
    else:
        y = onto
        if y.shape != (rows, total) or type(y) is not Tensor or y.dtype is not _F32 or y.requires_grad or not _lies(y):
            raise ShapeError(f"onto is {_said(y)}; it is written in place, and has to be ({rows}, {total}), contiguous float32")
        target = y.data_ptr()
        if source < target + 4 * rows * total and target < source + 4 * rows * inside:
            x = x.clone()
            source = x.data_ptr()
    failed: int = c.product(
        source, *matrices.addresses, target, matrices.parts, rows, inside, total, onto is not None, torch.get_num_threads()
    )
    if failed:
        raise MemoryError(f"no memory is left for a copy of {rows} rows of width {inside}")
    return y


def checksum(x: Tensor) -> int | None:
    """A number that changes with any byte of x and with their order. None where C cannot read x."""
    c = library()
    if c is None or type(x) is not Tensor or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        return None
    return c.checksum(x.data_ptr(), x.numel() * x.element_size(), torch.get_num_threads())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / sqrt(mean of x² + eps) · weight, row by row. None where C does not serve them."""
    if not serves(x) or not _lies(x):
        return None
    rows, width = x.shape
    if weight.shape != (width,) or type(weight) not in _PLAIN or weight.dtype is not _F32 or not _lies(weight):
        if weight.shape != (width,):
            raise ShapeError(f"weight is {_said(weight)}; rows of width {width} have as many")
        return None
    y = _empty(x, rows, width)
    library().rms(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), rows, width)
    return y


def act(x: Tensor, kind: str, gated: bool = False) -> Tensor | None:
    """An activation of each row or, where gated, of its first half times its second. None where C does not serve x."""
    if not serves(x) or not _lies(x):
        return None
    rows, width = x.shape
    if kind not in ACTIVATIONS:
        raise ShapeError(f"kind={kind!r} is not one of {', '.join(ACTIVATIONS)}")
    if gated and width % 2:
        raise ShapeError(f"x is {_said(x)}; gate and up are equal halves of its rows")
    y = _empty(x, rows, width // 2 if gated else width)
    library().act(x.data_ptr(), y.data_ptr(), rows, y.shape[1], gated, ACTIVATIONS.index(kind))
    return y


def text(
    k: Tensor, v: Tensor, heads: tuple[int, int], left: Tensor | None = None, signs: Tensor | None = None,
    bias: Tensor | None = None, *, lead: int = 0, head: int = 1,
) -> Text:  # fmt: skip
    """A text whose keys and values lie in k and v (G, capacity, W), for (G, D) heads; `meet` fills its tokens in."""
    (G, D), (_, capacity, W) = heads, k.shape if k.ndim == 3 else (0, 0, 0)
    R = 0 if left is None else left.shape[-2]
    if left is not None:
        _require(left, "left", (G, R, D))
        if signs is None:
            raise ShapeError(f"left is {_said(left)} without signs; each of its {R} columns has one")
        _require(signs, "signs", (R,))
    if bias is not None:
        _require(bias, "bias", (G, D))
    _require(k, "k", (G, capacity, W))
    _require(v, "v", (G, capacity, W))
    if W < D + R + 1 and (W != D or R or bias is not None):
        raise ShapeError(
            f"the cache keeps keys {W} wide, and this identity reads {D + R + 1} columns (heads of {D}, {R} of the trace, 1): "
            "a cache is read by whoever filled it"
        )
    if not 0 <= lead <= capacity or head < 0:
        raise ShapeError(f"{lead} slots in a room for {capacity}, behind a head of {head}")
    addresses = (None if x is None else x.data_ptr() for x in (left, signs, bias))
    return Text(*addresses, k.data_ptr(), v.data_ptr(), 0, 0, lead, capacity, lead, head, R, W)


def meet(
    x: Tensor, angles: tuple[Tensor, Tensor] | None, texts: ctypes.Array[Text], counts: Sequence[int], lengths: Sequence[int],
    heads: tuple[int, int, int], scale: float,
) -> Tensor:  # fmt: skip
    """New tokens meet the keys of their own texts, which get theirs: heads (tokens, H·D) of x (tokens, (H + 2G)·D), not turned.

    The tokens of text i are the next counts[i] rows of x, and it has lengths[i] already.
    """
    (H, G, D), tokens = heads, x.shape[0]
    if G < 1 or H % G or D < 1:
        raise ShapeError(f"{H} query heads over {G} key heads of width {D}: H is a multiple of G")
    _require(x, "x", (tokens, (H + 2 * G) * D))
    first = 0
    for t, n, length in zip(texts, counts, lengths, strict=True):
        if n < 1 or length < 0 or t.lead + length + n > t.capacity or t.W < D:
            raise ShapeError(
                f"{n} tokens after {length} and {t.lead} slots, in a room for {t.capacity} keys of width {t.W}; each text has new "
                f"ones, and room for them"
            )
        t.first, t.tokens, t.length = first, n, t.lead + length
        first += n
    if first != tokens:
        raise ShapeError(f"x is {_said(x)}, and the texts have {first} new tokens")
    if scale == 0:
        raise ShapeError("scale=0: every score would be 0")
    cos, sin = angles or (x, x)
    pairs = 0
    if angles is not None:
        pairs = cos.shape[-1]
        if 2 * pairs > D:
            raise ShapeError(f"cos is {_said(cos)}; heads of width {D} turn by at most {D // 2} angles")
        _require(cos, "cos", (tokens, pairs))
        _require(sin, "sin", (tokens, pairs))
    y = _empty(x, tokens, H * D)
    failed: int = library().meet(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), ctypes.addressof(texts), y.data_ptr(), len(texts), x.shape[1], H, G, D,
        pairs, scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory is left for the scores of {tokens} tokens")
    return y


@cache
def library() -> Any:
    """The compiled library, or None where it cannot be had."""
    return _loaded()[0]


def reason() -> str | None:
    """Why torch multiplies instead; None where C does."""
    return None if library() is not None else _loaded()[1] or "it was turned off"


def bound(path: str) -> ctypes.CDLL:
    """The library in a file, with the types of its functions."""
    loaded = ctypes.CDLL(path)
    for name, (arguments, result) in _SIGNATURES.items():
        f = getattr(loaded, name)
        f.argtypes, f.restype = arguments, result
    return loaded


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
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


_PLAIN = (Tensor, nn.Parameter)
_F32 = torch.float32


def _lies(x: Tensor) -> bool:
    # A negated view is contiguous too, and its memory holds the opposite.
    return x.is_cpu and x.is_contiguous() and not x.is_neg() and not x.data_ptr() & 3


def _empty(x: Tensor, *shape: int) -> Tensor:
    # Half as long as x.new_empty; but torch's default may be of another size, or on another device.
    y = torch.empty(shape)
    return y if y.dtype is torch.float32 and y.is_cpu else x.new_empty(shape)


def readable(x: Tensor, shape: tuple[int, ...] | None = None, kind: torch.dtype = torch.float32) -> bool:
    """True where C can read x as it lies, and it has this shape."""
    # Subclasses (DTensor, functional and fake tensors) have no memory of their own; a negated view holds the opposite.
    return (
        (shape is None or x.shape == shape)
        and x.dtype is kind
        and x.is_cpu
        and x.is_contiguous()
        and type(x) in _PLAIN
        and not x.is_neg()
        and (kind is torch.int8 or not x.data_ptr() & 3)
    )


def _require(x: Tensor, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> None:
    if not readable(x, shape, kind):
        raise ShapeError(f"{name} is {_said(x)}; C reads ({', '.join(map(str, shape))}) of {kind}, contiguous, on the CPU")


def _said(x: Tensor) -> str:
    strides = "" if x.layout is not torch.strided or x.is_contiguous() else f" with strides {tuple(x.stride())}"
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}{strides}"
