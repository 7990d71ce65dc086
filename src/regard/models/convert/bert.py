"""BERT in Hugging Face's layout; a file may have the guessing head, the pooler, both or neither."""

from __future__ import annotations

from collections.abc import Collection

from ...errors import CheckpointError
from ..bert import BertConfig
from ..blocks import Activation
from .converter import Converter
from .fields import DEEPEST, Fields
from .layout import TensorLayout, TensorPlace

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "relu": "relu"}


def layout(config: BertConfig) -> TensorLayout:
    layer, head = "bert.encoder.layer.{}.", "cls.predictions."
    spare = [r"embeddings\.position_ids$", r"^cls\.seq_relationship\.", r"^cls\.predictions\.(decoder\.)?bias$"]
    # A head of its own uses the decoder's bias; the other one stays in the file, unused.
    biases = [f"{head}bias", f"{head}decoder.bias"][:: 1 if config.tied else -1]
    return TensorLayout(
        {
            "embed": "bert.embeddings.word_embeddings",
            "place": "bert.embeddings.position_embeddings",
            "sentence": "bert.embeddings.token_type_embeddings",
            "norm": "bert.embeddings.LayerNorm",
            "blocks.{}.attention.q": f"{layer}attention.self.query",
            "blocks.{}.attention.k": f"{layer}attention.self.key",
            "blocks.{}.attention.v": f"{layer}attention.self.value",
            "blocks.{}.attention.out": f"{layer}attention.output.dense",
            "blocks.{}.norm_1": f"{layer}attention.output.LayerNorm",
            "blocks.{}.ffn.up": f"{layer}intermediate.dense",
            "blocks.{}.ffn.down": f"{layer}output.dense",
            "blocks.{}.norm_2": f"{layer}output.LayerNorm",
            "pooler": "bert.pooler.dense",
            "guess.mix": f"{head}transform.dense",
            "guess.norm": f"{head}transform.LayerNorm",
            "guess.head.weight": f"{head}decoder.weight",
            "guess.head.bias": TensorPlace(biases[0], also=(biases[1],)),
        },
        prefix="bert.",
        spare=(*spare, *([r"^cls\.predictions\.decoder\.weight$"] if config.tied else [])),
    )


def read(c: Fields, names: Collection[str]) -> BertConfig:
    c.word("position_embedding_type", ("absolute",), "absolute")
    if c.flag("is_decoder", False):
        raise c.refuse("is_decoder", "BERT is read as an encoder")
    return BertConfig(
        vocabulary=c.size("vocab_size"),
        width=c.size("hidden_size"),
        depth=c.size("num_hidden_layers", largest=DEEPEST),
        heads=c.size("num_attention_heads"),
        hidden=c.size("intermediate_size"),
        context=c.size("max_position_embeddings"),
        types=c.size("type_vocab_size", 2),
        activation=c.word("hidden_act", ACTIVATIONS, "gelu"),
        eps=c.number("layer_norm_eps", 1e-12),
        guesses=any(n.startswith("cls.predictions.") for n in names),
        pools=any(n.endswith("pooler.dense.weight") for n in names),
        tied=c.flag("tie_word_embeddings", True),
    )


def write(config: BertConfig) -> dict[str, object]:
    c = config
    if c.activation not in ACTIVATIONS:
        raise CheckpointError(f"Hugging Face's BERT has {', '.join(ACTIVATIONS)}; this is {c.activation}")
    return {
        "architectures": ["BertForMaskedLM" if c.guesses else "BertModel"],
        "model_type": "bert",
        "vocab_size": c.vocabulary,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "intermediate_size": c.hidden,
        "max_position_embeddings": c.context,
        "type_vocab_size": c.types,
        "hidden_act": c.activation,
        "layer_norm_eps": c.eps,
        "tie_word_embeddings": c.tied,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": 0.0,
    }


CONVERTER = Converter(("bert",), read, write, layout)
