"""Imprints: which moments of an experience are kept, as the (key, value) that each layer had for them.

A keeper gives every token of an experience a worth; the budget takes the best. One table, one line each:

    shock        what surprised the model                         recency      the last tokens
    shock_next   that, or what came right before a surprise       random       any (the control)
    attention    H2O: attention gathered from all tokens so far   value_norm   |v|, summed over layers
    snapkv       attention received from the last 16 tokens       diversity    GD coverage: far in L2 from what is kept
    coverage     both at once: far from what is kept, and shocking
    learned      that, with a scorer over all of these in the place of shock, trained on episodes of other people (`learn.py`)

`merged` keeps the same number of slots, but those that are not kept are folded into their nearest kept neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import SpecError
from ..experience import Experience
from ..packed import Packed
from ..state import Imprints

if TYPE_CHECKING:
    from .fast_write import FastWrite

LAST_QUERIES = 16
TELLING = 0.2
"""What a spread of shock is worth against the log of a distance."""
Keeper = Callable[[Experience, int], Float[Tensor, " N"]]
"""An experience and a seed to the worth of each token."""


def shock(e: Experience, seed: int = 0) -> Tensor:
    return e.shock


def shock_next(e: Experience, seed: int = 0) -> Tensor:
    """A surprise is found again by what led to it: the token before it is worth as much."""
    return torch.maximum(e.shock, F.pad(e.shock[1:], (0, 1)))


def attention_mass(e: Experience, seed: int = 0) -> Tensor:
    """H2O: the attention that a token has gathered from everyone so far, itself included."""
    return e.attention.sum((0, 1))


def later_attention(e: Experience) -> Tensor:
    """Attention from later tokens alone; a feature of the learned scorer."""
    return e.attention.tril(-1).sum((0, 1))


def snapkv(e: Experience, seed: int = 0) -> Tensor:
    """Attention from the last queries, smoothed over seven neighbours as SnapKV pools."""
    mass = e.attention[:, -LAST_QUERIES:].sum((0, 1))
    return F.avg_pool1d(mass[None, None], 7, stride=1, padding=3, count_include_pad=False)[0, 0]


def recency(e: Experience, seed: int = 0) -> Tensor:
    return torch.arange(len(e), dtype=torch.float32)


def random(e: Experience, seed: int = 0) -> Tensor:
    return torch.rand(len(e), generator=torch.Generator().manual_seed(seed))


def value_norm(e: Experience, seed: int = 0) -> Tensor:
    return e.v.norm(dim=-1).sum((0, 1))


def diversity(e: Experience, seed: int = 0) -> Tensor:
    """Farthest first: GD takes the nearest key, so what no kept key is near to is what coverage lacks."""
    return covering(e, torch.zeros(len(e)))


def coverage(e: Experience, seed: int = 0) -> Tensor:
    said = e.shock[e.content]
    spread = said.std(correction=0).clamp_min(1e-6) if len(said) else torch.tensor(1.0)
    return covering(e, TELLING * e.shock / spread)


def covering(e: Experience, telling: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Farthest first, where every distance counts e^telling times: a token's worth is the log of it when its turn comes.

    What is taken only brings the others nearer, so worths fall in the order of the taking, and those of two experiences compare.
    """
    said = e.content.cpu().nonzero().flatten()
    weight = telling.cpu()[said]
    keys = F.normalize(e.k[:, :, said.to(e.k.device)].permute(2, 0, 1, 3).flatten(1).float(), dim=-1)
    apart = torch.cdist(keys, keys).cpu()
    near, left = torch.full((len(said),), 2.0), torch.ones(len(said), dtype=torch.bool)
    far_then = torch.zeros(len(said))
    for _ in range(len(said)):
        far = near.clamp_min(1e-6).log()
        best = int((far + weight.detach()).masked_fill(~left, float("-inf")).argmax())
        far_then[best], left[best] = far[best], False
        near = torch.minimum(near, apart[best])
    return torch.full((len(e),), float("-inf")).index_copy(0, said, far_then + weight)


def learned(e: Experience, seed: int = 0) -> Tensor:
    from .fast_write import shipped

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
    found = KEEPERS[keep](e, seed).float().cpu()
    return found.masked_fill(~e.content.cpu(), float("-inf"))


def kept(
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
    home = (words[:, None] - index[None]).abs().argmin(1)
    share = F.one_hot(home, len(index)).float()
    count = share.sum(0)
    share = (share / count).to(e.k.device)
    k, v = (torch.einsum("lgnd,nm->lgmd", x[:, :, words], share) for x in (e.k, e.v))
    return k, v, count.log()


def evict(kept: Imprints, budget: int) -> Imprints:
    """At most `budget` slots: the worthiest, oldest first."""
    if len(kept) <= budget:
        return kept
    return kept.pick(kept.worth.topk(budget).indices.sort().values)


__all__ = ["KEEPERS", "evict", "kept", "worth_of"]
