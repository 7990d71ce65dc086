"""Linear layers laid out for few rows at a time: decoding multiplies one row, or one per sequence, with every weight.

There the arithmetic is nothing and reading the weights is all, so what counts is in which order they lie:

    any number of rows  (out, in), as it is, where `native` has products of its own; otherwise
    one row             (in, out), contiguous: the product streams whole lines; F.linear's (out, in) reaches half of it.
                        Where in > out, (out, in) is the better one again, and needs no copy.
    a few rows          oneDNN's blocked layout, made when the first such batch comes
    int8                a byte per weight, one scale per output; see `Int8`
    q4                  blocks of 4 to 8 bits, a GGUF file's own where the weights came from one; see `Quantised`

Where `native` multiplies, float32 weights are the model's own memory and can never be old. Whatever is copied from them is
`stale` once their contents, compared whole, are others. docs/decoding.md has what each way was measured to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CombinationError
from ..packed import packed_of
from . import native
from .marks import content_mark
from .tiles import KINDS, Q4_1, Q8_0, Blocks, quantised, read, rounded, tiled

FEW = 16
"""Rows up to which the blocked layout is faster than a plain product."""
BLOCK = 64
"""Numbers of a row that torch's int8 kernels may read at a time, on any processor."""


class Product(Protocol):
    """x (rows, in) to (rows, out); with `onto`, what it is added to, which is then overwritten where that saves a pass."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor: ...
    def stale(self) -> bool: ...
    @property
    def matrices(self) -> native.Matrices | None:
        """What C multiplies with; None where torch does."""
        ...

    @property
    def nbytes(self) -> int: ...


class Float:
    """Weights as they are, in the order that the number of rows asks for."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        weights, biases = [x.weight.detach() for x in linears], [None if x.bias is None else x.bias.detach() for x in linears]
        self.shape = torch.Size((sum(w.shape[0] for w in weights), weights[0].shape[1]))
        tensors = [x for x in (*weights, *biases) if x is not None]
        on_cpu = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        usable = on_cpu and self.shape[1] > 0 and all(map(native.readable, tensors)) and native.library() is not None
        self.matrices = native.Matrices(weights, biases) if usable else None
        self.parts = list(zip(weights, biases, strict=True))
        self.blocked = on_cpu and torch.backends.mkldnn.is_available()
        self.block: tuple[int, Tensor, object] | None = None
        self.turned = False
        if self.matrices is None:
            self.turned = on_cpu and self.shape[0] > self.shape[1]
            weight, bias = joined(self.parts)
            self.parts = [(weight.t().contiguous() if self.turned else weight, bias)]
        copied = self.turned or len(self.parts) < len(self.linears) or not all(map(_is_kept, self.linears))
        self.place = None if copied else _places(self.linears)
        self.content = _contents(self.linears) if copied else None

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.matrices is not None:
            out = native.product(x, self.matrices, onto)
            if out is not None:
                return out
        out = self._product(x)
        return out if onto is None else onto + out

    def stale(self) -> bool:
        """True where the layers' weights are no longer what this multiplies with."""
        if self.place is not None and self.place != _places(self.linears):
            return True
        if self.content is None and self.block is None:
            return False
        return (self.block[2] if self.content is None and self.block else self.content) != _contents(self.linears)

    def _product(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if 1 < rows <= FEW and self.blocked and x.dtype == torch.float32:
            if self.block is None or self.block[0] != rows:
                whole = self.parts[0][0].t().contiguous() if self.turned else joined(self.parts)[0]
                self.block = rows, _reorder(whole, rows), self.content or _contents(self.linears)
            return _blocked(x, self.block[1], joined(self.parts)[1], "none", [], "")
        weight, bias = self.parts[0]
        if self.turned:
            return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        if len(self.parts) == 1:
            return F.linear(x, weight, bias)
        # Each writes its columns of what one product of all would give.
        out, at = x.new_empty(rows, self.shape[0]), 0
        for weight, bias in self.parts:
            here = out[:, at : at + weight.shape[0]]
            torch.mm(x, weight.t(), out=here) if bias is None else torch.addmm(bias, x, weight.t(), out=here)
            at += weight.shape[0]
        return out

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.parts[0][0].element_size()


class Int8:
    """A byte per weight: W ≈ diag(s) · Q with |Q| ≤ 127, one s per output. Weights only: activations keep 14 bits or more.

    Faster kernels multiply bytes with bytes. Activations of seven bits took SmolLM2's perplexity from 104 to 240, so they are
    not for us.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        weight, bias = joined([(x.weight.detach(), None if x.bias is None else x.bias.detach()) for x in linears])
        self.content = _contents(self.linears)
        self.shape = weight.shape
        # The smallest that its reciprocal survives: a row of tiny weights is rounded like any other.
        self.scale = weight.float().abs().amax(dim=1).clamp_min(1e-30) / 127
        self.values = (weight.float() / self.scale.unsqueeze(1)).round_().to(torch.int8)
        self.bias = bias
        usable = weight.device.type == "cpu" and native.library() is not None
        whole = None if bias is None else bias.float().contiguous()
        sizes = [x.weight.shape[0] for x in linears]
        biases = [None] * len(sizes) if whole is None else whole.split(sizes)
        self.matrices = native.Matrices(self.values.split(sizes), biases, self.scale.split(sizes)) if usable else None
        # torch's kernel reads whole blocks of a row, also where a row ends within one.
        self.packed = F.pad(self.values, (0, -self.shape[1] % BLOCK)) if self.matrices is None else None
        self.coarse = self.scale.to(torch.bfloat16)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.matrices is not None:
            out = native.product(x, self.matrices, onto)
            if out is not None:
                return out
        if self.packed is None or x.shape[0] > FEW:
            # Many rows share the work of writing the weights out.
            out = F.linear(x, self.values.to(x.dtype) * self.scale.unsqueeze(1).to(x.dtype))
        else:
            wide = F.pad(x, (0, self.packed.shape[1] - x.shape[1])).to(torch.bfloat16)
            out = _bytes(wide, self.packed, self.coarse).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out if onto is None else onto + out

    def stale(self) -> bool:
        """True where the layers' weights are no longer those that were rounded."""
        return self.content != _contents(self.linears)

    @property
    def nbytes(self) -> int:
        return self.shape.numel()


class Quantised:
    """Weights in blocks of few bits (`tiles`): those of the GGUF file that they came from, or else our own.

    A weight that its file still holds is read in the file's blocks as they are. One that came from elsewhere, or was trained since, is
    rounded to Q4_1; the `head`, and what a file keeps in blocks that are not multiplied here, to Q8_0.
    """

    def __init__(self, linears: Sequence[nn.Linear], head: bool = False) -> None:
        self.linears = list(linears)
        self.content = _contents(self.linears)
        self.shape = torch.Size((sum(x.weight.shape[0] for x in linears), linears[0].weight.shape[1]))
        biases = [None if x.bias is None else x.bias.detach().float().contiguous() for x in linears]
        blocks = [_blocks(x.weight, head) for x in linears]
        self.kinds = [b.kind.name for b in blocks]
        self.tiles = [tiled(b, self.shape[1]) for b in blocks]
        on_cpu = all(x.weight.device.type == "cpu" for x in linears)
        self.matrices = native.Matrices(self.tiles, biases) if on_cpu and native.library() is not None else None
        self.plain: tuple[Tensor, Tensor | None] | None = None
        if self.matrices is None:
            weights = [b.weights()[:, : self.shape[1]].to(x.weight) for b, x in zip(blocks, linears, strict=True)]
            self.plain = joined(list(zip(weights, biases, strict=True)))

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.matrices is not None:
            out = native.product(x, self.matrices, onto)
            if out is not None:
                return out
        if self.plain is None:
            raise CombinationError(f"rows of {x.dtype} on {x.device}: weights in blocks multiply float32 on the CPU")
        out = F.linear(rounded(x).to(x.dtype), self.plain[0], None if self.plain[1] is None else self.plain[1].to(x.dtype))
        return out if onto is None else onto + out

    def stale(self) -> bool:
        """True where the layers' weights are no longer those that are multiplied with."""
        return self.content != _contents(self.linears)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tiles)


