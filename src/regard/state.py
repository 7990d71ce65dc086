"""What a call carries beside q, k and v. A spec names, a state carries: no tensor ever lives in a spec.

Legend of shapes, for the whole project
    B batch   H query heads   G key heads (H is a multiple of G)   Q queries   K keys
    D head width   E value width   M model width   V vocabulary   R rank   S width of the self
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import StateError
from .values import readable, tree


def _no_tensors() -> dict[str, Tensor]:
    return {}


@tree
@dataclass(frozen=True)
class LowRank:
    """T = left · diag(signs) · rightᵀ. `right` is `left` unless given, so that T is symmetric with chosen signs."""

    left: Float[Tensor, "*heads D R"]
    right: Float[Tensor, "*heads D R"] | None = None
    signs: Float[Tensor, " R"] | None = None

    def dense(self) -> Float[Tensor, "*heads D D"]:
        """T itself, D × D for each head."""
        signed = self.left if self.signs is None else self.left * self.signs
        return signed @ (self.left if self.right is None else self.right).mT

    def symmetric(self) -> tuple[Tensor, Tensor]:
        """Factors a, b with T + Tᵀ = a bᵀ: the only part of T that a distance sees."""
        signed = self.left if self.signs is None else self.left * self.signs
        if self.right is None:
            return 2 * signed, self.left
        return torch.cat([signed, self.right], -1), torch.cat([self.right, signed], -1)

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.left, self.right, self.signs) if x is not None]


@tree
@dataclass(frozen=True)
class Self:
    """A self state s and the weights through which it enters attention; `self_conditioned` and `affect` name those they need."""

    s: Float[Tensor, "*batch S"]
    weights: Mapping[str, Tensor] = field(default_factory=_no_tensors)

    def weight(self, name: str, by: object) -> Tensor:
        """The weight of this name, for the part `by` that reads it."""
        if name not in self.weights:
            have = ", ".join(sorted(self.weights)) or "none"
            raise StateError(
                f"{by} needs the weight {name!r}; state.self has {have}: pass State(self=Self(s, {{{name!r}: ...}}))"
            )
        return self.weights[name]


@tree
@dataclass(frozen=True)
class Additive:
    """Bahdanau's weights: score = w · tanh(w_q q + w_k k), A hidden units, shared or one set per query head."""

    w: Float[Tensor, "*heads A"]
    w_q: Float[Tensor, "*heads A D"]
    w_k: Float[Tensor, "*heads A D"]


@tree
@dataclass(frozen=True)
class State:
    """The tensors that mechanisms ask for by name, and where the first query stands."""

    trace: Float[Tensor, "*heads D D"] | LowRank | None = None
    self: Self | None = None
    additive: Additive | None = None
    alpha: Float[Tensor, " H"] | None = None
    temperature: Float[Tensor, " H"] | None = None
    relative: Float[Tensor, "buckets H"] | None = None
    positions: Float[Tensor, "length D"] | None = None
    carry: Tensor | None = None
    offset: int | None = None
    others: Mapping[str, Tensor] = field(default_factory=_no_tensors)
    """What parts that are not of this package ask for, by the names they need."""

    def get(self, name: str) -> object:
        """What a part calls by this name; None where there is none."""
        return vars(self)[name] if name in _NAMES else self.others.get(name)

    def having(self, name: str, value: Tensor) -> State:
        """The same state with this tensor by this name."""
        return replace(self, **{name: value} if name in _NAMES else {"others": {**self.others, name: value}})

    def need(self, name: str, by: object) -> object:
        """What the part `by` calls by this name; an error that says who asked for what where there is none."""
        value = self.get(name)
        if value is None:
            have = ", ".join([*(n for n in _NAMES if self.get(n) is not None), *self.others]) or "nothing"
            given = f"{name}=..." if name in _NAMES else f"others={{{name!r}: ...}}"
            raise StateError(f"{by} needs state.{name}, and the state carries {have}: pass state=State({given})")
        return value

    def tensor(self, name: str, by: object) -> Tensor:
        value = self.need(name, by)
        if not isinstance(value, Tensor):
            raise StateError(f"{by} needs state.{name} to be a tensor, not {type(value).__name__}")
        return value

    def tensors(self) -> Iterator[tuple[str, object]]:
        """Every place where a tensor belongs and something stands, with its name."""
        for name in _SINGLE:
            if (value := getattr(self, name)) is not None:
                yield name, value
        if isinstance(self.trace, LowRank):
            yield "trace.left", self.trace.left
            yield from ((f"trace.{n}", x) for n in ("right", "signs") if (x := getattr(self.trace, n)) is not None)
        elif isinstance(self.trace, Tensor):
            yield "trace", self.trace
        if isinstance(self.self, Self):
            yield "self.s", self.self.s
            yield from ((f"self.weights[{n!r}]", x) for n, x in self.self.weights.items())
        if isinstance(self.additive, Additive):
            yield from ((f"additive.{n}", getattr(self.additive, n)) for n in ("w", "w_q", "w_k"))
        yield from self.others.items()


_NAMES = tuple(f.name for f in fields(State) if f.name != "others")
_SINGLE = ("alpha", "temperature", "relative", "positions", "carry")


def magnitude(x: Tensor, name: str) -> float:
    """|x|, one pass. A NaN in a persistent state poisons everything after it, so it is refused where it enters.

    NaN where there are no numbers to read.
    """
    if not readable(x):
        return math.nan
    norm = float(torch.linalg.vector_norm(x.detach() if x.is_floating_point() else x.detach().double()))
    if not math.isfinite(norm) and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise StateError(f"{name} has {bad} values that are not finite out of {x.numel()}; roll back or reset it")
    return norm
