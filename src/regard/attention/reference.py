"""The plain twin of every fast path: all scores at once, the plain row map, one product. For tests and for reading.

It builds Q × K tensors (and worse: distances as they are written), so keep the inputs small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import Geometry
from ..position import Position
from ..selection import Selection
from ..selection.base import Given
from ..state import State
from .allow import Allow, Tile
from .problem import Problem, pose, settle
from .spec import Spec


@dataclass(frozen=True)
class Plain:
    output: Tensor
    weights: Tensor
    accepted: Tensor
    scores: Tensor


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    spec: str | Spec | None = None,
    *,
    geometry: Geometry | None = None,
    selection: Selection | None = None,
    position: Position | None = None,
    allow: Allow | Tensor | None = None,
    state: State | None = None,
) -> Plain:
    """`attend` by its definition."""
    return plainly(pose(q, k, v, spec, (geometry, selection, position), allow, state))


def plainly(p: Problem) -> Plain:
    """A call that is checked, by its definition."""
    p = settle(p, lambda step: plainly(step).output)
    B, H, G, Q, K, _, _ = p.sizes
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (p.k, p.v))
    geometry, position = p.spec.geometry, p.spec.position
    scores = geometry.scores(p.q, k, p.state, p.turn)
    if position.biases:
        scores = scores + position.bias(p.q_at, torch.arange(K, device=k.device), p.q, position.table(p.state))
    whole = Tile(0, Q, 0, K, p.offset, p.q.device)
    allowed = p.allow.tile(whole).expand(B, H, Q, K)
    scores = scores.masked_fill(~allowed, float("-inf"))
    empty = ~allowed.any(-1)
    filled = scores.masked_fill(empty.unsqueeze(-1), 0)
    slot = geometry.slot(p.q, k, p.state, p.turn)
    values = v
    if slot is not None:
        filled = torch.cat([filled, slot.score.unsqueeze(-1)], -1)
        value = slot.key if p.reads_keys else slot.value
        value = torch.zeros_like(v[:, :, 0]) if value is None else value
        values = torch.cat([values, value.unsqueeze(-2)], -2)
    if p.refusal is not None and p.refusal.null_logit is not None:
        filled = torch.cat([filled, filled.new_full((B, H, Q, 1), p.refusal.null_logit)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], -2)
    given = Given(
        at=p.q_at,
        empty=empty,
        slots=filled.shape[-1] - K,
        carry=p.start_carry(),
        distance=geometry.distance(p.q.shape[-1]),
        params=p.parameters(),
    )
    if p.inner.weighs_vectors:
        given = replace(given, **p.weighed(geometry.lower(p.q, k, p.state, p.turn)))
    weights = p.inner.plain(filled, given)
    if p.refusal is not None and p.refusal.threshold is not None:
        weights = weights * (scores.amax(-1, keepdim=True) >= p.refusal.threshold)
    weights = weights.masked_fill(empty.unsqueeze(-1), 0)
    if p.points:
        output = weights[..., :K]
    elif p.inner.both_sides:
        q_t, k_t = p.turn(p.q, k)
        sides = weights @ k_t, weights.mT @ q_t
        output = torch.cat([position.revert(x, p.offset, p.state) for x in sides], -1)
    else:
        output = weights @ values
    null = (slot is not None and slot.value is None) or (p.refusal is not None and p.refusal.null_logit is not None)
    mass = weights[..., :K].sum(-1) if null else weights.abs().sum(-1)
    if null and slot is not None and slot.value is not None:
        mass = mass + weights[..., K]
    accepted = (mass >= 0.5 if null else mass > 0) & ~empty
    return Plain(output, weights[..., :K], accepted, scores)
