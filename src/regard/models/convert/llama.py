"""LLaMA, Mistral and Qwen2 are one model here: a window makes it Mistral, biases on q, k and v alone make it Qwen2."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ...errors import CheckpointError
from ..llama import LlamaConfig
from .converter import Converter
from .fields import DEEPEST, Fields
from .layout import TensorLayout, TensorPlace
from .rope import read_rope, write_rope

CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def layout(config: LlamaConfig, interleaved: bool = False) -> TensorLayout:
    """`interleaved` for exports that pair neighbouring dimensions, as LLaMA's first release did."""
    q, k = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj"
    return TensorLayout(
        {
            "embed": "model.embed_tokens",
            "blocks.{}.attention.q": TensorPlace(q, heads=config.heads if interleaved else 0),
            "blocks.{}.attention.k": TensorPlace(k, heads=config.key_heads if interleaved else 0),
            "blocks.{}.attention.v": "model.layers.{}.self_attn.v_proj",
            "blocks.{}.attention.out": "model.layers.{}.self_attn.o_proj",
            "blocks.{}.ffn.gate": "model.layers.{}.mlp.gate_proj",
            "blocks.{}.ffn.up": "model.layers.{}.mlp.up_proj",
            "blocks.{}.ffn.down": "model.layers.{}.mlp.down_proj",
            "blocks.{}.norm_1": "model.layers.{}.input_layernorm",
            "blocks.{}.norm_2": "model.layers.{}.post_attention_layernorm",
            "norm": "model.norm",
            "head": "lm_head",
        },
        prefix="model.",
        spare=(r"rotary_emb\.inv_freq$", *([r"^lm_head\.weight$"] if config.tied else [])),
    )


def read(c: Fields, names: Collection[str]) -> LlamaConfig:
    c.word("hidden_act", ("silu",), "silu")
    kind = c.word("model_type", tuple(CLASSES))
    depth, heads = c.size("num_hidden_layers", largest=DEEPEST), c.size("num_attention_heads")
    context = c.size("max_position_embeddings", 2048)
    width = c.size("hidden_size")
    head_width = c.size("head_dim", max(width // heads, 1))
    bias: bool | Literal["qkv"] = "qkv" if kind == "qwen2" else kind == "llama" and c.flag("attention_bias", False)
    return LlamaConfig(
        vocabulary=c.size("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        key_heads=c.size("num_key_value_heads", heads),
        hidden=c.size("intermediate_size"),
        head_width=None if head_width * heads == width else head_width,
        rope=read_rope(c, context),
        eps=c.number("rms_norm_eps", 1e-6),
        tied=c.flag("tie_word_embeddings", False),
        attention_bias=bias,
        mlp_bias=kind == "llama" and c.flag("mlp_bias", False),
        window=_window(c, kind, depth),
        context=context,
    )


def write(config: LlamaConfig) -> dict[str, object]:
    c = config
    if (c.activation, c.norm) != ("swiglu", "pre"):
        raise CheckpointError(
            f"Hugging Face's LLaMA has activation=swiglu and norm=pre; this is activation={c.activation}, norm={c.norm}"
        )
    kind = "qwen2" if c.attention_bias == "qkv" else "llama" if c.window is None else "mistral"
    if kind != "llama" and (c.mlp_bias or c.attention_bias is True):
        raise CheckpointError(
            f"Hugging Face has no model with window={c.window}, attention_bias={c.attention_bias} and mlp_bias={c.mlp_bias} together"
        )
    own: dict[str, object] = {}
    if kind == "llama":
        own = {"attention_bias": bool(c.attention_bias), "mlp_bias": c.mlp_bias}
    if kind == "qwen2":
        own = {"use_sliding_window": c.window is not None, "max_window_layers": 0 if c.window else c.depth}
        own["layer_types"] = ["sliding_attention" if c.window else "full_attention"] * c.depth
    if kind != "llama":
        own["sliding_window"] = c.window
    # Qwen2's own configuration has no such field, and its layers read it where it is there.
    if kind != "qwen2" or c.head_width:
        own["head_dim"] = c.head_width or c.width // c.heads
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "vocab_size": c.vocabulary,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.key_heads,
        "intermediate_size": c.hidden,
        "rms_norm_eps": c.eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.context,
        **write_rope(c.rope),
        **own,
    }


def _window(c: Fields, kind: str, depth: int) -> int | None:
    if kind == "llama" or "sliding_window" not in c or (kind == "qwen2" and not c.flag("use_sliding_window", False)):
        return None
    kinds = c.values.get("layer_types") or ["sliding_attention"] * depth
    if kind == "qwen2" and "layer_types" not in c:
        # Before transformers 5, Qwen2 windows the layers from max_window_layers on.
        full = c.values.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise c.refuse("max_window_layers", "it must be a whole number")
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(depth)]
    if not isinstance(kinds, list) or set(map(str, kinds)) not in ({"sliding_attention"}, {"full_attention"}):
        raise c.refuse("layer_types", "all layers must be sliding_attention, or all full_attention, to be read here")
    return c.size("sliding_window") if kinds[0] == "sliding_attention" else None


CONVERTER = Converter(tuple(CLASSES), read, write, layout)
