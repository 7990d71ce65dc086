"""Transformers that take any attention spec, layer by layer."""

from .base import Look, Model, Output
from .gpt2 import GPT2, GPT2Config
from .llama import Llama, LlamaConfig

__all__ = ["GPT2", "GPT2Config", "Llama", "LlamaConfig", "Look", "Model", "Output"]
