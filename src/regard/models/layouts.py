"""Linear layers laid out for few rows at a time: decoding multiplies one row, or one per sequence, with every weight.

There the arithmetic is nothing and reading the weights is all, so what counts is in which order they lie:

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

FEW = 16
"""Rows up to which the blocked layout is faster than a plain product."""


class Product(Protocol):
    """x (rows, in) to (rows, out)."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Float:
    """Weights as they are, in the order that the number of rows asks for."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self.bias = joined(linears)
        self.shape = weight.shape
        self.on_cpu = weight.device.type == "cpu"
        self.turned = self.on_cpu and weight.shape[0] > weight.shape[1]
        self.weight = weight.t().contiguous() if self.turned else weight
        self.blocked = self.on_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        self.block: tuple[int, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
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
        return self.weight.numel() * self.weight.element_size()


class Int8:
    """A byte per weight: W ≈ diag(s) · Q with |Q| ≤ 127, one s per output. Weights only: activations stay bfloat16.

    Faster kernels multiply bytes with bytes. Activations of seven bits took SmolLM2's perplexity from 104 to 240, so they are
    not for us.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self.bias = joined(linears)
        self.shape = weight.shape
        scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127
        self.values = (weight / scale.unsqueeze(1)).round_().to(torch.int8)
        self.scale = scale.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        out = _bytes(x.to(torch.bfloat16), self.values, self.scale).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

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
