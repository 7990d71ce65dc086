"""Rules and position biases that no column holds, through torch's FlexAttention where a device has it.

The rule becomes a function of a pair, and its blocks are known beforehand: those that no pair of may meet are never made, those
that all of may meet are made without asking. Blocks are found from spans of keys, or from the rule's own tiles where spans promise
nothing; a whole Q × K is never asked. Biases per key and slots stay columns of the product (`columns`), positions are a table by
distance, so that nothing but q, k and v has a gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..geometry.base import Lowered
from .allow import All, Allow, Alone, Behind, Both, BoundPadding, Causal, Document, Either, Mask, Not, Prefix, Tile, Window
from .columns import product
from .problem import Problem

BLOCK = 128
DEVICES = ("cuda", "xpu")
"""Where torch has FlexAttention with its gradient."""

Pair = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query row, key) to whether they may meet."""


def refusal(p: Problem, asked: bool = False) -> str | None:
    """Why FlexAttention does not take a problem; None where it does. On CPU it serves whoever `asked`, slowly."""
    position, table = p.spec.position, p.spec.position.table(p.state)
    if p.q.device.type not in DEVICES and not (asked and p.q.device.type == "cpu"):
        return f"FlexAttention has no gradient on {p.q.device.type}"
    if not _there():
        return f"torch {torch.__version__} has no FlexAttention"
    if p.q.shape[2] < BLOCK and not asked:
        return f"fewer than {BLOCK} query rows, whose masks are small"
    if pair_of(p.allow, p.offset) is None:
        return "the rule is not known to FlexAttention"
    if position.biases and not position.shift_invariant:
        return f"{position.name} is more than a bias by distance"
    if position.biases and p.inner.softmax_temperature == "learned":
        return "a learned temperature divides the position bias too"
    if table is not None and table.requires_grad and torch.is_grad_enabled():
        return f"{position.name}'s table is being trained"
    return None


