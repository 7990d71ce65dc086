"""What every transformer here is built of: feed-forward layers, norms, and the block that joins them to attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.allow import Allow
from ..attention.inspect import Attended
from ..attention.spec import Spec, parse
from ..errors import SpecError
from ..nn import Attention, Cache
from ..position import NoPosition, Position
from ..state import State

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"]
NormOrder = Literal["pre", "post"]


@dataclass(frozen=True)
class FeedForwardKind:
    """The function of a feed-forward layer, and whether it gates a second product (Shazeer 2020)."""

    act: Callable[[Tensor], Tensor]
    gated: bool = False


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FEED_FORWARDS: dict[str, FeedForwardKind] = {
    "relu": FeedForwardKind(F.relu),
    "gelu": FeedForwardKind(F.gelu),
    "gelu_tanh": FeedForwardKind(gelu_tanh),
    "silu": FeedForwardKind(F.silu),
    "reglu": FeedForwardKind(F.relu, gated=True),
    "geglu": FeedForwardKind(F.gelu, gated=True),
    "geglu_tanh": FeedForwardKind(gelu_tanh, gated=True),
    "swiglu": FeedForwardKind(F.silu, gated=True),
}
"""By the name that `activation` has in a config."""


class FeedForward(nn.Module):
    """down(act(up x)); gated (ReGLU, GEGLU, SwiGLU), down(act(gate x) · up x)."""

    def __init__(self, width: int, hidden: int, activation: Activation = "gelu", bias: bool = True) -> None:
        super().__init__()
        kind = FEED_FORWARDS.get(activation)
        if kind is None:
            raise SpecError(f"activation={activation!r} is not one of {', '.join(FEED_FORWARDS)}")
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if kind.gated else None
        self.down = nn.Linear(hidden, width, bias=bias)
        self.act = kind.act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class BlockContext:
    """What a block is told in one call: who may meet, the layer's state, its cache, and whether to look closely."""

    allow: Allow | None = None
    state: State | None = None
    cache: Cache | None = None
    inspect: bool = False


class Block(nn.Module):
    """Attention and a feed-forward layer, each around a residual.

    `order=pre` norms what goes into a sublayer (GPT-2, LLaMA), `post` norms the sum (BERT, the first transformer).
    """

    def __init__(
        self,
        attention: Attention,
        ffn: nn.Module,
        norms: Sequence[nn.Module],
        order: NormOrder = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if order not in get_args(NormOrder):
            raise SpecError(f"norm={order!r} is not one of {', '.join(get_args(NormOrder))}")
        self.attention, self.ffn, self.order = attention, ffn, order
        self.norm_1, self.norm_2 = norms
        self.dropout = nn.Dropout(dropout)

    @property
    def is_plain(self) -> bool:
        """True where a call is norm, q, k and v, their meeting, out, norm and feed-forward layer, and nothing beside."""
        as_written = type(self).forward is Block.forward and self.order == "pre"
        return (
            as_written and type(self.attention) is Attention and type(self.ffn) is FeedForward and self.attention.v is not None
        )

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Cache | None, Attended | None]:
        x, cache, seen = self.attend(x, context)
        if self.order == "pre":
            return x + self.dropout(self.ffn(self.norm_2(x))), cache, seen
        x = self.norm_1(x)
        return self.norm_2(x + self.dropout(self.ffn(x))), cache, seen

    def attend(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Cache | None, Attended | None]:
        """The first half: x and what attention adds to it."""
        a, cache, seen = attended(self.attention, self.norm_1(x) if self.order == "pre" else x, context)
        return x + self.dropout(a), cache, seen


def attended(attention: Attention, x: Tensor, context: BlockContext) -> tuple[Tensor, Cache | None, Attended | None]:
    """One attention layer as its context asks: whole, after a cache, or inspected."""
    if context.cache is not None:
        out, cache = attention.step(x, context.cache, allow=context.allow, state=context.state)
        return out, cache, None
    if context.inspect:
        seen = attention.inspect(x, allow=context.allow, state=context.state)
        return attention.joined(seen.output), None, seen
    return attention(x, allow=context.allow, state=context.state), None, None


def layer_specs(attention: str | Spec | Sequence[str | Spec], depth: int, position: Position) -> list[Spec]:
    """One spec per layer, from one for all or one each. A spec that names no position keeps the model's own."""
    given = [attention] * depth if isinstance(attention, str | Spec) else list(attention)
    if len(given) != depth:
        raise SpecError(f"{len(given)} attention specs for {depth} layers; give one, or one for each layer")
    specs = [parse(s) for s in given]
    return [Spec(s.geometry, s.selection, position) if isinstance(s.position, NoPosition) else s for s in specs]


def last_norm(order: NormOrder, norm: nn.Module) -> nn.Module:
    """The norm after the last block: what blocks with norms after their sums leave has one already."""
    return norm if order == "pre" else nn.Identity()


def scale_residuals(blocks: nn.ModuleList, std: float = 0.02) -> None:
    """GPT-2's start: normal weights, those that write to the residual smaller by √(2 · depth)."""
    shrink = (2 * len(blocks)) ** -0.5
    for block in blocks:
        for name, p in block.named_parameters():
            if p.ndim == 2:
                writes = name.endswith(("attention.out.weight", "ffn.down.weight"))
                torch.nn.init.normal_(p, std=std * (shrink if writes else 1.0))
