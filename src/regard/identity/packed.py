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
"""float16's smallest step: a vector below it is zero."""


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
        # Rounded up in float16, so that the largest number of a vector is never cut.
        scale = (top / LIMIT * (1 + 2.0**-10)).clamp(max=65504.0).to(torch.float16)
        codes = (x / scale.float().clamp_min(SMALLEST)).round().clamp(-LIMIT, LIMIT).to(torch.int8)
        return cls(codes, scale)

    def dense(self) -> Float[Tensor, "*rest D"]:
        return self.codes.float() * self.scale.float()

    def __getitem__(self, index: object) -> Packed:
        return Packed(self.codes[index], self.scale[index])  # pyright: ignore

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


__all__ = ["Packed"]
