"""One line names a mechanism: `"cosine(temperature=0.2) | entmax(1.5) | alibi"`. The same line in Python, CLI and configs.

The grammar is a Python expression of names, calls and `|`, read as a syntax tree and never evaluated. Parts may come in any
order, at most one of each kind; the rest takes its default. `parse(str(spec)) == spec`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TypeVar

from ..errors import CombinationError, SpecError
from ..geometry import GEOMETRIES, Geometry
from ..part import Part
from ..position import POSITIONS, NoPosition, Position
from ..selection import SELECTIONS, Selection, Softmax
from ..selection.base import Refusal

KINDS: Mapping[str, Mapping[str, type[Part]]] = {"geometry": GEOMETRIES, "selection": SELECTIONS, "position": POSITIONS}

P = TypeVar("P", bound=Part)
_LARGEST = 2**53
"""Whole numbers up to here are exact as floats too."""


@dataclass(frozen=True)
class Spec:
    geometry: Geometry
    selection: Selection
    position: Position

    def __post_init__(self) -> None:
        slotted = self.geometry.slotted or self.refusal is not None
        reason = (
            self.geometry.refuses(self.position)
            or self.inner.refuses(self.geometry, slotted)
            or self.inner.refuses_position(self.position)
        )
        if reason:
            raise CombinationError(f"{self}: {reason}")

    @cached_property
    def inner(self) -> Selection:
        """The row map inside the wrappers."""
        return self.selection.unwrap()[0]

    @cached_property
    def refusal(self) -> Refusal | None:
        return self.selection.unwrap()[1]

    @cached_property
    def points(self) -> bool:
        """True when the weights themselves are the result."""
        return self.selection.unwrap()[2]

    @property
    def parts(self) -> tuple[Part, ...]:
        """What reads a state, in the order in which a module makes its parameters."""
        return self.inner, self.geometry, self.position

    def __str__(self) -> str:
        return " | ".join(map(str, (self.geometry, self.selection, *(() if self.position.absent else (self.position,)))))


def make(geometry: Geometry | None = None, selection: Selection | None = None, position: Position | None = None) -> Spec:
    """A Spec with defaults filled in; the default geometry is the one that the selection is defined on."""
    selection = selection or Softmax()
    geometry = geometry or GEOMETRIES[selection.unwrap()[0].natural_geometry]()
    return Spec(geometry, selection, position or NoPosition())


def parse(text: str | Spec) -> Spec:
    """The spec that a line names."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise SpecError(f"a spec is a line such as 'dot | softmax | rope', not a {type(text).__name__}")
    try:
        return _parsed(text)
    except RecursionError as error:
        raise SpecError(f"cannot read {text[:200]!r}: its parts are nested too deeply") from error


@lru_cache(maxsize=512)
def _parsed(text: str) -> Spec:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(
            f"cannot read {text[:200]!r}: write parts joined by |, as in 'cosine(temperature=0.2) | topk(4)'"
        ) from error
    parts = [_part(node, text) for node in _alternatives(tree)]
    return make(_only(parts, Geometry, text), _only(parts, Selection, text), _only(parts, Position, text))


def _only(parts: list[Part], kind: type[P], text: str) -> P | None:
    """The part of a kind, if there is one."""
    first, second, *_ = *(p for p in parts if isinstance(p, kind)), None, None
    if first is not None and second is not None:
        raise SpecError(f"{text!r} names two of one kind, {first.name} and {second.name} ({kind.__name__.lower()}); keep one")
    return first


def _alternatives(node: ast.expr) -> list[ast.expr]:
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _part(node: ast.expr, text: str) -> Part:
    if isinstance(node, ast.Name):
        name, args, keywords = node.id, [], []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, args, keywords = node.func.id, node.args, node.keywords
    else:
        raise SpecError(f"cannot read {ast.unparse(node)[:80]!r} in {text[:200]!r}: a part is a name or a call such as topk(4)")
    tables = {n: cls for table in KINDS.values() for n, cls in table.items()}
    if name not in tables:
        raise SpecError(_unknown(name))
    cls = tables[name]
    names = [f.name for f in fields(cls)]
    nested = {f.name for f in fields(cls) if f.type == "Selection"}
    if len(args) > len(names):
        raise SpecError(f"{ast.unparse(node)}: {name} takes {', '.join(names) or 'no parameters'}")
    given = {n: _value(a, text, n in nested) for n, a in zip(names, args, strict=False)}
    for k in keywords:
        if k.arg is None or k.arg not in names or k.arg in given:
            near = difflib.get_close_matches(k.arg or "", names, 1)
            hint = f"; did you mean {near[0]}?" if near and near[0] not in given else ""
            raise SpecError(f"{ast.unparse(node)}: {k.arg} is not a free parameter of {name}({', '.join(names)}){hint}")
        given[k.arg] = _value(k.value, text, k.arg in nested)
    return cls(**given)


def _value(node: ast.expr, text: str, nested: bool = False) -> object:
    if nested and isinstance(node, ast.Name | ast.Call):
        return _part(node, text)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if isinstance(node.value, int) and node.value > _LARGEST:
            raise SpecError(f"a number of {text[:200]!r} is larger than {_LARGEST}")
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.UnaryOp):
        value = _value(node.operand, text)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.Constant) and (isinstance(node.value, str) or node.value is None):
        return node.value
    if isinstance(node, ast.Name):
        return {"none": None, "inf": float("inf")}.get(node.id, node.id)
    raise SpecError(f"cannot read {ast.unparse(node)[:80]!r} in {text[:200]!r}: a value is a number, a word or a part")


def _unknown(name: str) -> str:
    known = "; ".join(f"{kind}: {', '.join(table)}" for kind, table in KINDS.items())
    near = difflib.get_close_matches(name, [n for table in KINDS.values() for n in table], 1)
    return f"{name!r} is no mechanism{f'; did you mean {near[0]}?' if near else ''} ({known})"
