"""Tiny random models of transformers, one for each thing that an attention layer may ask for, and random identities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from regard.identity.packed import Packed
from regard.identity.state import Base, Form, Identity, Imprints, SelfState, TraceState
from regard.models import Model
from regard.models.convert import load

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 37,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "eos_token_id": None,
}


def gpt_oss() -> hf.PreTrainedModel:
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **{**GROUPED, "intermediate_size": 40}, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
        )
    )


DECODERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral, windowed": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3, normed heads": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=10)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gemma2, softcap and window": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=12)
    ),
    "gpt-oss, sinks and window": gpt_oss,
    "gemma3, normed sideways": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=5)),
    "phi3, one projection": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)),
    "phi, half a head turned": lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),
    "smollm3, a layer without rope": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**{**GROUPED, "num_hidden_layers": 4}, no_rope_layer_interval=2)
    ),
    "cohere, scaled logits": lambda: hf.CohereForCausalLM(hf.CohereConfig(**GROUPED)),
}
OURS = {"llama": "llama", "mistral, windowed": "llama", "qwen2": "llama", "gpt2": "gpt2"}
"""Those that regard has models of its own for."""
SMALL = {"n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
DEAF: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(**SMALL, hidden_size=32)),
    "gpt-j": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**SMALL, n_embd=32, rotary_dim=4)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ),
    "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY)),
}
"""Those whose code never calls the interface."""


def loud(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Weights large enough that attention has a say; norms stay near 1."""
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.25)
        if p.ndim == 1:
            p.data += 0.5
    return model.eval()


def hub(name: str, attention: str | None = "eager") -> hf.PreTrainedModel:
    model = loud(DECODERS[name]())
    model.generation_config.pad_token_id = 0
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def both(name: str, folder: Path) -> tuple[Model, hf.PreTrainedModel]:
    """Ours and theirs with the same numbers."""
    theirs = hub(name)
    theirs.save_pretrained(folder)
    return load(folder).eval(), theirs


def tokens(batch: int = 2, length: int = 11, seed: int = 3) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: Iterable[int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Token ids with padding on the left, and the mask that says so."""
    rows = list(lengths)
    at = torch.arange(max(rows))
    real = at >= max(rows) - torch.tensor(rows)[:, None]
    return tokens(len(rows), max(rows), seed) * real, real.long()


def someone(
    base: Base, seed: int = 0, slots: int = 5, rank: int = 3, form: Form = "key_bias", weighed: bool = True
) -> Identity:
    """An identity of random numbers, large enough to change what is said."""
    generator = torch.Generator().manual_seed(seed)
    L, G, D = base.depth, base.key_heads, base.head_width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count = torch.arange(slots, dtype=torch.int32)
    return Identity(
        base,
        SelfState(normal(L, G * D * (1 if form == "key_bias" else 2)) * 0.5, form),
        TraceState(Packed.of(normal(L, G, rank, D) * 0.5), torch.tensor([1, -1, 1, -1, 1][:rank], dtype=torch.int8)),
        Imprints(
            k=Packed.of(normal(L, G, slots, D)),
            v=Packed.of(normal(L, G, slots, D)),
            token=count,
            position=count + 1,
            shock=torch.ones(slots),
            source=torch.zeros(slots, dtype=torch.int32),
            weight=normal(L, G, slots) * 0.5 if weighed else torch.zeros(L, G, slots),
            worth=torch.ones(slots),
        ),
        ("a test",),
    )


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
