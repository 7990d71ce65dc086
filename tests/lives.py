"""Tiny random models whose attention has a say, a tokenizer of single bytes, and made-up experiences and identities."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.identity.body import base_of
from regard.identity.experience import Experience, observe
from regard.identity.packed import Packed
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


def someone(
    base: Base, seed: int = 0, *, slots: int = 5, rank: int = 4, form: Form | None = "key_bias", weighed: bool = True
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
    return Identity(base, me, trace, kept if slots else Imprints.none(base), ("a test",))


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
