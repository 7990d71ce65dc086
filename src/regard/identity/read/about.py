"""Is a question about the life of whoever asks it? A linear map between two lists of plain questions, as a model itself reads them.

    about(x) = w·(x − μ)/s      w = argmin Σ (w·(xᵢ − μ)/s − yᵢ)² + |w|²,  yᵢ = 1 for a question about one's life, −1 for an everyday one

    wording(q) = ⅕ Σ over the words of q: log of how much more often the first list has the word than the second, each list with half a question more

x is the mean of a question's keys (`finding`), or its meaning; μ is the mean of both lists' means, s the root mean square of |xᵢ − μ|. So
nothing here is a constant of one base: another model makes its own w from the same lists (`questions.json`), without a gradient.

Measured on SmolLM2, pool "choose" of natural people, none of whose questions is in the lists: AUROC .99 against everyday questions, .94
against requests of many people (CLINC150); by MiniLM's meanings .95 and .92. Nearness of the best episode alone: .87 and .84.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from jaxtyping import Float
from torch import Tensor

_LISTS = json.loads(files(__name__.rpartition(".")[0]).joinpath("questions.json").read_text(encoding="utf-8"))

LIFE: tuple[str, ...] = tuple(_LISTS["life"])
"""Ask for something that the asker may have told."""
EVERYDAY: tuple[str, ...] = tuple(_LISTS["everyday"])
"""Ask for nothing that anybody told: the world, small tasks, greetings, requests to a device or a bank."""


@dataclass(frozen=True, eq=False)
class About:
    """How much a question sounds like one about somebody's own life: about 1 if it does, −1 if not."""

    weight: Float[Tensor, " W"]
    middle: Float[Tensor, " W"]

    def __call__(self, x: Float[Tensor, " W"]) -> float:
        return float((x - self.middle) @ self.weight)

    @classmethod
    def fitted(cls, life: Float[Tensor, "n W"], everyday: Float[Tensor, "m W"]) -> About:
        """By the dual of ridge regression: the lists are shorter than the vectors are wide."""
        middle = (life.mean(0) + everyday.mean(0)) / 2
        rows = torch.cat([life, everyday]) - middle
        scale = rows.pow(2).sum(1).mean().sqrt().clamp_min(1e-9)
        rows = rows / scale
        wanted = torch.cat([torch.ones(len(life)), -torch.ones(len(everyday))])
        dual = torch.linalg.solve(rows @ rows.mT + torch.eye(len(rows)), wanted)
        return cls(rows.mT @ dual / scale, middle)


def wording(question: str) -> float:
    """How much the words of a question are those of the first list: "my" and "I" say it in any grammar."""
    odds = _odds()
    return sum(odds.get(word, 0.0) for word in _words(question)) / 5


def _words(text: str) -> list[str]:
    """Each once, in order: a sum has one result."""
    return sorted(set(re.findall(r"[\w']+", text.lower())))


@cache
def _odds() -> dict[str, float]:
    life, everyday = _counted(LIFE), _counted(EVERYDAY)
    return {
        word: math.log((life[word] + 0.5) / (len(LIFE) + 1)) - math.log((everyday[word] + 0.5) / (len(EVERYDAY) + 1))
        for word in sorted(life | everyday)
    }


def _counted(questions: Sequence[str]) -> Counter[str]:
    return Counter(word for q in questions for word in _words(q))


__all__ = ["EVERYDAY", "LIFE", "About", "wording"]
