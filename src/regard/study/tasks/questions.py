"""Short factual questions as sentences to complete, with known answers, some about things that do not exist; each in three wordings.

    for q in questions(seed=0): model continues q.text; is_right(said, q.answers)

They are completions ("The capital of France is") and not questions, since a small model that is shown examples copies them: after five
examples, two of them "unknown", SmolLM2-135M answered "unknown" to the capital of Norway and "blunt" to every opposite.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .training import generator

FRAMES = ("Here are some well-known facts.\n", "From a quiz book:\n")
MADE_UP = "made-up "


class Question(NamedTuple):
    kind: str
    subject: str
    text: str
    answers: tuple[str, ...]
    """None where the thing does not exist, so that nothing is right."""

    @property
    def sort(self) -> str:
        """The kind that it is asked like: made-up capitals are asked like capitals."""
        return self.kind.removeprefix(MADE_UP)


@cache
def _data() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))


def questions(seed: int, share: float = 1.0) -> list[Question]:
    """A random share of each kind, worded by the seed."""
    g, asked = generator(seed), list[Question]()
    for kind, data in _data().items():
        ask, pairs = list(data["ask"])[seed % 3], list(data["answers"].items())
        count = max(1, round(share * len(pairs)))
        for i in sorted(torch.randperm(len(pairs), generator=g)[:count].tolist()):
            subject, answers = pairs[i]
            asked.append(Question(kind, subject, ask.format(subject), tuple(a for a in answers.split("|") if a)))
    return asked


def frame(seed: int) -> str:
    """The line before every question of this seed."""
    return FRAMES[seed // 3 % 2]


def is_right(said: str, answers: tuple[str, ...]) -> bool:
    """One of the answers stands in the first line as whole words; one or two letters in their own case, as symbols have."""
    line = said.strip().partition("\n")[0]
    return any(
        re.search(rf"(?<!\w){re.escape(a)}(?!\w)", line, 0 if len(a) <= 2 else re.IGNORECASE) is not None for a in answers
    )
