"""One call, checked: tensors, spec, rule and state whose shapes fit. Everything after this can trust what it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import CombinationError, NumericsError, ShapeError, SpecError, StateError
from ..geometry import Dot, Geometry
from ..geometry.base import Lowered, Slot, Turn, stay
from ..position import Position
from ..selection import Selection
from ..selection.base import Kernel, Refusal
from ..state import State
from ..values import readable
from .allow import Allow, Call, rule
from .spec import Spec, make, parse

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Memo:
    """What the fused kernel gives, from a forward that ends to the backward that begins there (`library`)."""

    read: Tensor | None = None
    lse: Tensor | None = None
    again: bool = False
    """True in backward: the result is known, and only its gradient is wanted."""


@dataclass(frozen=True, eq=False)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    spec: Spec
    allow: Allow
    state: State
    offset: int
    reads_keys: bool = False
    """True in the middle of a retrieval that repeats, when the keys themselves are what is read."""
    memo: Memo | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        (B, H, Q, D), (_, G, K, _) = self.q.shape, self.k.shape
        return B, H, G, Q, K, D, self.v.shape[-1]

    @property
    def inner(self) -> Selection:
        return self.spec.inner

    @property
    def refusal(self) -> Refusal | None:
        return self.spec.refusal

    @property
    def points(self) -> bool:
        return self.spec.points

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry to run: `dot` itself where the state makes a conditioned one idle, so that off is bit-identical."""
        g = self.spec.geometry
        return Dot() if g.idle(self.state) else g

    @cached_property
    def bypassed(self) -> bool:
        return self.geometry is not self.spec.geometry

    @cached_property
    def kernel(self) -> Kernel | None:
        """The row map as kernels know it, ours in C and those of devices; None where it is no such map."""
        return self.inner.kernel(self.geometry.distance(self.q.shape[-1]))

    @cached_property
    def turn(self) -> Turn:
        position = self.spec.position
        if not position.turns:
            return stay
        return lambda q, k: (position.apply(q, self.offset, self.state), position.apply(k, 0, self.state))

    @cached_property
    def q_at(self) -> Tensor:
        return torch.arange(self.offset, self.offset + self.q.shape[2], device=self.q.device)

    def bias_by_distance(self, dtype: torch.dtype) -> Tensor | None:
        """(H, Q + K − 1): the position's bias from the first query at the last key to the last query at the first, at i − j + K − 1.

        None where there is no bias. Without a gradient, for a position that is `shift_invariant`.
        """
        position, (Q, K) = self.spec.position, (self.q.shape[2], self.k.shape[2])
        if not position.biases:
            return None
        apart = torch.arange(self.offset - K + 1, self.offset + Q, device=self.q.device)
        table = position.table(self.state)
        like = self.q.detach().to(dtype)
        bias = position.bias(apart, torch.zeros_like(apart[:1]), like, None if table is None else table.detach())
        return bias.squeeze(-1).to(dtype).contiguous()

    def lower(self) -> Lowered:
        geometry = self.geometry
        lowered = geometry.lower(self.q, self.k, self.state, self.turn)
        if lowered.pair is not None and geometry.lowers:
            raise SpecError(f"{geometry.name}.lower gives a pair, which no dot product computes; it must say lowers = False")
        return lowered

    def slots(self, lowered: Lowered, temperature: float | Tensor = 1.0) -> list[Slot]:
        """The keys that every row sees beside the real ones: the geometry's own, and the one `abstain(null_logit)` adds.

        `temperature` is what `lowered` has been divided by.
        """
        slots = [] if lowered.slot is None else [lowered.slot]
        if self.reads_keys:
            slots = [replace(s, value=s.key) for s in slots]
        if self.refusal is not None and self.refusal.null_logit is not None:
            null = self.q.new_full(self.q.shape[:3], float(self.refusal.null_logit))
            slots.append(Slot(null / (temperature.view(1, -1, 1) if isinstance(temperature, Tensor) else temperature)))
        return slots

    def weighed(self, lowered: Lowered) -> dict[str, Tensor]:
        """q and k as a selection that weighs vectors takes them: their product is the score."""
        root = lowered.scale**0.5
        return {"q": lowered.q * root, "k": lowered.k * root}

    def parameters(self) -> dict[str, Tensor]:
        """What the selection reads from the state."""
        inner = self.inner
        whole = {name: self.state.tensor(name, inner).to(self.q.dtype) for name in inner.needs}
        return whole | {p.name: p.read(self.state, inner, self.q) for p in inner.per_head}

    def start_carry(self) -> Tensor | None:
        """What the state brings from earlier calls, widened to the keys there are now; None where nothing is carried."""
        if not self.inner.carries:
            return None
        if self.state.carry is not None:
            return self.widen(self.state.carry.to(self.q.dtype))
        B, H, _, _, K, _, _ = self.sizes
        return self.inner.start_carry(B, H, K, self.q)

    def widen(self, carry: Tensor | None) -> Tensor | None:
        """A carry on all keys of the call."""
        K = self.k.shape[2]
        if carry is None or carry.shape[-1] >= K:
            return None if carry is None else carry[..., :K]
        return torch.nn.functional.pad(carry, (0, K - carry.shape[-1]))

    def upcast(self) -> Problem:
        """Half precision holds the inputs; scores, sums and thresholds are float32."""
        return replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float())


