"""GPT-2: learned positions added to the embeddings, LayerNorm before each sublayer, GELU (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..attention.allow import Allow, Causal
from ..errors import ShapeError
from ..nn import Attention, Cache
from ..position import NoPosition
from .base import Look, Model, Output, States, walk
from .blocks import Activation, Block, FeedForward, layer_specs, scale_residuals


@dataclass(frozen=True)
class GPT2Config:
    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int | None = None
    context: int = 1024
    activation: Activation = "gelu_tanh"
    eps: float = 1e-5
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self) -> GPT2:
        """A model of this shape, its weights drawn anew."""
        return GPT2(self)


class GPT2(Model):
    family = "gpt2"

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = c = config
        specs = layer_specs(c.attention, c.depth, NoPosition())
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.place = nn.Embedding(c.context, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(c.width, c.heads, spec, bias=c.bias),
                FeedForward(c.width, c.hidden or 4 * c.width, c.activation, bias=c.bias),
                (nn.LayerNorm(c.width, eps=c.eps, bias=c.bias), nn.LayerNorm(c.width, eps=c.eps, bias=c.bias)),
                dropout=c.dropout,
            )
            for spec in specs
        )
        self.norm = nn.LayerNorm(c.width, eps=c.eps, bias=c.bias)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        scale_residuals(cast(Sequence[Block], self.blocks))
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
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
        positions: Tensor | None = None,
    ) -> Output:
        """`positions` (B, N) or (N) places the tokens; left-padded batches need it, since a place is absolute here."""
        c = self.config
        if positions is None:
            start = 0 if not caches else len(caches[0])
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if positions.numel() and int(positions.max()) >= c.context:
            raise ShapeError(f"position {int(positions.max())} is past this model's context of {c.context} tokens")
        rule = Causal() if allow is None else Causal() & allow
        x = self.dropout(self.embed(tokens) + self.place(positions))
        way = walk(self.blocks, x, rule, caches, states, look)
        last = self.norm(way.x)
        return way.output(self.head(last), last)
