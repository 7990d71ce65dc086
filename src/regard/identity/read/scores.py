"""How the episodes of a life fit a question: in which order they come, and whether any of them is asked for at all.

    rank       = 1½ z(alike) + ¼ z(near) + 0.15 z(words in common) + 0.3 z(alike of what follows) + ¼ age
                 + log(length/16) where it is shorter − 2½ if somebody else said it − ½ if it asks; alike counts how such things are told (`sought`)
    coherence  = log-odds that the question asks for something of this life, and for this: a logistic regression on
                 about      is it about the asker's life? by keys, by meaning and by its words (`about`)
                 alike      the cosine of meanings, less what all questions about a life have in common
                 near       by keys, in spreads above what plain questions reach
                 held       the share of the question's rarer tokens that the unit holds
                 margin     how far the first in rank stands above the fourth
    alike      (whole + best) / 2: of all that was said, and of the sentence or clause of it that fits best

A unit is an episode, or a short question of the listener's with the answer to it (`index`). Nothing but the margin depends on how long the
life is: a question is not refused because much was said since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...models.tokenizer import Tokenizer
from ..episodes import Episode
from .about import asks_listener, wording
from .finding import Finder, encoder_name, life_meanings, meanings
from .index import Index, index_of
from .updates import Updates, taken_back

MEANING, NEAR, COMMON, FOLLOWING = 1.5, 0.25, 0.15, 0.3
"""What likeness of meaning, nearness by keys, tokens in common and likeness of what follows count in rank.

Without meanings nearness and tokens count 1 each."""
CANDIDATES, BY_KEYS = 64, 512
"""Units that are compared token by token where meanings have put them first, and where mean keys have: nobody goes through a long life."""
FIRST = 16
"""Units that may correct one another: what fits worse does not come to mind."""
YOUNGER = 0.25
"""What it is worth in rank to be the youngest of a life rather than the oldest."""
OTHERS = -2.5
"""What it costs in rank that somebody else said it, where the question does not ask for what the listener said (`asks_listener`)."""
APART = 3.0
"""How far behind the first in rank others may stand and come to mind with it: what does not answer only draws attention to itself.

