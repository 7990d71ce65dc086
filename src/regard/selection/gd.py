"""GD: the nearest coherent key, or none.

Between a query and a key at distance L lies the energy φ(x) = −log(α e^{−x²} + (1−α) e^{−(L−x)²}), x along the jump q → k. Its
minimum is the coherence point s*, its value E*. With one α for all keys, E* grows with L, so that the key of least energy is
the nearest key, exactly; we compare distances, since E* saturates and float32 could not tell far keys apart. For
L ≤ L_c(α) (√2 at α = ½) φ has one valley: query and key cohere. Beyond, the "unique" coherence point of the
published statement does not exist. `coherence` asks for L_c²/(βL²) of at least that much; 0 asks for nothing, 1 for one valley.

    keep=nearest   the nearest key, straight-through gradient of softmax(−βL²/τ)
    keep=all       attention re-formed among all coherent keys, ∝ exp(−βL²/τ); at coherence=0 this is the relaxed form
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..errors import CombinationError
from ..geometry.base import Geometry
from .base import Given, Jump, Kernel, Reach, Selection, one_hot

_NEWTON_STEPS = 32
"""Two are enough for random (L, α); 30 at the cusp α = ½, L = √2."""


@lru_cache
def coherent_length(alpha: float) -> float:
    """L_c: the largest L at which φ has a single valley."""
    kappa = abs(math.log((1 - alpha) / alpha))

    def surplus(L: float) -> float:
        r = math.sqrt(max(1 - 2 / L**2, 0.0))
        return L * L * r - 2 * math.atanh(r) - kappa

    low = high = math.sqrt(2)
    while surplus(high) < 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(middle) < 0 else (low, middle)
    return low


def coherence_point(L: Tensor, alpha: float) -> Tensor:
    """x* along the jump, in the valley on the heavier side (the query's at α = ½)."""
    if alpha < 0.5:
        return L - coherence_point(L, 1 - alpha)
    kappa = math.log((1 - alpha) / alpha)
    x = torch.zeros_like(L)
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(kappa + 2 * L * x - L * L)
        x = x - (x - L * p) / (1 - 2 * L * L * p * (1 - p)).clamp_min(1e-6)
        x = torch.minimum(x.clamp_min(0), L)
    return torch.where(L.le(math.sqrt(2)), L / 2, x) if alpha == 0.5 else x


def energy_between(L: Tensor, alpha: float) -> Tensor:
    """E*: φ at its coherence point."""
    x = coherence_point(L, alpha)
    return -torch.logaddexp(math.log(alpha) - x * x, math.log1p(-alpha) - (L - x) ** 2)


@dataclass(frozen=True)
class GD(Selection):
    name = "gd"
    natural_geometry = "euclidean"
    sums_to_one = False
    cost = 3
    not_in_abstain = "gd refuses by its own coherence"
    alpha: float = 0.5
    beta: float = 1.0
    coherence: float = 0.0
    keep: Literal["nearest", "all"] = "nearest"
    tau: float = 1.0

    def __post_init__(self) -> None:
        self.check_positive("beta", "tau")
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < 1:
            raise self.refuse("alpha", "alpha weighs query against key, so it lies strictly between 0 and 1")
        if not isinstance(self.coherence, int | float) or not 0 <= self.coherence < float("inf"):
            raise self.refuse("coherence", "coherence is 0 (accept every key) or more; 1 asks for a single valley")
        self.check_choice("keep", ("nearest", "all"))

    @property
    def picks(self) -> bool:
        return self.keep == "nearest"

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        if geometry.distance(1) is None:
            return f"gd measures a distance and {geometry.name} gives none; use euclidean, rbf, cosine or trace(base=none)"
        return None

    def reads_row_bias(self, training: bool) -> bool:
        """The nearest key is the nearest without it; how far it is, and what trains, is not known without."""
        return training or self.coherence > 0 or self.keep == "all"

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return self.rows(scores, given)[0]

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        squared = self.squared_length(scores, given)
        if self.keep == "all":
            fits = self.accepts(squared) & (scores > float("-inf"))
            some = fits.any(-1, keepdim=True)
            # A row with nothing coherent is refused; its placeholder only keeps the softmax finite.
            weights = torch.softmax((squared / -self.tau).masked_fill(~fits & some, float("-inf")), dim=-1)
            return weights * some, None
        index, accepted = self.index(scores.detach(), given)
        hard = one_hot(index, scores)
        if torch.is_grad_enabled():
            soft = torch.softmax(squared / -self.tau, dim=-1)
            hard = hard + (soft - soft.detach())
        return hard if accepted is None else hard * accepted.unsqueeze(-1), None

    def index(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        best = scores.argmax(-1)
        if self.coherence == 0:
            return best, None
        nearest = scores.gather(-1, best.unsqueeze(-1))
        return best, self.accepts(self.squared_length(nearest, given)).squeeze(-1)

    def kernel(self, distance: tuple[float, float] | None) -> Kernel | None:
        if distance is None:
            return None
        c, top = distance
        least = None
        if self.coherence > 0:
            least = top - coherent_length(self.alpha) ** 2 * (1 + 1e-6) * c / (self.beta * self.coherence)
        return Kernel("picks" if self.picks else "relaxed", self.beta / (c * self.tau), least=least, flat_at_top=True)

    def energy(self, scores: Tensor, weights: Tensor, given: Given) -> Tensor:
        nearest = scores.amax(-1, keepdim=True)
        return energy_between(self.squared_length(nearest, given).sqrt(), self.alpha).squeeze(-1)

    def squared_length(self, scores: Tensor, given: Given) -> Tensor:
        """βL², the squared distance that the energy sees."""
        if given.distance is None:
            raise CombinationError("gd measures the distance from query to key, and this geometry gives none")
        full = scores if given.row_bias is None else scores + given.row_bias.unsqueeze(-1)
        c, top = given.distance
        return (full - top).mul(-self.beta / c).clamp_min(0) if top else (full * (-self.beta / c)).clamp_min(0)

    def accepts(self, squared: Tensor) -> Tensor:
        return squared * self.coherence <= coherent_length(self.alpha) ** 2 * (1 + 1e-6)

    def jump(self, q: Tensor, k: Tensor, tiles: Iterable[Reach]) -> Jump:
        index = torch.full(q.shape[:3], -1, device=q.device)
        squared = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device)
        for rows, first, scores, given in tiles:
            best, accepted = self.index(scores, given)
            there = torch.ones_like(best, dtype=torch.bool) if accepted is None else accepted
            there = there if given.empty is None else there & ~given.empty
            index[:, :, rows] = torch.where(there, best + first, -1)
            nearest = scores.gather(-1, best.unsqueeze(-1))
            squared[:, :, rows] = self.squared_length(nearest, given).squeeze(-1)
        there, tiny = index >= 0, torch.finfo(q.dtype).tiny
        chosen = k.gather(2, index.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, k.shape[-1]))
        step = torch.where(there.unsqueeze(-1), chosen - q, 0)
        L = torch.where(there, squared, 0).sqrt()
        along = (coherence_point(L, self.alpha) / L.clamp_min(tiny)).unsqueeze(-1)
        return Jump(
            index=index,
            distance=L / self.beta**0.5,
            direction=step / torch.linalg.vector_norm(step, dim=-1, keepdim=True).clamp_min(tiny),
            point=torch.where(there.unsqueeze(-1), q + along * step, 0),
            energy=torch.where(there, energy_between(L, self.alpha), 0),
            coherence=torch.where(there, coherent_length(self.alpha) ** 2 / squared, 0),
        )
