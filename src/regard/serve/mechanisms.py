"""Small scenes for the knobs of a mechanism: a few queries and keys, and what the operator itself makes of them.

played = scene([[0.2, 0.5]], [[0, 1], [1, 0]], "gd(coherence=1)")
played["weights"], played["energy"], played["accepted"], played["jump"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..attention.allow import Causal
from ..attention.inspect import inspect
from ..attention.spec import KINDS, parse
from ..errors import ShapeError, SpecError, StateError
from ..part import Part
from ..state import State

MOST_QUERIES, MOST_KEYS, MOST_WIDTH = 1024, 64, 16
MOST_NUMBERS = 1 << 16
"""Weights in one answer."""

Points = Sequence[Sequence[float]]


@torch.no_grad()
def scene(
    queries: Points,
    keys: Points,
    spec: str,
    *,
    values: Points | None = None,
    trace: Points | None = None,
    causal: bool = False,
    rows: bool = True,
) -> dict[str, Any]:
    """What each query weighs; without `rows`, only what can be said in one number a query."""
    mechanism = parse(spec)
    q, k = _points(queries, "queries", MOST_QUERIES), _points(keys, "keys", MOST_KEYS)
    v = k if values is None else _points(values, "values", MOST_KEYS)
    if q.shape[1] != k.shape[1] or len(v) != len(k):
        raise ShapeError(
            f"queries are {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}: one width, as many values as keys"
        )
    if rows and len(q) * len(k) > MOST_NUMBERS:
        raise ShapeError(
            f"{len(q)} queries of {len(k)} keys are too many for one answer of {MOST_NUMBERS:,} weights: leave the rows out"
        )
    state = State(trace=None if trace is None else _square(trace, q.shape[1])[None])
    seen = inspect(q[None, None], k[None, None], v[None, None], mechanism, allow=Causal() if causal else None, state=state)
    weights = seen.weights()[0, 0]
    answer: dict[str, Any] = {
        "spec": str(mechanism),
        "accepted": seen.accepted[0, 0].tolist(),
        "energy": None if seen.energy is None else _numbers(seen.energy[0, 0]),
        "effective": _numbers(seen.effective[0, 0]),
        "support": seen.support[0, 0].tolist(),
        "nearest": weights.abs().argmax(-1).tolist(),
        "plan": str(seen.plan).splitlines()[0],
    }
    if rows:
        answer |= {"weights": [_numbers(row) for row in weights], "output": [_numbers(row) for row in seen.output[0, 0]]}
        answer["jump"] = _jump(seen) if mechanism.inner.name == "gd" else None
    return answer


def _jump(seen: Any) -> list[dict[str, Any]]:
    """GD's story of each query."""
    jump = seen.jump()
    return [
        {
            "key": int(jump.index[0, 0, i]),
            "distance": round(float(jump.distance[0, 0, i]), 6),
            "direction": _numbers(jump.direction[0, 0, i]),
            "point": _numbers(jump.point[0, 0, i]),
            "energy": round(float(jump.energy[0, 0, i]), 6),
            "coherence": _finite(float(jump.coherence[0, 0, i])),
        }
        for i in range(jump.index.shape[2])
    ]


def parts() -> dict[str, list[dict[str, Any]]]:
    """Every mechanism of the tables, with its parameters, as knobs need them."""
    return {
        kind: [
            {"name": name, "about": _first_line(part), "needs": list(part.needs), "parameters": _parameters(part)}
            for name, part in table.items()
        ]
        for kind, table in KINDS.items()
    }


def _parameters(part: type[Part]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for f in fields(part):
        default = f.default if f.default is not MISSING else None
        if f.default_factory is not MISSING or not isinstance(default, int | float | str | None):
            # A mechanism inside another is written by hand.
            continue
        out.append({"name": f.name, "default": default, "type": _kind(str(f.type), default), "choices": _choices(str(f.type))})
    return out


def _kind(annotation: str, default: object) -> str:
    if "Literal[" in annotation and "Learned" not in annotation:
        return "choice"
    return (
        "whole"
        if annotation.startswith("int")
        else "number"
        if isinstance(default, int | float) or "float" in annotation
        else "text"
    )


def _choices(annotation: str) -> list[str] | None:
    if "Literal[" not in annotation:
        return None
    inside = annotation.split("Literal[", 1)[1].split("]", 1)[0]
    return [x.strip().strip("\"'") for x in inside.split(",")] + (["none"] if "None" in annotation else [])


def _first_line(part: type[Part]) -> str:
    import sys

    own = (part.__doc__ or "").strip()
    text = own if own and not own.startswith(f"{part.__name__}(") else (sys.modules[part.__module__].__doc__ or "").strip()
    return text.splitlines()[0] if text else ""


def _points(given: Points, name: str, most: int) -> torch.Tensor:
    widths = {len(row) for row in given}
    if not 1 <= len(given) <= most or len(widths) != 1 or not 1 <= widths.copy().pop() <= MOST_WIDTH:
        raise ShapeError(
            f"{name}: give 1 to {most} points of one width, 1 to {MOST_WIDTH}; these are {len(given)} of widths {sorted(widths)[:3]}"
        )
    return _tensor(given, name)


def _square(given: Points, width: int) -> torch.Tensor:
    if len(given) != width or any(len(row) != width for row in given):
        raise StateError(f"a trace here is {width} × {width}, symmetric or not; give {width} rows of {width} numbers")
    return _tensor(given, "trace")


def _tensor(given: Points, name: str) -> torch.Tensor:
    t = torch.tensor([list(map(float, row)) for row in given], dtype=torch.float64)
    if not bool(torch.isfinite(t).all()) or float(t.abs().max()) > 1e6:
        raise SpecError(f"{name}: numbers from −1e6 to 1e6")
    return t


def _numbers(row: torch.Tensor) -> list[float]:
    return [_finite(x) for x in row.tolist()]


def _finite(x: float) -> float:
    """Six digits are enough to draw, and JSON has no infinity."""
    return round(max(-1e30, min(1e30, x)), 6)


Tables = Mapping[str, list[dict[str, Any]]]

__all__ = ["parts", "scene"]
