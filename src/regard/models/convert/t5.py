"""T5 in Hugging Face's layout, versions 1.0 and 1.1."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...errors import CheckpointError
from ..blocks import Activation
from ..t5 import T5Config
from .converter import Converter
from .fields import DEEPEST, Fields
from .layout import TensorLayout, TensorPlace

FORMS: dict[str, Activation] = {"relu": "relu", "gated-gelu": "geglu_tanh"}


def layout(config: T5Config) -> TensorLayout:
    copies = [r"^(encoder|decoder)\.embed_tokens\.weight$", *([r"^lm_head\.weight$"] if config.tied else [])]
    # Where every layer was given another position, the file's table has nothing to fill.
    return TensorLayout(
        {
            "embed": TensorPlace("shared", also=("encoder.embed_tokens", "decoder.embed_tokens")),
            **_stack(config, "encoder", 1),
            **_stack(config, "decoder", 2),
            **{
                f"decoder.blocks.{{}}.cross.{ours}": f"decoder.block.{{}}.layer.1.EncDecAttention.{theirs}"
                for ours, theirs in QKVO
            },
            "decoder.blocks.{}.norm_cross": "decoder.block.{}.layer.1.layer_norm",
            "head": "lm_head",
        },
        spare=(*copies, r"relative_attention_bias\.weight$"),
    )


QKVO = (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))


def _stack(config: T5Config, side: str, last: int) -> Mapping[str, TensorPlace | str]:
    ours, theirs = f"{side}.blocks.{{}}.", f"{side}.block.{{}}.layer."
    gated = config.activation == "geglu_tanh"
    dense = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    return {
        **{f"{ours}attention.{a}": f"{theirs}0.SelfAttention.{b}" for a, b in QKVO},
        **{f"{ours}ffn.{a}": f"{theirs}{last}.DenseReluDense.{b}" for a, b in dense.items()},
        f"{ours}norm_1": f"{theirs}0.layer_norm",
        f"{ours}norm_2": f"{theirs}{last}.layer_norm",
        f"{ours}attention.trained.relative": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        f"{side}.norm": f"{side}.final_layer_norm",
    }


def read(c: Fields, names: Collection[str]) -> T5Config:
    depth, vocabulary = c.size("num_layers", largest=DEEPEST), c.size("vocab_size")
    start = c.ids("decoder_start_token_id")
    if isinstance(start, list) or not 0 <= (start or 0) < vocabulary:
        raise c.refuse("decoder_start_token_id", f"it must be the number of one of {vocabulary} tokens")
    return T5Config(
        vocabulary=vocabulary,
        width=c.size("d_model"),
        depth=depth,
        decoder_depth=c.size("num_decoder_layers", depth, largest=DEEPEST),
        heads=c.size("num_heads"),
        head_width=c.size("d_kv"),
        hidden=c.size("d_ff"),
        activation=c.word("feed_forward_proj", FORMS, "relu"),
        buckets=c.size("relative_attention_num_buckets", 32),
        max_distance=c.size("relative_attention_max_distance", 128),
        eps=c.number("layer_norm_epsilon", 1e-6),
        # transformers 5 writes tie_word_embeddings=true for every T5, so the file itself has to say.
        tied="lm_head.weight" not in names,
        # Before the field existed, heads that were said to be tied were scaled and others were not.
        scaled=c.flag("scale_decoder_outputs", c.flag("tie_word_embeddings", True)),
        start=start or 0,
    )


def write(config: T5Config) -> dict[str, object]:
    c = config
    forms = {ours: theirs for theirs, ours in FORMS.items()}
    if c.activation not in forms:
        raise CheckpointError(f"Hugging Face's T5 has {', '.join(forms)}; this is {c.activation}")
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": c.vocabulary,
        "d_model": c.width,
        "num_layers": c.depth,
        "num_decoder_layers": c.decoder_depth or c.depth,
        "num_heads": c.heads,
        "d_kv": c.head_width,
        "d_ff": c.hidden,
        "feed_forward_proj": forms[c.activation],
        "relative_attention_num_buckets": c.buckets,
        "relative_attention_max_distance": c.max_distance,
        "layer_norm_epsilon": c.eps,
        # It means "scaled" to transformers; whether the head is tied shows in the tensors.
        "tie_word_embeddings": c.scaled,
        "scale_decoder_outputs": c.scaled,
        "decoder_start_token_id": c.start,
        "dropout_rate": c.dropout,
    }


CONVERTER = Converter(("t5",), read, write, layout)
