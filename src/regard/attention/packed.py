"""A call as a registered operator takes it: tensors, whole numbers, and one line of text that says what they are.

    "trace(gamma=0.3) | entmax(1.5)␤trace␤Both(Causal(), Window(N, N))␤"     tensors [T]   numbers [5, 0]

Packing happens where a call is traced, so it reads no value of a tensor; a length that changes from call to call stays a number
and is never written into the line. Unpacking happens inside the operator, and each line is read once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ShapeError, SpecError, StateError
from ..geometry import Geometry
from ..part import Part
from ..position import Position
from ..selection import Selection
from ..state import Additive, LowRank, Self, State
from .allow import (
    All,
    Allow,
    Alone,
    Behind,
    Both,
    Causal,
    Document,
    Either,
    Mask,
    Not,
    Padding,
    Prefix,
    Tile,
    Window,
    rule,
)
from .spec import Spec, make, parse

RULES: dict[str, type[Allow]] = {
    cls.__name__: cls
    for cls in (All, Causal, Window, Prefix, Padding, Document, Mask, Behind, Alone, Both, Either, Not)
}  # fmt: skip
"""The rules that are written by name; a rule of somebody's own is written as the mask of its pairs."""
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in RULES.values()}  # pyright: ignore
_BETWEEN = "\x1f"
_SINGLE = ("alpha", "temperature", "relative", "positions", "carry")
_LIVE: dict[str, Spec] = {}
"""Specs with parts of somebody's own, which no line can name, by the line that stands for them in this process."""


class Facts(NamedTuple):
    """What tracing has to know of a spec."""

    line: str
    reads: tuple[str, ...]
    carries: bool


class Packed(NamedTuple):
    line: str
    tensors: list[Tensor]
    numbers: list[int]


def _constant(function: Any) -> Any:
    """What `torch.compiler.assume_constant_result` does, without its import of the whole compiler at the first call of `attend`."""
    function._dynamo_marked_constant = True
    return function


def facts_of(
    spec: str | Spec | None,
    geometry: Geometry | None = None,
    selection: Selection | None = None,
    position: Position | None = None,
) -> Facts:
    """What a trace holds of a spec, or of its parts."""
    if spec is not None:
        if not (geometry is None and selection is None and position is None):
            raise SpecError(f"give a spec or its parts, not both: {spec}")
        return _facts(spec)
    if _are_whole(geometry, selection, position):
        return _facts(None, geometry, selection, position)
    return _facts(None, *[None if part is None else _apart(part) for part in (geometry, selection, position)])


@_constant
def _are_whole(*parts: Part | None) -> bool:
    """False where torch hands on an object that was made in traced code: its class is there, and not what is in it."""
    return all(part is None or all(f.name in vars(part) for f in fields(part)) for part in parts)


def _apart(part: Part) -> tuple[Any, ...]:
    """Class and numbers of a part."""
    values = [getattr(part, f.name) for f in fields(part) if f.init]
    return (type(part), *[_apart(x) if isinstance(x, Part) else x for x in values])


def _joined(apart: object) -> Any:
    if not isinstance(apart, tuple) or not apart or not isinstance(apart[0], type):
        return apart
    cls, *values = cast(tuple[Any, ...], apart)
    return cls(**dict(zip([f.name for f in fields(cls) if f.init], map(_joined, values), strict=True)))


@_constant
def _facts(spec: str | Spec | None, *parts: Any) -> Facts:
    """A spec is the same thing every time it is asked, so that a trace may hold the answer."""
    chosen = parse(spec) if spec is not None else make(*map(_joined, parts))
    reads = tuple(name for part in chosen.parts for name in part.reads)
    carries = chosen.inner.carries
    return Facts(_line(chosen), (*reads, "carry") if carries else reads, carries)


def _line(spec: Spec) -> str:
    line = str(spec)
    try:
        if parse(line) == spec:
            return line
    except SpecError:
        pass
    for known, live in _LIVE.items():
        if live == spec:
            return known
    line = f"#{len(_LIVE)} {line}"
    _LIVE[line] = spec
    return line


def spec_of(line: str) -> Spec:
    if not line.startswith("#"):
        return parse(line)
    if line not in _LIVE:
        raise SpecError(
            f"{line[line.index(' ') + 1 :]!r} has parts that are not of this package: a program that was exported with them runs "
            "in the process that exported it"
        )
    return _LIVE[line]


