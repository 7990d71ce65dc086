"""Rotary positions: each pair of dimensions turns by p·base^(−2i/R), so q·k depends on the offset only (Su et al. 2021).

`layout=half` pairs dimension i with i + R/2 (LLaMA in Hugging Face's layout), `interleaved` pairs 2i with 2i+1 (the
paper, GPT-J). `fraction` turns the first part of a head only. `scaling` reaches past the trained length:

    linear   positions / factor (Chen et al. 2023)
    ntk      base · factor^(R/(R−2)): high frequencies stay
    dynamic  ntk whose factor grows with the text once it is longer than `original`, and is 1 until then
    llama3   low frequencies / factor, high ones kept, a ramp between `low` and `high` turns over `original` tokens
    yarn     the ramp counted in pairs, and turned parts longer by `stretch`, 0.1 ln(factor) + 1 (Peng et al. 2023)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from ..state import State
from .base import Position

Scaling = Literal["linear", "ntk", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope(Position):
    name = "rope"
    turns = True
    shift_invariant = True
    base: float = 10000.0
    fraction: float = 1.0
    layout: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float | None = None
    stretch: float | None = None

    def __post_init__(self) -> None:
        self.check_positive("base", "fraction", "factor", "original", "low", "high", "stretch")
        self.check_choice("layout", ("half", "interleaved"))
        if self.fraction > 1:
            raise self.refuse("fraction", "the fraction of a head that turns lies in (0, 1]")
        if self.scaling not in (None, *get_args(Scaling)):
            raise self.refuse("scaling", f"scaling must be one of none, {', '.join(get_args(Scaling))}")
        if self.scaling == "llama3" and self.low >= (self.high or 4.0):
            raise self.refuse("low", f"the ramp of llama3 goes from low up to high, so low must be below {self.high or 4.0:g}")

    def apply(self, x: Tensor, start: int, state: State) -> Tensor:
        return self.rotate(x, start)

    def revert(self, x: Tensor, start: int, state: State) -> Tensor:
        return self.rotate(x, start, back=True)

    def turned_width(self, width: int) -> int:
        turned = int(width * self.fraction)
        if turned % 2 or turned == 0:
            raise self.refuse("fraction", f"of a head of width {width} it turns {turned}, and pairs need an even number")
        if turned == 2 and self.scaling in ("ntk", "dynamic"):
            raise self.refuse("scaling", f"it stretches every pair but the first, and a head of width {width} turns one pair")
        return turned

    @property
    def reads_length(self) -> bool:
        return self.scaling == "dynamic"

    @property
    def early(self) -> bool:
        return not self.reads_length

    def rates(self, width: int, reach: int = 0) -> tuple[Tensor, float]:
        """The angle per position of each pair, in float64, and the factor on the length of the turned part.

        `reach` is the length of the text, which matters to `dynamic` only.
        """
        turned = self.turned_width(width)
        exponent = torch.arange(0, turned, 2, dtype=torch.float64) / turned
        rate = self.base**-exponent
        match self.scaling:
            case None:
                return rate, 1.0
            case "linear":
                return rate / self.factor, 1.0
            case "ntk":
                return (self.base * self.factor ** (turned / (turned - 2))) ** -exponent, 1.0
            case "dynamic":
                grown = self.factor * max(reach / self.original, 1.0) - (self.factor - 1)
                return (self.base * grown ** (turned / (turned - 2))) ** -exponent, 1.0
            case "llama3":
                turns, high = self.original * rate / (2 * math.pi), self.high or 4.0
                keep = ((turns - self.low) / (high - self.low)).clamp(0, 1)
                return rate * keep + rate / self.factor * (1 - keep), 1.0
            case "yarn":
                # Pair i makes original·rate/2π turns over the trained length; 32 and 1 are the paper's bounds.
                def pair_with(turns: float) -> float:
                    return turned * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

                first, last = max(math.floor(pair_with(self.high or 32)), 0), min(math.ceil(pair_with(self.low)), turned - 1)
                ramp = ((torch.arange(turned // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
                stretch = self.stretch or 0.1 * math.log(max(self.factor, 1.0)) + 1.0
                return rate * (1 - ramp) + rate / self.factor * ramp, stretch

    def rotate(self, x: Tensor, start: int, back: bool = False) -> Tensor:
        """x (…, N, D), whose tokens stand at start, start + 1, …; `back` turns the other way."""
        cos, sin = self.angles(x, start, start + x.shape[-2])
        return self.turn_pairs(x, cos, -sin if back else sin)

    def angles(self, x: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin (N, R/2) at positions start..stop, for heads like those of x."""
        global _recent
        if torch.compiler.is_compiling():
            # A graph is for texts of any length: a table of so many places would be made again with it.
            return _turns(
                self, x.shape[-1], (start, stop - start, 0 if self.early else max(stop, self.original)), x.dtype, x.device
            )
        asked, recent = (start, stop, x.shape[-1], x.dtype, x.device), _recent
        if recent[0] is self and recent[1] == asked:
            return recent[2]
        first = min(start, 0)
        # Every layer and every step asks for the same angles: a table, grown by doubling, answers.
        length = 1 << max(stop - first, 1).bit_length()
        reach = 0 if self.early else max(stop, self.original)
        cos, sin = _table(self, x.shape[-1], (first, length, reach), x.dtype, x.device)
        with torch.inference_mode(False):
            turns = cos[start - first : stop - first], sin[start - first : stop - first]
        _recent = self, asked, turns
        return turns

    def turn_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = 2 * cos.shape[-1]
        head, rest = x[..., :turned], x[..., turned:]
        if self.layout == "half":
            a, b = head.chunk(2, dim=-1)
            parts = [a * cos - b * sin, b * cos + a * sin]
        else:
            a, b = head[..., 0::2], head[..., 1::2]
            parts = [torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)]
        return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)


_recent: tuple[Rope | None, object, tuple[Tensor, Tensor]] = None, None, (torch.empty(0), torch.empty(0))
"""The last answer: all layers of a step ask the same. One name, so that a thread reads one answer or another."""


@lru_cache(maxsize=32)
def _table(
    rope: Rope, width: int, places: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`_turns`, kept."""
    # The table outlives the call: made under inference mode it could never be trained with.
    with torch.inference_mode(False):
        return _turns(rope, width, places, dtype, device)


def _turns(
    rope: Rope, width: int, places: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin (N, R/2) of the angles at positions first, first + 1, …, in a text as long as `reach`."""
    first, length, reach = places
    rate, stretch = rope.rates(width, reach)
    angle = torch.arange(first, first + length, dtype=torch.float64).unsqueeze(-1) * rate
    return (angle.cos() * stretch).to(device, dtype), (angle.sin() * stretch).to(device, dtype)
