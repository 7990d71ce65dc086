"""Self: a vector s per layer that conditions attention, and how an experience moves it: s' = s + η g(z, s).

z is the pooled hidden state, each token weighted by its shock, as the layer's own key map (and value map) projects it; pooling and
projecting commute, so s is in the space of the keys and needs no map of its own to be read.

    key_bias     k_j·s is added to the score of every key: what resembles s is attended more
    self_token   (s_k, s_v) stands before the first token as one more key and value: a mean of all that was met, as one token

    linear       g = W z − λ s, W one gain per layer and head           mlp     g = W₂ tanh(W₁ [z; s])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import ShapeError, SpecError
from ..experience import Experience
from ..state import Base, Form, SelfState

Update = Callable[[Float[Tensor, "L S"], Float[Tensor, "L S"]], Float[Tensor, "L S"]]
"""g: (z, s) to the direction in which s moves."""


@dataclass(frozen=True)
class SelfRule:
    form: Form = "self_token"
    rate: float = 0.5
    """η"""
    decay: float = 1.0
    """λ of the linear g; 1 makes s a running mean of what was met."""

    def __post_init__(self) -> None:
        if self.form not in ("key_bias", "self_token"):
            raise SpecError(f"form={self.form!r} is not one of key_bias, self_token")
        if not 0 < self.rate <= 1 or not 0 <= self.decay <= 1:
            raise SpecError(f"{self}: rate lies in (0, 1] and decay in 0..1")


@dataclass(frozen=True)
class LinearUpdate:
    """g(z, s) = gain · z − λ s."""

    gain: Float[Tensor, "L S"] | float = 1.0
    decay: float = 1.0

    def __call__(self, z: Tensor, s: Tensor) -> Tensor:
        return self.gain * z - self.decay * s


class MLPUpdate(nn.Module):
    """g(z, s) = W₂ tanh(W₁ [z; s]), one for all layers; it starts as no update at all."""

    def __init__(self, width: int, hidden: int = 32) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2 * width, hidden), nn.Linear(hidden, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, z: Tensor, s: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(torch.cat([z, s], -1))))


def pooled(e: Experience, form: Form, weights: Tensor | None = None, mean_k: Tensor | None = None) -> Float[Tensor, "L S"]:
    """z: the mean of what was said, in the space of keys (and values); weights default to shock."""
    said = e.content.cpu()
    w = (e.shock.cpu() if weights is None else weights) * said
    total = w.sum()
    w = w / total if float(total) > 0 else said.float() / said.sum().clamp_min(1)
    k = torch.einsum("lgnd,n->lgd", e.k.cpu(), w)
    if form == "key_bias":
        return (k if mean_k is None else k - mean_k).flatten(1)
    v = torch.einsum("lgnd,n->lgd", e.v.cpu(), w)
    return torch.stack([k, v], 1).flatten(1)


def moved(old: SelfState | None, z: Tensor, rule: SelfRule, update: Update | None = None, affect: float = 1.0) -> SelfState:
    """s + η·|affect| g(±z, s); a negative affect turns z around, so that a bias leads away from what hurt."""
    s = torch.zeros_like(z) if old is None else old.s
    if s.shape != z.shape:
        raise ShapeError(f"s is {tuple(s.shape)} and z is {tuple(z.shape)}: this self has another form than {rule.form}")
    first = old is None or not bool(s.any())
    # It is z that is turned, not g: s would run away from itself, further with every repetition.
    sign = -1.0 if affect < 0 and rule.form == "key_bias" else 1.0
    g = (update or LinearUpdate(decay=rule.decay))(sign * z, s)
    # The first experience is all there is: a running mean starts at it, not halfway from nothing.
    rate = abs(affect) if first and rule.decay == 1 else rule.rate * abs(affect)
    return SelfState((s + rate * g).detach().float(), rule.form)


def fresh(base: Base, form: Form) -> SelfState:
    width = base.key_heads * base.head_width
    return SelfState(torch.zeros(base.depth, width if form == "key_bias" else 2 * width), form)


__all__ = ["LinearUpdate", "MLPUpdate", "SelfRule", "fresh", "moved", "pooled"]
