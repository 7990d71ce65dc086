"""Blocks of few bits written out as float32, bit for bit as llama.cpp's own `gguf` writes them, many times as fast.

Every kind is whole numbers q in groups, and each group has a scale and perhaps an offset: w = scale · q + offset, rounded after each of
the two. A kind is one function from blocks (n, bytes) to (q, scale, offset). numpy, because it starts no threads: pieces that stay in the
cache are as fast on one core as memory can be filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import needs_extra

with needs_extra("models"):
    import numpy as np
    from numpy.typing import NDArray

PIECE = 1 << 16
"""Numbers that are written at a time."""
Array = NDArray[Any]
Parts = tuple[Array, Array, Array | None]
"""Of n blocks: q (n, groups, each), scale (n, groups, 1) and offset, which is added."""


def unpack(kind: str, raw: Array, out: Array) -> None:
    """Blocks (rows, blocks of a row, bytes of a block) to numbers (rows, width), contiguous."""
    step = max(1, PIECE // out.shape[1])
    for at in range(0, out.shape[0], step):
        here, numbers = raw[at : at + step], out[at : at + step]
        if kind in PLAIN:
            PLAIN[kind](here.reshape(len(here), -1), numbers)
            continue
        # What a hostile file holds may be infinite: that is seen where it is used, as with any other weight.
        with np.errstate(all="ignore"):
            q, scale, offset = PARTS[kind](here.reshape(-1, here.shape[-1]))
            numbers = numbers.reshape(q.shape)
            # One after the other: a fused product and sum would round once, and llama.cpp's numbers are rounded twice.
            numbers[...] = q
            np.multiply(numbers, scale, out=numbers)
            if offset is not None:
                np.add(numbers, offset, out=numbers)


def _f32(raw: Array, out: Array) -> None:
    out.view(np.uint8)[...] = raw


def _f16(raw: Array, out: Array) -> None:
    out[...] = np.ascontiguousarray(raw).view("<f2")


def _bf16(raw: Array, out: Array) -> None:
    np.left_shift(np.ascontiguousarray(raw).view("<u2"), 16, out=out.view(np.uint32), casting="unsafe", dtype=np.uint32)


def _half(raw: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, (n, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: Array, width: int) -> Array:
    """Low halves of `width` bytes, then their high halves, (n, runs, 2, width)."""
    q = np.empty((len(raw), raw.shape[1] // width, 2, width), np.uint8)
    runs = raw.reshape(len(raw), -1, width)
    np.bitwise_and(runs, 15, out=q[:, :, 0])
    np.right_shift(runs, 4, out=q[:, :, 1])
    return q


def _bits(raw: Array, count: int, each: int) -> Array:
    """`count` numbers of `each` bits from every byte, the lowest first: (n, runs, count, width) of (n, runs, width)."""
    shifts = np.arange(0, count * each, each, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (raw[:, :, None] >> shifts) & np.uint8((1 << each) - 1)


def _fifth(raw: Array, at: int) -> Array:
    """The fifth bits of 32 numbers, at their place."""
    return (np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)).reshape(-1, 1, 32)


def _signed(q: Array, middle: int) -> Array:
    return q.view(np.int8) - np.int8(middle)


def _q4_0(raw: Array) -> Parts:
    return _signed(_nibbles(raw[:, 2:], 16).reshape(-1, 1, 32), 8), _half(raw, 0)[:, None], None


def _q4_1(raw: Array) -> Parts:
    return _nibbles(raw[:, 4:], 16).reshape(-1, 1, 32), _half(raw, 0)[:, None], _half(raw, 2)[:, None]


def _q5_0(raw: Array) -> Parts:
    q = _nibbles(raw[:, 6:], 16).reshape(-1, 1, 32) | _fifth(raw, 2)
    return _signed(q, 16), _half(raw, 0)[:, None], None


def _q5_1(raw: Array) -> Parts:
    q = _nibbles(raw[:, 8:], 16).reshape(-1, 1, 32) | _fifth(raw, 4)
    return q, _half(raw, 0)[:, None], _half(raw, 2)[:, None]


def _q8_0(raw: Array) -> Parts:
    return raw[:, None, 2:].view(np.int8), _half(raw, 0)[:, None], None


def _q2_k(raw: Array) -> Parts:
    scales = raw[:, :16]
    scale, least = _half(raw, 80) * (scales & 15), _half(raw, 82) * (scales >> 4)
    q = _bits(raw[:, 16:80].reshape(-1, 2, 32), 4, 2).reshape(-1, 16, 16)
    return q, scale[..., None], -least[..., None]


def _q3_k(raw: Array) -> Parts:
    low, high = raw[:, 96:104], raw[:, None, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1) | (_bits(high, 4, 2).reshape(-1, 16) << np.uint8(4))
    q = _bits(raw[:, 32:96].reshape(-1, 2, 32), 4, 2).reshape(-1, 16, 16)
    # A bit of the mask that is not set takes four away.
    q = q | (_bits(raw[:, None, :32], 8, 1).reshape(-1, 16, 16) << np.uint8(2))
    return _signed(q, 4), (_half(raw, 108) * _signed(scales, 32))[..., None], None


def _scales_k(raw: Array) -> tuple[Array, Array]:
    """Scale and offset (n, 8, 1) of the eight groups of Q4_K and Q5_K, six bits each in bytes 4 to 15."""
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=1)
    least = np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=1)
    return (_half(raw, 0) * scale)[..., None], -(_half(raw, 2) * least)[..., None]


def _q4_k(raw: Array) -> Parts:
    return _nibbles(raw[:, 16:], 32).reshape(-1, 8, 32), *_scales_k(raw)


def _q5_k(raw: Array) -> Parts:
    fifth = _bits(raw[:, None, 16:48], 8, 1).reshape(-1, 8, 32) << np.uint8(4)
    return _nibbles(raw[:, 48:], 32).reshape(-1, 8, 32) | fifth, *_scales_k(raw)


def _q6_k(raw: Array) -> Parts:
    q = _nibbles(raw[:, :128], 64).reshape(-1, 8, 32)
    q |= _bits(raw[:, 128:192].reshape(-1, 2, 32), 4, 2).reshape(-1, 8, 32) << np.uint8(4)
    scale = _half(raw, 208) * raw[:, 192:208].view(np.int8)
    return _signed(q.reshape(-1, 16, 16), 32), scale[..., None], None


PLAIN: dict[str, Callable[[Array, Array], None]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
PARTS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


__all__ = ["unpack"]
