"""LLaMA: RMSNorm before each sublayer, RoPE, grouped key heads, SwiGLU, no biases (Touvron et al. 2023).

SmolLM2, TinyLlama, Mistral-like and llama2.c checkpoints are all this model with other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ..attention.allow import Allow, Causal, Window
from ..nn import Attention
from ..position import Rope
from .base import CausalModel
from .blocks import Activation, Block, FeedForward, NormOrder, last_norm, layer_specs, scale_residuals
from .tokens import TokenTable


@dataclass(frozen=True)
class LlamaConfig:
    vocabulary: int = 49152
    width: int = 576
    depth: int = 30
    heads: int = 9
    key_heads: int = 3
    hidden: int = 1536
    activation: Activation = "swiglu"
    norm: NormOrder = "pre"
    """Where norms stand: before each sublayer, or after each sum, as in the first transformer."""
    head_width: int | None = None
    rope: Rope = field(default_factory=Rope)
    eps: float = 1e-5
    tied: bool = True
    attention_bias: bool | Literal["qkv"] = False
    mlp_bias: bool = False
    window: int | None = None
    context: int = 8192
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self) -> Llama:
        """A model of this shape, its weights drawn anew."""
        return Llama(self)


class Llama(CausalModel):
    family = "llama"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.context = c.context
        specs = layer_specs(c.attention, c.depth, c.rope)
        self.embed = TokenTable(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(
            Block(
                Attention(c.width, c.heads, spec, key_heads=c.key_heads, head_width=c.head_width, bias=c.attention_bias),
                FeedForward(c.width, c.hidden, c.activation, bias=c.mlp_bias),
                (nn.RMSNorm(c.width, eps=c.eps), nn.RMSNorm(c.width, eps=c.eps)),
                order=c.norm,
            )
            for spec in specs
        )
        self.norm = last_norm(c.norm, nn.RMSNorm(c.width, eps=c.eps))
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        scale_residuals(self.blocks)
        nn.init.normal_(self.embed.weight, std=0.02)
        if c.tied:
            self.head.weight = self.embed.weight

    def rule(self) -> Allow:
        window = self.config.window
        return Causal() if window is None else Causal() & Window(window)
