"""Linear layers laid out for few rows at a time: decoding multiplies one row, or one per sequence, with every weight.

There the arithmetic is nothing and reading the weights is all, so what counts is in which order they lie:

    one to eight rows   (out, in), as it is, where `native` has products of its own; otherwise
    one row             (in, out), contiguous: the product streams whole lines; F.linear's (out, in) reaches half of it.
                        Where in > out, (out, in) is the better one again, and needs no copy.
    a few rows          oneDNN's blocked layout, made when the first such batch comes
    int8                a byte per weight, one scale per output; see `Int8`

docs/decoding.md has what each way was measured to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import native

FEW = 16
"""Rows up to which the blocked layout is faster than a plain product."""
SHORT = 64
"""Rows up to which reading int8 weights again for every eight is cheaper than writing them out as floats."""


class Product(Protocol):
    """x (rows, in) to (rows, out); with `onto`, what it is added to, which is then overwritten where that saves a pass."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor: ...


class Float:
    """Weights as they are, in the order that the number of rows asks for."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self.bias = joined(linears)
        self.shape = weight.shape
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.native = on_cpu and weight.is_contiguous() and native.serves(weight[:1])
        self.turned = on_cpu and not self.native and weight.shape[0] > weight.shape[1]
        self.weight = weight.t().contiguous() if self.turned else weight
        self.blocked = on_cpu and torch.backends.mkldnn.is_available()
        self.block: tuple[int, Tensor] | None = None

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.native and x.shape[0] <= native.ROWS:
            return native.product(x, self.weight, None, self.bias, onto)
        out = self._product(x)
        return out if onto is None else onto + out

    def _product(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if 1 < rows <= FEW and self.blocked:
            if self.block is None or self.block[0] != rows:
                whole = self.weight.t().contiguous() if self.turned else self.weight
                self.block = rows, _reorder(whole, rows)
            return _blocked(x, self.block[1], self.bias, "none", [], "")
        if not self.turned:
            return F.linear(x, self.weight, self.bias)
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.weight.element_size()


class Int8:
    """A byte per weight: W ≈ diag(s) · Q with |Q| ≤ 127, one s per output. Weights only: activations keep 14 bits or more.

    Faster kernels multiply bytes with bytes. Activations of seven bits took SmolLM2's perplexity from 104 to 240, so they are
    not for us.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self.bias = joined(linears)
        self.shape = weight.shape
        self.scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127
        self.values = (weight / self.scale.unsqueeze(1)).round_().to(torch.int8)
        self.coarse = self.scale.to(torch.bfloat16)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if native.serves(x):
            return native.product(x, self.values, self.scale, self.bias, onto)
        if x.shape[0] <= SHORT and native.serves(x[:1]):
            out = torch.cat([native.product(part, self.values, self.scale, None) for part in x.split(native.ROWS)])
        elif x.shape[0] > FEW or native.serves(x[:1]):
            # Many rows share the work of writing the weights out.
            out = F.linear(x, self.values.to(x.dtype) * self.scale.unsqueeze(1).to(x.dtype))
        else:
            out = _bytes(x.to(torch.bfloat16), self.values, self.coarse).to(x.dtype)
        out = out if self.bias is None else out.add_(self.bias)
        return out if onto is None else onto + out

    @property
    def nbytes(self) -> int:
        return self.shape.numel()


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Layers that read the same input, as one; a single layer's own tensors, not copies."""
    if len(linears) == 1:
        bias = linears[0].bias
        return linears[0].weight.detach(), None if bias is None else bias.detach()
    weight = torch.cat([x.weight.detach() for x in linears])
    biases = [x.bias for x in linears if x.bias is not None]
    return weight, torch.cat([b.detach() for b in biases]) if biases else None


_reorder: Any = torch.ops.mkldnn._reorder_linear_weight if torch.backends.mkldnn.is_available() else None  # pyright: ignore
_blocked: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None  # pyright: ignore
_bytes: Any = torch.ops.aten._weight_int8pack_mm  # pyright: ignore
