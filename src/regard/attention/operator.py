"""attend: the one operator that composes geometry, selection, position and allow."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..geometry import Geometry
from ..position import Position
from ..selection import Selection
from ..state import State
from ..values import transformed
from . import chunked, columns, flex, fused, library, native, tiled, triton
from .allow import Allow, rule
from .gradients import full_precision
from .packed import facts_of
from .plan import Plan, choose, plan
from .problem import Problem, check_result, pose, settle
from .reference import plainly
from .spec import Spec
from .transforms import needs_the_definition


def attend(
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
) -> Float[Tensor, "B H Q E"]:
    """Attention by any mechanism.

        out = attend(q, k, v, "cosine | entmax(1.5) | alibi", allow=Causal())

    `spec` is a line or a Spec; or give its parts as objects. Query i stands at position K − Q + i unless `state.offset` says
    other. A row with nothing allowed gives zeros. `pointer` returns weights (B, H, Q, K), `energy` both sides (B, H, Q, 2D).
    """
    return solve(q, k, v, spec, (geometry, selection, position), allow, state)[0]


def solve(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    spec: str | Spec | None,
    parts: tuple[Geometry | None, Selection | None, Position | None],
    allow: Allow | Tensor | None,
    state: State | None,
) -> tuple[Tensor, Tensor | None]:
    """`attend`, and what the next call of a selection that carries has to know; one operator where the call is traced."""
    if isinstance(q, Tensor) and library.is_called_for(q):
        if not torch.compiler.is_compiling() and needs_the_definition():
            return plainly(pose(q, k, v, spec, parts, allow, state)).output, None
        return library.call(q, k, v, facts_of(spec, *parts), allow, state)
    return run(pose(q, k, v, spec, parts, allow, state))


def explain(
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
) -> Plan:
    """What `attend` would do with these inputs, and why; computes nothing."""
    return plan(pose(q, k, v, spec, (geometry, selection, position), allow, state))


def run(p: Problem) -> tuple[Tensor, Tensor | None]:
    """The result, and what the next call of a selection that carries has to know."""
    p = settled(p)
    backend, _ = choose(p)
    half = p.q.dtype in (torch.bfloat16, torch.float16)
    full = p.upcast() if half and backend != "sdpa" else p
    carry: Tensor | None = None
    checked = False
    # torch's own call is left to autocast, as whoever calls it there expects.
    with nullcontext() if backend == "sdpa" else full_precision(p.q.device.type):
        if 0 in p.q.shape[:3] or p.k.shape[2] == 0:
            out = _nothing(p)
        elif backend == "tiled" or (backend == "flash" and native.softens(full)):
            out, carry, checked = _tiled(full)
        elif backend == "triton":
            out = triton.attend(full, full.lower(), p.q.dtype)
        elif backend == "chunked":
            how = chunked.order(full.allow)
            assert how is not None
            out = chunked.scan(full, how)
        else:
            temperature = _temperature(full)
            low = full.lower()
            if backend in ("columns", "flex"):
                through = columns if backend == "columns" else flex
                out, read = through.attend(full, low, temperature, through.dtype_for(p))
            else:
                low = low if isinstance(temperature, float) and temperature == 1.0 else low.divided(temperature)
                out, read = fused.sdpa(full, low) if backend == "sdpa" else fused.flash(full, low, temperature)
            seen = p.memo is not None and p.memo.again
            if read.device.type == "cpu" and not seen and fused.may_hide(read, low):
                # Tiles give NaN where all scores of a row are NaN or overflow; the kernel gives zeros, as if nothing were allowed.
                out, _, _ = _tiled(p.upcast() if half else p)
    out = out.to(p.q.dtype)
    if not checked or half:
        check_result(out, p)
    return out, carry


def run_after(p: Problem, how: chunked.Order, held: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """New tokens after `held` that a selection has written into its carry: the result, and the next carry."""
    full = p.upcast() if p.q.dtype in (torch.bfloat16, torch.float16) else p
    with full_precision(p.q.device.type):
        out, carry = chunked.scan_after(full, how, held, carry)
    out = out.to(p.q.dtype)
    check_result(out, p)
    return out, carry


def solve_after(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    allow: Allow | Tensor | None,
    state: State,
    written: tuple[int, Tensor | None],
) -> tuple[Tensor, Tensor] | None:
    """`run_after` of a call whose rule is for all tokens so far, of which so many are in the carry that is given with their number.

    None where each row would write keys of its own.
    """
    held, carry = written
    if torch.compiler.is_compiling() or (library.is_called_for(q) and not transformed()):
        if chunked.order(rule(allow).bind(held + k.shape[2])) is None:
            return None
        return library.call_after(q, k, v, facts_of(spec, None, None, None), allow, state, written)
    problem = pose(q, k, v, spec, (None, None, None), None, replace(state, offset=None))
    how = chunked.order_after(allow, problem, held)
    return None if how is None else run_after(problem, how, held, carry)


def settled(p: Problem) -> Problem:
    """The problem whose one step is left to run."""
    return settle(p, lambda step: run(step)[0])


def _nothing(p: Problem) -> Tensor:
    """No rows or no keys: zeros, whose gradient is zero for everything that a call with rows and keys would have read."""
    out = p.q.new_zeros(*p.q.shape[:3], tiled.out_width(p))
    read = {name for part in p.spec.parts for name in part.reads}
    state = [x for name, x in p.state.tensors() if name.split(".")[0] in read]
    for x in (p.q, p.k, p.v, *state):
        if isinstance(x, Tensor) and x.requires_grad:
            out = out + x.flatten()[:0].sum().to(out.dtype)
    return out


def _temperature(p: Problem) -> float | Tensor:
    t = p.inner.softmax_temperature
    return p.parameters()["temperature"] if t == "learned" else t or 1.0


def _tiled(p: Problem) -> tuple[Tensor, Tensor | None, bool]:
    """The result, the carry, and whether the result is known to be finite."""
    job, tensors = tiled.job_for(p, native.lower(p))
    if tiled.trains(*tensors):
        out, carry = tiled.Tiled.apply(job, *tensors)  # pyright: ignore
    else:
        out, carry, _ = tiled.walk(job, tensors)
    if p.inner.both_sides and p.spec.position.turns:
        sides = out.chunk(2, dim=-1)
        out = torch.cat([p.spec.position.revert(x, p.offset, p.state) for x in sides], dim=-1)
    return out, carry, native.takes(p, tensors)


library.install(run, run_after)
