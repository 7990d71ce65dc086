"""A part of a spec: a frozen dataclass that knows its name, prints itself as it is written and checks its numbers."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal

from .errors import SpecError

Learned = Literal["learned"]


@dataclass(frozen=True)
class Part:
    """`str(part)` is what `parse` reads: the name, then only the parameters that differ from their defaults."""

    name: ClassVar[str]

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
