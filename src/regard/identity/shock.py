"""Shock: how much a token surprised the model itself. Affect: a signed gain on how deeply an experience is written.

    shock_t  = −log p(x_t | x_<t)                                      nats, under the model (and the identity that it reads)
    rarity_t = −log mean_s p(x_t | x_<s)                               the same token at any place s of the text: how special its word is
    z_t      = (shock_t − mean) / spread                               against every token this identity has met so far
    affect   = tanh( mean_t (H_t − shock_t) / mean_t H_t )             H_t the entropy of the model's own expectation

H_t is the surprise that the model *expects* at t. A text that goes better than expected has affect above 0, one that goes worse
below: no list of good or bad words, in no language, only the model's own logits. It measures ease, not kindness; a caller
who knows better gives the number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import StateError

ROWS = 256
"""Of logits that are made probabilities at once."""
WINDOW = 2000
"""Tokens over which the running mean forgets: the usual surprise may change over time."""


def surprisal(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """−log p of every token given those before it; the first, which nothing comes before, has 0."""
    nats = logits[:-1].float().log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1).neg()
    return torch.cat([nats.new_zeros(1), nats])


def entropy(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """The surprise that the model expects at every token; 0 at the first."""
    logs = logits[:-1].float().log_softmax(-1)
    return torch.cat([logs.new_zeros(1), -(logs.exp() * logs).sum(-1)])


def rarity(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"], said: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """−log of how probable each token is on average where something is said; never more than its shock and log N."""
    at = said[1:].nonzero().flatten()
    if not len(at):
        return torch.zeros(len(tokens), device=logits.device)
    rows = [logits[part].float().log_softmax(-1).logsumexp(0) for part in at.split(ROWS)]
    return math.log(len(at)) - torch.stack(rows).logsumexp(0)[tokens]


def estimated_affect(shock: Float[Tensor, " N"], expected: Float[Tensor, " N"]) -> float:
    """Whether a text went better (above 0) or worse (below) than the model expected."""
    total = float(expected.sum())
    return math.tanh(float((expected - shock).sum()) / total) if total > 0 else 0.0


def checked_affect(affect: float) -> float:
    if not isinstance(affect, int | float) or not -1 <= affect <= 1:
        raise StateError(f"affect={affect!r}: it is a number from −1 to 1")
    return float(affect)


@dataclass(frozen=True)
class Norm:
    """Mean and spread of surprisal so far; exact over the first `WINDOW` tokens, then slowly forgetting."""

    mean: float = 0.0
    spread: float = 0.0
    count: int = 0

    def after(self, shock: Tensor) -> Norm:
        n = shock.numel()
        if not n:
            return self
        have = min(self.count, WINDOW)
        total = have + n
        mean = (self.mean * have + float(shock.sum())) / total
        squares = (self.spread**2 + self.mean**2) * have + float(shock.square().sum())
        return Norm(mean, math.sqrt(max(squares / total - mean**2, 0.0)), self.count + n)

    def scored(self, shock: Tensor) -> Tensor:
        """How unusual each shock is, in spreads from the mean of everything up to and with this text."""
        norm = self.after(shock)
        return (shock - norm.mean) / max(norm.spread, 1e-6)


__all__ = ["Norm", "entropy", "estimated_affect", "rarity", "surprisal"]
