"""Random calls of the operator: spec, shapes, values, layouts, rules, offset, state and dtype, all from one seed.

A failure names its seed: `verdict(draw(seed))` repeats the call. Values are drawn where a comparison means something, and
also where it does not (huge, not finite): there the result must be finite, or one of our own errors.
"""

from __future__ import annotations

import random as pseudo
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import (
    F64,
    GEOMETRY_SPECS,
    LAYOUTS,
    POSITION_SPECS,
    SELECTION_SPECS,
    Situation,
    every,
    full_state,
    joined,
    trained,
)
from torch import Tensor

from regard import Allow, Causal, Document, LowRank, Padding, Prefix, RegardError, Spec, State, Window, inspect
from regard.attention.allow import All, rule
from regard.attention.inspect import Attended
from regard.attention.reference import attend_plainly
from regard.selection import Selection, entmax_weights

TOLERANCE = {F64: 1e-7, torch.float32: 3e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
VALUES = ("normal", "normal", "normal", "zeros", "zero rows", "twins", "identical", "small", "tiny", "whole", "large")
WILD = ("huge", "not a number", "infinite")


@dataclass(frozen=True)
class Drawn:
    spec: Spec
    q: Tensor
    k: Tensor
    v: Tensor | None
    allow: Allow | Tensor | None
    state: State
    leaves: list[Tensor]
    direction: str
    wild: bool
    small_tiles: bool
    words: str

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v) if x is not None]


