"""Jinja for programs of strangers: nothing outside is reached, and every step is paid for out of a fixed budget.

Jinja's immutable sandbox keeps a template from the machine. It does not keep it from looping for ever, from 10 ** 10 ** 9 or
from 'x' * 10 ** 10. Here each thing that takes time or memory (an item of a loop, a call, a character that is written, an
element that is copied) costs one unit before it is done; what it would cost beyond the budget or the time is never started.
Methods and filters whose cost is not known are not there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sized
from functools import wraps
from itertools import islice
from typing import Any

from ..errors import needs_extra

with needs_extra("models"):
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import loopcontrols
    from jinja2.runtime import Context, Macro, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

UNITS = 4 << 20
"""For the template itself; what it is given adds to it."""
PER_INPUT = 64
SECONDS = 5.0
"""Of the processor: a busy machine refuses nobody."""
CALL, ELEMENT, DEEPEST = 64, 4, 32
"""What a macro costs beside what it does, and an element of a list beside what it says; how deep statements may nest, since
compiling takes more than the square of it."""
BITS = 4096
"""The longest whole number."""
WIDEST = 4096
"""The most columns that text is padded or indented to, and the most pieces that a list is cut into."""

CHEAP = {"abs", "attr", "count", "d", "default", "first", "float", "int", "last", "length", "safe"}
SHALLOW = {
    "batch", "dictsort", "groupby", "items", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr", "slice", "sort", "sum", "unique",
}  # fmt: skip
TEXT = {
    "capitalize", "center", "e", "escape", "format", "indent", "join", "lower", "replace", "round", "string", "striptags",
    "title", "trim", "truncate", "upper", "wordcount",
}  # fmt: skip
COMPARING = {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "le", "gt", "ge", "in"}
STR_METHODS = {
    "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold", "swapcase", "removeprefix",
    "removesuffix", "split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith", "find", "rfind",
    "index", "rindex", "count", "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal",
    "istitle", "isascii", "isidentifier", "replace", "join", "ljust", "rjust", "center", "zfill",
}  # fmt: skip
METHODS: dict[type, set[str]] = {
    str: STR_METHODS,
    dict: {"get", "items", "keys", "values", "copy"},
    list: {"index", "count", "copy"},
    tuple: {"index", "count"},
    bytes: set(),
    bytearray: set(),
    int: set(),
    float: {"is_integer"},
    set: set(),
    frozenset: set(),
}
WIDE = re.compile(r"\d{4}|\*")


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for one rendering, with the budget for it."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, given: object, helpers: dict[str, Callable[..., Any]]) -> None:
        self.left, self.until = UNITS, time.thread_time() + SECONDS
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=self.shown)
        self.left += PER_INPUT * self.cost(given, limit=1 << 62)
        self.globals.pop("lipsum", None)
        self.globals.update(helpers)
        known = {**self.filters, "tojson": self.to_json}
        self.filters = {n: _paid_filter(self, n, f) for n, f in known.items() if n in CHEAP | SHALLOW | TEXT | {"tojson"}}
        self.tests = {n: _paid_test(self, f) if n in COMPARING else f for n, f in self.tests.items()}

    # The budget

    def charge(self, units: int) -> None:
        if units > self.left:
            raise SecurityError(f"it asks for more than its budget of {UNITS:,} steps and characters")
        if time.thread_time() > self.until:
            raise SecurityError(f"it takes more than {SECONDS:g} seconds of the processor")
        self.left -= units

    def cost(self, value: object, *, text: bool = True, limit: int | None = None) -> int:
        """Elements of a value, shared ones as often as they are there; with `text` the length of what it says too."""
        limit = self.left if limit is None else limit
        total, open_ = 0, [value]
        while open_:
            x = open_.pop()
            total += ELEMENT
            if isinstance(x, str | bytes):
                total += len(x) if text else 0
            elif isinstance(x, dict):
                open_.extend(x.keys())
                open_.extend(x.values())
            elif isinstance(x, list | tuple | set | frozenset):
                open_.extend(x)
            elif isinstance(x, Namespace):
                open_.append(object.__getattribute__(x, "_Namespace__attrs"))
            if total > limit:
                raise SecurityError(f"it asks for more than its budget of {UNITS:,} steps and characters")
        return total

    def listed(self, value: Any) -> Any:
        """The value, one unit an element; what has no length becomes a list first."""
        if not isinstance(value, Sized) or isinstance(value, Undefined):
            value = list(islice(iter(value), self.left))
        self.charge(len(value) + 1)
        return value

    # What the rewritten template calls

    def shown(self, value: object) -> object:
        """Every {{ value }}."""
        self.charge(len(value) + 1 if isinstance(value, str) else self.cost(value))
        return value

    def tick(self, units: int) -> None:
        self.charge(units + CALL)

    def loop_over(self, value: Iterable[object], units: int) -> object:
        items = self.listed(value)
        self.charge(units * len(items))
        return items

    def made(self, value: object) -> object:
        """A list, tuple or dict that the template writes. Sharing costs as much as copying: no value is ever larger, all of its
        shared parts counted, than what was paid, and so no comparison, search or sort of one takes long."""
        self.charge(self.cost(value))
        return value

    def joined(self, *values: object) -> str:
        self.charge(self.cost(values))
        return "".join(map(str, values))

    def sliced(self, value: Any, start: object, stop: object, step: object) -> object:
        self.charge(len(value) + 1)
        return value[start:stop:step]

    def to_json(self, value: object, indent: int | None = None) -> str:
        """Jinja's own filter escapes HTML, which no model was trained on."""
        parts: list[str] = []
        columns = self._columns(indent or 0) if indent is not None else None
        for part in json.JSONEncoder(ensure_ascii=False, indent=columns).iterencode(value):
            self.charge(len(part))
            parts.append(part)
        return "".join(parts)

    # What the sandbox calls

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "%" and isinstance(left, str):
            self._format(left, right)
        elif operator == "**":
            self._power(left, right)
        elif operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(a, Sized) and isinstance(b, int):
                    self.charge(self.cost(a) * max(b, 0) + 1)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > BITS:
                raise SecurityError(f"it makes a whole number of more than {BITS} bits")
        elif operator == "+":
            lengths = [len(x) for x in (left, right) if isinstance(x, Sized)]
            self.charge(sum(lengths) + 1)
            if isinstance(left, list | tuple):
                # The longer one has been paid for; a list that grows by one element costs that element.
                self.charge(self.cost(left if len(lengths) > 1 and lengths[0] < lengths[1] else right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        pattern: str = value.__self__

        def checked(*args: object, **kwargs: object) -> str:
            if "{" in re.sub(r"\{\{", "", pattern) and re.search(r"\{[^{}]*\{", pattern):
                raise SecurityError("it formats text to a width that is computed")
            self._format(pattern, (*args, kwargs))
            return inner(*args, **kwargs)

        return checked

    def call(self, context: Context, function: Any, /, *args: object, **kwargs: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        owner = getattr(function, "__self__", None)
        if owner is self:
            # Inside loops and blocks the compiler hands their variables to every call.
            return function(*args)
        name: str = getattr(function, "__name__", "")
        if isinstance(owner, type):
            raise SecurityError(f"it calls {owner.__name__}.{name}, which templates have no use for")
        known = next((names for kind, names in METHODS.items() if isinstance(owner, kind)), None)
        if known is not None:
            if name not in known:
                raise SecurityError(f"it calls {name!r} of a {type(owner).__name__}, whose cost is not known")
            args = self._pay_method(owner, name, args)
        else:
            # A macro only hands on what it is given.
            self.charge(self.cost((args, kwargs), text=not isinstance(function, Macro)))
        return super().call(context, function, *args, **kwargs)

    def _pay_method(self, owner: Any, name: str, args: tuple[object, ...]) -> tuple[object, ...]:
        if not isinstance(owner, str):
            self.charge(len(owner) + 1 if isinstance(owner, Sized) and name not in ("get", "items", "keys", "values") else 1)
        elif name == "replace" and len(args) > 1:
            self._pay_replace(owner, *args[:2])
        elif name == "join" and args:
            items = self.listed(args[0])
            self.charge(self.cost(list(items)) + len(items) * len(owner))
            return (items, *args[1:])
        else:
            width = self._columns(args[0]) if args and name in ("ljust", "rjust", "center", "zfill") else 0
            # Pieces of a text take more than their characters.
            self.charge((len(owner) + 1) * (4 if "split" in name else 1) + width)
        return args

    def _pay_replace(self, text: object, old: object, new: object) -> None:
        text, old, new = str(text), str(old), str(new)
        self.charge(len(text) + 1 + text.count(old) * len(new))

    def _columns(self, width: object) -> int:
        if not isinstance(width, int) or abs(width) > WIDEST:
            raise SecurityError(f"it asks for {width!r:.40} columns or pieces; {WIDEST} are allowed")
        return abs(width)

    def _format(self, pattern: str, values: object) -> None:
        if WIDE.search(pattern):
            raise SecurityError(f"it formats text with {pattern!r:.60}; no width there has four digits")
        self.charge(len(pattern) + (self.cost(values) + 1000) * (pattern.count("%") + pattern.count("{")))

    def _power(self, left: object, right: object) -> None:
        if isinstance(left, int) and isinstance(right, int) and (abs(right) > BITS or left.bit_length() * abs(right) > BITS):
            raise SecurityError(f"it raises {left!r:.40} to {right!r:.40}, a number of more than {BITS} bits")

    def pay_filter(self, name: str, value: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Charge a filter, and give back the value to filter."""
        if name in CHEAP or name == "tojson":
            self.charge(1)
            return value
        if name in SHALLOW:
            value = value if isinstance(value, Undefined) else self.listed(value)
            if name in ("batch", "slice"):
                given = (*args, *kwargs.values())
                pieces = self._columns(next((x for x in given if isinstance(x, int)), 0))
                self.charge(self.cost(given) * (pieces + 1))
            if name == "sum" and not all(isinstance(x, int | float | str) for x in (*args, *kwargs.values())):
                raise SecurityError("it sums what are no numbers")
            return value
        if name == "join":
            value = value if isinstance(value, Undefined) else self.listed(value)
            separator = args[0] if args else kwargs.get("d", "")
            self.charge(self.cost(value) + (len(value) if isinstance(value, Sized) else 0) * self.cost(separator))
            return value
        self.charge(2 * self.cost((value, args, kwargs)))
        if name == "format":
            self._format(str(value), (args, kwargs))
        elif name == "replace":
            given = dict(zip(("old", "new"), args, strict=False)) | kwargs
            self._pay_replace(value, given.get("old", ""), given.get("new", ""))
        elif name in ("center", "indent", "round", "truncate"):
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int)]
            width = max(map(self._columns, numbers), default=80)
            self.charge(width * (str(value).count("\n") + 1))
        return value

    # Compiling

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return Priced(self).visit(super()._parse(source, name, filename))


class Priced(NodeTransformer):
    """A template in which loops, macros, lists and joined texts ask the budget first."""

    def __init__(self, environment: Sandbox) -> None:
        self.environment, self.depth = environment, 0

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        nests = isinstance(node, nodes.Stmt)
        self.depth += nests
        if self.depth > DEEPEST:
            raise SecurityError(f"its statements nest more than {DEEPEST} deep")
        visited = super().generic_visit(node, *args, **kwargs)
        self.depth -= nests
        return visited

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("it has a recursive loop, which no chat needs")
        self.generic_visit(node)
        node.iter = self._ask("loop_over", node, [node.iter, nodes.Const(_length(node), lineno=node.lineno)])
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        paid = self._ask("tick", node, [nodes.Const(_length(node), lineno=node.lineno)])
        node.body = [nodes.ExprStmt(paid, lineno=node.lineno), *node.body]
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._ask("joined", node, node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [
            nodes.Const(None, lineno=node.lineno) if x is None else x for x in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return self._ask("sliced", node, [node.node, *ends])

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(x, nodes.Const) for x in node.items):
            return node
        return self._ask("made", node, [node])

    visit_Tuple = visit_Dict = visit_List

    def _ask(self, method: str, node: nodes.Node, args: list[Any]) -> nodes.Call:
        asked = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=node.lineno)
        # It gives itself back, typed as any node.
        return asked.set_environment(self.environment)  # type: ignore[return-value]


def _length(node: nodes.Node) -> int:
    """Characters that a body writes whatever happens."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _paid_filter(sandbox: Sandbox, name: str, inner: Callable[..., Any]) -> Callable[..., object]:
    before = 1 if hasattr(inner, "jinja_pass_arg") else 0

    @wraps(inner)
    def paid(*args: object, **kwargs: object) -> object:
        value = sandbox.pay_filter(name, args[before], args[before + 1 :], kwargs)
        result = inner(*args[:before], value, *args[before + 1 :], **kwargs)
        # What is made for each element may be larger than the element.
        return sandbox.made(list(result)) if name == "map" else result

    return paid


def _paid_test(sandbox: Sandbox, inner: Callable[..., object]) -> Callable[..., object]:
    @wraps(inner)
    def paid(*args: object) -> object:
        sandbox.charge(1)
        return inner(*args)

    return paid


__all__ = ["Sandbox"]
