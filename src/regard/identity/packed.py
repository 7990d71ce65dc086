"""Vectors as bytes: x ≈ scale · code, one scale for each vector, so that a person's state stays small.

What is packed once is read back bit for bit the same, everywhere: packing happens when something is written, never on save.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ..errors import NumericsError

LIMIT = 127
SMALLEST = 2.0**-24
"""float16's smallest step: a vector below half of it is zero."""
NORMAL, LARGEST = 2.0**-14, 65504.0
"""float16 has 11 bits between these, and fewer below."""


@dataclass(frozen=True, eq=False)
class Packed:
    codes: Int8[Tensor, "*rest D"]
    scale: Float[Tensor, "*rest 1"]

    @classmethod
    def of(cls, x: Tensor) -> Packed:
        """The nearest packed vectors; an error of at most half a scale in each number."""
        x = x.detach().float().cpu()
        if not bool(torch.isfinite(x).all()):
            raise NumericsError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} numbers to be written are not finite")
        top = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(*x.shape[:-1], 1)
        if x.numel() and float(top.max()) > LIMIT * LARGEST:
            raise NumericsError(
                f"a number of size {float(top.max()):.3g} is to be written; {LIMIT * LARGEST:.3g} is the largest"
            )
        scale = _above(top / LIMIT)
        codes = (x / scale.float().clamp_min(SMALLEST)).round().clamp(-LIMIT, LIMIT).to(torch.int8)
        return cls(codes, scale)

    def dense(self) -> Float[Tensor, "*rest D"]:
        return self.codes.float() * self.scale.float()

    def pick(self, index: Tensor, dim: int) -> Packed:
        return Packed(self.codes.index_select(dim, index), self.scale.index_select(dim, index))

    def joined(self, other: Packed, dim: int) -> Packed:
        return Packed(torch.cat([self.codes, other.codes], dim), torch.cat([self.scale, other.scale], dim))

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 2 * self.scale.numel()


def _above(x: Tensor) -> Tensor:
    """The next number of float16 that is not below x, so that the largest number of a vector is never cut.

    Where float16 has few bits left, the next power of two: only then does packing what was packed change nothing.
    """
    mantissa, exponent = torch.frexp(x)
    bits = torch.where(x < NORMAL, (mantissa * 2).ceil() / 2, (mantissa * 2.0**11).ceil() / 2.0**11)
    # Half of the smallest step or less comes to nothing but zeros, and zeros have no scale.
    return torch.where(x * LIMIT > SMALLEST / 2, torch.ldexp(bits, exponent).clamp_min(SMALLEST), 0.0).to(torch.float16)


__all__ = ["Packed"]