def valued(shape: tuple[int, ...], kind: str, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=F64)
    match kind:
        case "zeros":
            return torch.zeros_like(x)
        case "zero rows":
            return x * (torch.rand(*shape[:3], 1, generator=g) < 0.6)
        case "twins":
            return x[:, :, torch.arange(shape[2]) // 2]
        case "identical":
            return x[:, :, :1].expand(shape).clone()
        case "small":
            return x * 1e-4
        case "tiny":
            return x * 1e-30
        case "whole":
            return (2 * x).round()
        case "large":
            return x * 10
        case "huge":
            return x * 10.0 ** float(torch.randint(10, 38, (), generator=g))
        case "not a number" | "infinite":
            if x.numel():
                x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = float("nan" if kind == "not a number" else "inf")
            return x
        case _:
            return x


def ruled(dice: pseudo.Random, g: torch.Generator, sizes: tuple[int, int, int, int], depth: int = 0) -> Allow | Tensor | None:
    B, _, _, K = sizes
    kinds = ["none", "all", "causal", "window", "prefix", "padding", "document", "mask"] + ["not", "both", "either"] * (
        depth < 2
    )
    match dice.choice(kinds):
        case "none":
            return None if depth == 0 else All()
        case "all":
            return All()
        case "causal":
            return Causal()
        case "window":
            return Window(dice.randint(1, 5), dice.choice([0, 0, 2]))
        case "prefix":
            return Prefix(dice.randint(0, K + 1))
        case "padding":
            return Padding(torch.randint(0, K + 1, (B,), generator=g), dice.choice(["left", "right"]))
        case "document":
            shape = dice.choice([(K,), (B, K)])
            return Document(torch.randint(0, 3, shape, generator=g).sort(-1).values)
        case "not":
            return ~rule(ruled(dice, g, sizes, depth + 1))
        case "both":
            return rule(ruled(dice, g, sizes, depth + 1)) & rule(ruled(dice, g, sizes, depth + 1))
        case "either":
            return rule(ruled(dice, g, sizes, depth + 1)) | rule(ruled(dice, g, sizes, depth + 1))
        case _:
            shape = [n if dice.random() < 0.6 else 1 for n in sizes]
            return torch.rand(shape, generator=g) < dice.random()


def stated(spec: Spec, dice: pseudo.Random, s: Situation, width: int, value_width: int, dtype: torch.dtype) -> State:
    state = full_state(s, width, value_width, dtype, getattr(spec.position, "buckets", 32))
    T = state.trace
    assert isinstance(T, Tensor)
    match dice.choice(["full", "full", "zero", "low rank", "per head", "per row"]):
        case "zero":
            state = replace(state, trace=torch.zeros_like(T))
        case "low rank":
            state = replace(state, trace=LowRank(T[..., :2].contiguous()))
        case "per head":
            state = replace(state, trace=T.repeat_interleave(s.heads // s.key_heads, 0))
        case "per row":
            state = replace(state, trace=T.expand(max(s.batch, 1), *T.shape).clone())
        case _:
            pass
    me = state.self
    assert me is not None
    if dice.random() < 0.3:
        state = replace(state, self=replace(me, s=me.s * 0))
    elif dice.random() < 0.3:
        state = replace(state, self=replace(me, s=torch.stack([me.s] * max(s.batch, 1))))
    carry = {"selective": (s.batch,), "monotonic": (s.batch, s.heads)}.get(spec.inner.name)
    if carry is not None and dice.random() < 0.4:
        before = torch.rand(*carry, dice.randint(1, max(1, s.keys)), dtype=F64, generator=torch.Generator().manual_seed(1))
        state = replace(state, carry=(before / before.sum(-1, keepdim=True).clamp_min(1)).to(dtype))
    return replace(state, offset=dice.choice([None, None, None, 0, dice.randint(-3, s.keys + 3)]))


def draw(seed: int) -> Drawn:
    dice, g = pseudo.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    spec = None
    while spec is None:
        position = dice.choice(["", "", *every(POSITION_SPECS)])
        spec = joined(dice.choice(every(GEOMETRY_SPECS)), dice.choice(["softmax", *every(SELECTION_SPECS)]), position)
    inner = spec.inner
    length = lambda: dice.choice([0, 1, 1, 2, 3, 5, 7, 9, 9, 17, 33])  # noqa: E731
    groups, per = dice.choice([1, 1, 2, 3]), dice.choice([1, 1, 2, 3])
    Q, K, B = length(), length(), dice.choice([0, 1, 1, 2, 2, 3])
    if inner.name == "energy":
        per, Q = 1, K
    width = dice.choice([2, 4, 6, 6, 10, 16])
    if "fraction" in str(spec.position):
        width = 6
    value_width = width if inner.name == "energy" else dice.choice([1, width, width, 5, 2 * width + 1])
    dtype = dice.choice([F64, F64, F64, F64, torch.float32, torch.bfloat16, torch.float16])
    s = Situation(groups * per, groups, Q, K, B)
    wild = dice.random() < 0.12
    kinds = [dice.choice([*VALUES, *WILD] if wild else VALUES) for _ in range(3)]
    wild = wild and any(x in WILD for x in kinds)
    layouts = [dice.choice(["contiguous", *LAYOUTS]) for _ in range(3)]
    shapes = (B, s.heads, Q, width), (B, groups, K, width), (B, groups, K, value_width)
    trains = dice.random() < 0.8
    made = [
        LAYOUTS.get(layout, torch.clone)(valued(shape, kind, g).to(dtype)).detach().requires_grad_(trains)
        for shape, kind, layout in zip(shapes, kinds, layouts, strict=True)
    ]
    state = stated(spec, dice, s, width, value_width, dtype)
    leaves: list[Tensor] = []
    if trains and dice.random() < 0.6:
        state, leaves = trained(state)
    direction = dice.choice(["random", "random", "sum", "one row", "stepped"])
    allow = ruled(dice, g, (B, s.heads, Q, K))
    small = dice.random() < 0.4
    words = (
        f"seed {seed}: {spec}, q {tuple(made[0].shape)} k {tuple(made[1].shape)} v {tuple(made[2].shape)} {dtype}, "
        f"values {kinds}, layouts {layouts}, allow {' '.join(str(allow).split())}, offset {state.offset}, carry {state.carry is not None}, "
        f"gradient {direction if trains else 'none'}, state leaves {len(leaves)}, small tiles {small}"
    )
    v = None if inner.name == "energy" else made[2]
    return Drawn(spec, made[0], made[1], v, allow, state, leaves, direction, wild, small, words)


def slopes(out: Tensor, d: Drawn) -> list[Tensor]:
    """The gradients of the call's tensors and of the state, zeros where a leaf has no part."""
    leaves = [*d.tensors, *d.leaves]
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    g = torch.Generator().manual_seed(5)
    match d.direction:
        case "sum":
            along = torch.ones(1, dtype=out.dtype).expand_as(out)
        case "one row":
            along = torch.zeros_like(out)
            along[:, :, :1] = 1
        case "stepped":
            along = torch.randn(*out.shape, 2, generator=g, dtype=F64).to(out.dtype)[..., 0]
        case _:
            along = torch.randn(out.shape, generator=g, dtype=F64).to(out.dtype)
    asked = [x for x in leaves if x.requires_grad]
    if not asked:
        return [torch.zeros_like(x) for x in leaves]
    found = dict(zip(map(id, asked), torch.autograd.grad(out, asked, along, allow_unused=True), strict=True))
    return [torch.zeros_like(x) if found.get(id(x)) is None else found[id(x)] for x in leaves]


def undecided(d: Drawn, scores: Tensor, tolerance: float) -> bool:
    """True when the choice hangs on the last digits of a score, so that two exact ways may choose differently."""
    inner, refusal = d.spec.inner, d.spec.refusal
    s = scores.detach().double()
    if inner.name == "selective" or not s.numel():
        return False
    near = tolerance * (1 + s.masked_fill(s == float("-inf"), 0).abs().amax())
    if refusal is not None and refusal.threshold is not None and bool(((s.amax(-1) - refusal.threshold).abs() < near).any()):
        return True
    if inner.name == "monotonic":
        return str(inner) != "monotonic" and bool((s.abs() < near).any())
    if getattr(inner, "coherence", 0) > 0:
        return True
    if inner.name in ("entmax", "sparsemax"):
        # At the border of the support the gradient jumps: a little noise then changes which keys have a weight.
        e, there = alpha_of(d, inner), ~(s == float("-inf")).all(-1)
        noise = torch.randn(s.shape, generator=torch.Generator().manual_seed(0), dtype=F64) * near * 10
        return any(
            not torch.equal((entmax_weights(x, e) > 0)[there], (entmax_weights(s, e) > 0)[there])
            for x in (s + noise, s - noise)
        )
    if inner.name in ("hard", "gd", "topk"):
        ordered = s.sort(-1, descending=True).values
        gaps = ordered[..., :-1] - ordered[..., 1:]
        return bool((gaps[ordered[..., 1:] > float("-inf")] < near).any())
    return False


def alpha_of(d: Drawn, inner: Selection) -> float | Tensor:
    alpha = getattr(inner, "alpha")  # noqa: B009
    return d.state.tensor("alpha", "entmax").detach().double().view(-1, 1, 1) if alpha == "learned" else float(alpha)


def steepness(d: Drawn) -> float:
    """1/|x| of the shortest vector where lengths are divided by: what rounding in a direction is multiplied with."""
    if d.spec.geometry.name != "cosine" and "norm=unit" not in str(d.spec.geometry):
        return 1.0
    lengths = torch.cat([x.detach().norm(dim=-1).flatten() for x in (d.q, d.k)])
    return max(1.0, 1 / float(lengths[lengths > 0].min())) if bool((lengths > 0).any()) else 1.0


@contextmanager
def tiles_of(d: Drawn) -> Generator[None]:
    """Tiles and chunks of 16 rows where the call asks for them, so that short inputs cross their borders."""
    with pytest.MonkeyPatch.context() as patch:
        if d.small_tiles:
            patch.setattr("regard.attention.tiled.TILE", 1)
            patch.setattr("regard.attention.fused.CHUNK", 1)
        yield


def verdict(d: Drawn) -> str:
    """'agrees', 'finite' (wild values), 'undecided' or 'refused'; an AssertionError that names the call otherwise."""
    try:
        with tiles_of(d):
            seen = inspect(d.q, d.k, d.v, d.spec, allow=d.allow, state=d.state)
            grads = slopes(seen.output, d)
            assert bool(seen.output.isfinite().all()), "the output is not finite"
            if d.wild:
                return "finite"
            if 0 in d.q.shape[:3] or d.k.shape[2] == 0:
                assert not seen.output.any()
                assert not any(x.any() for x in grads)
                return "agrees"
            return compared(d, seen, grads)
    except RegardError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{d.words}") from error


def compared(d: Drawn, seen: Attended, grads: list[Tensor]) -> str:
    tolerance = TOLERANCE[d.q.dtype]
    exact = as_double(d)
    plain = attend_plainly(exact.q, exact.k, exact.v, exact.spec, allow=exact.allow, state=exact.state)
    expected_grads = slopes(plain.output, exact)
    for x, y in zip([plain.output, *grads], [plain.output, *expected_grads], strict=True):
        # A gradient that is right and beyond the largest float16 is infinite there, as loss scaling expects.
        fits = float(y.detach().abs().max()) < torch.finfo(x.dtype).max if y.numel() else True
        assert bool(y.isfinite().all()), "the definition itself is not finite"
        assert bool(x.isfinite().all()) or not fits, "a gradient is not finite"
    if undecided(d, plain.scores, tolerance):
        return "undecided"
    assert_near(seen.output, plain.output, tolerance, "the output")
    if d.q.dtype == F64:
        assert_near(seen.weights(), plain.weights, tolerance, "the weights")
        # A weight that all but underflows is 0 in one order of multiplication and not in another.
        told = ~((mass := torch.maximum(plain.weights.sum(-1), seen.weights().sum(-1))) > 0) | (mass > 1e-100)
        assert torch.equal(seen.accepted[told], plain.accepted[told]), "accepted"
        for n, (x, y) in enumerate(zip(grads, expected_grads, strict=True)):
            assert_near(x, y, tolerance * steepness(exact), f"gradient {n}")
    return "agrees"


def assert_near(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    if expected.numel():
        far = float((found.double() - expected.double()).detach().abs().max())
        size = 1 + float(expected.detach().abs().max())
        assert far <= tolerance * size, f"{name} is off by {far:.3g}, and up to {size:.3g}"


def as_double(d: Drawn) -> Drawn:
    """The same call in float64."""
    if d.q.dtype == F64:
        return d
    made, leaves = trained(d.state)
    for x in leaves:
        x.data = x.data.double()
    q, k = (x.detach().double().requires_grad_(x.requires_grad) for x in (d.q, d.k))
    v = None if d.v is None else d.v.detach().double().requires_grad_(d.v.requires_grad)
    carry = None if d.state.carry is None else d.state.carry.double()
    used = leaves if d.leaves else []
    return replace(d, q=q, k=k, v=v, state=replace(made, carry=carry), leaves=used)
