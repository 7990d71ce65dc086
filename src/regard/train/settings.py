"""A run as frozen dataclasses: defaults, then a YAML file, then dotted overrides such as `model.width=384 train.steps=100`.

Nothing is guessed: an unknown key suggests the nearest one, and a value of another type says which type it should be.
"""

from __future__ import annotations

import difflib
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast

from ..errors import CheckpointError, needs_extra
from ..files import read_plain, reading
from .limits import ConfigError, RangeError, check_range, check_ranges, shown

LARGEST = 1 << 20
"""Bytes of a config file."""
FROM_DATA = ("vocabulary", "context")
"""Sizes of a model that the data decides, unless they are given."""


@dataclass(frozen=True)
class DataConfig:
    source: str = "tinyshakespeare"
    """A text file, a folder of text files, a `.jsonl` file, `hf:name` for a Hugging Face dataset, or tinyshakespeare."""
    field: str = "text"
    """Where the text stands in a JSONL line or a dataset's row."""
    split: str = "train"
    """Which split of a Hugging Face dataset to read."""
    tokenizer: Literal["byte", "char", "bpe"] = "char"
    vocabulary: int = 4096
    """Tokens of a BPE tokenizer; the others count their own."""
    context: int = 128
    """Tokens of one training window."""
    validation: float = 0.1
    """The last part of the tokens is kept for validation."""
    cache: str | None = None
    """Where token files are kept; by default `tokens` in regard's home."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 4e-3
    floor: float = 0.03
    """What is left of `lr` at the end of the cosine."""
    warmup: int = 50
    beta_1: float = 0.9
    beta_2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """The largest gradient norm; 0 for no limit."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    batch: int = 16
    """Windows per optimiser step over all ranks and accumulated parts, so neither changes the result."""
    accumulate: int = 1
    """Into how many parts each rank's share of a batch is cut, one after the other, to save memory."""
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 autocast where the processor multiplies it natively, float32 elsewhere (see docs/training.md)."""
    device: str = "auto"
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    log_every: int = 10
    validate_every: int = 200
    save_every: int = 200
    patience: int = 0
    """Validations without a better loss before an early stop; 0 never stops early."""


@dataclass(frozen=True)
class Family:
    """Where a family's config stands, and a size that trains in minutes."""

    config: str
    small: Mapping[str, Any] = field(default_factory=dict[str, Any])
    follows: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Settings that, when not given, are a multiple of another one, so that changing that one is enough."""


_SMALL = {"width": 128, "depth": 4, "heads": 4}
_GATED = {"hidden": ("width", 3)}
FAMILIES: dict[str, Family] = {
    "gpt2": Family("regard.models.gpt2:GPT2Config", _SMALL),
    "llama": Family("regard.models.llama:LlamaConfig", _SMALL, {**_GATED, "key_heads": ("heads", 1)}),
    "ngpt": Family("regard.models.ngpt:NGPTConfig", {**_SMALL, "alpha": 0.25}, _GATED),
    "routing": Family("regard.models.routing:RoutingConfig", {**_SMALL, "experts": 4}, {"hidden": ("width", 2)}),
    "recurrent": Family("regard.models.recurrent:RecurrentConfig", {"width": 192, "depth": 2}),
}
"""The families that predict the next token."""


@dataclass(frozen=True)
class Config:
    model: Any
    """The family's own config, with `vocabulary` and `context` filled in from the data when the run begins, unless given."""
    family: str = "llama"
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    given: frozenset[str] = frozenset()
    """Which of `model.vocabulary` and `model.context` somebody chose; the data decides the others."""

    def tree(self) -> dict[str, Any]:
        """Plain values that `config` reads back to this; sizes that the data will decide are not among them."""
        plain = cast(dict[str, Any], _plain(asdict(self)))
        undecided = set(FROM_DATA) - plain.pop("given")
        model = {k: v for k, v in plain.pop("model").items() if k not in undecided}
        return {"model": {"family": plain.pop("family"), **model}, **plain}


