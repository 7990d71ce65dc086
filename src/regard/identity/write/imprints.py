"""Imprints: which moments of an experience are kept, as the (key, value) that each layer had for them.

A keeper gives every token of an experience a worth (`keepers.py`, `peers.py`); the budget takes the best. `merge` keeps the same
number of slots, but those that are not kept are folded into their nearest kept neighbour. What is told anew displaces what it corrects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import SpecError
from ..experience import Experience
from ..packed import Packed
from ..state import Imprints
from .fast_write import FastWrite
from .keepers import (
    Present,
    covering,
    equal,
    random,
    recency,
    shock,
    shock_next,
    shock_spread,
    told_words,
    unit_keys,
    value_norm,
)
from .peers import attention_mass, criticalkv, expected_attention, keydiff, kvzip, snapkv

LATE = 1.0
"""Nats by which the last layer opens wider to slots, and the first less, on any base: early layers read what words are, late ones what is said next.

It needs no learning, and beats gates and loudness that were learned for every head. Share of the in-context gain at 12.5, 25 and 50% of the tokens, six people of the pool
"choose": who write 47, 73, 91 by those, 49, 79, 94 so; who chat 96, 122, 132 and 109, 128, 135 (five and six people). As they were met, without a shift of
their keys, four people: 48, 68, 91 without it and 53, 74, 97; 75, 97, 100 and 86, 109, 110."""
NEAR = 0.65
"""An imprint is corrected by what is this much nearer to it than to most of what is kept (ten corrections in English: 0.3 to 0.6 of the
median distance, what they leave alone from 0.7)."""


@dataclass(frozen=True)
class Keeper:
    """A measure of every token from an experience and a seed; where it covers, what a distance from what is kept counts."""

    measure: Callable[[Experience, int], Tensor]
    covers: bool = False
    whole: bool = False
    """Whether the tokens of a word are kept together."""


KEEPERS: dict[str, Keeper] = {
    "words": Keeper(told_words, covers=True, whole=True),
    "coverage": Keeper(shock_spread, covers=True),
    "diversity": Keeper(equal, covers=True),
    "shock": Keeper(shock),
    "shock_next": Keeper(shock_next),
    "value_norm": Keeper(value_norm),
    "attention": Keeper(attention_mass),
    "snapkv": Keeper(snapkv),
    "keydiff": Keeper(keydiff),
    "expected": Keeper(expected_attention),
    "criticalkv": Keeper(criticalkv),
    "kvzip": Keeper(kvzip),
    "recency": Keeper(recency),
    "random": Keeper(random),
}
DEFAULT = "words"


def worth_of(e: Experience, keep: str, seed: int = 0, present: Present | None = None) -> Tensor:
    """What each token is worth, beside what an identity keeps already; −inf for markup, which is never kept."""
    if keep not in KEEPERS:
        raise SpecError(f"keep={keep!r} is not one of {', '.join(KEEPERS)}")
    keeper = KEEPERS[keep]
    worth = keeper.measure(e, seed)
    if keeper.covers:
        worth = covering(e, worth, present, keeper.whole)
    return worth.float().cpu().masked_fill(~e.content.cpu(), float("-inf"))


def present_in(imprints: Imprints, learned: FastWrite | None) -> Present:
    """What is kept, with the keys that it had before the heads were opened to it."""
    k = imprints.k.dense()
    return Present(k if learned is None else learned.closed(k), imprints.token.long())


def displaced(imprints: Imprints, new: Imprints, learned: FastWrite | None) -> Imprints:
    """The same, but what a new imprint of another token is nearest to, and near, loses worth: the log of how near it is.

    By the keys of the middle layers, where what stands in the same place of the same kind of statement is alike."""
    if not len(imprints) or not len(new):
        return imprints
    depth = imprints.k.shape[0]
    middle = slice(depth // 3, max(depth // 3 + 1, 2 * depth // 3))
    old, fresh = (unit_keys(present_in(x, learned).k[middle]) for x in (imprints, new))
    apart = torch.cdist(fresh, old)
    ratio = apart / apart.median(1, keepdim=True).values.clamp_min(1e-6)
    ratio = ratio.masked_fill(new.token[:, None] == imprints.token[None], 1.0)
    nearest = torch.zeros_like(ratio, dtype=torch.bool).scatter(1, ratio.argmin(1, keepdim=True), True)
    loss = (ratio / NEAR).clamp_min(1e-6).log().clamp_max(0) * nearest
    return replace(imprints, worth=imprints.worth + loss.amin(0))


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
    if learned is not None:
        k = learned.opened(k)
    return Imprints(
        Packed.of(k),
        Packed.of(v),
        e.tokens[index].to(torch.int32).cpu(),
        (_before(e)[index] + born).to(torch.int32),
        e.shock[index].float().cpu(),
        torch.full((count,), source, dtype=torch.int32),
        opening(e.base.depth).expand(*e.k.shape[:2], 1) + weight,
        worth[index] * abs(e.affect),
    )


def opening(depth: int) -> Float[Tensor, "L 1 1"]:
    """How widely the heads of each layer open to slots."""
    return (LATE * torch.linspace(-1, 1, depth))[:, None, None]


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


__all__ = ["DEFAULT", "KEEPERS", "Keeper", "best_imprints", "displaced", "evict", "opening", "present_in", "worth_of"]
