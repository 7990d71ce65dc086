"""Weights in blocks of few bits, as a GGUF file keeps them: mapped, named, and there for whoever multiplies with blocks.

packed = packed_of(linear.weight)              # None where the weight came from elsewhere
packed.kind, packed.shape, packed.raw          # Q4_1, (out, in), uint8 (out, bytes of a row): the file, not a copy
packed.rows                                    # which row of `raw` each row of the weight is; None where they are in order
packed.holds(linear.weight)                    # False once the weight was trained, or moved
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """A way to keep numbers: `block` of them in `size` bytes."""

    name: str
    block: int
    size: int


KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
}
"""By the number that a GGUF file gives them."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One weight as its file keeps it."""

    kind: Kind
    shape: tuple[int, ...]
    raw: Tensor
    """uint8 (rows, bytes of a row), mapped; nobody writes to it."""
    heads: int = 0
    """Rows of each of so many heads pair dimension 2i with 2i + 1 in the file, i with i + D/2 in the weight; 0: the same order."""

    @cached_property
    def rows(self) -> Tensor | None:
        """The row of the file that each row of the weight is; None where they are in order."""
        return self._in_order(torch.arange(self.raw.shape[0])) if self.heads else None

    def ordered(self) -> Tensor:
        """`raw` with its rows in the order of the weight; a copy only where that is another."""
        return self._in_order(self.raw) if self.heads else self.raw

    def unpacked(self) -> Tensor:
        """The weight in float32, in memory of its own."""
        from .unpack import unpack

        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        unpack(
            self.kind.name, self.ordered().unflatten(1, (-1, self.kind.size)).numpy(), out.view(self.raw.shape[0], -1).numpy()
        )
        return out

    def holds(self, weight: Tensor) -> bool:
        """True where a weight still has exactly these numbers; it may have been trained since it was read."""
        fits = weight.shape == self.shape and weight.dtype == torch.float32 and weight.device.type == "cpu"
        return fits and torch.equal(weight.detach(), self.unpacked())

    def _in_order(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a weight, or one that is read back from a file, is a weight of its own.
        return type(None), ()


_PACKED = "_regard_packed"


def keep_packed(weight: nn.Parameter, packed: PackedWeight) -> None:
    """Let a weight know the blocks that it was written out from."""
    setattr(weight, _PACKED, packed)


def packed_of(weight: Tensor) -> PackedWeight | None:
    """The blocks that a weight was written out from. It may have been trained since: `holds` says whether it was."""
    return getattr(weight, _PACKED, None)


__all__ = ["KINDS", "Kind", "PackedWeight", "keep_packed", "packed_of"]
