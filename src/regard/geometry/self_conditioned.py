"""Self-conditioned attention: a self state s, one vector per episode, enters the scores q·k/√D.

    uniform      + u·s                       inert: softmax ignores what is constant along a row
    temperature  · exp(w·s)                  sharper or flatter, per head
    key_bias     + k_j · U s                 prefers some keys, for every query
    low_rank     q → (I + A diag(B s) C) q   bends the query
    self_token   one more key W_k s and value W_v s, at + log g(s), g = |s|²/(1+|s|²)
    null_slot    one more key with value 0 and score −u·s: the row can look away

The published minimal form is `uniform`; the others are the smallest that act. At s = 0 all but `null_slot` are plain dot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ShapeError, StateError
from ..part import Sizes
from ..state import Self, State, magnitude
from .base import Geometry, Lowered, Slot, Turn, stay
from .dot import Dot

Form = Literal["uniform", "temperature", "key_bias", "low_rank", "self_token", "null_slot"]
_WEIGHTS: dict[Form, dict[str, str]] = {
    "uniform": {"u": "HS"}, "temperature": {"w": "HS"}, "key_bias": {"U": "GDS"}, "null_slot": {"u": "HS"},
    "low_rank": {"A": "HDR", "B": "RS", "C": "HRD"}, "self_token": {"W_k": "GDS", "W_v": "GES"},
}  # fmt: skip
"""The axes of each form's weights, by the letters of the legend. G may be any number that divides H."""
FORMS = get_args(Form)
_TRAINED_RANK = 4

_SMALLEST_GATE = 1e-30
"""log 0 would give NaN gradients; exp(log 1e-30) adds exactly nothing to a softmax in float32."""


@dataclass(frozen=True)
class SelfConditioned(Geometry):
    name = "self_conditioned"
    needs = ("self",)
    reads_unturned = True
    form: Form = "key_bias"

    def __post_init__(self) -> None:
        self.check_choice("form", FORMS)

    @property
    def slotted(self) -> bool:
        return self.form in ("self_token", "null_slot")

    @property
    def bare(self) -> bool:
        return not self.slotted

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        me = self._self(state, q)
        return Dot().scores(self._query(q, me), k, state, turn) + self._row(me, q).unsqueeze(-1)

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        me = self._self(state, q)
        lowered = Dot().lower(self._query(q, me), k, state, turn)
        return replace(lowered, row_bias=lambda: self._row(me, q), slot=self.slot(q, k, state))

    def slot(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Slot | None:
        me = self._self(state, q)
        rows = q.shape[:3]
        if self.form == "null_slot":
            return Slot(-(me.s @ me.weight("u", self).mT).unsqueeze(-1).expand(rows))
        if self.form == "self_token":
            key = torch.einsum("gds,bs->bgd", me.weight("W_k", self), me.s)
            value = torch.einsum("ges,bs->bge", me.weight("W_v", self), me.s)
            key, value = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).expand(q.shape[0], -1, -1) for x in (key, value))
            norm = me.s.square().sum(-1)
            gate = (norm / (1 + norm)).clamp_min(_SMALLEST_GATE).log()
            score = torch.einsum("bhqd,bhd->bhq", q, key) * q.shape[-1] ** -0.5 + gate.view(-1, 1, 1)
            return Slot(score, key, value)
        return None

    def idle(self, state: State) -> bool:
        return still(self, state) and self.form != "null_slot"

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        """The weights; s belongs to an episode."""
        size = {**vars(sizes), "E": sizes.D, "R": _TRAINED_RANK}
        shapes = {n: [size[a] for a in axes] for n, axes in _WEIGHTS[self.form].items()}
        return {f"self_{n}": torch.randn(shape) * sizes.S**-0.5 for n, shape in shapes.items()}

    def fill(self, state: State, trained: Mapping[str, Tensor]) -> State:
        if state.self is None:
            return state
        own = {n: trained[f"self_{n}"] for n in _WEIGHTS[self.form] if f"self_{n}" in trained}
        return replace(state, self=Self(state.self.s, {**own, **state.self.weights}))

    def check(self, state: State, value_width: int) -> None:
        if self.form == "self_token" and isinstance(state.self, Self):
            W_v = state.self.weight("W_v", self)
            if W_v.ndim == 3 and W_v.shape[1] != value_width:
                raise ShapeError(
                    f"state.self weight 'W_v' is {tuple(W_v.shape)}; v has width E={value_width}, so it is (G, E, S)"
                )

    def _query(self, q: Tensor, me: Self) -> Tensor:
        match self.form:
            case "temperature":
                return q * torch.exp(me.s @ me.weight("w", self).mT)[..., None, None]
            case "key_bias":
                bias = torch.einsum("hds,bs->bhd", me.weight("U", self), me.s) * q.shape[-1] ** 0.5
                return q + bias.repeat_interleave(q.shape[1] // bias.shape[1], dim=1).unsqueeze(-2)
            case "low_rank":
                A, B, C = (me.weight(x, self) for x in ("A", "B", "C"))
                gain = (me.s @ B.mT)[:, None, None, :]
                return q + (q @ C.mT * gain) @ A.mT
            case _:
                return q

    def _row(self, me: Self, q: Tensor) -> Tensor:
        if self.form != "uniform":
            return q.new_zeros(q.shape[:3])
        return (me.s @ me.weight("u", self).mT).unsqueeze(-1).expand(q.shape[:3])

    def _self(self, state: State, q: Tensor) -> Self:
        return self_of(self, state, q, _WEIGHTS[self.form])


def self_of(part: Geometry, state: State, q: Tensor, weights: Mapping[str, str]) -> Self:
    """The state's self as a part reads it: s (B, S) or (1, S), and weights of these axes, checked, in the dtype of q."""
    me = state.need("self", part)
    if not isinstance(me, Self):
        raise StateError(f"state.self is a {type(me).__name__}; pass State(self=Self(s, weights))")
    s = me.s if me.s.ndim == 2 else me.s.unsqueeze(0)
    if s.ndim != 2 or s.shape[0] not in (1, q.shape[0]):
        raise ShapeError(f"state.self.s is {tuple(me.s.shape)}; it is (S,) or (B, S) with B={q.shape[0]} from q")
    H, D = q.shape[1], q.shape[-1]
    for name, axes in weights.items():
        weight = me.weight(name, part)
        if not _fits(weight.shape, axes, {"H": H, "D": D, "S": s.shape[-1]}):
            raise ShapeError(
                f"state.self weight {name!r} is {tuple(weight.shape)}; {part} with H={H}, "
                f"D={D}, S={s.shape[-1]} takes {_written(axes)}"
            )
    return Self(s.to(q.dtype), {n: w.to(q.dtype) for n, w in me.weights.items()})


def still(part: Geometry, state: State) -> bool:
    """True when s is 0 and neither it nor a weight is being trained."""
    me = state.need("self", part)
    if not isinstance(me, Self):
        return False
    return magnitude(me.s, "state.self.s") == 0 and not any(t.requires_grad for t in (me.s, *me.weights.values()))


def _fits(shape: Sequence[int], axes: str, sizes: Mapping[str, int]) -> bool:
    groups = [n for n, a in zip(shape, axes, strict=False) if a == "G"]
    known = all(n == sizes.get(a, n) for n, a in zip(shape, axes, strict=False))
    return len(shape) == len(axes) and known and all(n > 0 and sizes["H"] % n == 0 for n in groups)


def _written(axes: str) -> str:
    text = f"({', '.join(axes)})"
    return f"{text} or {text.replace('G', 'H')}" if "G" in axes else text