def config(tree: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then `tree`, then overrides."""
    merged: dict[str, Any] = {}
    for part in (tree or {}, *(parse_override(o) for o in overrides)):
        merged = _merge(merged, part)
    _check_keys(merged, [*_SECTIONS, "model"], "")
    model = _section(merged.get("model"), "model")
    name = model.pop("family", "llama")
    built = Config(
        model=model_config(name, model),
        family=name,
        given=frozenset(n for n in FROM_DATA if n in model),
        **{key: _build(cls, _section(merged.get(key), key), f"{key}.") for key, cls in _SECTIONS.items()},
    )
    check(built)
    return built


_SECTIONS: dict[str, type] = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


def model_config(family: Any, given: Mapping[str, Any]) -> Any:
    """The config of a family: small, unless given otherwise."""
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"model.family={shown(family)} is not one of {', '.join(FAMILIES)}{_nearest(str(family), list(FAMILIES))}"
        )
    kind = FAMILIES[family]
    module, name = kind.config.split(":")
    values = {**kind.small, **given}
    for setting, (other, times) in kind.follows.items():
        if setting not in given and isinstance(values[other], int):
            values[setting] = values[other] * times
    return _build(getattr(importlib.import_module(module), name), values, "model.")


def read(path: str | Path) -> dict[str, Any]:
    """The tree in a YAML file."""
    try:
        with reading(path, ConfigError):
            text = read_plain(path, LARGEST, follow=True).decode("utf-8")
    except CheckpointError as error:
        raise ConfigError(f"no config file: {error}") from error
    tree = from_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a config is a map such as 'train: {{steps: 100}}'")
    return cast(dict[str, Any], tree)


def from_yaml(text: str, name: str) -> Any:
    """The values of a YAML text."""
    module = yaml()

    class Plain(module.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of aliases to aliases stand for more values than any memory holds.
            if self.check_event(module.AliasEvent):
                raise module.YAMLError("it has an alias (*name); write the value out")
            return super().compose_node(parent, index)

    try:
        return module.load(text, Plain)
    except Exception as error:
        # Beside its own errors, the parser lets out what a broken number, date or tag raises, and too deep a nesting.
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name} is not YAML: {said[:300]}") from error


def dump(tree: Mapping[str, Any]) -> str:
    return yaml().safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as {a: {b: value}}; the value is read as YAML, so `true`, `null`, `0.1` and `[x, y]` mean what they say."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{shown(text)} is no override; write section.name=value, as in train.steps=100")
    try:
        found: Any = from_yaml(value, "") if value.strip() else ""
    except ConfigError:
        found = value  # a spec such as `cosine | topk(4)` needs no quotes
    # YAML would read `entmax(1.5): x` or a leading `|` as structure; a setting here is a value or a list of values.
    found = value if isinstance(found, dict) else found
    for part in reversed(parts):
        found = {part: found}
    return cast(dict[str, Any], found)


def yaml() -> Any:
    # No ConfigError: an override that is no YAML is taken as text, and a missing package is something else.
    with needs_extra("train"):
        import yaml as module
    return module


def _merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(a)
    for key, value in b.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(cast(Any, old), cast(Any, value)) if both else value
    return merged


def _section(found: Any, name: str) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}={shown(found)} is a {type(found).__name__}; it is a section: write {name}.<setting>=value")
    return dict(cast(Mapping[str, Any], found))


def _check_keys(tree: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    for key in tree:
        if key not in known:
            near = _nearest(key, known, prefix)
            # A forgotten section is the commonest slip: `steps=100` for `train.steps=100`.
            homes = [f"{s}.{key}" for s, cls in _SECTIONS.items() if key in {f.name for f in fields(cls)}]
            if not prefix and homes:
                near = f"; did you mean {' or '.join(homes)}?"
            raise ConfigError(f"there is no setting {prefix}{str(key)[:80]}{near} (known: {', '.join(known)})")


def _nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls) if f.init]
    _check_keys(values, known + (["family"] if prefix == "model." else []), prefix)
    found = {name: _coerce(value, hints[name], prefix + name) for name, value in values.items()}
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING and f.name not in found]
    if needed:
        raise ConfigError(f"{prefix}{needed[0]} has no default; give it a value")
    try:
        return cls(**found)
    except ConfigError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{prefix.rstrip('.')}: {error}") from error


def _coerce(value: Any, hint: Any, name: str) -> Any:
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
                return _coerce(value, option, name)
            except RangeError:
                raise
            except ConfigError:
                continue
        raise wrong
    if origin is Literal:
        if value not in options:
            raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(map(str, options))}{_nearest(value, options)}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong
        items = cast(Sequence[Any], value)
        inner = [options[0]] * len(items) if options[-1] is Ellipsis else list(options)
        if len(inner) != len(items):
            raise wrong
        return tuple(_coerce(v, t, f"{name}[{i}]") for i, (v, t) in enumerate(zip(items, inner, strict=True)))
    if is_dataclass(hint):
        return value if isinstance(value, cast(type, hint)) else _build(cast(type, hint), _section(value, name), f"{name}.")
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            found = float(value)  # YAML 1.1 reads 1e-3, without a point, as a string
        except (ValueError, OverflowError):
            raise wrong from None
        check_range(name, found)
        return found
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


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in cast(dict[str, Any], x).items()}
    if isinstance(x, tuple | list):
        return [_plain(v) for v in cast(Sequence[Any], x)]
    return x


def check(c: Config) -> None:
    """Refuse settings that make no sense, alone or beside each other."""
    for prefix, part in (("data.", c.data), ("optim.", c.optim), ("train.", c.train), ("model.", c.model)):
        check_ranges(part, prefix)
    if c.train.batch % c.train.accumulate:
        raise ConfigError(f"train.batch={c.train.batch} cannot be cut into train.accumulate={c.train.accumulate} equal parts")
    if c.optim.lr * c.optim.weight_decay >= 1:
        raise ConfigError(
            f"optim.lr={c.optim.lr:g} × optim.weight_decay={c.optim.weight_decay:g} is at least 1: "
            "a step would take more from each weight than there is of it"
        )
    parts = getattr(c.model, "depth", 1) * getattr(c.model, "experts", 1)
    if parts > 1 << 16:
        raise ConfigError(f"model.depth × model.experts = {parts:,} feed-forward layers; at most {1 << 16:,} are built")
    for name in ("source", "field", "split", "cache"):
        if "\0" in (getattr(c.data, name) or ""):
            raise ConfigError(f"data.{name}={shown(getattr(c.data, name))} holds a null character")
    if not c.data.source.strip():
        raise ConfigError("data.source is empty; name a text file, a folder, hf:<dataset>, or tinyshakespeare")
