"""Softmax attention with biases and slots through torch's public fused call, on any device.

Whatever is added to a dot product is written as more columns of it, exactly:

    scale · q·k + b_j              q' = [q, 1],              k' = [k, b_j / scale]
    b_hj, by query head            q' = [q, one-hot of h],   k' = [k, b_1j / scale, b_2j / scale, …]   (keys stay shared)
    ALiBi where i ≥ j              q' = [q, m_h / scale],    k' = [k, j − c]     −m_h (i − c) is constant along the row
    one more key of score z_i      q' = [q, z_i / scale],    k' = [k, 0], and the new key [0, 1]

The new key stands before the others, so that the kernel's own causal rule serves, with a row before the others that is thrown
away; its weight comes back in one more column of v. Half precision takes each number as the sum of three, which is float32's.
Widths are padded to a multiple of 8, v to the width of q, or torch leaves its fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..geometry.base import Lowered
from .allow import Allow, Behind, Both, Causal, Either, Tile, Window
from .fused import adjacent, is_causal, simple_rule
from .problem import Problem
from .tiled import trains

HALF = (torch.bfloat16, torch.float16)
CHUNK = 1 << 24
"""Pairs per chunk of mask."""
FAR = 4096
"""Keys that ALiBi's column may span: its numbers stay small enough for float32 to hold the differences between neighbours."""


@dataclass(frozen=True)
class Product:
    """Attention as one product: softmax(scale · q kᵀ) v, of which the first `lead` keys are slots."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    width: int
    """Of the values, in front of v's last axis; then one column for each slot that has a value."""
    lead: int
    values: tuple[Tensor, ...]

    def read(self, out: Tensor) -> Tensor:
        """The values' part of a result, with the slots' own values added by their weights."""
        real = out[..., : self.width]
        for n, value in enumerate(self.values):
            real = real + out[..., self.width + n, None] * value.unsqueeze(-2).to(real.dtype)
        return real


