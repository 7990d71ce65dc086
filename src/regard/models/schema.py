"""A frozen config from plain values, by its own type hints: what a YAML file of settings and a config.json of ours have in common.

An unknown name suggests the nearest one, a value of another type says which type it should be, and a number has to lie where it
makes sense. There is one row for each number that can be set. The ends are where training breaks (a rate of 0 learns nothing, a beta of 1 never forgets), or far beyond any machine: a size that
nobody means is refused here, before anything is allocated or written.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, cast

from ..attention.spec import parse
from ..errors import RegardError
from ..position import Position

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class ConfigError(RegardError):
    """A setting that does not exist, has another type, or makes no sense beside the others."""


class RangeError(ConfigError):
    """A number where training breaks or no machine is large enough."""


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    above: bool = False
    """`low` itself is outside."""
    below: bool = False
    """`high` itself is outside."""

    def holds(self, x: float) -> bool:
        """False for nan, too."""
        return (self.low < x if self.above else self.low <= x) and (x < self.high if self.below else x <= self.high)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:,g} and {'below' if self.below else 'at most'} {number(self.high)}"


def number(x: float) -> str:
    return f"{int(x):,}" if x == int(x) else f"{x:g}"


SIZE = 1 << 24
"""Tokens of a vocabulary, a context or a window."""
COUNT = 10**9
"""Steps, and what is counted in steps."""
POSITIVE = Range(0, 1e12, above=True)
SHARE = Range(0, 1, above=True, below=True)

RANGES: dict[str, Range] = {
    "data.vocabulary": Range(257, SIZE),
    "data.context": Range(1, SIZE),
    "data.validation": SHARE,
    "objective.rate": SHARE,
    "objective.replaced": Range(0, 1),
    "objective.span": Range(1, SIZE),
    "objective.sentinels": Range(1, 1 << 12),
    "optim.lr": Range(0, 100, above=True),
    "optim.floor": Range(0, 1),
    "optim.warmup": Range(0, COUNT),
    "optim.beta_1": Range(0, 1, below=True),
    "optim.beta_2": Range(0, 1, below=True),
    "optim.eps": Range(0, 1, above=True),
    "optim.weight_decay": Range(0, 1000),
    "optim.clip": Range(0, 1e12),
    "train.steps": Range(1, COUNT),
    "train.batch": Range(1, 1 << 20),
    "train.accumulate": Range(1, 1 << 20),
    "train.seed": Range(0, (1 << 63) - 1),
    "train.threads": Range(-1, 4096),
    "train.log_every": Range(1, COUNT),
    "train.validate_every": Range(1, COUNT),
    "train.save_every": Range(1, COUNT),
    "train.patience": Range(0, COUNT),
    "model.vocabulary": Range(1, SIZE),
    "model.context": Range(1, SIZE),
    "model.window": Range(1, SIZE),
    "model.width": Range(1, 1 << 16),
    "model.depth": Range(1, 1024),
    "model.heads": Range(1, 1 << 12),
    "model.key_heads": Range(1, 1 << 12),
    "model.head_width": Range(1, 1 << 16),
    "model.hidden": Range(1, 1 << 20),
    "model.experts": Range(1, 1 << 12),
    "model.chosen": Range(1, 1 << 12),
    "model.capacity": Range(0, 1e6, above=True),
    "model.clusters": Range(1, 1 << 16),
    "model.kernel": Range(1, 1 << 12),
    "model.memories": Range(1, SIZE),
    "model.steps": Range(1, 1 << 16),
    "model.decoder_depth": Range(1, 1024),
    "model.buckets": Range(2, 1 << 16),
    "model.max_distance": Range(1, SIZE),
    "model.start": Range(0, SIZE),
    "model.types": Range(1, SIZE),
    "model.rate": POSITIVE,
    "model.eps": Range(0, 1, above=True),
    "model.alpha": Range(0, 1, above=True),
    "model.dropout": Range(0, 1, below=True),
    "model.rope.base": POSITIVE,
    "model.rope.fraction": Range(0, 1, above=True),
    "model.rope.factor": POSITIVE,
    "model.rope.original": Range(1, SIZE),
    "model.rope.low": POSITIVE,
    "model.rope.high": POSITIVE,
    "model.rope.stretch": POSITIVE,
}


def section(given: object, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={shown(given)} is a {type(given).__name__}; it is a section: write {name}.<setting>=value")
    return dict(cast(Mapping[str, Any], given))


def check_keys(
    tree: Mapping[str, object], known: Sequence[str], prefix: str, sections: Mapping[str, type] | None = None
) -> None:
    for key in tree:
        if key not in known:
            near = nearest(key, known, prefix)
            # A forgotten section is the commonest slip: `steps=100` for `train.steps=100`.
            settings = [f"{s}.{key}" for s, cls in (sections or {}).items() if key in {f.name for f in fields(cls)}]
            if settings:
                near = f"; did you mean {' or '.join(settings)}?"
            raise ConfigError(f"there is no setting {prefix}{str(key)[:80]}{near} (known: {', '.join(known)})")


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def build(cls: type, values: Mapping[str, object], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls) if f.init]
    check_keys(values, known + (["family"] if prefix == "model." else []), prefix)
    settings = {name: coerce(value, hints[name], prefix + name) for name, value in values.items()}
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING and f.name not in settings]
    if needed:
        raise ConfigError(f"{prefix}{needed[0]} has no default; give it a value")
    try:
        return cls(**settings)
    except ConfigError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{prefix.rstrip('.')}: {error}") from error


def coerce(value: object, hint: Any, name: str) -> object:
    """The value as its field's type, or an error that says that type."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    wrong = ConfigError(f"{name}={shown(value)} is a {type(value).__name__}; it should be {_say(hint)}")
    if origin in (Union, types.UnionType):
        # The narrower types first: `null` is None and 3 is an int before either could become a string.
        for option in options:
            if option is type(None) and value is None:
                return None
        for option in sorted(options, key=lambda o: o is str):
            try:
                return coerce(value, option, name)
            except RangeError:
                raise
            except ConfigError:
                continue
        raise wrong
    if origin is Literal:
        if value not in options:
            raise ConfigError(
                f"{name}={shown(value)} is not one of {', '.join(map(str, options))}{nearest(str(value), options)}"
            )
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong
        items = cast(Sequence[Any], value)
        inner = [options[0]] * len(items) if options[-1] is Ellipsis else list(options)
        if len(inner) != len(items):
            raise wrong
        return tuple(coerce(v, t, f"{name}[{i}]") for i, (v, t) in enumerate(zip(items, inner, strict=True)))
    if isinstance(value, str) and isinstance(hint, type) and issubclass(hint, Position):
        try:
            value = parse(value).position
        except RegardError as error:
            raise ConfigError(f"{name}={shown(value)}: {error}") from error
    if is_dataclass(hint):
        return value if isinstance(value, cast(type, hint)) else build(cast(type, hint), section(value, name), f"{name}.")
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)  # YAML 1.1 reads 1e-3, without a point, as a string
        except (ValueError, OverflowError):
            raise wrong from None
        check_range(name, number)
        return number
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return shown(value)  # a name may look like a number
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        if hint is int:
            check_range(name, cast(int, value))
        return value
    raise wrong


def _say(hint: Any) -> str:
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if o is type(None) else _say(o) for o in options)
    if typing.get_origin(hint) is tuple:
        return f"a list of {_say(options[0])}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))


def check_range(name: str, value: float) -> None:
    allowed = RANGES.get(name)
    if allowed is not None and not allowed.holds(value):
        raise RangeError(f"{name}={shown(value)} is out of range: it should be {allowed}")
    if allowed is None and not (isinstance(value, int) or math.isfinite(value)):
        raise RangeError(f"{name}={shown(value)} is no finite number")


def check_ranges(part: DataclassInstance, prefix: str) -> None:
    """Every number of a config, as it was built."""
    for name, value in numbers(part, prefix):
        check_range(name, value)


def numbers(part: DataclassInstance, prefix: str) -> Iterator[tuple[str, float]]:
    for f in fields(part):
        value: object = getattr(part, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from numbers(value, f"{prefix}{f.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{f.name}", value


def shown(value: object) -> str:
    """A value in an error, at a length that a person reads, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # Python refuses to write out a number of more than 4,300 digits.
        return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 6
_SHORT.maxlevel = 3
