"""Does what is told there answer what is asked? The model says it itself, two thirds of the way up, where it reads the question behind it.

    log-odds(u) = w·h̄(u) + A·behind(u) + C·coherence(u) + b
        h̄          what layer 18 leaves of the question's tokens, read behind unit u as it would come to mind: each of length √M, the mean of them
        behind     how far u stands behind the first in rank
        coherence  how much the question asks for something of this life, and for this (`scores`)

Likeness finds the cat where the hamster is asked for, and a model that says words one by one has no word for "it does not say". But what it makes
of a question differs by whether the answer stands before it, and a linear map sees that. The map is a choice among the first few in rank *and none of
them*, fitted on people whose questions have an answer and on as many that have none (`regard.study.people.answering`). `answering.safetensors`
has it, for one base; on another, rank and coherence alone decide.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_plain, reading
from ...nn import Cache
from .body import Body, OwnBody
from .finding import Finder
from .scores import Scores

FILE = Path(__file__).with_name("answering.safetensors")
LARGEST = 1 << 20
LOOKS = 4
"""Units that are looked at."""
ANSWERED = -1.5
"""Log-odds from which on something answers. Each pool left out of the fit in its turn, people written by hand and made-up ones: by −2, −1.5 and −1 of the
questions that have an answer 6, 8 and 11% and 2, 2 and 4% are refused; of those that have none 34, 46 and 57% and 59, 65 and 76%."""
CLOSE = 2.0
"""How far behind the surest others may stand and come to mind with it. Right greedy answers of 293 questions (three pools by hand, one made up): 142
before, 153 by 0.7 and 150 by 2, which costs 0.04 nats less."""
NEWER = 1.5
"""How much less surely what corrects may answer than what it corrects, and come in its stead."""
BEGUN = 4
"""Heads of prompts whose keys and values are held in memory."""


@dataclass(frozen=True, eq=False)
class Answering:
    """The map, and what else counts."""

    depth: int
    """Layers that are asked."""
    weight: Float[Tensor, " M"]
    behind: float
    coherence: float
    bias: float
    fingerprint: str

    def odds(self, hidden: Float[Tensor, "n M"], behind: float, coherence: float) -> float:
        """Of what layer `depth` leaves of the question."""
        rows = hidden.float()
        mean = (rows * rows.pow(2).mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()).mean(0).cpu()
        return float(mean @ self.weight) + self.behind * behind + self.coherence * coherence + self.bias


def hidden_behind(
    finder: Finder, said: Sequence[Sequence[int]], asked: Sequence[int], prompt: Sequence[int], depth: int
) -> Tensor:
    """What the first layers make of a question, token by token, behind what would come to mind, (n, M)."""
    body = finder.body
    assert isinstance(body, OwnBody)
    head, (before, _, _) = finder.frame.head_alone(prompt), finder.frame.around(prompt)
    held: OrderedDict[tuple[int, ...], tuple[Cache, ...]] = body.made.setdefault("begun", OrderedDict())
    begin = (*head, *before)
    with torch.no_grad(), body.read([None] * body.base.depth):
        begun = held.get(begin)
        if begun is None:
            begun = held[begin] = body.onward(begin, tuple(Cache() for _ in range(depth)))[1]
            while len(held) > BEGUN:
                held.popitem(last=False)
        tokens = [*finder.frame.read(said, prompt)[0][len(before) :], *asked]
        return body.onward(tokens, begun)[0][len(tokens) - len(asked) :]


@dataclass(frozen=True, eq=False)
class LookedAt:
    """The fittest units of a life, and how surely each answers what is asked."""

    scores: Scores
    odds: dict[int, float]
    """Above `ANSWERED`, so that what is below 0 does not answer."""

    @property
    def best(self) -> float:
        return max(self.odds.values())

    def chosen(self, most: int, room: int) -> list[int]:
        """What answers, oldest first; nothing where nothing does. What is corrected stays away if what corrects it answers nearly as surely."""
        chosen: list[int] = []
        for u in sorted(self.odds, key=lambda u: -self.odds[u]):
            said = self._newest(u)
            size = sum(len(self.scores.episodes[i]) + 1 for i in self.scores.units[said])
            answers = self.odds[u] >= max(0.0, self.best - CLOSE)
            if answers and said not in chosen and len(chosen) < most and (size <= room or not chosen):
                chosen.append(said)
                room -= size
        return sorted(chosen)

    def likely(self, most: int) -> list[tuple[int, float]]:
        """What may answer, and how likely each is the one that does, the likeliest first; nothing where nothing does."""
        if self.best < 0:
            return []
        # What corrects is as likely as what it corrects, where that is likelier.
        odds = dict[int, float]()
        for u in sorted(self.odds, key=lambda u: -self.odds[u]):
            odds.setdefault(self._newest(u), self.odds[u])
        first = list(odds)[:most]
        return list(zip(first, torch.tensor([odds[u] for u in first]).softmax(0).tolist(), strict=True))

    def _newest(self, unit: int) -> int:
        while (newer := self.scores.newer.get(unit)) in self.odds and self.odds[newer] >= self.odds[unit] - NEWER:
            unit = newer
        return unit


def looked_at(finder: Finder, scores: Scores, answering: Answering, asked: Sequence[int], prompt: Sequence[int]) -> LookedAt:
    """The first in rank, what corrects them and what may correct the first, each with the question behind it."""
    first = scores.rank.topk(min(LOOKS, len(scores.units))).indices.tolist()
    others = [scores.newest(u) for u in first] + ([] if scores.beside is None else [scores.beside])
    odds = dict[int, float]()
    for u in dict.fromkeys([*first, *others]):
        said = [scores.episodes[i].tokens.tolist() for i in scores.units[u]]
        hidden = hidden_behind(finder, said, asked, prompt, answering.depth)
        behind = float(scores.rank[u] - scores.rank.max())
        odds[u] = answering.odds(hidden, behind, float(scores.coherence[u])) - ANSWERED
    return LookedAt(scores, odds)


@lru_cache(maxsize=1)
def shipped() -> Answering:
    """The map that came with the package."""
    from safetensors.torch import load

    with reading(FILE):
        data = read_plain(FILE, LARGEST, follow=True)
        numbers = load(data)
        about = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["about"])
        weight, others = numbers["weight"], numbers["others"]
        if weight.ndim != 1 or others.shape != (3,) or not all(bool(torch.isfinite(x).all()) for x in (weight, others)):
            raise CheckpointError(
                f"{FILE.name}: weight {tuple(weight.shape)}, others {tuple(others.shape)}; they are finite, (M) and (3)"
            )
        behind, coherence, bias = others.tolist()
        return Answering(int(about["depth"]), weight.float(), behind, coherence, bias, str(about["fingerprint"]))


def answering_for(body: Body) -> Answering | None:
    """The same, if it was fitted on this base and what comes to mind stands there as it did then; None if not."""
    return shipped() if isinstance(body, OwnBody) and shipped().fingerprint == body.base.fingerprint else None


__all__ = ["FILE", "Answering", "answering_for", "hidden_behind", "shipped"]