def pack(
    facts: Facts, sizes: tuple[int, int], allow: Allow | Tensor | None, state: State | None, device: torch.device
) -> Packed:
    """A call whose spec is known; `sizes` are Q and K."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    names: list[str] = []
    offset: int | None = None
    if state is not None:
        if not isinstance(state, State):
            raise StateError(f"state is a {type(state).__name__}; pass regard.State(...)")
        offset = state.offset
        for name, x in _carried(state):
            if name.split(".")[0 if not name.startswith("others.") else 1] in facts.reads:
                names.append(name)
                tensors.append(x)
    Q, K = sizes
    at = K - Q if offset is None else offset
    written = _written(rule(allow), Tile(0, Q, 0, K, at, device), tensors, numbers)
    if offset is not None:
        numbers.append(offset)
    line = "\n".join((facts.line, _BETWEEN.join(names), written, "" if offset is None else "offset"))
    return Packed(line, tensors, numbers)


def _carried(state: State) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, by the path to each."""
    for name in _SINGLE:
        x = getattr(state, name)
        if x is not None:
            yield name, x
    trace, me, additive = state.trace, state.self, state.additive
    if isinstance(trace, LowRank):
        yield "trace.left", trace.left
        if trace.right is not None:
            yield "trace.right", trace.right
        if trace.signs is not None:
            yield "trace.signs", trace.signs
    elif trace is not None:
        yield "trace", trace
    if me is not None:
        yield "self.s", me.s
        for name, x in me.weights.items():
            yield f"self.weights.{name}", x
    if additive is not None:
        yield "additive.w", additive.w
        yield "additive.w_q", additive.w_q
        yield "additive.w_k", additive.w_k
    for name, x in state.others.items():
        yield f"others.{name}", x


def _written(a: Allow, whole: Tile, tensors: list[Tensor], numbers: list[int]) -> str:
    if type(a) not in _FIELDS:
        tensors.append(a.tile(whole))
        return "Mask(T)"
    if isinstance(a, Behind):
        # The rule inside counts keys and places from the first key that it sees.
        whole = Tile(0, whole.stop, 0, whole.hi - a.lead, whole.offset - a.lead, whole.device)
    parts: list[str] = []
    for name in _FIELDS[type(a)]:
        x = getattr(a, name)
        if isinstance(x, Allow):
            parts.append(_written(x, whole, tensors, numbers))
        elif isinstance(x, Tensor):
            tensors.append(x)
            parts.append("T")
        elif isinstance(x, (int, torch.SymInt)):
            numbers.append(x)  # pyright: ignore
            parts.append("N")
        else:
            parts.append(repr(x))
    return f"{type(a).__name__}({', '.join(parts)})"


class Unpacked(NamedTuple):
    spec: Spec
    allow: Allow
    state: State


class Lines(NamedTuple):
    """A packed line, read."""

    spec: Spec
    names: tuple[str, ...]
    rule: Callable[[Iterator[Tensor], Iterator[int]], Allow]
    placed: bool
    owners: tuple[str, ...]
    """Of each tensor: its path in the state, or the name of the rule that has it."""

    def unpack(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Unpacked:
        given, counted = iter(tensors), iter(numbers)
        state = _state(dict(zip(self.names, given, strict=False)))
        allow = self.rule(given, counted)
        return Unpacked(self.spec, allow, State(**state, offset=next(counted) if self.placed else None))


@lru_cache(maxsize=4096)
def lines(line: str) -> Lines:
    spec, names, written, placed = line.split("\n")
    paths = tuple(names.split(_BETWEEN)) if names else ()
    tree = ast.parse(written, mode="eval").body
    return Lines(spec_of(spec), paths, _builder(tree), bool(placed), (*paths, *_owners(tree)))


def _owners(node: ast.expr) -> Iterator[str]:
    """The names of the rules that have a tensor, in the order of the tensors."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for a in node.args:
            yield from [node.func.id] if isinstance(a, ast.Name) and a.id == "T" else _owners(a)


def _builder(node: ast.expr) -> Callable[[Iterator[Tensor], Iterator[int]], Allow]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in RULES:
        raise ShapeError(f"{ast.unparse(node)!r} is no rule of who may meet")
    cls: Any = RULES[node.func.id]
    kinds = [_field(a) for a in node.args]
    return lambda tensors, numbers: cls(*(kind(tensors, numbers) for kind in kinds))


def _field(node: ast.expr) -> Callable[[Iterator[Tensor], Iterator[int]], object]:
    if isinstance(node, ast.Name):
        return (lambda tensors, numbers: next(tensors)) if node.id == "T" else (lambda tensors, numbers: next(numbers))
    if isinstance(node, ast.Call):
        return _builder(node)
    value = ast.literal_eval(node)
    return lambda tensors, numbers: value


def _state(named: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a State from the paths to its tensors."""
    under: dict[str, dict[str, Tensor]] = {"trace": {}, "self": {}, "additive": {}, "others": {}}
    made: dict[str, Any] = {}
    for name, x in named.items():
        head, _, rest = name.partition(".")
        if rest:
            under[head][rest] = x
        else:
            made[head] = x
    if under["trace"]:
        made["trace"] = LowRank(**under["trace"])
    if under["self"]:
        s = under["self"].pop("s")
        made["self"] = Self(s, {name.removeprefix("weights."): x for name, x in under["self"].items()})
    if under["additive"]:
        made["additive"] = Additive(**under["additive"])
    return {**made, "others": under["others"]} if under["others"] else made


__all__ = ["Facts", "Packed", "Unpacked", "facts_of", "lines", "pack"]
