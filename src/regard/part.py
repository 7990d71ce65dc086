"""A part of a spec: a frozen dataclass that knows its name, prints itself as it is written, checks its numbers and says what it reads.

Whoever owns a fact answers for it: the operator and the modules ask a part, and never test which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .errors import ShapeError, SpecError, StateError
from .state import State
from .values import readable

Learned = Literal["learned"]


@dataclass(frozen=True)
class Sizes:
    """Of the module that trains a part's parameters, by the letters of the legend."""

    H: int
    G: int
    D: int
    S: int


@dataclass(frozen=True)
class PerHead:
    """A number above `above` for each query head. A module trains x, which is free, and the state carries above + exp(x)."""

    name: str
    start: float
    above: float = 0.0

    def initial(self, heads: int) -> Tensor:
        return torch.full((heads,), self.start - self.above).log()

    def read(self, state: State, by: Part, like: Tensor) -> Tensor:
        """What the state carries, checked, in the dtype of `like` (B, H, …)."""
        x, H = state.tensor(self.name, by), like.shape[1]
        if x.shape != (H,):
            raise ShapeError(f"state.{self.name} is {tuple(x.shape)}; {by} needs one number per query head, ({H},)")
        if readable(x) and not bool((x > self.above).all()):
            raise StateError(f"state.{self.name} is {x.detach().tolist()}; every value must be above {self.above:g}")
        return x.to(like.dtype)


@dataclass(frozen=True)
class Part:
    """`str(part)` is what `parse` reads: the name, then only the parameters that differ from their defaults."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the state's tensors that this part reads, beside its numbers per head."""

    @property
    def per_head(self) -> tuple[PerHead, ...]:
        """The numbers per query head that it reads from the state."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of everything that it reads from the state."""
        return (*self.needs, *(p.name for p in self.per_head))

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        """What a module trains for this part, at values where attention starts as the usual one."""
        return {p.name: p.initial(sizes.H) for p in self.per_head}

    def fill(self, state: State, trained: Mapping[str, Tensor]) -> State:
        """The state of a call, completed by what a module trained from `initial`; what the call brings itself stays."""
        above = {p.name: p.above for p in self.per_head}
        for name in self.reads:
            if name in trained and state.get(name) is None:
                x = trained[name]
                state = state.having(name, above[name] + x.exp() if name in above else x)
        return state

    def __str__(self) -> str:
        given: list[str] = []
        for f in fields(self):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            if getattr(self, f.name) != default:
                given.append(f"{f.name}={_written(getattr(self, f.name))}")
        return f"{self.name}({', '.join(given)})" if given else self.name

    def refuse(self, parameter: str, fix: str) -> SpecError:
        return SpecError(f"{self.name}({parameter}={_written(getattr(self, parameter))}): {fix}")

    def check_positive(self, *parameters: str) -> None:
        """Each is a number above 0, or none or learned where its annotation says so."""
        annotated = {f.name: str(f.type) for f in fields(self)}
        for p in parameters:
            value = getattr(self, p)
            if (value is None and "None" in annotated[p]) or (value == "learned" and "Learned" in annotated[p]):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise self.refuse(p, f"{p} must be a number above 0")

    def check_choice(self, parameter: str, choices: tuple[str, ...]) -> None:
        if getattr(self, parameter) not in choices:
            raise self.refuse(parameter, f"{parameter} must be one of {', '.join(choices)}")


def _written(value: object) -> str:
    return "none" if value is None else str(value)
