"""GPT-2 in Hugging Face's layout: weights stand (in, out), and q, k and v in one tensor."""

from __future__ import annotations

from collections.abc import Collection

from ...errors import CheckpointError
from ..blocks import Activation
from ..gpt2 import GPT2Config
from .converter import Converter
from .fields import DEEPEST, Fields
from .layout import TensorLayout, TensorPlace

ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def layout(config: GPT2Config) -> TensorLayout:
    def conv(name: str, i: int = 0, n: int = 1) -> TensorPlace:
        return TensorPlace(f"transformer.h.{{}}.{name}", transposed=True, part=(i, n))

    return TensorLayout(
        {
            "embed": "transformer.wte",
            "place": "transformer.wpe",
            **{f"blocks.{{}}.attention.{x}": conv("attn.c_attn", i, 3) for i, x in enumerate("qkv")},
            "blocks.{}.attention.out": conv("attn.c_proj"),
            "blocks.{}.ffn.up": conv("mlp.c_fc"),
            "blocks.{}.ffn.down": conv("mlp.c_proj"),
            "blocks.{}.norm_1": "transformer.h.{}.ln_1",
            "blocks.{}.norm_2": "transformer.h.{}.ln_2",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        prefix="transformer.",
        spare=(r"\.attn\.(masked_)?bias$", *([r"^lm_head\.weight$"] if config.tied else [])),
    )


def read(c: Fields, names: Collection[str]) -> GPT2Config:
    for key, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if c.flag(key, usual) is not usual:
            raise c.refuse(key, f"only {str(usual).lower()} is read here")
    return GPT2Config(
        vocabulary=c.size("vocab_size"),
        width=c.size("n_embd"),
        depth=c.size("n_layer", largest=DEEPEST),
        heads=c.size("n_head"),
        hidden=c.size("n_inner") if "n_inner" in c else None,
        context=c.size("n_positions", c.size("n_ctx", 1024)),
        activation=c.word("activation_function", ACTIVATIONS, "gelu_new"),
        eps=c.number("layer_norm_epsilon", 1e-5),
        tied=c.flag("tie_word_embeddings", True),
    )


def write(config: GPT2Config) -> dict[str, object]:
    c = config
    names = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
    if not c.bias or c.activation not in names:
        raise CheckpointError(f"Hugging Face's GPT-2 has biases and {', '.join(names)}; this is bias={c.bias}, {c.activation}")
    if c.norm != "pre":
        raise CheckpointError(f"Hugging Face's GPT-2 has norms before each sublayer, norm=pre; this is norm={c.norm}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocabulary,
        "n_embd": c.width,
        "n_layer": c.depth,
        "n_head": c.heads,
        "n_inner": c.hidden,
        "n_positions": c.context,
        "activation_function": names[c.activation],
        "layer_norm_epsilon": c.eps,
        "tie_word_embeddings": c.tied,
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": 0.0,
        # transformers falls back to GPT-2's own id, which a smaller vocabulary does not have.
        "bos_token_id": min(50256, c.vocabulary - 1),
        "eos_token_id": min(50256, c.vocabulary - 1),
    }


CONVERTER = Converter(("gpt2",), read, write, layout)
