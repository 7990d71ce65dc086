"""One line names a mechanism: `"cosine(temperature=0.2) | entmax(1.5) | alibi"`. The same line in Python, CLI and configs.

The grammar is a Python expression of names, calls and `|`, read as a syntax tree and never evaluated. Parts may come in any
order, at most one of each kind; the rest takes its default. `parse(str(spec)) == spec`.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, fields
from functools import lru_cache

from ..errors import CombinationError, SpecError
from ..geometry import GEOMETRIES, Geometry, Polynomial, SelfConditioned, Trace
from ..part import Part
from ..position import POSITIONS, NoPosition, Position
from ..selection import GD, SELECTIONS, Energy, Hopfield, Monotonic, Selection, Softmax
from ..selection.wrappers import unwrap

KINDS: dict[str, dict[str, type[Part]]] = {
    "geometry": {**GEOMETRIES},
    "selection": {**SELECTIONS},
    "position": {**POSITIONS},
}

_LARGEST = 2**53
"""Whole numbers up to here are exact as floats too."""


@dataclass(frozen=True)
class Spec:
    geometry: Geometry
    selection: Selection
    position: Position

    def __post_init__(self) -> None:
        reason = meaningless(self)
        if reason:
            raise CombinationError(f"{self}: {reason}")

    def __str__(self) -> str:
        parts: list[Part] = [self.geometry, self.selection, self.position]
        return " | ".join(str(p) for p in parts if not isinstance(p, NoPosition))


def make(geometry: Geometry | None = None, selection: Selection | None = None, position: Position | None = None) -> Spec:
    """A Spec with defaults filled in; the default geometry is the one that the selection is defined on."""
    selection = selection or Softmax()
    natural = GEOMETRIES[unwrap(selection)[0].natural_geometry]()
    return Spec(geometry or natural, selection, position or NoPosition())


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
    found: dict[str, Part] = {}
    for node in _alternatives(tree):
        part = _part(node, text)
        kind = next(k for k, table in KINDS.items() if part.name in table)
        if kind in found:
            raise SpecError(f"{text!r} names two of one kind, {found[kind].name} and {part.name} ({kind}); keep one")
        found[kind] = part
    return make(**found)  # type: ignore[arg-type]


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


def meaningless(spec: Spec) -> str | None:
    """Why the parts have no meaning together, or None. Every refused combination stands here."""
    geometry, position = spec.geometry, spec.position
    selection, refusal, _ = unwrap(spec.selection)
    slotted = isinstance(geometry, SelfConditioned) and geometry.form in ("self_token", "null_slot")
    if isinstance(geometry, Trace) and geometry.base is None and position.turns:
        return (
            f"the metric acts before {position.name} turns q and k, so {position.name} would do nothing; use base=dot or alibi"
        )
    if isinstance(selection, GD) and geometry.distance(1) is None:
        return f"gd measures a distance and {geometry.name} gives none; use euclidean, rbf, cosine or trace(base=none)"
    if isinstance(selection, Energy) and geometry.name != "dot":
        return f"energy is the gradient of dot's log-sum-exp, not of {geometry.name}'s; use dot"
    if isinstance(selection, Monotonic) and (slotted or refusal):
        return "monotonic walks along the keys in order, and a slot has no place in the order"
    if isinstance(selection, Hopfield):
        if selection.beta is not None and geometry.with_scale(selection.beta) is None:
            return f"hopfield(beta) takes the place of a scale, and {geometry.name} has none; leave beta out"
        if selection.steps > 1 and geometry.name in ("additive", "polynomial"):
            named = isinstance(geometry, Polynomial)
            return (
                f"hopfield's state moves among the keys, and {'a polynomial kernel' if named else 'additive'} has no such space"
            )
    return None
