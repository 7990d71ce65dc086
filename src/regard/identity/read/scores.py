"""How the episodes of a life fit a question: in which order they come, and whether any of them is asked for at all.

    rank       = 2 z(alike) + ½ z(near) + ¼ z(words in common) + ½ age − 2.5 if somebody else said it − 1½ if it asks
    coherence  = log-odds that the question asks for something of this life, and for this: a logistic regression on
                 about      is it about the asker's life? by keys and by meaning (`about`)
                 alike      the cosine of meanings, less what all questions about a life have in common
                 near       by keys, in spreads above what plain questions reach (where there are no meanings)
                 held       the share of the question's rarer tokens that the unit holds
                 margin     how far the first in rank stands above the fourth
    alike      (whole + best) / 2: of all that was said, and of the sentence of it that fits best

A unit is an episode, or a short question of the listener's with the answer to it. Nothing but the margin depends on how long the life is: a
question is not refused because much was said since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..episodes import Episode
from .finding import Finder, LifeMeanings, encoder_name, life_meanings, meanings

QUESTION = 24
"""Tokens of a listener's question that comes to mind with the answer to it, at most."""
MEANING, NEAR, COMMON = 2.0, 0.5, 0.25
"""What likeness of meaning, nearness by keys and tokens in common count in rank; without meanings the other two count 1 each."""
CANDIDATES = 512
"""Units that are compared by keys where meanings have put them first: the rest of a long life is not gone through token by token."""
YOUNGER = 0.5
"""What it is worth in rank to be the youngest of a life rather than the oldest."""
OTHERS = -2.5
"""What it costs in rank that somebody else said it."""
ASKS = -1.5
"""What it costs that it ends as a question: it may only have asked. Most real messages end so and tell something before."""


@dataclass(frozen=True)
class Weights:
    """Of a logistic regression; 0 is as likely as not."""

    about: float
    meant: float
    alike: float
    near: float
    held: float
    margin: float
    bias: float