def attend(p: Problem, low: Lowered, temperature: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention, and what the kernel gave of it."""
    made = product(p, low, temperature, dtype)
    rule = pair_of(p.allow, p.offset)
    assert rule is not None
    H, G = made.q.shape[1], made.k.shape[1]
    read = _flex()(
        made.q, made.k, made.v, score_mod=_score(p, made.lead, temperature), scale=made.scale, enable_gqa=H != G,
        block_mask=block_mask(p, _behind(rule, made.lead), made.lead),
    )  # fmt: skip
    out = made.read(read)
    if made.values:
        # A slot is met by every row; a row that may meet nothing else is zeros all the same.
        empty = _empty(p)
        out = out if empty is None else out.masked_fill(empty.unsqueeze(-1), 0)
    return out, read[..., : made.width]


def dtype_for(p: Problem) -> torch.dtype:
    """Of the product. Biases by position are added in float32, whatever it is; a temperature that divides it would be rounded."""
    kept = p.q.device.type != "cpu" and p.inner.softmax_temperature != "learned"
    return p.q.dtype if kept else torch.promote_types(p.q.dtype, torch.float32)


def pair_of(a: Allow, offset: int) -> Pair | None:
    """A rule as a function of a pair; None for a rule that only knows tiles."""
    match a:
        case All():
            return lambda b, h, i, j: j >= 0
        case Causal():
            return lambda b, h, i, j: j <= i + offset
        case Window(keys, ahead):
            return lambda b, h, i, j: (i + offset - j < keys) & (i + offset - j >= -ahead)
        case Prefix(n):
            return lambda b, h, i, j: j < n
        case BoundPadding(first, last):
            return lambda b, h, i, j: (j >= first[b]) & (j < last[b])
        case Document(ids):
            if ids.ndim == 1 or ids.shape[0] == 1:
                flat = ids.reshape(-1)
                return lambda b, h, i, j: flat[i + offset] == flat[j]
            return lambda b, h, i, j: ids[b, i + offset] == ids[b, j]
        case Mask(allowed):
            # A dimension of 1 is that of every index.
            B, H, Q, K = (int(n > 1) for n in allowed.shape)
            return lambda b, h, i, j: allowed[b * B, h * H, i * Q, j * K]
        case Alone(lead, first):
            if isinstance(first, int):
                return lambda b, h, i, j: (i + offset >= lead + first) | (j >= lead)
            return None
        case Not(x):
            inner = pair_of(x, offset)
            return None if inner is None else lambda b, h, i, j: ~inner(b, h, i, j)
        case Behind(lead, x):
            inner = pair_of(x, offset - lead)
            return None if inner is None else _behind(inner, lead)
        case Both(x, y) | Either(x, y):
            left, right = pair_of(x, offset), pair_of(y, offset)
            if left is None or right is None:
                return None
            if isinstance(a, Both):
                return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)
            return lambda b, h, i, j: left(b, h, i, j) | right(b, h, i, j)
        case _:
            return None


def _behind(rule: Pair, lead: int) -> Pair:
    """The rule for the keys after the first `lead`, which everyone may meet."""
    if lead == 0:
        return rule
    return lambda b, h, i, j: (j < lead) | rule(b, h, i, (j - lead).clamp_min(0))


def block_mask(p: Problem, rule: Pair, lead: int, block: int | None = None) -> Any:
    """Which blocks have to be made, and which of them without asking, after `lead` keys that everyone may meet."""
    from torch.nn.attention.flex_attention import BlockMask

    block = block or BLOCK
    Q, K = p.q.shape[2], p.k.shape[2]
    some, full = blocks(p, lead, block)
    partial = some & ~full
    lists: list[Tensor] = []
    for chosen in (partial, full):
        order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True).to(torch.int32)
        lists += [chosen.sum(-1, dtype=torch.int32), order]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=(Q, lead + K))


def blocks(p: Problem, lead: int, block: int) -> tuple[Tensor, Tensor]:
    """(B or 1, H or 1, rows, columns) of blocks: those with a pair that may meet, and those all of whose pairs may."""
    Q, K = p.q.shape[2], p.k.shape[2]
    columns = -(-(lead + K) // block)
    first = torch.arange(columns, device=p.q.device) * block
    last = first + block
    some: list[Tensor] = []
    full: list[Tensor] = []
    for start in range(0, Q, block):
        stop = min(start + block, Q)
        span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
        # A block that hangs over an edge is never full: what is beyond is no key, and no query.
        inside = (last <= lead + K) & (stop - start == block)
        sure_lo = 0 if span.sure_lo == 0 else span.sure_lo + lead
        met = (last > span.lo + lead) & (first < span.hi + lead) if span.hi > span.lo else first < 0
        sure = (first >= sure_lo) & (last <= span.sure_hi + lead) if span.sure_hi > span.sure_lo else first < 0
        sure = (sure | (last <= lead)) & inside
        met, sure = met[None, None], sure[None, None]
        if span.hi > span.lo and span.sure_hi <= span.sure_lo:
            met, sure = _asked(p, Tile(start, stop, 0, K, p.offset, p.q.device), lead, block, columns)
            sure = sure & inside
        some.append(met | (first < lead))
        full.append(sure)
    return _stack(some), _stack(full)


def _asked(p: Problem, t: Tile, lead: int, block: int, columns: int) -> tuple[Tensor, Tensor]:
    """The same of one row of blocks, from the rule itself."""
    allowed = p.allow.tile(t)
    allowed = allowed.expand(*allowed.shape[:2], t.stop - t.start, t.hi - t.lo)
    found: list[Tensor] = []
    for reduced, edge in ((allowed.any(-2), False), (allowed.all(-2), True)):
        wide = torch.nn.functional.pad(reduced, (lead, columns * block - lead - reduced.shape[-1]), value=edge)
        wide = wide.unflatten(-1, (columns, block))
        found.append(wide.all(-1) if edge else wide.any(-1))
    return found[0], found[1]


def _stack(rows: list[Tensor]) -> Tensor:
    B, H = (max(r.shape[n] for r in rows) for n in (0, 1))
    return torch.stack([r.expand(B, H, -1) for r in rows], 2)


def _score(p: Problem, lead: int, temperature: float | Tensor) -> Callable[..., Tensor] | None:
    table = p.bias_by_distance(torch.promote_types(p.q.dtype, torch.float32))
    if table is None:
        return None
    assert not isinstance(temperature, Tensor)
    table = table / temperature
    K = p.k.shape[2]

    def added(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        bias = table[h, i - (j - lead).clamp_min(0) + (K - 1)]
        return score + (bias if lead == 0 else torch.where(j < lead, 0.0, bias))

    return added


def _empty(p: Problem) -> Tensor | None:
    """(#B, #H, Q): rows with nothing allowed, or None where spans promise that there is none."""
    _, _, _, Q, K, _, _ = p.sizes
    found: list[Tensor] = []
    for start in range(0, Q, BLOCK):
        stop = min(start + BLOCK, Q)
        span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
        if span.sure_hi > span.sure_lo:
            found.append(torch.zeros(1, 1, stop - start, dtype=torch.bool, device=p.q.device))
            continue
        allowed = p.allow.tile(Tile(start, stop, 0, K, p.offset, p.q.device))
        found.append(~allowed.expand(*allowed.shape[:2], stop - start, K).any(-1))
    B, H = (max(x.shape[n] for x in found) for n in (0, 1))
    return torch.cat([x.expand(B, H, -1) for x in found], -1)


@lru_cache
def _there() -> bool:
    return importlib.util.find_spec("torch.nn.attention.flex_attention") is not None


@lru_cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module

    # Without torch.compile it makes all of Q × K: for tests, and where a graph around it is being compiled anyway.
    plain = torch.compiler.is_compiling() or getattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    return module.flex_attention if plain else _compiled()


__all__ = ["attend", "block_mask", "blocks", "dtype_for", "pair_of", "refusal"]