def settle(p: Problem, attend: Callable[[Problem], Tensor]) -> Problem:
    """A retrieval that repeats, walked to its last step, which reads v; any other problem as it is."""
    repeated = p.inner.repeats(p.spec.geometry)
    if repeated is None:
        return p
    geometry, selection, steps = repeated
    step = replace(p, spec=make(geometry, selection, p.spec.position))
    state = p.q
    for _ in range(steps - 1):
        state = attend(replace(step, q=state, v=p.k, reads_keys=True, memo=None))
    return replace(step, q=state)


def pose(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    spec: str | Spec | None,
    parts: tuple[Geometry | None, Selection | None, Position | None],
    allow: Allow | Tensor | None,
    state: State | None,
) -> Problem:
    """Check a call and fill in what it leaves out."""
    chosen = _spec(spec, parts)
    state = State() if state is None else state
    if not isinstance(state, State):
        raise StateError(f"state is a {type(state).__name__}; pass regard.State(...)")
    inner = chosen.inner
    if v is None:
        if not (chosen.points or inner.both_sides):
            raise ShapeError(f"v is None; only pointer and energy do without values, and this is {chosen}")
        v = k
    check_tensors(q, k, v)
    B, H, Q, _ = q.shape
    K = k.shape[2]
    if inner.both_sides and (k.shape[1] != H or Q != K):
        raise CombinationError(
            f"{inner.name} moves the tokens that are both queries and keys; q is {tuple(q.shape)} and k is {tuple(k.shape)}: "
            "they need as many heads and as many tokens"
        )
    _check_state(chosen, state, q, v)
    offset = K - Q if state.offset is None else state.offset
    ruled = rule(allow)
    ruled.check(Call(B, H, Q, K, offset, q.device))
    return Problem(q, k, v, chosen, ruled.bind(K), state, offset)


def _spec(spec: str | Spec | None, parts: tuple[Geometry | None, Selection | None, Position | None]) -> Spec:
    given = [p for p in parts if p is not None]
    if spec is not None and given:
        raise SpecError(f"give a spec or its parts, not both: {spec!r} and {', '.join(str(p) for p in given)}")
    return parse(spec) if spec is not None else make(*parts)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}; q, k and v are tensors (B, heads, length, width)")
        if x.ndim != 4:
            raise ShapeError(f"{name} is {tuple(x.shape)}; it must have 4 dimensions, (B, heads, length, width)")
        if x.dtype not in FLOATS:
            raise ShapeError(f"{name} is {x.dtype}; use float32, float64, bfloat16 or float16")
    if not (q.dtype == k.dtype == v.dtype):
        raise ShapeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; make them one dtype")
    if not (q.device == k.device == v.device):
        raise ShapeError(f"q, k, v are on {q.device}, {k.device}, {v.device}; put them on one device")
    problem = _misfit(q.shape, k.shape, v.shape)
    if problem is not None:
        raise ShapeError(f"q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}: {problem}")


