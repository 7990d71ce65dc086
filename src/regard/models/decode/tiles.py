"""Weights of 4 to 8 bits in blocks, as GGUF files keep them: what they mean, and how they lie for products in C.

A block is 32 weights of one row (of Q6_K, 16) with a scale of its own; of the K kinds, eight blocks share one more in float16:

    Q4_0, Q5_0, Q8_0    w = d (q − middle)               middle 8, 16, 128 (Q8_0's codes are signed in files)
    Q4_1, Q5_1          w = d q + m
    Q4_K, Q5_K          w = (D s) q − M t                s, t of 6 bits for each block, D and M for eight of them
    Q6_K                w = (D s) (q − 32)               s of 8 bits with a sign, for sixteen weights

A product rounds its input to 14 bits, block by block of 32 (`rounded`); codes times those are whole numbers and summed exactly.
Blocks are then added from the first to the last in float32, in every lane alike: a row's numbers are the same bits in any company.
For C sixteen rows make a tile (blocks.h): the same codes and scales in the order in which sixteen lanes read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CheckpointError, CombinationError, ShapeError

TILE, SPAN, SUPER = 16, 32, 8
MOST = 8191
LIFTED = 1e-30
"""Below it a block's largest number is lifted by 2⁹⁶ first, so that its reciprocal is finite."""


