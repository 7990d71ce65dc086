"""What an identity is measured beside: turns that are searched for and stand in the prompt as text, a summary, a LoRA.

bm25       Okapi's BM25 over words, k₁ = 1.2, b = 0.75
MiniLM     cosines of sentence vectors
summary    what the model itself writes about the history, as the system message
LoRA       W + BA of rank 8 on the queries' and values' projections (Hu et al. 2021), trained on the history itself
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...identity.experience import chat_tokens
from ...identity.sleep.items import Item, item_loss
from ...models.llama import Llama
from ..tasks.packaged import sentence_vectors
from ..tasks.training import generator
from .asking import Examiner, Message
from .generator import Conversation
from .natural import Turn

RANK, LEARNING_RATE, GAIN = 8, 2e-3, 2.0
"""Of a LoRA; the gain is α/rank of its paper."""
SUMMARISE = (
    "Summarise everything that you know about me in a few short sentences: names, places, numbers, what I like and what I plan."
)
KNOWN = "You are a helpful AI assistant. What you know about the user: "


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def bm25(question: str, texts: Sequence[str]) -> list[float]:
    """How well each text fits the words of a question."""
    counts = [Counter(words(text)) for text in texts]
    lengths = [sum(c.values()) for c in counts]
    mean = sum(lengths) / max(len(lengths), 1) or 1.0
    scores = [0.0] * len(texts)
    for word in set(words(question)):
        held = sum(word in c for c in counts)
        rarity = math.log(1 + (len(texts) - held + 0.5) / (held + 0.5))
        for n, c in enumerate(counts):
            scores[n] += rarity * c[word] * 2.2 / (c[word] + 1.2 * (0.25 + 0.75 * lengths[n] / mean))
    return scores


@dataclass(frozen=True, eq=False)
class Turns:
    """The messages of a history in a row, to be searched."""

    messages: list[dict[str, str]]
    places: list[Turn]

    @classmethod
    def of(cls, history: Sequence[Conversation]) -> Turns:
        rows = [((c, m), dict(message)) for c, said in enumerate(history) for m, message in enumerate(said)]
        return cls([message for _, message in rows], [place for place, _ in rows])

    @cached_property
    def texts(self) -> list[str]:
        return [m["content"] for m in self.messages]

    @cached_property
    def vectors(self) -> Tensor:
        return sentence_vectors(self.texts)

    def by_words(self, question: str) -> list[int]:
        scores = bm25(question, self.texts)
        return sorted(range(len(scores)), key=lambda n: -scores[n])

    def by_meaning(self, question: str) -> list[int]:
        return (self.vectors @ sentence_vectors([question])[0]).argsort(descending=True).tolist()

    def before(self, question: Message, order: Sequence[int]) -> list[Message]:
        """A chat in which these turns stand before the question, as they were said and in the order in which they were."""
        return [*(self.messages[n] for n in sorted(order)), question]


def summary(examiner: Examiner, history: Sequence[Message], tokens: int) -> str:
    """What the model itself writes about a history that stands in its context."""
    writer = Examiner(examiner.model, examiner.tokenizer, replace(examiner.sampling, max_tokens=tokens))
    return writer.ask(writer.prompt([*history, {"role": "user", "content": SUMMARISE}]), ".").text


def knowing(text: str, question: Message) -> list[Message]:
    """A chat whose system message says what is known."""
    return [{"role": "system", "content": f"{KNOWN}{text}"}, question]


@dataclass(eq=False)
class Lora:
    """A copy of a model that learns a history by heart, and forgets it again."""

    model: Llama

    @classmethod
    def of(cls, model: Llama) -> Lora:
        student = model.config.build()
        student.load_state_dict(model.state_dict())
        return cls(student.requires_grad_(False).eval())

    @contextmanager
    def trained(self, examiner: Examiner, history: Sequence[Conversation], steps: int, seed: int) -> Generator[Examiner]:
        """Inside, the copy has learnt the history, one conversation a step; afterwards it is as it was."""
        student = Examiner(self.model, examiner.tokenizer, examiner.sampling)
        items = [_said(student, c) for c in history]
        linears = [cast(nn.Linear, x) for layer in student.body.layers for x in (layer.q, layer.v)]
        moved = self._deltas(student, items, linears, steps, seed)
        before = [linear.weight.detach().clone() for linear in linears]
        try:
            with torch.no_grad():
                for linear, delta in zip(linears, moved, strict=True):
                    linear.weight += delta
            yield Examiner(self.model, examiner.tokenizer, examiner.sampling)
        finally:
            with torch.no_grad():
                for linear, weight in zip(linears, before, strict=True):
                    linear.weight.copy_(weight)

    def _deltas(
        self, student: Examiner, items: Sequence[Item], linears: Sequence[nn.Linear], steps: int, seed: int
    ) -> list[Tensor]:
        g = generator(seed)
        downs = [nn.Parameter(torch.randn(RANK, x.in_features, generator=g) / math.sqrt(x.in_features)) for x in linears]
        ups = [nn.Parameter(torch.zeros(x.out_features, RANK)) for x in linears]
        hooks = [x.register_forward_hook(_added(a, b)) for x, a, b in zip(linears, downs, ups, strict=True)]
        learner = torch.optim.AdamW([*downs, *ups], lr=LEARNING_RATE, weight_decay=0.0)
        try:
            with student.body.read([None] * student.body.base.depth):
                for step in range(steps):
                    learner.zero_grad()
                    item_loss(student.body, items[step % len(items)]).backward()
                    learner.step()
        finally:
            for hook in hooks:
                hook.remove()
        return [(GAIN * b @ a).detach() for a, b in zip(downs, ups, strict=True)]


def _added(down: Tensor, up: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + GAIN * (given[0] @ down.mT) @ up.mT

    return hook


def _said(examiner: Examiner, conversation: Conversation) -> Item:
    """All that is said in a conversation, scored as it was said."""
    ids, said = chat_tokens([dict(m) for m in conversation], examiner.tokenizer)
    at = [i for i, x in enumerate(said) if x and i > 0]
    return Item(torch.tensor(ids, device=examiner.body.device), torch.tensor(at, device=examiner.body.device))


__all__ = ["Lora", "Turns", "bm25", "knowing", "summary"]
