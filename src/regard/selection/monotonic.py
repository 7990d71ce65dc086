"""Monotonic attention: the place of reading only moves forward (Raffel et al. 2017).

At each step the reader walks from where it stopped; at key j it stops with probability σ(s_ij).

    mode=expected   the probability of stopping at j, for training:  α_ij = p_ij Σ_{k≤j} α_{i−1,k} Π_{k≤l<j} (1 − p_il)
    mode=hard       stop at the first j with σ(s_ij) ≥ ½, for decoding online; no such j: the row is refused and waits

The carry is where the previous row stopped. The weights of a row may sum to less than one: the reader can run off the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.base import Geometry
from . import walking
from .base import Given, Selection

_LOG_ZERO = -1e4
"""exp of it is 0 in every float type, and, unlike −inf, it has a gradient that is not NaN."""


@dataclass(frozen=True)
class Monotonic(Selection):
    name = "monotonic"
    carries = True
    absolute = True
    sums_to_one = False
    cost = 16
    not_in_abstain = "monotonic walks along the keys, and a refusal has no place on the way; its hard mode refuses by itself"
    mode: Literal["expected", "hard"] = "expected"

    def __post_init__(self) -> None:
        self.check_choice("mode", ("expected", "hard"))

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        """The recurrence as it is written, one pair at a time along both axes."""
        stop = torch.sigmoid(scores)
        rows: list[Tensor] = []
        before = self._before(scores, given)
        for i in range(scores.shape[-2]):
            row = self._hard_row(scores[..., i, :], before) if self.mode == "hard" else _walk(stop[..., i, :], before)
            rows.append(row)
            before = self._keep(before, row, given, i)
        return torch.stack(rows, dim=-2)

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        if self.mode == "expected":
            found = walking.walked(scores, self._before(scores, given), given.empty)
            if found is not None:
                return found
        # Sums of many logs lose float32's last digits, and the difference of two of them is what counts.
        dtype, scores = scores.dtype, scores.double()
        before = self._before(scores, given)
        stops, goes_on = F.logsigmoid(scores), F.logsigmoid(-scores)
        walked = goes_on.clamp_min(_LOG_ZERO).cumsum(-1)
        walked = F.pad(walked, (1, -1))
        rows: list[Tensor] = []
        for i in range(scores.shape[-2]):
            if self.mode == "hard":
                row = self._hard_row(scores[..., i, :], before)
            else:
                # In logs: a quotient of the products would overflow after a few dozen keys.
                log_before = torch.where(before > 0, before.clamp_min(torch.finfo(before.dtype).tiny).log(), _LOG_ZERO)
                reach = torch.logcumsumexp(log_before - walked[..., i, :], dim=-1) + walked[..., i, :]
                row = (stops[..., i, :] + reach).exp()
            rows.append(row)
            before = self._keep(before, row, given, i)
        return torch.stack(rows, dim=-2).to(dtype), before.to(dtype)

    @property
    def hides_nan(self) -> bool:
        return self.mode == "hard"

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        return "monotonic walks along the keys in order, and a slot has no place in the order" if slotted else None

    def start_carry(self, B: int, H: int, K: int, like: Tensor) -> Tensor:
        """Before the first row the reader stands at the first key."""
        start = super().start_carry(B, H, K, like)
        start[..., :1] = 1
        return start

    def _before(self, scores: Tensor, given: Given) -> Tensor:
        B, H, _, K = scores.shape
        return self.start_carry(B, H, K, scores) if given.carry is None else given.carry[..., :K].to(scores.dtype)

    def _keep(self, before: Tensor, row: Tensor, given: Given, i: int) -> Tensor:
        """A row that is not there, or that found nothing in hard mode, leaves the reader where it stood."""
        stay = row.detach().sum(-1, keepdim=True) == 0 if self.mode == "hard" else None
        if given.empty is not None:
            gone = given.empty[..., i].unsqueeze(-1)
            stay = gone if stay is None else stay | gone
        return row if stay is None else torch.where(stay, before, row)

    def _hard_row(self, scores: Tensor, before: Tensor) -> Tensor:
        here = before.argmax(-1, keepdim=True)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        ready = (scores >= 0) & (columns >= here)
        first = ready.int().argmax(-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, first, ready.any(-1, keepdim=True).to(scores.dtype))


def _walk(stop: Tensor, before: Tensor) -> Tensor:
    arrives = torch.zeros_like(before[..., 0])
    row: list[Tensor] = []
    for j in range(stop.shape[-1]):
        if j:
            arrives = arrives * (1 - stop[..., j - 1])
        arrives = arrives + before[..., j]
        row.append(arrives * stop[..., j])
    return torch.stack(row, dim=-1)