def product(p: Problem, low: Lowered, temperature: float | Tensor, dtype: torch.dtype) -> Product:
    """The columns of a problem, whose `low` is not divided by the temperature yet. Made of sums and products, so that gradients
    need nothing of ours. A bias by position is not in it: `with_line` adds one that is a line in j.
    """
    q, k, v = low.q, low.k, p.v
    (B, H, Q, _), (_, G, K, _) = q.shape, k.shape
    v = v if v.shape[1] == G else v.repeat_interleave(G // v.shape[1], dim=1)
    slots = p.slots(low)
    lead = len(slots)
    q_columns, k_columns = [_parts(q, dtype)[0]], [_parts(k, dtype)[0]]
    if low.key_bias is not None:
        one, bias = _key_bias(low.key_bias / low.scale, q, G, dtype)
        q_columns += one
        k_columns += bias
    k_columns = [F.pad(x, (0, 0, lead, 0)) for x in k_columns]
    row = low.row_bias() if slots and low.row_bias is not None else None
    for n, slot in enumerate(slots):
        score = (slot.score if row is None else slot.score - row) / low.scale
        pieces = _parts(score.clamp_min(torch.finfo(dtype).min / 16).unsqueeze(-1), dtype)
        here = torch.zeros(1, 1, lead + K, 1, dtype=dtype, device=q.device)
        here[:, :, n] = 1
        q_columns += [x.expand(B, H, Q, 1) for x in pieces]
        k_columns += [here.expand(B, G, -1, 1)] * len(pieces)
    values = [(n, s.value) for n, s in enumerate(slots) if s.value is not None]
    marks = torch.zeros(1, 1, lead + K, len(values), dtype=dtype, device=q.device)
    for column, (n, _) in enumerate(values):
        marks[:, :, n, column] = 1
    E = v.shape[-1]
    wide = torch.cat([F.pad(v.to(dtype), (0, 0, lead, 0)), marks.expand(B, G, -1, -1)], -1)
    q, k = torch.cat(q_columns, -1), torch.cat(k_columns, -1)
    q = q / temperature.view(1, -1, 1, 1).to(dtype) if isinstance(temperature, Tensor) else q
    scale = low.scale if isinstance(temperature, Tensor) else low.scale / temperature
    return Product(q, k, wide, scale, E, lead, tuple(value for _, value in values))


def with_line(p: Problem, made: Product, low: Lowered, temperature: float | Tensor, at: tuple[Tensor, Tensor]) -> Product:
    """The same with ALiBi's columns: slope per head, and where queries and keys stand from some centre, `at` = (Q), (K).

    What is constant along a row cancels among the keys, and a slot, which stands nowhere, is raised by it.
    """
    (B, H, Q, _), (_, G, K, _) = made.q.shape, made.k.shape
    numbers = p.spec.position.slope_per_head(H)
    assert numbers is not None
    slopes = torch.tensor(numbers, device=made.q.device, dtype=low.q.dtype).view(1, H, 1, 1) / low.scale
    slopes = slopes / temperature.view(1, -1, 1, 1) if isinstance(temperature, Tensor) else slopes
    q_at, k_at = (x.to(low.q.dtype).view(1, 1, -1, 1) for x in at)
    left, right = _parts(slopes, made.q.dtype), _parts(F.pad(k_at, (0, 0, made.lead, 0)), made.q.dtype)
    q_columns, k_columns = [x for x in left for _ in right], [x for _ in left for x in right]
    if made.lead:
        q_columns += (raised := _parts(slopes * q_at, made.q.dtype))
        k_columns += [(torch.arange(K, device=q_at.device) < made.lead).to(made.q.dtype).view(1, 1, K, 1)] * len(raised)
    q = torch.cat([made.q, *(x.expand(B, H, Q, 1) for x in q_columns)], -1)
    return replace(made, q=q, k=torch.cat([made.k, *(x.expand(B, G, K, 1) for x in k_columns)], -1))


def attend(p: Problem, low: Lowered, temperature: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention, and what the kernel gave of it (`fused.may_hide` looks at that)."""
    made = product(p, low, temperature, dtype)
    if whole(p):
        if p.spec.position.biases:
            K = p.k.shape[2]
            k_at = torch.arange(K, device=p.q.device)
            made = with_line(p, made, low, temperature, (p.q_at - (K - 1) / 2, k_at - (K - 1) / 2))
        read = _call(made, p)
        return made.read(read), read[..., : made.width]
    table = p.spec.position.table(p.state)
    tensors = [made.q, made.k, made.v] if table is None else [made.q, made.k, made.v, table]
    pieces: list[Tensor] = []
    for t in _chunks(p):
        if t.hi == t.lo:
            pieces.append(made.q.new_zeros(*made.q.shape[:2], t.stop - t.start, made.width))
            continue
        call = _Masked(p, low, t, made, temperature)
        # The masks of all chunks together are Q × K: backward makes each of them again.
        read, empty = checkpoint(call, *tensors, use_reentrant=False) if trains(*tensors) else call(*tensors)
        piece = made.read(read)
        pieces.append(piece if empty is None else piece.masked_fill(empty.unsqueeze(-1), 0))
    out = torch.cat(pieces, 2)
    return out, out


def dtype_for(p: Problem) -> torch.dtype:
    """Of the product. Half precision stays, where nothing of it is rounded that its three columns do not hold."""
    divides = p.inner.softmax_temperature == "learned"
    kept = p.q.device.type != "cpu" and not divides and (past(p) or not p.spec.position.biases)
    return p.q.dtype if kept else torch.promote_types(p.q.dtype, torch.float32)


def whole(p: Problem) -> bool:
    """True when one call with the kernel's own rule computes the problem."""
    ruled = simple_rule(p) or _meets_all(p)
    return ruled and (not p.spec.position.biases or (past(p) and p.k.shape[2] <= FAR))


def _meets_all(p: Problem) -> bool:
    """True when every row meets every key, as the one row of a step of decoding does under most rules."""
    Q, K = p.q.shape[2], p.k.shape[2]
    span = p.allow.span(p.offset, p.offset + Q - 1, K).clip(K)
    return (span.sure_lo, span.sure_hi) == (0, K)


def past(p: Problem) -> bool:
    """True when the position's bias is a line in j for every key that a row may meet."""
    return p.spec.position.biases and p.spec.position.slope_per_head(1) is not None and _backward(p.allow, p.offset)


def _backward(a: Allow, offset: int) -> bool:
    """True when no query meets a key after its own position."""
    match a:
        case Causal():
            return True
        case Window(ahead=ahead):
            return ahead == 0
        case Both(x, y):
            return _backward(x, offset) or _backward(y, offset)
        case Either(x, y):
            return _backward(x, offset) and _backward(y, offset)
        case Behind(lead, x):
            return _backward(x, offset - lead) and offset >= lead - 1
        case _:
            return False


def _call(made: Product, p: Problem) -> Tensor:
    q, k, v = _even(made)
    (B, H, Q, W), G, lead, causal = q.shape, k.shape[1], made.lead, is_causal(p) and not _meets_all(p)
    if Q == 1 and H != G:
        # One query meets every key, so its group's heads can stand as rows and no key is repeated.
        out = F.scaled_dot_product_attention(q.reshape(B, G, H // G, W), adjacent(k), adjacent(v), scale=made.scale)
        return out.reshape(B, H, 1, W)
    if causal and lead:
        q = F.pad(q, (0, 0, lead, 0))
    out = sdpa(q, k, v, None, made.scale, causal)
    return out[:, :, lead:] if causal and lead else out


def _even(made: Product) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one width, a multiple of 8."""
    width = -(-max(made.q.shape[-1], made.v.shape[-1]) // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (made.q, made.k, made.v))
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """torch's public call, with heads repeated where its fused kernels do not share keys."""
    H, G = q.shape[1], k.shape[1]
    shares = mask is None and (q.device.type == "cpu" or q.dtype in HALF)
    if H != G and not shares:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    q, k, v = adjacent(q), adjacent(k), adjacent(v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=H != G and shares
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Masked:
    """One chunk of rows under a mask that is made for it."""

    problem: Problem
    low: Lowered
    tile: Tile
    made: Product
    temperature: float | Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        p, t, lead = self.problem, self.tile, self.made.lead
        part = replace(self.made, q=q[:, :, t.start : t.stop], k=_cut(k, lead, t), v=_cut(v, lead, t))
        mask, empty = self._rule()
        if past(p):
            middle = (t.start + t.stop) / 2 + t.offset
            part = with_line(p, part, self.low, self.temperature, (t.q_at() - middle, t.k_at() - middle))
        elif p.spec.position.biases:
            bias = p.spec.position.bias(t.q_at().squeeze(-1), t.k_at(), q, table).unsqueeze(0)
            warm = self.temperature
            bias = F.pad(bias / (warm.view(1, -1, 1, 1) if isinstance(warm, Tensor) else warm), (lead, 0)).to(q.dtype)
            mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
        return sdpa(*_even(part), mask, part.scale, False), empty

    def _rule(self) -> tuple[Tensor | None, Tensor | None]:
        """Which pairs may meet (None: all), and which rows have nothing allowed."""
        p, t = self.problem, self.tile
        span = p.allow.span(t.start + t.offset, t.stop - 1 + t.offset, p.k.shape[2]).clip(p.k.shape[2])
        if (span.sure_lo, span.sure_hi) == (t.lo, t.hi):
            return None, None
        mask, empty = p.allow.tile(t), None
        mask = mask.expand(*mask.shape[:2], t.stop - t.start, t.hi - t.lo)
        if span.sure_hi <= span.sure_lo:
            empty = ~mask.any(-1)
            # A row without any key would be NaN in some kernels: it meets everything there and is set to zero after.
            mask = mask | empty.unsqueeze(-1)
        return F.pad(mask, (self.made.lead, 0), value=True), empty


def _chunks(p: Problem) -> Iterator[Tile]:
    _, H, _, Q, K, _, _ = p.sizes
    heads = H if p.spec.position.biases else 1
    rows = max(16, min(FAR // 2, CHUNK // max(1, K * heads)))
    for start in range(0, Q, rows):
        stop = min(start + rows, Q)
        span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
        yield Tile(start, stop, span.lo, span.hi, p.offset, p.q.device)


def _cut(x: Tensor, lead: int, t: Tile) -> Tensor:
    keys = x[:, :, lead + t.lo : lead + t.hi]
    return torch.cat([x[:, :, :lead], keys], 2) if lead else keys


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a dtype whose sum is x: one, or three of half precision. The first has all of the gradient."""
    first = x.to(dtype)
    if dtype not in HALF:
        return [first]
    rest = x.detach() - first.detach().to(x.dtype)
    second = rest.to(dtype)
    return [first, second, (rest - second.to(x.dtype)).to(dtype)]


def _key_bias(bias: Tensor, q: Tensor, G: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The columns of a bias (#B, heads, K), heads being G, or more where several query heads of a group differ."""
    B, H, Q, _ = q.shape
    if bias.shape[1] < G:
        bias = bias.repeat_interleave(G // bias.shape[1], dim=1)
    heads, K = bias.shape[1:]
    each = heads // G
    columns = bias.view(-1, G, each, K).mT.expand(B, G, K, each)
    mine = torch.arange(H, device=q.device) * heads // H % each
    one = F.one_hot(mine, each).to(dtype).view(1, H, 1, each)
    # float16 ends at 65,504: a power of two goes to the other side of the product.
    most = torch.finfo(dtype).max / 16
    if dtype == torch.float16:
        far = (columns.detach().abs().amax() / most).clamp_min(1)
        far = torch.exp2(torch.log2(far).ceil())
        columns, one = columns / far, one * far.to(dtype)
    pieces = _parts(columns, dtype)
    return [one.expand(B, H, Q, each)] * len(pieces), pieces