def _misfit(q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
    """Why shapes of four dimensions do not fit each other; None where they do."""
    (B, H, _, D), (k_batch, G, K, k_width), (v_batch, v_heads, v_length, E) = q, k, v
    if not (B == k_batch == v_batch):
        return "the batch sizes differ"
    if v_heads != G or v_length != K:
        return "k and v need the same heads and the same length"
    if G == 0 or H % G:
        return f"H={H} query heads is not a multiple of G={G} key heads"
    if k_width != D:
        return "q and k need the same width D"
    if D == 0 or E == 0:
        return "widths of 0 hold nothing to compare"
    return None


def _check_state(spec: Spec, state: State, q: Tensor, v: Tensor) -> None:
    """What neither a geometry nor a selection can check, since it does not see q and v together."""
    if state.offset is not None and (not isinstance(state.offset, (int, torch.SymInt)) or isinstance(state.offset, bool)):
        raise StateError(f"state.offset is {state.offset!r}; it is the position of the first query, a whole number")
    for name, x in state.tensors():
        if not isinstance(x, Tensor):
            raise StateError(f"state.{name} is a {type(x).__name__}; it must be a tensor")
        if x.is_complex():
            raise StateError(f"state.{name} is {x.dtype}; it must be real")
        if x.device != q.device:
            raise StateError(f"state.{name} is on {x.device}, and q is on {q.device}; put them on one device")
    spec.geometry.check(state, v.shape[-1])
    if spec.inner.carries and state.carry is not None:
        want = spec.inner.carry_shape(q.shape[0], q.shape[1], v.shape[2])[:-1]
        if state.carry.shape[:-1] != want:
            raise ShapeError(
                f"state.carry is {tuple(state.carry.shape)}; {spec.inner} on q {tuple(q.shape)} carries {(*want, 'K')}: "
                "pass the state that inspect returned for the tokens before, or none at the start"
            )
        if state.carry.shape[-1] > v.shape[2]:
            raise ShapeError(
                f"state.carry is {tuple(state.carry.shape)} and there are {v.shape[2]} keys; it is of another, longer text"
            )


def check_result(out: Tensor, p: Problem) -> None:
    """Not finite in, not finite out: say which, instead of handing NaN on. One pass over the output, on CPU only."""
    # A hard walk among NaN scores reads a finite value, so its inputs are looked at too; a pick looks at its own score.
    read = (out, p.q, p.k) if p.inner.hides_nan else (out,)
    if out.device.type == "cpu" and readable(out) and not all(map(_finite, read)):
        raise not_finite(p)


def not_finite(p: Problem) -> NumericsError:
    """Which input is not finite, or else that the scores overflow."""
    for name in ("q", "k", "v"):
        x: Tensor = getattr(p, name)
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            return NumericsError(f"{name} has {bad} of {x.numel()} values that are not finite (NaN or infinity)")
    largest = [f"{float(x.detach().abs().max()):.3g}" for x in (p.q, p.k, p.v)]
    return NumericsError(
        f"the scores of {p.spec} overflow {p.q.dtype}: the largest |q|, |k|, |v| are {', '.join(largest)}; "
        "normalise (cosine), scale down or use float64"
    )


def _finite(x: Tensor) -> bool:
    """A sum is one cheap pass; it can overflow where no value is infinite, and only then is each looked at."""
    x = x.detach()
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())
