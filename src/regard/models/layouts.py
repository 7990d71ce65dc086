"""Linear layers laid out for few rows at a time: decoding multiplies one row, or one per sequence, with every weight.

There the arithmetic is nothing and reading the weights is all, so what counts is in which order they lie:

    one row             (in, out), contiguous: the product streams whole lines; F.linear's (out, in) reaches half of it.
                        Where in > out, (out, in) is the better one again, and needs no copy.
    a few rows          oneDNN's blocked layout, made when the first such batch comes
    int8                a byte per weight, one scale per output; see `Int8`

docs/decoding.md has what each way was measured to give.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16
"""Rows up to which the blocked layout is faster than a plain product."""

LEVELS = 63
"""Steps to each side of zero. AVX2 adds two products of bytes in 16 bits: 2 · 127 · 127 still fits, 255 would not."""


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
    """A byte per weight: W ≈ diag(s) · Q with |Q| ≤ 127, one s per output. The activations keep 13 bits.

    The kernel multiplies bytes with bytes, and seven bits are few for activations. So each row goes in twice: rounded to 126
    steps, and then what rounding took off, magnified 126 times. The sum of both products has the error of 126² steps, and
    since the weights are read once for both, the second row is free.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self.bias = joined(linears)
        weight = weight.float()
        self.shape = weight.shape
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
        values = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        self.packed: Any = pack(values, scale)
        self.values, self.scale = (values, scale) if self.packed is None else (None, None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.values is not None
            assert self.scale is not None
            half = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.values, self.scale.bfloat16())  # pyright: ignore
            out = half.to(x.dtype)
        else:
            rows = x.shape[0]
            step = float(x.abs().max()) / LEVELS or 1.0
            coarse = (x * (1 / step)).round_()
            fine = torch.sub(x, coarse, alpha=step).mul_(2 * LEVELS)
            both = _bytes(torch.cat([x, fine]), step, LEVELS + 1, self.packed)
            out = torch.add(both[:rows], both[rows:], alpha=1 / (2 * LEVELS))
        return out if self.bias is None else out + self.bias

    @property
    def nbytes(self) -> int:
        return self.shape.numel()


def pack(values: Tensor, scale: Tensor) -> Any:
    """FBGEMM's layout of a quantised matrix; None where this build of torch has no such kernel."""
    if values.device.type != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # torch means to retire quantised tensors. Until it does, theirs is the fastest kernel by far; after, see `Int8`.
        warnings.simplefilter("ignore")
        try:
            torch.backends.quantized.engine = "fbgemm"
            zero = torch.zeros(scale.shape[0], dtype=torch.long)
            whole = torch._make_per_channel_quantized_tensor(values, scale, zero, 0)  # pyright: ignore
            return torch.ops.quantized.linear_prepack(whole, None)  # pyright: ignore
        except (RuntimeError, AttributeError):
            return None
        finally:
            torch.backends.quantized.engine = engine


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


def _bytes(x: Tensor, step: float, zero: int, packed: Any) -> Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, step, zero, packed)  # pyright: ignore
