"""Tiny models built by transformers, a row for each way in which a checkpoint of a family can differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from regard.models import Model
from regard.models.convert import load

VOCABULARY, TOLERANCE = 97, 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 37,
    "max_position_embeddings": 32,
}  # fmt: skip


def scaled(kind: str, **fields: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **fields}}


def llama(**changes: Any) -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}))


def mistral() -> hf.PreTrainedModel:
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, num_key_value_heads=3, sliding_window=5))


def qwen2(**changes: Any) -> hf.PreTrainedModel:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, num_key_value_heads=2, **changes))


def gpt2(**changes: Any) -> hf.PreTrainedModel:
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **changes))


DECODERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": llama,
    "llama, many key heads": lambda: llama(num_key_value_heads=6),
    "llama, tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama, biased": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, wide heads": lambda: llama(head_dim=10),
    "llama, linear": lambda: llama(**scaled("linear", factor=3.0)),
    "llama, dynamic": lambda: llama(**scaled("dynamic", factor=2.0)),
    "llama, llama3": lambda: llama(
        **scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=20)
    ),
    "llama, yarn": lambda: llama(**scaled("yarn", factor=4.0, original_max_position_embeddings=8)),
    "llama, yarn with its own bounds": lambda: llama(
        **scaled("yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=1.3, beta_fast=8.0, beta_slow=0.5)
    ),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2, wide heads": lambda: qwen2(head_dim=10),
    "qwen2, windowed": lambda: qwen2(use_sliding_window=True, max_window_layers=0, sliding_window=5),
    "gpt2": gpt2,
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False, n_inner=50, activation_function="gelu"),
}


def t5(form: str, tied: bool, **changes: Any) -> hf.PreTrainedModel:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=7, d_ff=33, num_layers=2, num_decoder_layers=3, num_heads=4,
        feed_forward_proj=form, tie_word_embeddings=tied, decoder_start_token_id=0,
        **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, **changes},
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, 48))
    return model


T5S: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "1.0": lambda: t5("relu", tied=True),
    "1.0, usual buckets": lambda: t5("relu", tied=True, relative_attention_num_buckets=32, relative_attention_max_distance=128),
    "1.1": lambda: t5("gated-gelu", tied=False),
}

BERT_SIZES = {**SIZES, "max_position_embeddings": 40}
BERTS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "guesses": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT_SIZES)),
    "pools": lambda: hf.BertModel(hf.BertConfig(**BERT_SIZES)),
    "both": lambda: hf.BertForPreTraining(hf.BertConfig(**BERT_SIZES)),
    "untied, relu": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT_SIZES, tie_word_embeddings=False, hidden_act="relu")),
}


def loud(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Weights large enough that attention has a say; norms stay near 1."""
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.25)
        if p.ndim == 1:
            p.data += 0.5
    return model.eval()


def both(make: Callable[[], hf.PreTrainedModel], folder: Path) -> tuple[Model, hf.PreTrainedModel]:
    """Ours and theirs, with the same numbers, through theirs' own file."""
    theirs = loud(make())
    theirs.save_pretrained(folder)
    return load(folder).eval(), theirs


def tokens(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert theirs.abs().max() > 0.1, "logits near zero would agree by luck"
    difference = float((ours - theirs).abs().max())
    assert difference <= tolerance, f"max |Δ| = {difference:.2e}"
