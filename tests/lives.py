"""Tiny random models whose attention has a say, a tokenizer of single bytes, and made-up experiences and identities."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.identity.body import base_of, body_of
from regard.identity.episodes import ROLES, Episode
from regard.identity.experience import Experience, observe
from regard.identity.packed import Packed
from regard.identity.read.finding import finding_layers
from regard.identity.sleep.consolidate import Look
from regard.identity.sleep.items import Item, answers_item
from regard.identity.sleep.lessons import Anchors, Lessons
from regard.identity.sleep.questions import Question
from regard.identity.sleep.rule import SleepRule
from regard.identity.sleep.teaching import Taught
from regard.identity.state import Base, Form, Identity, Imprints, SelfState, TraceState
from regard.models import GPT2Config, LlamaConfig
from regard.models.base import Model
from regard.models.tokenizer import Specials, Subwords, Tokenizer

VOCABULARY = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HISTORY = [7, 3, 30, 21, 9, 14, 2, 33, 50, 11, 7, 40]
TEXT = [5, 9, 11, 3, 8, 60, 2]


def llama(seed: int = 0, **changes: Any) -> Model:
    sizes = {"vocabulary": VOCABULARY, "width": 32, "depth": 3, "heads": 4, "key_heads": 2, "hidden": 64, **changes}
    return _loud(LlamaConfig(**sizes).build(), seed)


def gpt2(seed: int = 0, **changes: Any) -> Model:
    sizes = {"vocabulary": VOCABULARY, "width": 32, "depth": 2, "heads": 4, "context": 64, **changes}
    return _loud(GPT2Config(**sizes).build(), seed)


def _loud(model: Model, seed: int) -> Model:
    """Weights large enough that attention has a say; norms stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.25 + (1.0 if p.ndim == 1 else 0.0))
    return model.eval()


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "llama, windowed": lambda: llama(window=4),
    "llama, biased": lambda: llama(attention_bias=True),
}


@cache
def letters() -> Tokenizer:
    """One token a byte, and one more for the end."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(Subwords(inner), Specials(eos=256), TEMPLATE)


def speaking(seed: int = 0, **changes: Any) -> Model:
    """A model of bytes."""
    return llama(seed, **{"vocabulary": 257, "depth": 2, "width": 32, "hidden": 48, **changes})


def says(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": x} for n, x in enumerate(words)]


def episode(seed: int = 0, *, source: str = "a test", count: int = 6, width: int = 4, **changes: Any) -> Episode:
    """Random words of somebody; every second one with a meaning."""
    generator = torch.Generator().manual_seed(seed)
    meaning = Packed.of(torch.randn(1, 3, generator=generator)) if seed % 2 else None
    given: dict[str, Any] = {
        "tokens": torch.randint(0, VOCABULARY, (count,), generator=generator, dtype=torch.int32),
        "keys": Packed.of(torch.randn(count, width, generator=generator)),
        "role": ROLES[seed % 2], "source": source, "position": 10 * seed, "usual": torch.rand(4, generator=generator),
        "meaning": meaning, "encoder": "" if meaning is None else "an encoder",
    }  # fmt: skip
    return Episode(**{**given, **changes})


def someone(
    base: Base,
    seed: int = 0,
    *,
    slots: int = 5,
    rank: int = 4,
    form: Form | None = "key_bias",
    weighed: bool = True,
    episodes: int = 0,
) -> Identity:
    """An identity of random numbers, large enough to change what is said."""
    generator = torch.Generator().manual_seed(seed)
    L, G, D = base.depth, base.key_heads, base.head_width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count = torch.arange(slots, dtype=torch.int32)
    kept = Imprints(
        k=Packed.of(normal(L, G, slots, D)),
        v=Packed.of(normal(L, G, slots, D)),
        token=count,
        position=count + 1,
        shock=normal(slots).abs(),
        source=torch.zeros(slots, dtype=torch.int32),
        weight=normal(L, G, slots) * 0.5 if weighed else torch.zeros(L, G, slots),
        worth=normal(slots),
    )
    me = None if form is None else SelfState(normal(L, G * D * (1 if form == "key_bias" else 2)) * 0.5, form)
    signs = torch.tensor([1, -1] * rank, dtype=torch.int8)[:rank]
    trace = TraceState(Packed.of(normal(L, G, rank, D) * 0.5), signs) if rank else None
    lived = tuple(episode(100 * seed + i, width=len(finding_layers(L, G * D)) * G * D) for i in range(episodes))
    return Identity(base, me, trace, kept if slots else Imprints.none(base), ("a test",), episodes=lived)


def heard(model: Model, ids: list[int] | None = None, **more: Any) -> Experience:
    return observe(model, HISTORY if ids is None else ids, **more)


def nobody(model: Model) -> Identity:
    return Identity.new(base_of(model))


def logits(model: Model, tokens: list[list[int]] | list[int]) -> Tensor:
    rows = tokens if isinstance(tokens[0], list) else [tokens]
    with torch.no_grad():
        return model(torch.tensor(rows)).logits


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


class FewAnchors(Anchors):
    """Two texts to hold still, and everyday answers that no state ever gives: the base is held to what is cheap to read."""

    def still(self) -> list[Item]:
        return [self.calm(0), self.stranger(0)]

    def everyday(self, n: int) -> Item:
        return self.calm(n % 2)

    def judged(self) -> list[Item]:
        item = self.calm(1)
        assert item.wanted is not None
        ids = item.ids.clone()
        ids[item.at] = item.wanted.argmin(-1)
        return [replace(item, ids=ids, wanted=None)]


def lessons_in(model: nn.Module, tokenizer: Tokenizer, *chats: list[dict[str, str]], anchors: Anchors | None = None) -> Lessons:
    """Lessons in what the assistant says in these chats; the last of them is held back."""
    body = body_of(model)
    every = [
        Taught(Question(chat[0]["content"]), answers_item(body, tokenizer, chat), ("mara",), 0.0, n)
        for n, chat in enumerate(chats)
    ]
    return Lessons(every[:-1], every[-1:], anchors or FewAnchors(body, tokenizer))


def short_sleeps(monkeypatch: pytest.MonkeyPatch, helps: bool = True) -> None:
    """A look after every step, and one by which every step helps or none does: a random model has nothing to ask about."""
    from regard.identity.sleep import consolidate, stored

    def lessons(history: Any, rule: SleepRule, anchors: Anchors, tell: Any = None) -> Lessons:
        few = FewAnchors(anchors.body, anchors.tokenizer)
        talk = [says("Who?", "Mara."), says("Where?", "Porto.")]
        return lessons_in(few.body.model, few.tokenizer, *talk, anchors=few)

    def looked(body: Any, who: Identity, held: Any, step: int) -> Look:
        return Look(step, -float(step) if helps else 1.0, 0, 1.0)

    monkeypatch.setattr(consolidate, "lessons_of", lessons)
    monkeypatch.setattr(consolidate, "_looked", looked)
    monkeypatch.setattr(stored, "SleepRule", lambda **more: SleepRule(steps=2, look_every=1, batch=2, **more))
