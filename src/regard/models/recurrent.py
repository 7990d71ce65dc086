"""The models that attention replaced: LSTM, GRU and causal 1-D convolutions, with the same output and the same step decoding.

`attention=` puts one causal attention layer over what the layers below said, as the first attention models did (Bahdanau
et al. 2015 with "additive"); without it, the state is all that a recurrent model remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.allow import Allow, Causal
from ..errors import SpecError
from ..nn import Attention, Cache
from .base import Look, Model, Output, States, cached_length, narrowed, per_layer
from .blocks import BlockContext, attended
from .tokens import TokenTable

Kind = Literal["lstm", "gru", "cnn"]


@dataclass(frozen=True)
class RecurrentConfig:
    kind: Kind = "lstm"
    vocabulary: int = 256
    width: int = 256
    depth: int = 2
    kernel: int = 4
    """Tokens that a convolution sees, its own included; layer i skips 2^i, so depth d reaches (kernel − 1)(2^d − 1) back."""
    heads: int = 4
    """Of the attention layer, where there is one."""
    tied: bool = True
    dropout: float = 0.0
    attention: str | None = None

    def build(self) -> Recurrent:
        """A model of this shape, its weights drawn anew."""
        return Recurrent(self)


class Recurrent(Model):
    family = "recurrent"

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = c = config
        if c.kind not in LAYERS:
            raise SpecError(f"kind={c.kind!r} is not one of {', '.join(LAYERS)}")
        self.embed = TokenTable(c.vocabulary, c.width)
        self.layers = nn.ModuleList(LAYERS[c.kind](c, i) for i in range(c.depth))
        self.attention = None if c.attention is None else Attention(c.width, c.heads, c.attention)
        self.norm = nn.LayerNorm(c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if c.tied:
            self.head.weight = self.embed.weight

    @property
    def cache_count(self) -> int:
        return len(self.layers) + (self.attention is not None)

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
    ) -> Output:
        """`allow` and `states` go to the attention layer; a layer below reads every token, so padding goes to the right."""
        cached_length(caches, self.cache_count)
        look = look or Look()
        x = self.dropout(self.embed(tokens))
        hidden, grown, seen = [x], list[Cache](), None
        for i, layer in enumerate(self.layers):
            y, carry = layer(x, None if caches is None else caches[i].carry)
            x = x + self.dropout(y)
            hidden.append(x)
            grown += [] if caches is None else [replace(caches[i], carry=carry)]
        if self.attention is not None:
            rule, state = narrowed(Causal(), allow), per_layer(states, 1)[0]
            a, cache, seen = attended(
                self.attention, x, BlockContext(rule, state, None if caches is None else caches[-1], look.attention)
            )
            x = x + a
            hidden.append(x)
            grown += [] if cache is None else [cache]
        last = self.norm(x)
        return Output(
            self.head(last),
            None if caches is None else tuple(grown),
            (*hidden, last) if look.hidden else None,
            (seen,) if seen is not None else () if look.attention else None,
        )


class Gated(nn.Module):
    """torch's LSTM or GRU of one layer; what it carries is (B, 2 or 1, M)."""

    def __init__(self, c: RecurrentConfig, number: int) -> None:
        super().__init__()
        self.cell: nn.LSTM | nn.GRU = (nn.LSTM if c.kind == "lstm" else nn.GRU)(c.width, c.width, batch_first=True)
        self.has_two = c.kind == "lstm"

    def forward(self, x: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        start = None
        if carry is not None:
            parts = [p.contiguous() for p in carry.transpose(0, 1).split(1)]
            start = tuple(parts) if self.has_two else parts[0]
        y, end = self.cell(x, start)
        return y, torch.cat(list(end) if self.has_two else [cast(Tensor, end)]).transpose(0, 1)


class Convolved(nn.Module):
    """A gated causal convolution (Dauphin et al. 2017); what it carries are the last tokens that the next one sees."""

    def __init__(self, c: RecurrentConfig, number: int) -> None:
        super().__init__()
        self.skip = 2**number
        self.reach = (c.kernel - 1) * self.skip
        self.filter = nn.Conv1d(c.width, 2 * c.width, c.kernel, dilation=self.skip)

    def forward(self, x: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        before = x.new_zeros(x.shape[0], self.reach, x.shape[2]) if carry is None else carry
        whole = torch.cat([before, x], dim=1)
        return F.glu(self.filter(whole.transpose(1, 2)).transpose(1, 2), dim=-1), whole[:, whole.shape[1] - self.reach :]


LAYERS: dict[str, type[Gated] | type[Convolved]] = {"lstm": Gated, "gru": Gated, "cnn": Convolved}
