"""BERT: every token meets every other, norms after each sum, trained by guessing hidden words (Devlin et al. 2019).

MiniLM and other sentence encoders are this model without the guessing head; `mean_pooled` makes their sentence vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..attention.allow import All, Allow
from ..errors import CombinationError, ShapeError
from ..nn import Attention, Cache
from ..position import NoPosition
from ..values import tree
from .base import Look, Model, Output, States, walk
from .blocks import Activation, Block, FeedForward, layer_specs
from .infill import masks_filled
from .objectives import Masked, Objective
from .tokens import TokenTable

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True)
class BertConfig:
    vocabulary: int = 30522
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    context: int = 512
    types: int = 2
    activation: Activation = "gelu"
    eps: float = 1e-12
    guesses: bool = True
    """The head that guesses hidden words; without it `logits` has no columns."""
    pools: bool = True
    """The layer over the first token that makes `pooled`."""
    tied: bool = True
    dropout: float = 0.0
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self) -> Bert:
        """A model of this shape, its weights drawn anew."""
        return Bert(self)


@tree
@dataclass(frozen=True)
class BertOutput(Output):
    last: Float[Tensor, "B N M"] | None = None
    """What the last block left."""
    pooled: Float[Tensor, "B M"] | None = None
    """The first token, through its own layer; None for a model without one."""


class Bert(Model):
    family = "bert"
    instead = "reads a text from both sides and continues none; model.answer(text, tokenizer) fills in its masks"
    objectives: ClassVar[Mapping[str, type[Objective]]] = {"masked": Masked}
    has_place_table = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = c = config
        self.context = c.context
        specs = layer_specs(c.attention, c.depth, NoPosition())
        self.embed = TokenTable(c.vocabulary, c.width)
        self.place = nn.Embedding(c.context, c.width)
        self.sentence = nn.Embedding(c.types, c.width)
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(c.width, c.heads, spec, bias=True),
                FeedForward(c.width, c.hidden, c.activation),
                (nn.LayerNorm(c.width, eps=c.eps), nn.LayerNorm(c.width, eps=c.eps)),
                order="post",
                dropout=c.dropout,
            )
            for spec in specs
        )
        self.pooler = nn.Linear(c.width, c.width) if c.pools else None
        self.guess = Guess(c) if c.guesses else None
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if self.guess is not None and c.tied:
            self.guess.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> BertOutput:
        """`types` (B, N) says which sentence a token is of, the first by default; `positions` (B, N) or (N) where it stands."""
        if caches is not None:
            raise CombinationError("bert reads a text both ways, so it has nothing to cache: a new token changes all others")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if positions.numel() and int(positions.max()) >= self.config.context:
            raise ShapeError(f"position {int(positions.max())} is past this model's context of {self.config.context} tokens")
        types = torch.zeros_like(tokens) if types is None else types
        x = self.embed(tokens) + self.place(positions) + self.sentence(types)
        way = walk(self.blocks, self.dropout(self.norm(x)), allow or All(), None, states, look)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(way.x[:, 0]))
        logits = way.x.new_zeros(*way.x.shape[:2], 0) if self.guess is None else self.guess(way.x)
        seen = way.output(logits, way.x)
        # The norm comes inside the last block here, so what it left is the end already.
        hidden = None if seen.hidden is None else seen.hidden[:-1]
        return BertOutput(logits, None, hidden, seen.attended, way.x, pooled)

    @property
    def trains_every_parameter(self) -> bool:
        return self.pooler is None  # guessing hidden words does not ask it

    def answer(self, text: str, tokenizer: Tokenizer, limit: int = 64) -> str:
        """The text with a token for each of its masks, the surest first."""
        return masks_filled(self, text, tokenizer)


class Guess(nn.Module):
    """The head that guesses hidden words: a layer, a norm, and the embedding read backwards."""

    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.mix = nn.Linear(c.width, c.width)
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocabulary)
        nn.init.zeros_(self.head.bias)
        self.act = F.relu if c.activation == "relu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.act(self.mix(x))))


def mean_pooled(
    last: Float[Tensor, "B N M"], real: Bool[Tensor, "B N"] | None = None, unit: bool = True
) -> Float[Tensor, "B M"]:
    """Sentence vectors: the mean over the tokens that are real, of length 1 unless asked otherwise.

        vectors = mean_pooled(model(tokens, allow=Padding(lengths)).last, real)

    `real` is False where a token is padding.
    """
    real = torch.ones(last.shape[:2], dtype=torch.bool, device=last.device) if real is None else real
    weight = real.to(last.dtype).unsqueeze(-1)
    mean = (last * weight).sum(1) / weight.sum(1).clamp_min(1)
    return F.normalize(mean, dim=-1) if unit else mean