def _blocks(weight: Tensor, head: bool) -> Blocks:
    packed = packed_of(weight)
    if packed is not None and packed.holds(weight):
        kind = next((k for k in KINDS.values() if k.name == packed.kind.name), None)
        if kind is not None:
            return read(kind, packed.ordered())
        head = head or packed.kind.block > 1
    return quantised(weight.detach(), Q8_0 if head else Q4_1)


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of layers that read the same input, as one; a single layer's own tensors, not copies."""
    if len(parts) == 1:
        return parts[0]
    weight = torch.cat([w for w, _ in parts])
    if all(b is None for _, b in parts):
        return weight, None
    return weight, torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in parts])


def _is_kept(linear: nn.Linear) -> bool:
    """False where the weight or the bias is computed each time it is read, as parametrizations do."""
    return "weight" in linear._parameters and "bias" in linear._parameters  # pyright: ignore[reportPrivateUsage]


def _places(linears: Sequence[nn.Linear]) -> list[object]:
    # The layout holds the old memory, so an address that is the same is the same memory.
    return [None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype) for f in linears for x in (f.weight, f.bias)]


def _contents(linears: Sequence[nn.Linear]) -> list[object]:
    return [None if x is None else (x.shape, x.dtype, x.device, content_mark(x)) for f in linears for x in (f.weight, f.bias)]


_reorder: Any = torch.ops.mkldnn._reorder_linear_weight if torch.backends.mkldnn.is_available() else None  # pyright: ignore
_blocked: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None  # pyright: ignore
_bytes: Any = torch.ops.aten._weight_int8pack_mm  # pyright: ignore
