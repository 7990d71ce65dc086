"""Linear attention: keys are weighed by feature maps, φ(q)·φ(k), and so all of them fit into one matrix (Katharopoulos et al. 2020).

    out_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = φ(q_i)·φ(k_j);    the same as  φ(q_i)ᵀS / φ(q_i)ᵀz  with  S = Σ φ(k_j)v_jᵀ,  z = Σ φ(k_j)

    map=elu        φ(x) = elu(x) + 1, above 0
    map=exp        φ(x)_m = exp(ω_m·x − |x|²/2)/√M, M = `features` random ω: its mean over ω is exp(q·k), softmax's (Choromanski et al. 2021)
    map=identity   φ(x) = x: w is the score, of either sign, and is not divided by its sum

x is q or k times the root of the geometry's scale. A row *writes* the keys that it may meet, in their order, and then reads. So
S is a network whose weights are written by the keys, a fast-weight programmer (Schmidhuber 1992; Schlag et al. 2021):

    decay=λ        S ← λS + φ(k)vᵀ                      each write fades those before it
    delta=β        S ← λS + β k̂(v − (λS)ᵀk̂)ᵀ           a write replaces what k̂ = φ(k)/|φ(k)| reads; q̂ᵀS is not divided by a sum

Weights exist in every case, since out is linear in v: with `delta` they are what is read where the values are one-hot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.base import Geometry
from ..geometry.cosine import unit
from ..position.base import Position
from .base import Given, Selection


@dataclass(frozen=True)
class Linear(Selection):
    name = "linear"
    weighs_vectors = True
    cost = 16
    not_in_abstain = "linear weighs by features and has no scores that a refusal could be measured by"
    not_in_pointer = "linear never makes the weights that a pointer returns; read them with inspect(...).weights()"
    map: Literal["elu", "exp", "identity"] = "elu"
    features: int = 128
    seed: int = 0
    delta: float | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        self.check_choice("map", ("elu", "exp", "identity"))
        for p, least in (("features", 1), ("seed", 0)):
            n = getattr(self, p)
            if not isinstance(n, int) or isinstance(n, bool) or n < least:
                raise self.refuse(p, f"{p} is a whole number of at least {least}")
        if self.delta is not None and not _between(self.delta, 2):
            raise self.refuse(
                "delta", "a write corrects what its key reads by this share: above 0, at most 2 (beyond, it grows)"
            )
        if not _between(self.decay, 1):
            raise self.refuse("decay", "the share of every earlier write that stays: above 0, at most 1")

    @property
    def divides(self) -> bool:
        """True when the weights of a row are divided by their sum."""
        return self.map != "identity" and self.delta is None

    @property
    def sums_to_one(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.divides

    @property
    def signed(self) -> bool:
        return not self.divides

    @property
    def ordered(self) -> bool:
        return self.delta is not None or self.decay < 1

    def shift_invariant(self, position: Position) -> bool:
        """Only the product of turned vectors themselves depends on their distance alone; φ of them depends on where both stand."""
        return position.absent or (self.map == "identity" and position.shift_invariant)

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        if slotted or not geometry.bare:
            return f"linear maps q and k themselves, and {geometry.name} adds to their product; use dot or cosine"
        return None

    def refuses_position(self, position: Position) -> str | None:
        if position.biases:
            return f"{position.name} adds to a score, and linear has none; use decay, or a position that turns q and k"
        return None

    def features_for(self, width: int) -> int:
        return self.features if self.map == "exp" else width

    def directed(self, x: Tensor) -> Tensor:
        """φ̂(x) = φ(x)/|φ(x)|, what `delta` writes along and reads along."""
        if self.map == "exp":
            logs = self.logs(x)
            return unit((logs - logs.detach().amax(-1, keepdim=True)).exp())
        return unit(self.asked(x))

    def mapped(self, x: Tensor) -> Tensor:
        """φ(x), where it is no exponential."""
        return x if self.map == "identity" else F.elu(x) + 1

    def asked(self, q: Tensor) -> Tensor:
        """φ(q), but for a factor per row that the sum of the weights cancels: without it a query far below 0 would have no features."""
        if self.map == "identity":
            return q
        return F.elu(q - q.detach().amax(-1, keepdim=True).clamp_max(0)) + 1

    def logs(self, x: Tensor) -> Tensor:
        """log φ(x) of map=exp, without the 1/√M that cancels."""
        omega = directions(self.features, x.shape[-1], self.seed).to(x.device, x.dtype)
        return x @ omega.mT - x.square().sum(-1, keepdim=True) / 2

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        q, k, allowed = _vectors(scores, given)
        if self.delta is not None:
            return self._written(q, k, allowed)
        if self.map == "exp":
            weights = torch.logsumexp(self.logs(q).unsqueeze(-2) + self.logs(k).unsqueeze(-3), dim=-1)
            faded = weights + _writes_after(allowed, q) * math.log(self.decay)
            return torch.softmax(faded.masked_fill(~allowed, float("-inf")), dim=-1)
        weights = self.asked(q) @ self.mapped(k).mT * self.decay ** _writes_after(allowed, q) * allowed
        return weights / weights.sum(-1, keepdim=True) if self.divides else weights

    def _written(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        """The recurrence as it stands above, each row with a matrix of its own, and with one-hot values."""
        assert self.delta is not None
        asks, along = self.directed(q), self.directed(k)
        B, H, Q, K = allowed.shape
        state, values = q.new_zeros(B, H, Q, asks.shape[-1], K), torch.eye(K, dtype=q.dtype, device=q.device)
        for j in range(K):
            key = along[:, :, None, j]
            faded = self.decay * state
            missed = values[j] - (faded * key.unsqueeze(-1)).sum(-2)
            written = faded + self.delta * key.unsqueeze(-1) * missed.unsqueeze(-2)
            state = torch.where(allowed[..., j, None, None], written, state)
        return (asks.unsqueeze(-1) * state).sum(-2)

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        """For a rule under which each row writes keys of its own; `FastWeights` serves those that share their writes."""
        q, k, allowed = _vectors(scores, given)
        if self.delta is not None:
            return self._unwound(q, k, allowed), None
        if self.map == "exp":
            # Features span hundreds of nats. Each one's largest over the keys goes to the query, whose own largest then cancels.
            asks, tells = self.logs(q.double()), self.logs(k.double())
            largest = tells.detach().amax(-2, keepdim=True)
            asks = asks + largest
            phi_q, phi_k = (asks - asks.detach().amax(-1, keepdim=True)).exp(), (tells - largest).exp()
        else:
            phi_q, phi_k = self.asked(q), self.mapped(k)
        weights = phi_q @ phi_k.mT * allowed
        if self.decay < 1:
            weights = weights * self.decay ** _writes_after(allowed, weights)
        if self.divides:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(q.dtype), None

    def _unwound(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        """Weights of the delta rule from the last write back: r reads S, and what k̂ took of r is no longer read from before it."""
        assert self.delta is not None
        r, along = self.directed(q), self.directed(k)
        weights: list[Tensor] = []
        for j in reversed(range(k.shape[-2])):
            key, met = along[:, :, None, j], allowed[..., j, None]
            w = self.delta * (r * key).sum(-1, keepdim=True) * met
            r = torch.where(met, self.decay * (r - w * key), r)
            weights.append(w)
        return torch.cat(weights[::-1], dim=-1)


def _vectors(scores: Tensor, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """q, k with as many heads as q, and which pairs may meet."""
    q, k = given.q, given.k
    if q is None or k is None:
        raise TypeError("linear weighs vectors: Given.q and Given.k hold them")
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), scores != float("-inf")


def _writes_after(allowed: Tensor, like: Tensor) -> Tensor:
    """How many keys a row writes after each of its own (B, H, Q, K); what stands at keys that it does not write is not read."""
    count = allowed.to(like.dtype)
    return (count.flip(-1).cumsum(-1).flip(-1) - count).expand(allowed.shape)


@lru_cache(maxsize=64)
def directions(features: int, width: int, seed: int) -> Tensor:
    """ω (M, D): blocks of orthogonal directions whose lengths are those of normal vectors, which errs less than normal ones do."""
    with torch.inference_mode(False), torch.no_grad():
        g = torch.Generator().manual_seed(seed)
        blocks: list[Tensor] = []
        for start in range(0, features, width):
            basis, r = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64))
            # QR fixes the sign of each column by its first number, and then the directions would lean to one side.
            basis = (basis * r.diagonal().sign()).mT
            lengths = torch.randn(width, width, generator=g, dtype=torch.float64).norm(dim=-1, keepdim=True)
            blocks.append((basis * lengths)[: features - start])
        return torch.cat(blocks)


def _between(x: object, most: float) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= most
