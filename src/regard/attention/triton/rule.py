"""A rule as the kernels read it: for each query row one range of keys, and at most one mask and one list of documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..allow import All, Allow, Behind, Both, BoundPadding, Causal, Document, Either, Mask, Prefix, Window
from ..problem import Problem


@dataclass(frozen=True, eq=False)
class Range:
    """Keys [lo, hi) of each row, (Q) or (B, Q), further narrowed by a mask and by documents."""

    lo: Tensor
    hi: Tensor
    mask: Tensor | None = None
    ids: Tensor | None = None


def known(a: Allow) -> bool:
    """True when `ranged` can write the rule; computes nothing."""
    return _shape(a) is not None


def ranged(p: Problem) -> Range:
    """The rule of a problem whose rule is `known`."""
    _, _, _, Q, K, _, _ = p.sizes
    found = _range(p.allow, p.q_at, K)
    lo, hi = (x.clamp(0, K).to(torch.int32).expand(-1, Q).contiguous() for x in (found.lo.view(-1, Q), found.hi.view(-1, Q)))
    return replace(found, lo=lo, hi=hi)


def _shape(a: Allow) -> tuple[bool, int, int] | None:
    """Whether the ranges begin at the first key, how many masks there are and how many lists of documents; None: unknown."""
    match a:
        case All() | Causal() | Prefix():
            return True, 0, 0
        case Window() | BoundPadding():
            return False, 0, 0
        case Mask():
            return False, 1, 0
        case Document():
            return False, 0, 1
        case Both(x, y):
            left, right = _shape(x), _shape(y)
            if left is None or right is None or left[1] + right[1] > 1 or left[2] + right[2] > 1:
                return None
            return left[0] and right[0], left[1] + right[1], left[2] + right[2]
        case Either(x, y):
            # Two ranges are one where both begin at the first key.
            return (True, 0, 0) if _shape(x) == _shape(y) == (True, 0, 0) else None
        case Behind(_, x):
            return (True, 0, 0) if _shape(x) == (True, 0, 0) else None
        case _:
            return None


def _range(a: Allow, q_at: Tensor, K: int) -> Range:
    zero = torch.zeros_like(q_at)
    match a:
        case Causal():
            return Range(zero, q_at + 1)
        case Prefix(n):
            return Range(zero, zero + min(n, K))
        case Window(keys, ahead):
            return Range(q_at - keys + 1, q_at + ahead + 1)
        case BoundPadding(first, last):
            return Range(*(x.view(-1, 1).expand(-1, len(q_at)) for x in (first, last)))
        case Mask(allowed):
            return Range(zero, zero + K, mask=allowed)
        case Document(ids):
            return Range(zero, zero + K, ids=ids)
        case Both(x, y):
            left, right = _range(x, q_at, K), _range(y, q_at, K)
            return Range(
                torch.maximum(left.lo, right.lo),
                torch.minimum(left.hi, right.hi),
                mask=left.mask if right.mask is None else right.mask,
                ids=left.ids if right.ids is None else right.ids,
            )
        case Either(x, y):
            left, right = _range(x, q_at, K), _range(y, q_at, K)
            return Range(zero, torch.maximum(left.hi, right.hi))
        case Behind(lead, x):
            return Range(zero, _range(x, q_at - lead, K - lead).hi.clamp_min(0) + lead)
        case _:
            return Range(zero, zero + K)