76 natural questions of the pools train / choose, on which this was chosen: nats 3.48 / 4.07 without, 3.25 / 3.93 by 4, 3.22 / 3.81 by 3, 3.30 / 3.81 by 2;
right greedy answers 14 / 16 of 38, 17 / 19, 18 / 22, 16 / 21."""
BESIDE = 64
"""Slots more that are read where what may correct the first in rank would have no room."""
ASKS = -0.5
"""What it costs that it ends as a question: it may only have asked. Most real messages end so and tell something before."""


@dataclass(frozen=True)
class Weights:
    """Of a logistic regression; 0 is as likely as not."""

    about: float
    meant: float
    wording: float
    alike: float
    near: float
    held: float
    margin: float
    bias: float


WEIGHTS = {
    True: Weights(about=1.28, meant=1.36, wording=0.89, alike=5.4, near=0.19, held=2.23, margin=0.17, bias=-2.55),
    False: Weights(about=1.97, meant=0.0, wording=1.28, alike=0.0, near=0.33, held=3.13, margin=0.07, bias=-2.3),
}
"""With an encoder of meanings and without."""


@dataclass(frozen=True, eq=False)
class Scores:
    """How the units of a life fit a question."""

    episodes: Sequence[Episode]
    units: list[tuple[int, ...]]
    rank: Float[Tensor, " U"]
    coherence: Float[Tensor, " U"]
    has_meanings: bool
    newer: Mapping[int, int]
    """Of a unit that is corrected by a younger one, that one (`updates`)."""
    beside: int | None = None
    """What may correct the first in rank."""
    asked: Float[Tensor, " W"] | None = None
    """What the question means, less what all questions about a life have in common."""

    def best(self, most: int) -> float:
        """The coherence of the most coherent among the first in rank."""
        return float(self.coherence[self.rank.argsort(descending=True)[:most]].max())

    def chosen(self, most: int, room: int) -> list[int]:
        """The first in rank that have room, oldest first, so that what is youngest stands nearest to the prompt.

        What is corrected stays away, and what corrects it comes; what may correct the first comes beside it, however far behind it stands.
        """
        chosen: list[int] = []
        first = float(self.rank.max()) if len(self.rank) else 0.0
        order = self.rank.argsort(descending=True)[: 2 * most].tolist()
        if self.beside is not None:
            order.insert(1, self.beside)
        for u in order:
            said, is_beside = self.newest(u), u == self.beside
            size = sum(len(self.episodes[i]) + 1 for i in self.units[said])
            if (
                len(chosen) < most
                and (float(self.rank[u]) >= first - APART or is_beside)
                and said not in chosen
                and (size <= room + BESIDE * is_beside or not chosen)
            ):
                chosen.append(said)
                room -= size
        return sorted(chosen)

    def taken_back(self, turns: Sequence[int], asked: Sequence[int], tokenizer: Tokenizer) -> list[Tensor | None]:
        """Of each of these episodes, how much less its tokens are looked at, where it corrects another (`updates`)."""
        first = self.rank.topk(min(len(self.units), FIRST)).indices.tolist()
        out: list[Tensor | None] = []
        for i in turns:
            old = [u for u in self.newer if i in self.units[self.newest(u)]]
            others = [self._said(u) for u in first if u not in old and i not in self.units[u]]
            turn = self.episodes[i].tokens.tolist()
            out.append(taken_back(turn, [self._said(u) for u in old], others, asked, tokenizer) if old else None)
        return out

    def _said(self, unit: int) -> list[int]:
        return [t for i in self.units[unit] for t in self.episodes[i].tokens.tolist()]

    def newest(self, unit: int) -> int:
        # What corrects is younger than what it corrects, so this ends.
        while unit in self.newer:
            unit = self.newer[unit]
        return unit


def scored(finder: Finder, episodes: Sequence[Episode], asked: Sequence[int], text: str) -> Scores:
    """Rank and coherence of every unit of a life."""
    held: OrderedDict[int, Index] = finder.body.made.setdefault("lives", OrderedDict())
    index, name = index_of(held, episodes), encoder_name()
    rare = sorted({t for t in asked if t not in finder.words})
    counts = _counts(rare, index)
    known = life_meanings() if name and index.encoders() == {name} else None
    meaning = None if known is None else meanings([text])
    count = len(index.units)
    rank = (
        OTHERS * (1 - asks_listener(text)) * index.others
        + ASKS * index.asks
        + index.room
        + YOUNGER * torch.linspace(0, 1, count)
    )
    common, (keys, about) = _z(_best(_common(counts, index), index)), finder.question(asked)
    if known is None or meaning is None:
        weights, meant, alike = WEIGHTS[False], 0.0, torch.zeros(count)
        rank, most = rank + common, BY_KEYS
        fits = rank + (_z(_best(index.pooled @ keys.mean(0), index)) if count > most else 0.0)
    else:
        weights, meant, alike = WEIGHTS[True], known.about(meaning[0]), _likeness(meaning[0] - known.mean, index)
        sought = _likeness(known.sought(meaning[0]), index)
        following = torch.where(index.goes_on, sought.roll(-1), sought.mean())
        rank = rank + MEANING * _z(sought) + COMMON * common + FOLLOWING * _z(following)
        fits, most = rank, CANDIDATES
    near, above = _by_keys(keys, index, fits.topk(min(count, most)).indices.sort().values.tolist())
    rank = rank + (1.0 if known is None else NEAR) * near
    coherence = (
        weights.bias
        + weights.about * about
        + weights.meant * meant
        + weights.wording * wording(text)
        + weights.alike * alike
        + weights.near * above
        + weights.held * (_best((counts > 0).float().mean(1), index) if rare else torch.zeros(count))
        + weights.margin * _margin(rank)
    )
    newer, beside, sought_for = dict[int, int](), None, None
    if known is not None and meaning is not None:
        sought_for = meaning[0] - known.mean
        first = rank.topk(min(count, FIRST)).indices.tolist()
        updates = Updates(index, rank, sought_for, rare, known.change, first)
        newer, beside = updates.found(), updates.beside()
        for older in sorted(newer):
            # Whoever asks for the one asks for the other.
            coherence[newer[older]] = torch.maximum(coherence[newer[older]], coherence[older])
    return Scores(episodes, index.units, rank, coherence, known is not None, newer, beside, sought_for)


def _by_keys(asked: Float[Tensor, "n W"], index: Index, some: Sequence[int]) -> tuple[Float[Tensor, " U"], Float[Tensor, " U"]]:
    """How near some units come by keys: in spreads over these units, and above what plain questions reach.

    What was not compared is as far as the farthest that was.
    """
    places = [i for u in some for i in sorted(set(index.units[u]))]
    near = torch.full((len(index.episodes),), -1.0)
    near[places] = _nearness(asked, [index.episodes[i] for i in places])
    best, over = _best(near, index)[list(some)], _best((near - index.usual[:, 0]) / index.usual[:, 1], index)[list(some)]
    spreads = _z(best)
    out = torch.full((len(index.units),), float(spreads.min())), torch.full((len(index.units),), float(over.min()))
    for all_units, these in zip(out, (spreads, over), strict=True):
        all_units[list(some)] = these
    return out


def _margin(rank: Float[Tensor, " U"]) -> float:
    """How far the first stands above the fourth, or above the last where there are fewer."""
    first = rank.topk(min(4, len(rank))).values
    return float(first[0] - first[-1])


def _best(x: Float[Tensor, " E"], index: Index) -> Float[Tensor, " U"]:
    return torch.maximum(x[index.first], x[index.last])


def _likeness(asked: Float[Tensor, " W"], index: Index) -> Float[Tensor, " U"]:
    """Of what is asked for to what was said. An answer means what it does with its question."""
    counts = index.meaning_counts
    cosines, together = index.meanings @ asked, index.together @ asked
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    best = torch.full((len(counts),), -1.0).scatter_reduce(0, owner, cosines, "amax")
    whole = cosines[counts.cumsum(0) - counts]
    return (torch.maximum(whole[index.last], together) + torch.maximum(best[index.last], together)) / 2


def _nearness(asked: Float[Tensor, "n W"], episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    """Each token of the question takes its nearest in an episode: the mean of these cosines."""
    out: list[Tensor] = []
    # A few thousand tokens at a time: a long life as floats would be as large as the model.
    for part in _batches(episodes):
        codes, scale = torch.cat([e.keys.codes for e in part]), torch.cat([e.keys.scale for e in part])
        cosines = (asked @ codes.float().mT) * scale.float().mT
        nearest = cosines.new_full((len(asked), len(part)), -1.0)
        owner = torch.arange(len(part)).repeat_interleave(torch.tensor([len(e) for e in part])).expand(len(asked), -1)
        out.append(nearest.scatter_reduce(1, owner, cosines, "amax").mean(0))
    return torch.cat(out)


def _batches(episodes: Sequence[Episode], tokens: int = 4096) -> list[list[Episode]]:
    batches: list[list[Episode]] = []
    room = 0
    for e in episodes:
        if not batches or room < len(e):
            batches.append([])
            room = tokens
        batches[-1].append(e)
        room -= len(e)
    return batches


def _counts(words: Sequence[int], index: Index) -> Float[Tensor, "E w"]:
    """How often each of these tokens is in each episode."""
    counts = torch.zeros(len(index.episodes), len(words))
    for n, word in enumerate(words):
        # One word at a time: of a long life few tokens are any of them.
        at = index.owner[index.tokens == word]
        counts[:, n].index_add_(0, at, torch.ones(len(at)))
    return counts


def _common(counts: Float[Tensor, "E w"], index: Index) -> Float[Tensor, " E"]:
    """Okapi's BM25 over tokens: what few episodes hold says most."""
    lengths = index.lengths.float()
    held = (counts > 0).sum(0)
    rarity = ((len(index.episodes) - held + 0.5) / (held + 0.5) + 1).log()
    return (rarity * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * (lengths / lengths.mean())[:, None]))).sum(-1)


def _z(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std(correction=0).clamp_min(1e-6)


__all__ = ["Scores", "scored"]
