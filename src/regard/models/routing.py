"""Models that route: tokens to experts (sparsely gated mixture, Switch) and queries to clusters of keys (Routing Transformer).

    routed = RoutingConfig(experts=8, chosen=2, gate="noisy").build()    # Shazeer et al. 2017
    switch = RoutingConfig(experts=8, chosen=1, capacity=1.25).build()   # Fedus et al. 2021
    nearby = RoutingConfig(experts=1, clusters=8).build()                # Roy et al. 2021

The parts are `models/experts.py` and `models/clusters.py`; this is a GPT with RoPE and RMSNorm around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..attention.allow import Allow
from ..attention.inspect import Attended
from ..attention.spec import Spec
from ..nn import Attention, Cache
from ..position import Rope
from ..values import tree
from .base import CausalModel, Look, Output, States, narrowed, walk
from .blocks import Activation, Block, BlockContext, FeedForward, layer_specs
from .clusters import ClusteredAttention
from .experts import Experts, Gate, Route
from .tokens import TokenTable


@dataclass(frozen=True)
class RoutingConfig:
    vocabulary: int = 256
    width: int = 256
    depth: int = 4
    heads: int = 4
    hidden: int | None = None
    activation: Activation = "gelu"
    experts: int = 8
    """Feed-forward layers to choose among; 1 is an ordinary transformer."""
    chosen: int = 2
    """How many of them a token goes through."""
    capacity: float | None = None
    """In training an expert takes at most this many times its even share, and other tokens pass it by; None: it takes all."""
    gate: Gate = "plain"
    """`noisy` adds a trained noise to the router's scores in training."""
    clusters: int | None = None
    """Clusters of queries and keys per head; a query meets keys of its own cluster only. None: it meets all."""
    rope: Rope = field(default_factory=Rope)
    eps: float = 1e-5
    tied: bool = True
    attention: str | tuple[str, ...] = "dot | softmax"

    @property
    def parts(self) -> int:
        """Feed-forward layers of all blocks, which a file must hold tensors for."""
        return self.depth * self.experts

    def build(self) -> Routing:
        """A model of this shape, its weights drawn anew."""
        return Routing(self)


@tree
@dataclass(frozen=True)
class RoutingOutput(Output):
    balance: Float[Tensor, ""] | None = None
    """The mean load-balancing loss of the layers: 1 when experts are used evenly, up to their number when one takes all."""
    routes: tuple[Route, ...] = ()
    """Where each layer sent its tokens; empty for a model with one expert."""


class Routing(CausalModel):
    family = "routing"

    def __init__(self, config: RoutingConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embed = TokenTable(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(RoutedBlock(c, spec) for spec in layer_specs(c.attention, c.depth, c.rope))
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if c.tied:
            self.head.weight = self.embed.weight

    @property
    def trains_every_parameter(self) -> bool:
        return self.config.experts == 1  # an expert that no token chose learns nothing in that step

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
        positions: Tensor | None = None,
    ) -> RoutingOutput:
        """Add `0.01 * out.balance` to the loss, or a few experts will learn everything."""
        routes: list[Route] = []
        steps = [partial(block, routes=routes) for block in self.blocks]
        way = walk(steps, self.start(tokens, positions=positions), narrowed(self.rule(), allow), caches, states, look)
        last = self.norm(way.x)
        out = way.output(self.readout(last), last)
        balance = torch.stack([r.balance for r in routes]).mean() if routes else None
        return RoutingOutput(out.logits, out.caches, out.hidden, out.attended, balance, tuple(routes))


class RoutedBlock(Block):
    """A pre-norm block whose feed-forward layer says where it sent the tokens."""

    def __init__(self, c: RoutingConfig, spec: Spec) -> None:
        hidden = c.hidden or 4 * c.width
        attention = (
            Attention(c.width, c.heads, spec) if c.clusters is None else ClusteredAttention(c.width, c.heads, spec, c.clusters)
        )
        ffn: nn.Module = (
            FeedForward(c.width, hidden, c.activation)
            if c.experts == 1
            else Experts(c.width, hidden, c.experts, c.chosen, c.capacity, c.activation, c.gate)
        )
        super().__init__(attention, ffn, (nn.RMSNorm(c.width, eps=c.eps), nn.RMSNorm(c.width, eps=c.eps)))

    def forward(
        self, x: Tensor, context: BlockContext, routes: list[Route] | None = None
    ) -> tuple[Tensor, Cache | None, Attended | None]:
        if not isinstance(self.ffn, Experts):
            return super().forward(x, context)
        x, cache, seen = self.attend(x, context)
        y, route = self.ffn(self.norm_2(x))
        if routes is not None:
            routes.append(route)
        return x + self.dropout(y), cache, seen