WEIGHTS = {
    True: Weights(about=1.1, meant=1.26, alike=6.6, near=0.0, held=2.6, margin=0.16, bias=-3.56),
    False: Weights(about=1.94, meant=0.0, alike=0.0, near=0.37, held=3.3, margin=0.13, bias=-3.05),
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

    def best(self, most: int) -> float:
        """The coherence of the most coherent among the first in rank."""
        return float(self.coherence[self.rank.argsort(descending=True)[:most]].max())

    def chosen(self, most: int, room: int) -> list[int]:
        """The first in rank that have room, oldest first, so that what is youngest stands nearest to the prompt."""
        chosen: list[int] = []
        for u in self.rank.argsort(descending=True)[: 2 * most].tolist():
            size = sum(len(self.episodes[i]) + 1 for i in self.units[u])
            if len(chosen) < most and (size <= room or not chosen):
                chosen.append(u)
                room -= size
        return sorted(chosen)


def scored(finder: Finder, episodes: Sequence[Episode], asked: Sequence[int], text: str) -> Scores:
    """Rank and coherence of every unit of a life."""
    units = _units(episodes)
    rare = sorted({t for t in asked if t not in finder.words})
    counts = _counts(rare, episodes)
    known = life_meanings() if _have_meanings(episodes) else None
    meaning = None if known is None else meanings([text])
    last = [episodes[u[-1]] for u in units]
    who = torch.tensor([OTHERS if e.role != "user" else ASKS * e.asks for e in last])
    rank = who + YOUNGER * torch.linspace(0, 1, len(units))
    common = _z(_best(_common(counts, episodes), units))
    if known is None or meaning is None:
        weights, meant, alike = WEIGHTS[False], 0.0, torch.zeros(len(units))
        near, above = _by_keys(finder.asked(asked), episodes, units, range(len(units)))
        rank = rank + common + near
    else:
        weights, meant, alike = WEIGHTS[True], known.about(meaning[0]), _likeness(meaning[0], known, episodes, units)
        rank = rank + MEANING * _z(alike) + COMMON * common
        first = rank.topk(min(len(rank), CANDIDATES)).indices.sort().values
        near, above = _by_keys(finder.asked(asked), episodes, units, first.tolist())
        rank = rank + NEAR * near
    coherence = (
        weights.bias
        + weights.about * finder.about_life(asked)
        + weights.meant * meant
        + weights.alike * alike
        + weights.near * above
        + weights.held * (_best((counts > 0).float().mean(1), units) if rare else torch.zeros(len(units)))
        + weights.margin * _margin(rank)
    )
    return Scores(episodes, units, rank, coherence, known is not None)


def _by_keys(
    asked: Float[Tensor, "n W"], episodes: Sequence[Episode], units: Sequence[tuple[int, ...]], some: Sequence[int]
) -> tuple[Float[Tensor, " U"], Float[Tensor, " U"]]:
    """How near some units come by keys: in spreads over these units, and above what plain questions reach. 0 for all others."""
    places = [i for u in some for i in sorted(set(units[u]))]
    at = {i: n for n, i in enumerate(places)}
    mine = [episodes[i] for i in places]
    within = [tuple(at[i] for i in units[u]) for u in some]
    near, usual = _nearness(asked, mine), torch.stack([e.usual for e in mine])
    spreads, above = torch.zeros(len(units)), torch.zeros(len(units))
    spreads[list(some)] = _z(_best(near, within))
    above[list(some)] = _best((near - usual[:, 0]) / usual[:, 1], within)
    return spreads, above


def _margin(rank: Float[Tensor, " U"]) -> float:
    """How far the first stands above the fourth, or above the last where there are fewer."""
    first = rank.topk(min(4, len(rank))).values
    return float(first[0] - first[-1])


def _units(episodes: Sequence[Episode]) -> list[tuple[int, ...]]:
    units: list[tuple[int, ...]] = []
    for i, e in enumerate(episodes):
        before = episodes[i - 1] if i else None
        answers = before is not None and before.asks and before.role == "assistant" and before.source == e.source
        if answers and before is not None and e.role == "user" and len(before) <= QUESTION:
            units[-1] = (i - 1, i)
        else:
            units.append((i,))
    return units


def _best(x: Float[Tensor, " E"], units: Sequence[tuple[int, ...]]) -> Float[Tensor, " U"]:
    return torch.maximum(x[[u[0] for u in units]], x[[u[-1] for u in units]])


def _have_meanings(episodes: Sequence[Episode]) -> bool:
    """Whether all episodes have a meaning by the encoder that is at hand."""
    name = encoder_name()
    return bool(name) and all(e.meaning is not None and e.encoder == name for e in episodes)


def _likeness(
    meaning: Float[Tensor, " E"], known: LifeMeanings, episodes: Sequence[Episode], units: Sequence[tuple[int, ...]]
) -> Float[Tensor, " U"]:
    """Of a question's meaning, less that of any question about a life, to what was said. An answer means what it does with its question."""
    packed = [e.meaning for e in episodes if e.meaning is not None]
    counts = torch.tensor([len(p.codes) for p in packed])
    rows = torch.cat([p.codes for p in packed]).float() * torch.cat([p.scale for p in packed]).float()
    asked = meaning - known.mean
    cosines, starts = rows @ asked, counts.cumsum(0) - counts
    best = torch.full((len(episodes),), -1.0).scatter_reduce(
        0, torch.arange(len(episodes)).repeat_interleave(counts), cosines, "amax"
    )
    whole = rows[starts]
    first, last = torch.tensor([u[0] for u in units]), torch.tensor([u[-1] for u in units])
    together = F.normalize(whole[first] + whole[last], dim=-1) @ asked
    return (torch.maximum(cosines[starts][last], together) + torch.maximum(best[last], together)) / 2


def _nearness(asked: Float[Tensor, "n W"], episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    """Each token of the question takes its nearest in an episode: the mean of these cosines."""
    out: list[Tensor] = []
    # A few thousand tokens at a time: a long life as floats would be as large as the model.
    for part in _batches(episodes):
        codes, scale = torch.cat([e.keys.codes for e in part]), torch.cat([e.keys.scale for e in part])
        cosines = (asked @ codes.float().mT) * scale.float().mT
        nearest = cosines.new_full((len(asked), len(part)), -1.0)
        owner = _owners(part).expand(len(asked), -1)
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


def _owners(episodes: Sequence[Episode]) -> Tensor:
    """Which episode each token of all of them is of."""
    return torch.arange(len(episodes)).repeat_interleave(torch.tensor([len(e) for e in episodes]))


def _counts(words: Sequence[int], episodes: Sequence[Episode]) -> Float[Tensor, "E w"]:
    """How often each of these tokens is in each episode."""
    same = (torch.cat([e.tokens for e in episodes])[:, None] == torch.tensor(words, dtype=torch.int32)).float()
    return torch.zeros(len(episodes), len(words)).index_add(0, _owners(episodes), same)


def _common(counts: Float[Tensor, "E w"], episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    """Okapi's BM25 over tokens: what few episodes hold says most."""
    lengths = torch.tensor([float(len(e)) for e in episodes])
    held = (counts > 0).sum(0)
    rarity = ((len(episodes) - held + 0.5) / (held + 0.5) + 1).log()
    return (rarity * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * (lengths / lengths.mean())[:, None]))).sum(-1)


def _z(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std(correction=0).clamp_min(1e-6)


__all__ = ["Scores", "scored"]
