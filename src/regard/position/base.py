"""A position says where a token stands: by turning or shifting q and k, or by a bias on their score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..part import Part
from ..state import State


@dataclass(frozen=True)
class Position(Part):
    absent: ClassVar[bool] = False
    """True when nothing says where a token stands."""
    turns: ClassVar[bool] = False
    """True when the position changes q and k themselves."""
    biases: ClassVar[bool] = False
    """True when it adds a bias to each pair."""
    shift_invariant: ClassVar[bool] = False
    """True when scores depend on how far apart two tokens stand alone, so that padding before a text changes nothing."""

    @property
    def reads_length(self) -> bool:
        """True when a token stands elsewhere in a longer text: what is read with it, padding and guesses too, moves it."""
        return False

    @property
    def early(self) -> bool:
        """True when keys may be cached as `apply` left them: it reads no state, and no later, longer text turns them again."""
        return False

    def apply(self, x: Tensor, start: int, state: State) -> Tensor:
        """x (B, heads, N, D), whose tokens stand at start, start + 1, …"""
        return x

    def revert(self, x: Tensor, start: int, state: State) -> Tensor:
        """The transpose of `apply` on a gradient: back from the turned frame."""
        return x

    def bias(self, q_at: Tensor, k_at: Tensor, like: Tensor, table: Tensor | None) -> Tensor:
        """(H, Q, K), added to the scores; `like` (B, H, ...) gives heads and dtype."""
        raise TypeError(f"{self.name} adds no bias")

    def slope_per_head(self, heads: int) -> list[float] | None:
        """m_h where the bias is −m_h · |i − j|: for keys before the query a line in j, which a dot product can hold."""
        return None

    def table(self, state: State) -> Tensor | None:
        """The trained numbers behind the bias, if any."""
        return None


@dataclass(frozen=True)
class NoPosition(Position):
    name = "none"
    absent = True
    shift_invariant = True
