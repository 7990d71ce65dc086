"""Transformers that take any attention spec, layer by layer, and the models they are compared with."""

from .base import CausalModel, Look, Model, Output
from .bert import Bert, BertConfig, mean_pooled
from .convert import load as from_pretrained
from .decode.generate import Generated, Sampling, generate, perplexity, stream
from .downloads import open_model
from .energy import EnergyConfig, EnergyTransformer
from .families import FAMILIES, Family  # with it comes `convert`, which says how models come from files
from .gpt2 import GPT2, GPT2Config
from .llama import Llama, LlamaConfig
from .ngpt import NGPT, NGPTConfig
from .recurrent import Recurrent, RecurrentConfig
from .routing import Routing, RoutingConfig
from .t5 import T5, T5Config

__all__ = [
    "FAMILIES", "GPT2", "NGPT", "T5", "Bert", "BertConfig", "CausalModel", "EnergyConfig", "EnergyTransformer", "Family",
    "GPT2Config", "Generated", "Llama", "LlamaConfig", "Look", "Model", "NGPTConfig", "Output", "Recurrent", "RecurrentConfig",
    "Routing", "RoutingConfig", "Sampling", "T5Config", "from_pretrained", "generate", "mean_pooled", "open_model", "perplexity",
    "stream",
]  # fmt: skip
