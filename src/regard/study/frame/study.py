"""What a study is: a claim, how it is tested, and functions that measure one seed, judge all of them and draw the figure.

    STUDY = Study(claim="…", source="…", protocol="…", controls=("…",), caption="…",
                  run=run, judge=judge, draw=draw, planted=planted)

A module of `regard.study` that has a `STUDY` is a study, and its name is the module's. Nothing else has to be edited to add one.
One that has a `PENDING` instead is written and tested, and not measured in full yet: it can be run by its name, and no report shows it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ...errors import SpecError
from .verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Size = Literal["mini", "quick", "full"]
"""mini: seconds, for tests; quick: all studies within ten minutes on two cores; full: what the report shows."""
SIZES: tuple[Size, ...] = ("mini", "quick", "full")
Plant = Literal["positive", "negative", "control"]
PLANTS: tuple[Plant, ...] = ("positive", "negative", "control")
Record = dict[str, Any]
"""What one seed measured: JSON, numbers and lists and dictionaries with string keys."""
SEEDS = 5
FEWEST = {"mini": 2, "quick": 3, "full": 5}
"""Seeds of each size at least; a study may ask for more of the full size."""


@dataclass(frozen=True)
class Published:
    """A printed statement beside what was measured; `measured` reads it from the records."""

    statement: str
    printed: str
    measured: Callable[[Sequence[Record]], str]
    contradicted: Callable[[Sequence[Record]], bool]


@dataclass(frozen=True)
class Study:
    """One claim and its test."""

    claim: str
    """In one sentence, in our words."""
    source: str
    """Who claims it: a row of the sources, or a paper."""
    protocol: str
    controls: tuple[str, ...]
    """What must not show the effect, in words."""
    caption: str
    """What to see in the figure."""
    run: Callable[[int, Size], Record]
    """Measure one seed: the same seed and size give the same record, whoever runs it."""
    judge: Callable[[Sequence[Record]], Verdict]
    """The verdict, from the records alone."""
    draw: Callable[[Sequence[Record], Figure], None]
    planted: Callable[[Plant, int], Record]
    """A made-up record of one seed: as it would be if the claim were true, false, or true of the controls too."""
    seeds: int = SEEDS
    needs: tuple[str, ...] = ()
    """Packages that carry a model or a corpus; without them the study says so and is left out."""
    published: tuple[Published, ...] = ()
    parts: Mapping[str, str] | None = None
    """Pages of the documentation to read beside it, by title."""
    name: str = ""
    """Its module's, given when it is listed."""

    def seeds_of(self, size: Size) -> range:
        return range(self.seeds if size == "full" else FEWEST[size])

    @cached_property
    def lacking(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        import importlib.util

        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def studies(*, pending: bool = False) -> dict[str, Study]:
    """Every study by name: the modules of `regard.study` that have a `STUDY`, and those that have a `PENDING` if these are asked for."""
    from dataclasses import replace

    from ... import study as package

    listed: dict[str, Study] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            made = getattr(loaded, "STUDY", getattr(loaded, "PENDING", None) if pending else None)
            if isinstance(made, Study):
                listed[module.name] = replace(made, name=module.name)
    return dict(sorted(listed.items()))


def study(name: str) -> Study:
    """The study of this name."""
    import difflib

    listed = studies(pending=True)
    if name not in listed:
        near = difflib.get_close_matches(name, listed, n=1)
        raise SpecError(
            f"no study is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(listed)}")
        )
    return listed[name]
