"""Imprints: which moments of an experience are kept, as the (key, value) that each layer had for them.

A keeper gives every token of an experience a worth (`keepers.py`, and `learned`); the budget takes the best. `merge` keeps the same
number of slots, but those that are not kept are folded into their nearest kept neighbour.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import SpecError
from ..experience import Experience
from ..packed import Packed
from ..state import Imprints
from .fast_write import FastWrite, shipped
from .keepers import Keeper, attention_mass, coverage, diversity, random, recency, shock, shock_next, snapkv, value_norm


def learned(e: Experience, seed: int = 0) -> Tensor:
    """Coverage, with a scorer over all measures in the place of shock, trained on episodes of other people."""
    return shipped().worth(e)


KEEPERS: dict[str, Keeper] = {
    "shock": shock,
    "shock_next": shock_next,
    "attention": attention_mass,
    "snapkv": snapkv,
    "recency": recency,
    "random": random,
    "value_norm": value_norm,
    "diversity": diversity,
    "coverage": coverage,
    "learned": learned,
}


def worth_of(e: Experience, keep: str, seed: int = 0) -> Tensor:
    """What each token is worth; −inf for markup, which is never kept."""
    if keep not in KEEPERS:
        raise SpecError(f"keep={keep!r} is not one of {', '.join(KEEPERS)}")
    worth = KEEPERS[keep](e, seed).float().cpu()
    return worth.masked_fill(~e.content.cpu(), float("-inf"))


def best_imprints(
    e: Experience, worth: Tensor, count: int, *, born: int, source: int, merge: bool = False, learned: FastWrite | None = None
) -> Imprints:
    """The `count` best tokens of an experience as imprints, in their order; `born` tokens were met before it.

    `learned` opens the heads to them."""
    count = min(count, int(torch.isfinite(worth).sum()))
    index = worth.topk(count).indices.sort().values if count else torch.zeros(0, dtype=torch.long)
    k, v, weight = e.k[:, :, index], e.v[:, :, index], torch.zeros(count)
    if merge and count:
        k, v, weight = _merged(e, index, torch.isfinite(worth))
    gate = torch.zeros(*e.k.shape[:2], 1)
    if learned is not None:
        k, v, gate = learned.opened(k, v)
    return Imprints(
        Packed.of(k),
        Packed.of(v),
        e.tokens[index].to(torch.int32).cpu(),
        (_before(e)[index] + born).to(torch.int32),
        e.shock[index].float().cpu(),
        torch.full((count,), source, dtype=torch.int32),
        gate + weight,
        worth[index] * abs(e.affect),
    )


def _before(e: Experience) -> Tensor:
    """How many tokens were said before each; markup does not count, as it does not in a life."""
    said = e.content.cpu().long()
    return said.cumsum(0) - said


def _merged(e: Experience, index: Tensor, said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every token that was said joins the nearest kept one in the text: means of k and v, and the log of the count."""
    words = said.nonzero().flatten()
    nearest = (words[:, None] - index[None]).abs().argmin(1)
    share = F.one_hot(nearest, len(index)).float()
    count = share.sum(0)
    share = (share / count).to(e.k.device)
    k, v = (torch.einsum("lgnd,nm->lgmd", x[:, :, words], share) for x in (e.k, e.v))
    return k, v, count.log()


def evict(imprints: Imprints, budget: int) -> Imprints:
    """At most `budget` slots: the worthiest, oldest first."""
    if len(imprints) <= budget:
        return imprints
    return imprints.pick(imprints.worth.topk(budget).indices.sort().values)


__all__ = ["KEEPERS", "best_imprints", "evict", "worth_of"]
