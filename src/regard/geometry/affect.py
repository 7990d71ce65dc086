"""Affect: a self that is read nonlinearly. It warps the score itself, e = q·k/√D, per head:

    score = exp(t·s) · (e + tanh(w·s) · log cosh e)

The slope of the warp is 1 + tanh(w·s) tanh(e), above 0 for every s: the order of the keys never changes, only how far apart they
stand. At w·s → +∞ the warp is softplus(2e) − log 2: whatever is below 0 is equally unwanted, and likings count double. At
w·s → −∞ it is log 2 − softplus(−2e): whatever is above 0 is equally welcome, and dislikes count double. exp(t·s) is a
temperature by affect; with w = 0 it is `self_conditioned(form=temperature)`.

s = 0 is plain dot, bit for bit. A warp is no dot product, so it runs in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..part import Sizes
from ..state import Self, State
from .base import Geometry, Lowered, Turn, stay
from .self_conditioned import self_of, still

_WEIGHTS = {"w": "HS", "t": "HS"}


def affected(scores: Tensor, lean: Tensor, gain: Tensor) -> Tensor:
    """gain · (e + lean · log cosh e); lean lies in −1..1, gain above 0, and e may be of any size."""
    return gain * (scores + lean * (torch.logaddexp(scores, -scores) - math.log(2)))


def affected_scores(q: Tensor, k: Tensor, lean: Tensor, gain: Tensor) -> Tensor:
    return affected(q @ k.mT * q.shape[-1] ** -0.5, lean, gain)


@dataclass(frozen=True)
class Affect(Geometry):
    name = "affect"
    needs = ("self",)
    lowers = False

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Tensor:
        return affected_scores(*turn(q, k), *self._numbers(state, q))

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        numbers = self._numbers(state, q)
        return Lowered(*turn(q, k), pair=affected_scores, params=numbers)

    def idle(self, state: State) -> bool:
        return still(self, state)

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        """The weights; s belongs to an episode."""
        return {f"self_{n}": torch.randn(sizes.H, sizes.S) * sizes.S**-0.5 for n in _WEIGHTS}

    def fill(self, state: State, trained: Mapping[str, Tensor]) -> State:
        if state.self is None:
            return state
        own = {n: trained[f"self_{n}"] for n in _WEIGHTS if f"self_{n}" in trained}
        return replace(state, self=Self(state.self.s, {**own, **state.self.weights}))

    def _numbers(self, state: State, q: Tensor) -> tuple[Tensor, Tensor]:
        """tanh(w·s) and exp(t·s), each (B, H, 1, 1) or (1, H, 1, 1)."""
        me = self_of(self, state, q, _WEIGHTS)
        w, t = ((me.s @ me.weight(n, self).mT)[..., None, None] for n in _WEIGHTS)
        return w.tanh(), t.exp()
