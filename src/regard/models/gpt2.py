"""GPT-2: learned positions added to the embeddings, LayerNorm before each sublayer, GELU (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from ..nn import Attention
from ..position import NoPosition
from .base import CausalModel
from .blocks import Activation, Block, FeedForward, NormOrder, last_norm, layer_specs, scale_residuals
from .tokens import TokenTable


@dataclass(frozen=True)
class GPT2Config:
    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int | None = None
    context: int = 1024
    activation: Activation = "gelu_tanh"
    norm: NormOrder = "pre"
    """Where norms stand: before each sublayer, or after each sum, as in the first transformer."""
    eps: float = 1e-5
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self) -> GPT2:
        """A model of this shape, its weights drawn anew."""
        return GPT2(self)


class GPT2(CausalModel):
    family = "gpt2"
    has_place_table = True

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = c = config
        self.context, self.start_dropout = c.context, c.dropout
        specs = layer_specs(c.attention, c.depth, NoPosition())
        self.embed = TokenTable(c.vocabulary, c.width)
        self.place = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(
            Block(
                Attention(c.width, c.heads, spec, bias=c.bias),
                FeedForward(c.width, c.hidden or 4 * c.width, c.activation, bias=c.bias),
                (nn.LayerNorm(c.width, eps=c.eps, bias=c.bias), nn.LayerNorm(c.width, eps=c.eps, bias=c.bias)),
                order=c.norm,
                dropout=c.dropout,
            )
            for spec in specs
        )
        self.norm = last_norm(c.norm, nn.LayerNorm(c.width, eps=c.eps, bias=c.bias))
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        scale_residuals(self.blocks)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        if c.tied:
            self.head.weight = self.embed.weight

    def start(self, tokens: Tensor, at: int = 0, positions: Tensor | None = None) -> Tensor:
        stop = at + tokens.shape[1] if positions is None else int(positions.max()) + 1 if positions.numel() else 0
        if stop > self.config.context:
            raise ShapeError(f"{stop:,} tokens are past this model's context of {self.config.context:,} tokens")
        positions = torch.arange(at, stop, device=tokens.device) if positions is None else positions
        return self.embed(tokens) + self.place(positions)
