"""nGPT: every vector lives on the unit sphere, and a layer turns the state toward its own answer (Loshchilov et al. 2024).

    h ← Norm(h + |α_A| ⊙ (Norm(attention(h)) − h)),   h ← Norm(h + |α_M| ⊙ (Norm(ffn(h)) − h))
    q, k ← s_qk ⊙ Norm(q), s_qk ⊙ Norm(k), scores q·k √D;   logits s_z ⊙ (E h)

α are the eigen learning rates: 0 leaves h where it is, 1 takes the answer. There are no norm layers and no weight decay;
`normalize_()` after each optimiser step puts the weights back on the sphere. One s_qk serves both dimensions of a RoPE pair:
a free one would stretch a pair before it turns, and scores would depend on absolute positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.inspect import Attended
from ..attention.spec import Spec
from ..geometry import Dot
from ..nn import Attention, Cache
from ..position import Rope
from .base import CausalModel
from .blocks import BlockContext, attended, layer_specs
from .tokens import TokenTable


@dataclass(frozen=True)
class NGPTConfig:
    vocabulary: int = 256
    width: int = 384
    depth: int = 6
    heads: int = 6
    hidden: int | None = None
    context: int = 1024
    rope: Rope = field(default_factory=Rope)
    alpha: float = 0.05
    """Where the eigen learning rates start; the paper takes about 1/depth."""
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self) -> NGPT:
        """A model of this shape, its weights drawn anew."""
        return NGPT(self)


class NGPT(CausalModel):
    family = "ngpt"

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.config = c = config
        self.context = c.context
        self.embed = TokenTable(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(SphereBlock(c, spec) for spec in layer_specs(c.attention, c.depth, c.rope))
        self.norm = nn.Identity()
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        self.s_z = Gain(c.vocabulary, 1.0, c.width**-0.5)
        for name, p in self.named_parameters():
            if p.ndim == 2 and not name.endswith(".raw"):
                nn.init.normal_(p, std=c.width**-0.5)
        self.normalize_()

    def start(self, tokens: Tensor, at: int = 0, positions: Tensor | None = None) -> Tensor:
        return unit(super().start(tokens, at, positions))

    def readout(self, last: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return self.s_z(super().readout(last, head))

    @torch.no_grad()
    def normalize_(self) -> None:
        """Every weight vector along the model's width back to length 1. Call it after each optimiser step."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # A layer that writes to the state has the model's width in its rows, not in its columns.
                writes = getattr(module, "writes", False)
                module.weight.copy_(F.normalize(module.weight, dim=0 if writes else -1))


class SphereBlock(nn.Module):
    def __init__(self, c: NGPTConfig, spec: Spec) -> None:
        super().__init__()
        self.attention = SphereAttention(c.width, c.heads, spec)
        self.ffn = SphereFeedForward(c.width, c.hidden or 4 * c.width)
        self.alpha_attention = Gain(c.width, c.alpha, c.width**-0.5)
        self.alpha_ffn = Gain(c.width, c.alpha, c.width**-0.5)

    def forward(self, h: Tensor, context: BlockContext) -> tuple[Tensor, Cache | None, Attended | None]:
        a, cache, seen = attended(self.attention, h, context)
        h = toward(h, a, self.alpha_attention())
        return toward(h, self.ffn(h), self.alpha_ffn()), cache, seen


class SphereAttention(Attention):
    """Attention between unit queries and keys, stretched by s_qk; a dot product without a scale of its own gets √D."""

    def __init__(self, width: int, heads: int, spec: Spec) -> None:
        D = width // heads
        if isinstance(spec.geometry, Dot) and spec.geometry.scale is None:
            spec = Spec(Dot(D**0.5), spec.selection, spec.position)
        super().__init__(width, heads, spec)
        self.s_qk = Gain((heads, 1, D // 2), 1.0, width**-0.5)
        self.pairs_split = getattr(spec.position, "layout", "half") == "half"
        if self.out is not None:
            self.out.writes = True  # pyright: ignore[reportArgumentType]

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = super()._project(x, source)
        s = self.s_qk()
        s = torch.cat([s, s], dim=-1) if self.pairs_split else s.repeat_interleave(2, dim=-1)
        return unit(q) * s, unit(k) * s, v


class SphereFeedForward(nn.Module):
    """down(s_u ⊙ up h · silu(√M s_v ⊙ gate h)): √M brings the product of two unit vectors to a size where SiLU is curved."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.down.writes = True  # pyright: ignore[reportArgumentType]
        self.s_u, self.s_v = Gain(hidden, 1.0, 1.0), Gain(hidden, 1.0, 1.0)
        self.root = width**0.5

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.s_u(self.up(h)) * F.silu(self.s_v(self.gate(h)) * self.root))


class Gain(nn.Module):
    """A trained vector that starts at `start` and learns as if it were of size `size`: Adam's step is absolute."""

    def __init__(self, shape: int | tuple[int, ...], start: float, size: float) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((shape,) if isinstance(shape, int) else shape, size))
        self.ratio = start / size

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.raw * self.ratio if x is None else x * (self.raw * self.ratio)


def toward(h: Tensor, answer: Tensor, alpha: Tensor) -> Tensor:
    """A step on the sphere from h to a layer's answer."""
    return unit(h + alpha.abs() * (unit(answer) - h))


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)
