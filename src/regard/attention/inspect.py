"""inspect: the result, and on demand what is behind it. The fused path stays on; weights are computed for the rows asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import CombinationError, ShapeError
from ..geometry import Geometry
from ..position import Position
from ..selection import Jump, Selection
from ..selection.base import Reach
from ..state import State
from .allow import Allow, Tile
from .gradients import full_precision
from .operator import run, settled
from .plan import Plan, plan
from .problem import Problem, pose
from .spec import Spec
from .tiled import Job, TileOut, cut, job_for


@dataclass(frozen=True)
class _Survey:
    accepted: Tensor
    energy: Tensor | None
    support: Tensor
    effective: Tensor


class Rows(NamedTuple):
    """Some rows of some heads."""

    weights: Float[Tensor, "B heads rows K"]
    accepted: Bool[Tensor, "B heads rows"]


class Attended:
    """What one call did. `output` and `state` are there; the rest is computed when it is first read."""

    def __init__(self, problem: Problem) -> None:
        self._asked = problem
        self.output, carry = run(problem)
        """(B, H, Q, E)"""
        self.state: State = problem.state if carry is None else replace(problem.state, carry=carry, offset=None)
        """The state for the next call: what a selection that carries leaves behind."""

    @property
    def accepted(self) -> Bool[Tensor, "B H Q"]:
        """False where a row had nothing allowed, or refused."""
        return self._survey.accepted

    @property
    def energy(self) -> Float[Tensor, "B H Q"] | None:
        """The energy that the selection minimises: −max ⟨p, s⟩ + H(p), Hopfield's E, GD's E*; None where it has none."""
        return self._survey.energy

    @property
    def support(self) -> Int[Tensor, "B H Q"]:
        """How many keys have a weight that is not zero."""
        return self._survey.support

    @property
    def effective(self) -> Float[Tensor, "B H Q"]:
        """The effective number of keys, exp of the entropy of the weights' sizes: 1 is a hard choice, K a uniform blend."""
        return self._survey.effective

    @cached_property
    def plan(self) -> Plan:
        return plan(self._asked)

    def weights(
        self, rows: Sequence[int] | slice | None = None, heads: Sequence[int] | slice | None = None
    ) -> Float[Tensor, "B heads rows K"]:
        """The weights of some rows and heads, all by default. Only the tiles that hold the rows are computed."""
        return self.rows(rows, heads).weights

    @torch.no_grad()
    def rows(self, rows: Sequence[int] | slice | None = None, heads: Sequence[int] | slice | None = None) -> Rows:
        """Weights and acceptance of some rows and heads, where `accepted` would compute every tile."""
        (B, H, _, Q, K, _, _) = self._problem.sizes
        row_list, head_list = _chosen(rows, Q, "rows"), _chosen(heads, H, "heads")
        out = self.output.new_zeros(B, len(head_list), len(row_list), K)
        accepted = torch.zeros(out.shape[:3], dtype=torch.bool, device=out.device)
        for t, tile in self._tiles(set(row_list)):
            here = [(n, r - t.start) for n, r in enumerate(row_list) if t.start <= r < t.stop]
            if here:
                into, of = [n for n, _ in here], [r for _, r in here]
                chosen = tile.weights[:, head_list][:, :, of]
                out[:, :, into, t.lo : t.hi] = chosen[..., : t.hi - t.lo].to(out.dtype)
                accepted[:, :, into] = _accepts(chosen, self._job[0].null_slots)
        return Rows(out, accepted)

    def jump(self) -> Jump:
        """GD's story of each row: key, distance, direction, coherence point, energy, coherence."""
        p = self._problem
        with torch.no_grad():
            q, k = map(p.geometry.compared, p.turn(p.q, p.k))
            tiles = (Reach(slice(t.start, t.stop), t.lo, tile.scores, tile.given) for t, tile in self._tiles(None))
            jump = p.inner.jump(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), tiles)
        if jump is None:
            raise CombinationError(f"only gd jumps to one key; this is {p.spec}")
        return jump

    @cached_property
    def _problem(self) -> Problem:
        p = settled(self._asked)
        return p.upcast() if p.q.dtype in (torch.bfloat16, torch.float16) else p

    @cached_property
    def _job(self) -> tuple[Job, dict[str, Tensor]]:
        with torch.no_grad(), full_precision(self._problem.q.device.type):
            job, tensors = job_for(self._problem, self._problem.lower(), need_rows=True)
        return job, dict(zip(job.names, tensors, strict=True))

    def _tiles(self, rows: set[int] | None) -> Iterator[tuple[Tile, TileOut]]:
        """The computed tiles that hold any of the rows (None: all); a carry makes every earlier tile necessary too."""
        if not self._asked.q.numel():
            return
        job, whole = self._job
        carry = job.problem.start_carry()
        last = max(rows, default=-1) if rows is not None else None
        for t in job.tiles():
            if last is not None and t.start > last:
                return
            wanted = rows is None or any(t.start <= r < t.stop for r in rows)
            if t.hi > t.lo and (wanted or job.problem.inner.carries):
                with full_precision(whole["q"].device.type):
                    tile = job.compute(t, {n: cut(x, n, t) for n, x in whole.items()}, carry, weigh=True)
                carry = job.problem.widen(tile.carry) if job.problem.inner.carries else None
                if wanted:
                    yield t, tile

    @cached_property
    def _survey(self) -> _Survey:
        p, (job, _) = self._problem, self._job
        B, H, _, Q, _, _, _ = p.sizes
        accepted = torch.zeros(B, H, Q, dtype=torch.bool, device=p.q.device)
        support = torch.zeros(B, H, Q, dtype=torch.long, device=p.q.device)
        effective = torch.zeros(B, H, Q, dtype=p.q.dtype, device=p.q.device)
        energies: list[tuple[Tile, Tensor | None]] = []
        with torch.no_grad():
            for t, tile in self._tiles(None):
                rows = slice(t.start, t.stop)
                real = tile.weights[..., : t.hi - t.lo]
                accepted[:, :, rows] = _accepts(tile.weights, job.null_slots)
                size = real.abs()
                support[:, :, rows] = (real != 0).sum(-1)
                share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(real.dtype).tiny)
                effective[:, :, rows] = torch.special.entr(share).sum(-1).exp() * (size.sum(-1) > 0)
                e = p.inner.energy(tile.scores, tile.weights, tile.given)
                bias = tile.given.row_bias
                if e is not None and bias is not None and not p.inner.reads_row_bias(training=True):
                    e = e - bias
                energies.append((t, e if e is None or tile.empty is None else e.masked_fill(tile.empty, 0)))
        energy = None
        if p.spec is not self._asked.spec:
            energy = self._retrieval_energy(energies)
        elif energies and all(e is not None for _, e in energies):
            energy = torch.zeros(B, H, Q, dtype=p.q.dtype, device=p.q.device)
            for t, e in energies:
                if e is not None:
                    energy[:, :, t.start : t.stop] = e
        return _Survey(accepted, energy, support, effective)

    def _retrieval_energy(self, free: list[tuple[Tile, Tensor | None]]) -> Tensor | None:
        """Of a selection that repeats, at the state that was read out; defined for dot products."""
        p = self._problem
        beta = p.geometry.scale_for(p.q.shape[-1])
        if beta is None:
            return None
        norms = torch.linalg.vector_norm(p.k, dim=-1).repeat_interleave(p.q.shape[1] // p.k.shape[1], dim=1)
        energy = torch.zeros(p.q.shape[:3], dtype=p.q.dtype, device=p.q.device)
        for t, e in free:
            allowed = p.allow.tile(t).expand(*p.q.shape[:2], t.stop - t.start, t.hi - t.lo)
            largest = torch.where(allowed, norms[:, :, None, t.lo : t.hi], 0).amax(-1)
            count = allowed.sum(-1).clamp_min(1).to(p.q.dtype)
            if (
                e is None
                or (attained := self._asked.inner.retrieval_energy(-e, beta, p.q[:, :, t.start : t.stop], count, largest))
                is None
            ):
                return None
            energy[:, :, t.start : t.stop] = attained
        return energy


def inspect(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"] | None,
    spec: str | Spec | None = None,
    *,
    geometry: Geometry | None = None,
    selection: Selection | None = None,
    position: Position | None = None,
    allow: Allow | Tensor | None = None,
    state: State | None = None,
) -> Attended:
    """Like `attend`, and the result can say why: `accepted`, `energy`, `support`, `effective`, `weights(rows=, heads=)`, `plan`."""
    return Attended(pose(q, k, v, spec, (geometry, selection, position), allow, state))


def _accepts(weights: Tensor, null_slots: int) -> Tensor:
    """Rows that chose: not those that had nothing to choose from, or laid more than half of their weight on what refuses."""
    total = weights.abs().sum(-1)
    return total - weights[..., -null_slots:].sum(-1) >= 0.5 if null_slots else total > 0


def _chosen(asked: Sequence[int] | slice | None, count: int, name: str) -> list[int]:
    if asked is None or isinstance(asked, slice):
        return list(range(count))[asked or slice(None)]
    chosen = [i + count if i < 0 else i for i in asked]
    if any(not 0 <= i < count for i in chosen):
        raise ShapeError(f"{name}={list(asked)}: there are {count} {name}, numbered from 0 (or from −1 backwards)")
    return chosen