@dataclass(frozen=True)
class Kind:
    """How a block is kept. `number` is blocks.h's, `gguf` is the files'."""

    name: str
    number: int
    gguf: int
    bits: int
    middle: int = 0
    least: bool = False
    """Each block has a value of its own that is added (of K kinds, taken off)."""
    shares: bool = False
    """Eight blocks share a scale: the K kinds."""

    @property
    def block(self) -> int:
        """Weights that a file keeps together."""
        return SPAN * SUPER if self.shares else SPAN

    @property
    def block_bytes(self) -> int:
        """Bytes that a file keeps them in."""
        if not self.shares:
            return 4 * self.bits + 2 + 2 * self.least
        return 32 * self.bits + (16 if self.least else 18)

    def tile_bytes(self, inside: int) -> int:
        """Bytes of sixteen rows of this width, as blocks.h counts them."""
        blocks = -(-inside // SPAN)
        scales = 64 if self.least and not self.shares else 32
        shared = 0 if not self.shares else 64 if self.least else 32
        return -(-(blocks * (64 * self.bits + scales) + -(-blocks // SUPER) * shared) // 64) * 64


Q4_0, Q4_1 = Kind("Q4_0", 2, 2, 4, middle=8), Kind("Q4_1", 3, 3, 4, least=True)
Q5_0, Q5_1 = Kind("Q5_0", 4, 6, 5, middle=16), Kind("Q5_1", 5, 7, 5, least=True)
Q8_0 = Kind("Q8_0", 6, 8, 8, middle=128)
Q4_K, Q5_K = Kind("Q4_K", 7, 12, 4, least=True, shares=True), Kind("Q5_K", 8, 13, 5, least=True, shares=True)
Q6_K = Kind("Q6_K", 9, 14, 6, middle=32, shares=True)
KINDS = {k.gguf: k for k in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)}


@dataclass(frozen=True)
class Blocks:
    """A matrix (out, in) in codes. Scales have one column a block, of Q6_K two; `shared` and `shared_least` one for eight."""

    kind: Kind
    codes: Tensor
    """(out, in) uint8."""
    scale: Tensor
    """float16; of K kinds whole numbers, uint8 or (Q6_K) int8."""
    least: Tensor | None = None
    shared: Tensor | None = None
    shared_least: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def weights(self) -> Tensor:
        """The matrix in float32: the plain definition."""
        q = self.codes.float() - self.kind.middle
        scale, least = self.scale.float(), None if self.least is None else self.least.float()
        if self.shared is not None:
            scale = self.shared.float().repeat_interleave(scale.shape[1] // self.shared.shape[1], dim=1) * scale
        if least is not None and self.shared_least is not None:
            least = -(self.shared_least.float().repeat_interleave(SUPER, dim=1) * least)
        w = q.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)
        w = w if least is None else w + least.unsqueeze(-1)
        return w.flatten(1)


def read(kind: Kind, rows: Tensor) -> Blocks:
    """Blocks of a file: rows (out, bytes) of uint8."""
    if rows.ndim != 2 or rows.dtype != torch.uint8 or rows.shape[1] % kind.block_bytes:
        raise CheckpointError(
            f"rows are {tuple(rows.shape)} of {rows.dtype}; {kind.name} keeps {kind.block} weights in {kind.block_bytes} bytes"
        )
    blocks = rows.reshape(rows.shape[0], -1, kind.block_bytes)
    return _read_shared(kind, blocks) if kind.shares else _read_single(kind, blocks)


def _read_single(kind: Kind, x: Tensor) -> Blocks:
    halves = x[..., : 4 if kind.least else 2].contiguous().view(torch.float16)
    scale, least = halves[..., 0], halves[..., 1] if kind.least else None
    body = x[..., 4 if kind.least else 2 :]
    if kind is Q8_0:
        codes = body ^ 128
    else:
        nibbles = body[..., -16:]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
        if kind.bits == 5:
            codes = codes | _bits(body[..., :4]) << 4
    return Blocks(kind, codes.flatten(1), scale, least)


def _read_shared(kind: Kind, x: Tensor) -> Blocks:
    if kind is Q6_K:
        low, high, scale, d = x.split([128, 64, 16, 2], dim=-1)
        low, high = low.unflatten(-1, (2, 1, 64)), high.unflatten(-1, (2, 1, 32))
        nibbles = torch.cat([low & 15, low >> 4], dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)
        pairs = torch.cat([high >> s & 3 for s in (0, 2, 4, 6)], dim=-2)
        codes = (nibbles | pairs << 4).flatten(1)
        shared = d.contiguous().view(torch.float16)[..., 0]
        return Blocks(kind, codes, scale.contiguous().view(torch.int8).flatten(1), shared=shared)
    halves, six = x[..., :4].contiguous().view(torch.float16), x[..., 4:16]
    first, second, third = six.split(4, dim=-1)
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    least = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    nibbles = x[..., -128:].unflatten(-1, (4, 1, 32))
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-2).flatten(-3, -2)
    if kind.bits == 5:
        high = x[..., 16:48].unsqueeze(-2)
        codes = codes | torch.cat([high >> s & 1 for s in range(8)], dim=-2) << 4
    return Blocks(kind, codes.flatten(1), scale.flatten(1), least.flatten(1), halves[..., 0], halves[..., 1])


def _bits(x: Tensor) -> Tensor:
    """The bits of each byte, the lowest first."""
    return (x.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def quantised(weight: Tensor, kind: Kind) -> Blocks:
    """A matrix in Q4_1 (what is left of each block is the least of some ranges) or Q8_0, padded with zeros to whole blocks."""
    w = F.pad(weight.float(), (0, -weight.shape[1] % SPAN)).unflatten(1, (-1, SPAN))
    if not bool(torch.isfinite(w).all()) or float(w.abs().max() if w.numel() else 0) > 60000:
        raise CombinationError("weights that are not finite, or above 60,000, are not kept in blocks: their scales are float16")
    if kind is Q8_0:
        scale = (w.abs().amax(dim=-1) / 127).half()
        q = (w / _positive(scale).unsqueeze(-1)).round_().clamp_(-127, 127) + 128
        return Blocks(kind, q.to(torch.uint8).flatten(1), scale)
    if kind is not Q4_1:
        raise ShapeError(f"{kind.name} is read, not made: Q4_1 and Q8_0 are")
    low, high = w.amin(dim=-1), w.amax(dim=-1)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    errors = torch.full_like(low, torch.inf)
    for share in (1.0, 0.96, 0.92, 0.88, 0.84):
        middle, reach = (low + high) / 2, (high - low) / 2 * share
        scale, least = (2 * reach / 15).half(), (middle - reach).half()
        q = ((w - least.float().unsqueeze(-1)) / _positive(scale).unsqueeze(-1)).round_().clamp_(0, 15)
        off = (q * scale.float().unsqueeze(-1) + least.float().unsqueeze(-1) - w).square_().sum(-1)
        better = off < errors
        errors = torch.where(better, off, errors)
        q = q.to(torch.uint8)
        best = (
            (q, scale, least)
            if best is None
            else (
                torch.where(better.unsqueeze(-1), q, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, least, best[2]),
            )
        )
    assert best is not None
    return Blocks(kind, best[0].flatten(1), best[1], best[2])


def _positive(scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide > 0, wide, torch.ones_like(wide))


def rounded(x: Tensor) -> Tensor:
    """Activations (rows, in) as a product with blocks sees them: 14 bits in blocks of 32; what is not finite makes its block NaN."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % SPAN)).unflatten(1, (-1, SPAN))
    most = blocks.abs().amax(dim=-1, keepdim=True)
    lift = torch.where(most < LIFTED, 2.0**96, 1.0)
    # A number over a tensor would be a reciprocal and a product, rounded twice.
    up = torch.where(most > 0, torch.full_like(most, MOST) / (most * lift), 0)
    return ((blocks * lift * up).round() * (most / MOST)).flatten(1)[:, : x.shape[1]]


@dataclass(frozen=True)
class Tiles:
    """Blocks in the order in which C reads them."""

    kind: Kind
    data: Tensor
    shape: torch.Size
    """(out, in) of the matrix; rows are padded to sixteen and columns to whole blocks."""

    @property
    def nbytes(self) -> int:
        return -(-self.shape[0] // TILE) * self.kind.tile_bytes(self.shape[1])


def tiled(blocks: Blocks, inside: int | None = None) -> Tiles:
    """`inside`: how wide rows really are, where the last block is padded."""
    kind, (out, wide) = blocks.kind, blocks.shape
    inside = wide if inside is None else inside
    if not wide - SPAN < inside <= wide or (kind.shares and wide % kind.block):
        raise ShapeError(f"rows of {inside} in blocks that are {wide} wide")
    count = -(-out // TILE)

    def lanes(x: Tensor) -> Tensor:
        """(out, columns) to (tile, columns, sixteen)."""
        return F.pad(x, (0, 0, 0, count * TILE - out)).unflatten(0, (count, TILE)).transpose(1, 2)

    # (tile, block, group, output, input)
    codes = F.pad(blocks.codes, (0, 0, 0, count * TILE - out)).view(count, TILE, -1, 8, 4).permute(0, 2, 3, 1, 4).flatten(-2)
    planes = [codes]
    if kind.bits < 8:
        planes = [codes[:, :, 0::2] & 15 | codes[:, :, 1::2] << 4]
    if kind.bits == 5:
        high, bit = codes >> 4, torch.zeros_like(codes[:, :, 0])
        for g in range(8):
            bit |= high[:, :, g] << g
        planes.append(bit.unsqueeze(2))
    if kind.bits == 6:
        high = (codes >> 4).unflatten(2, (2, 4))
        two = torch.zeros_like(high[:, :, :, 0])
        for g in range(4):
            two |= high[:, :, :, g] << 2 * g
        planes.append(two)
    body = torch.cat(planes, dim=2).flatten(2)
    scales = [lanes(blocks.scale)]
    if kind is Q6_K:
        scales = [lanes(blocks.scale)[:, 0::2], lanes(blocks.scale)[:, 1::2]]
    if blocks.least is not None:
        scales.append(lanes(blocks.least))
    parts = [torch.cat([body, *map(_as_bytes, scales)], dim=-1).flatten(1)]
    if blocks.shared is not None:
        shared = [lanes(s) for s in (blocks.shared, blocks.shared_least) if s is not None]
        parts.insert(0, torch.cat([_as_bytes(s) for s in shared], dim=-1).flatten(1))
    data = torch.cat(parts, dim=1)
    tiles = Tiles(kind, F.pad(data, (0, kind.tile_bytes(inside) - data.shape[1])).flatten(), torch.Size((out, inside)))
    assert tiles.data.numel() == tiles.nbytes
    return tiles


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


__all__ = ["KINDS", "Blocks", "Kind", "Tiles", "quantised", "read", "rounded", "tiled"]
