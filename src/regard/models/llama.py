"""LLaMA: RMSNorm before each sublayer, RoPE, grouped key heads, SwiGLU, no biases (Touvron et al. 2023).

SmolLM2, TinyLlama, Mistral-like and llama2.c checkpoints are all this model with other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import Tensor, nn

from ..attention.allow import Allow, Causal, Window
from ..nn import Attention, Cache
from ..position import Rope
from .base import Look, Model, Output, States, walk
from .blocks import Block, FeedForward, layer_specs, scale_residuals


@dataclass(frozen=True)
class LlamaConfig:
    vocabulary: int = 49152
    width: int = 576
    depth: int = 30
    heads: int = 9
    key_heads: int = 3
    hidden: int = 1536
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


class Llama(Model):
    family = "llama"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = c = config
        specs = layer_specs(c.attention, c.depth, c.rope)
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(
            Block(
                Attention(c.width, c.heads, spec, key_heads=c.key_heads, head_width=c.head_width, bias=c.attention_bias),
                FeedForward(c.width, c.hidden, "swiglu", bias=c.mlp_bias),
                (nn.RMSNorm(c.width, eps=c.eps), nn.RMSNorm(c.width, eps=c.eps)),
            )
            for spec in specs
        )
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        scale_residuals(cast(Sequence[Block], self.blocks))
        nn.init.normal_(self.embed.weight, std=0.02)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
    ) -> Output:
        c = self.config
        rule: Allow = Causal() if c.window is None else Causal() & Window(c.window)
        rule = rule if allow is None else rule & allow
        x = self.embed(tokens)
        way = walk(self.blocks, x, rule, caches, states, look)
        last = self.norm(way.x)
        return way.output(self.head(last), last)
