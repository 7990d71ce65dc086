"""What each token of an experience is worth keeping: one untrained measure after the other; `peers.py` has those of others.

    shock        what surprised the model                         recency      the last tokens
    shock_next   that, or what came right before a surprise       random       any (the control)
    value_norm   |v|, summed over layers                          diversity    far in L2 from what is kept
    coverage     both at once: far from what is kept, and shocking
    words        far from what is kept and from all keys' mean, and whole words that would be rare anywhere in this text: of what the person told first

The last three choose one token after the other (`covering`), and begin with what an identity keeps already. `imprints.py` has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..experience import Experience
from ..speech import ASSISTANT
from .peers import keydiff

TELLING = 0.2
"""What a spread of shock is worth against the log of a distance."""
ELSEWHERE = 0.05
"""What a spread of how far a key points from all the others is worth, in logs of a distance: little, and it finds names at small budgets.

Six people each of the pools train / choose, share of the in-context gain at 12.5% of the tokens: chats 85 / 109 without, 92 / 116 with it, 91 / 119 by twice
as much; diaries 51 / 49, 55 / 52 and 55 / 55; from 25% on within two points."""
BEHIND = 1e-4
"""What a token of a word is worth less than the one before it, in logs of a distance."""
LISTENER, QUESTION, MARK = 1.5, 0.5, 3.0
"""What words lose for being the listener's, of a sentence that asks, or without a letter; in logs of a distance."""


@dataclass(frozen=True, eq=False)
class Present:
    """What an identity keeps already: the keys that its imprints had when they were met, and their tokens."""

    k: Float[Tensor, "L G m D"]
    token: Int[Tensor, " m"]


def shock(e: Experience, seed: int = 0) -> Tensor:
    return e.shock


def shock_next(e: Experience, seed: int = 0) -> Tensor:
    """A surprise is found again by what led to it: the token before it is worth as much."""
    return torch.maximum(e.shock, F.pad(e.shock[1:], (0, 1)))


def recency(e: Experience, seed: int = 0) -> Tensor:
    return torch.arange(len(e), dtype=torch.float32)


def random(e: Experience, seed: int = 0) -> Tensor:
    return torch.rand(len(e), generator=torch.Generator().manual_seed(seed))


def value_norm(e: Experience, seed: int = 0) -> Tensor:
    return e.v.norm(dim=-1).sum((0, 1))


def equal(e: Experience, seed: int = 0) -> Tensor:
    return torch.zeros(len(e))


def shock_spread(e: Experience, seed: int = 0) -> Tensor:
    """Shock in its spreads, as it weighs against distances."""
    return TELLING * _in_spreads(e, e.shock.cpu())


def told_words(e: Experience, seed: int = 0) -> Tensor:
    """A name of several tokens surprises with its first alone, and none of them says it: a word is as rare as its rarest token.
    One whose keys point elsewhere tells a little more. A question tells little, a listener less, a mark without letters nothing."""
    speech = e.speech
    rare, apart = (_of_words(e, x.cpu()) for x in (e.rarity, keydiff(e)))
    telling = TELLING * _in_spreads(e, rare) + ELSEWHERE * _in_spreads(e, apart - apart[e.content.cpu()].mean())
    asks = speech.asks[speech.sentence.clamp_min(0)] if len(speech.asks) else torch.zeros(len(e), dtype=torch.bool)
    return telling - LISTENER * (speech.role == ASSISTANT) - QUESTION * asks - MARK * ~speech.letters


def _of_words(e: Experience, x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The largest of each word."""
    word = e.speech.word
    largest = torch.full((int(word.max()) + 2,), float("-inf")).scatter_reduce(0, word + 1, x.float(), "amax")
    return largest[word + 1]


def _in_spreads(e: Experience, x: Tensor) -> Tensor:
    said = x[e.content.cpu()]
    return x / said.std(correction=0).clamp_min(1e-6) if len(said) else x


def covering(
    e: Experience, telling: Float[Tensor, " N"], present: Present | None = None, whole: bool = False
) -> Float[Tensor, " N"]:
    """Farthest first, where every distance counts e^telling times: a token's worth is the log of it when its turn comes. With
    `whole` words, the other tokens of its word are taken with it, right behind it.

    What is taken only brings the others nearer, so worths fall in the order of the taking, and those of two experiences compare.
    The same token that an identity keeps already is as near from the start; another one may say what has changed since, and is not.
    """
    said = e.content.cpu().nonzero().flatten()
    weight = telling.cpu()[said]
    keys = unit_keys(e.k[:, :, said.to(e.k.device)])
    apart = torch.cdist(keys, keys).cpu()
    near, left = torch.full((len(said),), 2.0), torch.ones(len(said), dtype=torch.bool)
    if present is not None and len(present.token):
        old = torch.cdist(keys, unit_keys(present.k.to(keys.device))).cpu()
        same = e.tokens.cpu()[said][:, None] == present.token[None]
        near = old.masked_fill(~same, 2.0).amin(1).clamp_max(2.0)
    word = e.speech.word[said] if whole else torch.arange(len(said))
    worth = torch.zeros(len(said))
    while bool(left.any()):
        now = (near.clamp_min(1e-6).log() + weight).masked_fill(~left, float("-inf"))
        best = int(now.argmax())
        taken = (word == word[best]).nonzero().flatten()
        # In the order of the word where the budget ends inside it.
        worth[taken] = now[best] - BEHIND * torch.arange(len(taken))
        left[taken] = False
        near = torch.minimum(near, apart[taken].amin(0))
    return torch.full((len(e),), float("-inf")).index_copy(0, said, worth)


def unit_keys(k: Float[Tensor, "L G n D"]) -> Float[Tensor, "n X"]:
    """All keys of a token as one unit vector."""
    return F.normalize(k.permute(2, 0, 1, 3).flatten(1).float(), dim=-1)
