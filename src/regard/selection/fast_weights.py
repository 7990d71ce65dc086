"""The matrix that `linear` writes and reads, in chunks: what one chunk of keys does to it is a few products, and no loop over tokens.

With c_t the number of keys written up to t inside a chunk, and u the written values (v itself, or β times what `delta` corrects),

    out_i = λ^{c_i} φ(q_i)ᵀS₀ + Σ_{j≤i} λ^{c_i−c_j} φ(q_i)·φ(k_j) u_j,         S = λ^{c_C} S₀ + Σ_j λ^{c_C−c_j} φ(k_j) u_jᵀ
    delta:  (I + L) u/β = v − λ^{c} k̂ᵀS₀,   L_ts = β λ^{c_t−c_s} k̂_t·k̂_s for s < t        (Yang et al. 2024)

The sum of the weights is one more column of v, of ones. Of map=exp each feature is held relative to its largest over the keys so
far (`top`), with λ in the logarithm, so that neither overflows nor vanishes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear

CHUNK = 64
_LOG_NOTHING = -1e30
"""The largest of no features: any other is above it, and, unlike −inf, the difference of two is a number."""


@dataclass(frozen=True)
class FastWeights:
    """S for each key head. State in, state out."""

    linear: Linear
    S: Tensor
    """(B, G, F, E + 1): φ(k)vᵀ summed, and φ(k) itself in the last column."""
    top: Tensor
    """(B, G, F), read for map=exp alone."""
    count: Tensor
    """(B, G, 1): keys written so far."""

    @staticmethod
    def empty(linear: Linear, k: Tensor, v: Tensor) -> FastWeights:
        B, G, _, D = k.shape
        width = linear.features_for(D)
        S, top = v.new_zeros(B, G, width, v.shape[-1] + 1), v.new_full((B, G, width), _LOG_NOTHING)
        return FastWeights(linear, S, top, v.new_zeros(B, G, 1))

    def packed(self) -> Tensor:
        """(B, G, F, E + 3), one tensor for a cache."""
        count = self.count.unsqueeze(-1).expand(*self.top.shape, 1)
        return torch.cat([self.S, self.top.unsqueeze(-1), count], dim=-1)

    @staticmethod
    def unpacked(linear: Linear, x: Tensor, heads: int, dtype: torch.dtype) -> FastWeights:
        x = x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1)
        return FastWeights(linear, x[..., :-2], x[..., -2], x[:, :, :1, -1])

    def write(self, k: Tensor, v: Tensor, real: Tensor | None) -> FastWeights:
        """With keys (B, G, n, D), of which `real` (#B, #G, n) are there."""
        whole = self.linear.delta is None
        done = self
        for start in range(0, k.shape[2], max(k.shape[2], 1) if whole else CHUNK):
            stop = k.shape[2] if whole else min(start + CHUNK, k.shape[2])
            cut = None if real is None else real[..., start:stop]
            done = done._chunk(None, k[:, :, start:stop], v[:, :, start:stop], cut)[1]
        return done

    def meet(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[Tensor, FastWeights]:
        """Row i reads after key i is written; q is (B, H, n, D)."""
        done, pieces = self, list[Tensor]()
        for start in range(0, k.shape[2], CHUNK):
            rows = slice(start, min(start + CHUNK, k.shape[2]))
            cut = None if real is None else real[..., rows]
            out, done = done._chunk(q[:, :, rows], k[:, :, rows], v[:, :, rows], cut)
            pieces += [] if out is None else [out]
        return torch.cat(pieces, dim=2) if len(pieces) != 1 else pieces[0], done

    def read(self, q: Tensor) -> Tensor:
        """What is there for queries (B, H, n, D)."""
        n, E = q.shape[2], self.S.shape[-1] - 1
        out = self._asks(q, self.top) @ self.S
        return self._divided(_unfold(out, n), self.count, E).reshape(*q.shape[:3], E)

    def _chunk(self, q: Tensor | None, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[Tensor | None, FastWeights]:
        x, n = self.linear, k.shape[2]
        there = k.new_ones(1, 1, n) if real is None else real.to(k.dtype)
        c = there.cumsum(-1)
        last, E = c[..., -1:], v.shape[-1]
        state, key, fade = self._keys(k, there, c)
        kept = fade ** last.unsqueeze(-1)
        values = F.pad(v, (0, 1), value=1.0)
        faded = None
        if fade < 1 and (q is not None or x.delta is not None):
            # λ^(c_i − c_j); after i nothing is read, and there the power would grow.
            faded = fade ** (c.unsqueeze(-1) - c.unsqueeze(-2)).clamp_min(0)
        if x.delta is not None:
            L = _times(x.delta * key @ key.mT, faded).tril(-1)
            missed = values - _times(key @ state.S, None if fade == 1 else fade ** c.unsqueeze(-1))
            values = x.delta * torch.linalg.solve_triangular(L, missed, upper=False, unitriangular=True)
        out = None
        if q is not None:
            asks = state._asks(q, state.top)
            near = _unfold(asks @ key.mT, n)
            near = _times(near, None if faded is None else faded.unsqueeze(2)).tril().flatten(2, 3)
            far = _unfold(asks @ state.S, n)
            far = far if fade == 1 else far * (fade**c).unsqueeze(2).unsqueeze(-1)
            out = self._divided(_unfold(near @ values, n) + far, self.count + c, E).reshape(*q.shape[:3], E)
        late = key if fade == 1 else key * (fade ** (last - c)).unsqueeze(-1)
        return out, replace(state, S=kept * state.S + late.mT @ values, count=self.count + last)

    def _keys(self, k: Tensor, there: Tensor, c: Tensor) -> tuple[FastWeights, Tensor, float]:
        """The state and φ(k) on one scale, 0 where no key is, and what is left of λ to fade by."""
        x, shown = self.linear, there.unsqueeze(-1)
        if x.delta is not None:
            return self, x.directed(k) * shown, x.decay
        if x.map != "exp":
            return self, x.mapped(k) * shown, x.decay
        fading = math.log(x.decay)
        last = c[..., -1:]
        logs = x.logs(k) + ((last - c) * fading).unsqueeze(-1)
        before = self.top + last * fading
        seen = logs.detach().masked_fill(shown == 0, _LOG_NOTHING).amax(-2)
        top = torch.maximum(before, seen)
        S = self.S * (before - top).exp().unsqueeze(-1)
        # A hidden key may stand above the largest that is there; it is 0 all the same, and must not be 0 · ∞.
        key = (logs - top.unsqueeze(-2)).masked_fill(shown == 0, 0).exp() * shown
        return replace(self, S=S, top=top), key, 1.0

    def _asks(self, q: Tensor, top: Tensor) -> Tensor:
        """φ(q) on the scale of the keys, (B, G, P·n, F): the P query heads of a key head in a row."""
        x, G = self.linear, self.S.shape[1]
        q = q.reshape(q.shape[0], G, -1, q.shape[-1])
        if x.delta is not None:
            return x.directed(q)
        if x.map != "exp":
            return x.asked(q)
        logs = x.logs(q) + top.unsqueeze(-2)
        return (logs - logs.detach().amax(-1, keepdim=True)).exp()

    def _divided(self, out: Tensor, count: Tensor, E: int) -> Tensor:
        """out (B, G, P, n, E + 1) by its last column, where a row has written anything."""
        if not self.linear.divides:
            return out[..., :E]
        nothing = (count == 0).unsqueeze(2).unsqueeze(-1)
        return out[..., :E] / torch.where(nothing, 1, out[..., E:])


def _unfold(x: Tensor, n: int) -> Tensor:
    """(B, G, P·n, ·) to (B, G, P, n, ·)."""
    return x.unflatten(2, (x.shape[2] // n if n else 0, n))


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
