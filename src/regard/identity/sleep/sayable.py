"""What a self alone learns from: a person's words as words that may be said, and the model's own words everywhere else.

    teacher   m(x | answer so far) ∝ (1 − ω) p(so far) p(x | so far) + ω Σ_w a_w [the word w goes on with x]      a_w ∝ the probability that w is the person's

after the beginnings of answers to personal questions ("Your dog is called"). That is the exact mixture of the model, at 1 − ω, with one that
says one of the person's words and then goes on as the model does; a word of several tokens is weighed by what was said of it.

The self starts as a second sink in the last layers: the key and the value of the first token of any text. To begin with it says nothing,
and is looked at by every head that has nothing to say; started at zero, it is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..body import Body
from ..experience import Chat
from .finder import Found, found_words
from .items import Item, logs_at
from .questions import Questions

LAST = 6
"""Layers in which the self stands; below them are those that find out what is being asked."""


@dataclass(frozen=True, eq=False)
class Sayable:
    """A person's words as the model would write them within a sentence, and how likely each is to be said."""

    words: list[list[int]]
    weight: Float[Tensor, " n"]
    """Sums to 1."""

    @classmethod
    def of(cls, questions: Questions, found: Sequence[Found]) -> Sayable | None:
        """None where there is nothing to say."""
        words = [questions.tokenizer.encode(f" {x.text}", bos=False) for x in found]
        kept = [(w, x.sure) for w, x in zip(words, found, strict=True) if w]
        total = sum(p for _, p in kept)
        return cls([w for w, _ in kept], torch.tensor([p / total for _, p in kept])) if total > 0 else None

    def item(self, questions: Questions, n: int, share: float, pick: torch.Generator) -> Item:
        """The n-th question of the list, with one of the words for its answer."""
        question = questions.listed[n % len(questions.listed)]
        word = self.words[int(torch.multinomial(self.weight, 1, generator=pick))]
        asked, begun = questions.prompt(question), len(questions.begun(question))
        ids = torch.tensor([*asked, *word], device=questions.body.device)
        at = torch.arange(len(asked) - begun, len(ids), device=ids.device)
        with questions.body.read([None] * questions.body.base.depth):
            logs = logs_at(questions.body, ids, at)
        return Item(ids, at, torch.cat([logs[:begun], self.mixed(logs[begun:], word, share)]))

    def mixed(self, logs: Float[Tensor, "n V"], said: Sequence[int], share: float) -> Float[Tensor, "n V"]:
        """log m at each token of what is said, where the model by itself has `logs`."""
        own, each = 1 - share, (share * self.weight).tolist()
        rows = list[Tensor]()
        for i, token in enumerate(said):
            p = logs[i].exp()
            ended = sum(a for a, w in zip(each, self.words, strict=True) if len(w) <= i)
            row = (own + ended) * p
            for a, w in zip(each, self.words, strict=True):
                if len(w) > i:
                    row[w[i]] += a
            rows.append((row / row.sum()).clamp_min(1e-12).log())
            own *= float(p[token])
            each = [
                (a * float(p[token]) if len(w) <= i else a * (w[i] == token)) for a, w in zip(each, self.words, strict=True)
            ]
        return torch.stack(rows)


def sayable(questions: Questions, history: Sequence[Chat]) -> Sayable | None:
    """None where no word of a history is the person's."""
    return Sayable.of(questions, found_words(questions, history))


@torch.no_grad()
def sink(body: Body, tokens: Sequence[int]) -> Float[Tensor, "L S"]:
    """A self as one more sink in the last layers, (key, value) of the first of these tokens; zeros below, where it does not stand."""
    heads = body.heads(torch.tensor(list(tokens), device=body.device))
    s = torch.stack([torch.stack([h.k[:, 0], h.v[:, 0]]).flatten() for h in heads]).float().cpu()
    s[: max(0, len(s) - LAST)] = 0
    return s


__all__ = ["Sayable", "sayable", "sink"]
