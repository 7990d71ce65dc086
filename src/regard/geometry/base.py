"""A geometry says how near a query and a key are.

Every geometry has `scores`, the plain definition that tests trust, and `lower`, which writes the same scores as a dot
product plus a bias per key, so that a fused kernel can run them:

    scores(q, k) = scale · q' k'ᵀ + key_bias + row_bias

`row_bias` is constant along a row. Softmax ignores it; thresholds, distances and energies do not, so it is kept apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ..part import Part
from ..position.base import Position
from ..state import State

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Where the tokens stand, applied to the content of q and k: RoPE turns them, sinusoids are added to them."""


def stay(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


@dataclass(frozen=True)
class Slot:
    """One more key that every row sees and no mask hides: its score per row, its key and value (None: zero)."""

    score: Float[Tensor, "B H Q"]
    key: Float[Tensor, "B H D"] | None = None
    value: Float[Tensor, "B H E"] | None = None


@dataclass(frozen=True)
class Lowered:
    """Scores as a dot product. A geometry that is none gives `pair(q, k, *params)`, which scores one tile of queries.

    `row_bias` is a function, since only a few selections ask for it and a metric's qᵀTq is not free.
    """

    q: Float[Tensor, "B H Q Dq"]
    k: Float[Tensor, "B G K Dq"]
    scale: float = 1.0
    key_bias: Float[Tensor, "#B heads K"] | None = None
    row_bias: Callable[[], Tensor] | None = None
    slot: Slot | None = None
    pair: Callable[..., Tensor] | None = None
    params: tuple[Tensor, ...] = ()

    def divided(self, temperature: float | Tensor) -> Lowered:
        """The same scores over a temperature: one number, or a tensor with one per query head."""
        row, slot, bias = self.row_bias, self.slot, self.key_bias
        per_head = temperature.view(1, -1, 1) if isinstance(temperature, Tensor) else temperature
        if isinstance(temperature, Tensor) and bias is not None:
            bias = bias.repeat_interleave(temperature.numel() // bias.shape[1], dim=1)
        return replace(
            self,
            q=self.q / per_head.unsqueeze(-1) if isinstance(per_head, Tensor) else self.q,
            scale=self.scale if isinstance(temperature, Tensor) else self.scale / temperature,
            key_bias=None if bias is None else bias / per_head,
            row_bias=None if row is None else lambda: row() / per_head,
            slot=None if slot is None else replace(slot, score=slot.score / per_head),
        )


@dataclass(frozen=True)
class Geometry(Part, ABC):
    lowers: ClassVar[bool] = True
    """False where scores are no dot product, so that `lower` gives a `pair`."""
    reads_unturned: ClassVar[bool] = False
    """True when it looks at q and k before a position turns them, so that keys are cached as they were."""

    @abstractmethod
    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Float[Tensor, "B H Q K"]:
        """The plain definition; k has as many heads as q here."""

    @abstractmethod
    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Lowered:
        """The same scores as a dot product; k keeps its G heads."""

    def slot(self, q: Tensor, k: Tensor, state: State, turn: Turn = stay) -> Slot | None:
        """The extra key that this geometry adds to each row, if it does."""
        return None

    def distance(self, width: int) -> tuple[float, float] | None:
        """(c, top) with scores = top − c · distance², or None where the scores are no distance."""
        return None

    def with_scale(self, scale: float) -> Geometry | None:
        """The same geometry at another inverse temperature, or None where it has no such number."""
        return None

    def idle(self, state: State) -> bool:
        """True when the state makes this geometry equal to plain `dot`, so that the plan may bypass it."""
        return False

    @property
    def bare(self) -> bool:
        """True when `lower` gives a dot product and nothing else: no bias per key and no slot."""
        return False

    @property
    def slotted(self) -> bool:
        """True when `slot` gives one."""
        return False

    def scale_for(self, width: int) -> float | None:
        """The scale where scores are scale · q·k of q and k as they are; None where they are anything else."""
        return None

    @property
    def is_dot(self) -> bool:
        return self.scale_for(1) is not None

    def compared(self, x: Tensor) -> Tensor:
        """The vectors between which `distance` is measured."""
        return x

    def lowered_width(self, width: int, turned: bool, state: State) -> int:
        """Of the dot product that `lower` gives for heads of this width."""
        return width

    def lowering_flops(self, keys: int, width: int) -> int:
        """What `lower` costs for so many keys, beyond passes over q and k."""
        return 0

    def check(self, state: State, value_width: int) -> None:
        """Refuse a state that does not fit v, which neither `scores` nor `lower` sees."""
        return

    def refuses(self, position: Position) -> str | None:
        """Why this geometry has no meaning with a position, or None."""
        return None
