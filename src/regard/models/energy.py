"""The Energy Transformer: one block, applied again and again, that walks its tokens down an energy (Hoover et al. 2023).

    g = LayerNorm(x),  E = −(1/β) Σ_h Σ_i log Σ_{j≠i} exp(β q_i·k_j)  −  ½ Σ_i Σ_μ ReLU(ξ_μ·g_i)²,  x ← x − rate · ∂E/∂g

The first term is attention, the second a Hopfield memory of patterns ξ. The Jacobian of the norm is symmetric and positive, so
E falls for small steps. A token also moves by who attends to it, later ones included: this is a model that fills in hidden
tokens, as BERT is, and not one that writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attention.allow import Allow, Window
from ..attention.inspect import Attended
from ..attention.spec import Spec
from ..errors import CombinationError, ShapeError
from ..geometry import Dot
from ..nn import Attention, Cache
from ..position import NoPosition
from ..selection import Energy
from ..state import State
from ..values import tree
from .base import Look, Model, Output, States, narrowed, per_layer
from .blocks import layer_specs
from .infill import masks_filled
from .objectives import Masked, Objective
from .tokens import TokenTable

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True)
class EnergyConfig:
    vocabulary: int = 256
    width: int = 128
    depth: int = 1
    """Blocks, each with its own energy; the paper has one."""
    steps: int = 12
    """Steps down the energy of each block."""
    rate: float = 0.1
    heads: int = 4
    memories: int = 512
    context: int = 256
    eps: float = 1e-5
    attention: str | tuple[str, ...] = "energy"

    def build(self) -> EnergyTransformer:
        """A model of this shape, its weights drawn anew."""
        return EnergyTransformer(self)


@tree
@dataclass(frozen=True)
class EnergyOutput(Output):
    energies: Float[Tensor, "B T"] | None = None
    """The energy before each step and after the last, one block after the other; None unless attention was asked for."""


class EnergyTransformer(Model):
    family = "energy"
    instead = "moves earlier tokens too and continues no text; model.answer(text, tokenizer) fills in its masks"
    objectives: ClassVar[Mapping[str, type[Objective]]] = {"masked": Masked}
    has_place_table = True

    def __init__(self, config: EnergyConfig) -> None:
        super().__init__()
        self.config = c = config
        self.context = c.context
        self.embed = TokenTable(c.vocabulary, c.width)
        self.place = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(EnergyBlock(c, spec) for spec in layer_specs(c.attention, c.depth, NoPosition()))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocabulary)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
    ) -> EnergyOutput:
        """Logits for every token. With `look.attention` the energies too, and each block's attention at its last step."""
        if caches is not None:
            raise CombinationError("the energy transformer moves earlier tokens too, so it cannot be decoded step by step")
        if tokens.shape[1] > self.config.context:
            raise ShapeError(f"{tokens.shape[1]} tokens are past this model's context of {self.config.context}")
        look = look or Look()
        rule = narrowed(~Window(1), allow)
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        hidden, seen, energies = [x], list[Attended](), list[Tensor]()
        for block, state in zip(self.blocks, per_layer(states, len(self.blocks)), strict=True):
            for _ in range(self.config.steps):
                x, energy, _ = cast(EnergyBlock, block).descend(x, rule, state, look.attention)
                energies += [] if energy is None else [energy]
            if look.attention:
                _, energy, attended = cast(EnergyBlock, block).descend(x, rule, state, True)
                energies += [] if energy is None else [energy]
                seen += [] if attended is None else [attended]
            hidden.append(x)
        last = self.norm(x)
        return EnergyOutput(
            self.head(last),
            None,
            (*hidden, last) if look.hidden else None,
            tuple(seen) if look.attention else None,
            torch.stack(energies, dim=-1) if energies else None,
        )

    def answer(self, text: str, tokenizer: Tokenizer, limit: int = 64) -> str:
        """The text with a token for each of its masks, the surest first."""
        return masks_filled(self, text, tokenizer)


class EnergyBlock(nn.Module):
    def __init__(self, c: EnergyConfig, spec: Spec) -> None:
        super().__init__()
        if not isinstance(spec.selection, Energy):
            raise CombinationError(
                f"{spec}: the energy transformer descends an energy; give 'energy' or 'dot(scale=2) | energy'"
            )
        self.attention = Attention(c.width, c.heads, spec)
        self.memory = Memory(c.width, c.memories)
        self.norm = EnergyNorm(c.width, c.eps)
        self.rate = c.rate
        self.beta = cast(Dot, spec.geometry).scale_for(c.width // c.heads)

    def descend(
        self, x: Tensor, rule: Allow, state: State | None, inspect: bool
    ) -> tuple[Tensor, Tensor | None, Attended | None]:
        """One step down; asked to, the energy where it started (B) and a close look at its attention."""
        g = self.norm(x)
        force = self.memory(g)
        if not inspect:
            return x + self.rate * (self.attention(g, allow=rule, state=state) + force), None, None
        seen = self.attention.inspect(g, allow=rule, state=state)
        assert seen.energy is not None
        energy = seen.energy.sum((1, 2)) / self.beta + self.memory.energy(g)
        return x + self.rate * (self.attention.joined(seen.output) + force), energy, seen


class Memory(nn.Module):
    """Patterns that draw tokens near: E = −½ Σ ReLU(ξ·g)², and −∂E/∂g = ξᵀ ReLU(ξ g)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.patterns = nn.Parameter(torch.randn(count, width) * width**-0.5)

    def forward(self, g: Tensor) -> Tensor:
        return F.relu(g @ self.patterns.T) @ self.patterns

    def energy(self, g: Tensor) -> Float[Tensor, " B"]:
        return -0.5 * F.relu(g @ self.patterns.T).square().sum((1, 2))


class EnergyNorm(nn.Module):
    """LayerNorm with one gain for all dimensions: only then is it the gradient of a function, and its Jacobian symmetric."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * F.layer_norm(x, x.shape[-1:], eps=self.eps) + self.shift
