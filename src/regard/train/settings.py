"""A run as frozen dataclasses: defaults, then a YAML file, then dotted overrides such as `model.width=384 train.steps=100`.

Nothing is guessed: an unknown key suggests the nearest one, and a value of another type says which type it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError, needs_extra
from ..files import read_plain, reading
from ..models.base import Model
from ..models.families import FAMILIES, Family
from ..models.objectives import NextToken, Objective
from ..models.schema import ConfigError, build, check_keys, check_ranges, nearest, section, shown

LARGEST = 1 << 20
"""Bytes of a config file."""
FROM_DATA = ("vocabulary", "context", "start")
"""Fields of a model that the data and its tokenizer decide, unless they are given."""
LIVE = ("dropout", "capacity")
"""Settings of a model that another run of the same weights may change: they act in training only."""
INITIAL = {"data": {"tokenizer": "model"}, "optim": {"lr": 1e-4}}
"""Defaults where training goes on from a model: its tokenizer, and a rate that does not undo what it has learned."""


@dataclass(frozen=True)
class DataConfig:
    source: str = "tinyshakespeare"
    """A text file, a folder of text files, a `.jsonl` file, `hf:name` for a Hugging Face dataset, or tinyshakespeare."""
    field: str = "text"
    """Where the text stands in a JSONL line or a dataset's row."""
    split: str = "train"
    """Which split of a Hugging Face dataset to read."""
    tokenizer: Literal["byte", "char", "bpe", "model"] = "char"
    """`model` is the one that came with the model that training goes on from."""
    vocabulary: int = 4096
    """Tokens of a BPE tokenizer; the others count their own."""
    context: int = 128
    """Tokens of one training window."""
    validation: float = 0.1
    """The last part of the tokens, or of the pairs, is validated on."""
    cache: str | None = None
    """Where token files lie; by default `tokens` in regard's home."""


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
    threads: int = -1
    """CPU threads; -1 is torch's choice while its cores are free and fewer beside other work, 0 is torch's choice whatever runs beside."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    log_every: int = 10
    validate_every: int = 200
    save_every: int = 200
    patience: int = 0
    """Validations without a better loss before an early stop; 0 never stops early."""


@dataclass(frozen=True)
class Config:
    model: Any
    """The family's own config, with `vocabulary` and `context` filled in from the data when the run begins, unless given."""
    family: str = "llama"
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: Objective = field(default_factory=NextToken)
    """What the model learns from, one of its own `objectives`."""
    given: frozenset[str] = frozenset()
    """Which of the fields that the data decides somebody chose."""

    def tree(self) -> dict[str, Any]:
        """Plain values that `config` reads back to this; sizes that the data will decide are not among them."""
        sections = {name: _plain(asdict(getattr(self, name))) for name in ("model", "data", "optim", "train", "objective")}
        model = {k: v for k, v in sections["model"].items() if k in self.given or k not in FROM_DATA}
        objectives = FAMILIES[self.family].model.objectives
        name = next(n for n, kind in objectives.items() if kind is type(self.objective))
        return {**sections, "model": {"family": self.family, **model}, "objective": {"name": name, **sections["objective"]}}


def config(tree: Mapping[str, Any] | None = None, overrides: Sequence[str] = (), *, initial: Model | None = None) -> Config:
    """Defaults, then `tree`, then overrides; the model is the `initial` one where there is one, whatever its size."""
    merged: dict[str, Any] = {}
    for part in ({} if initial is None else INITIAL, tree or {}, *(parse_override(o) for o in overrides)):
        merged = _merge(merged, part)
    check_keys(merged, [*_SECTIONS, "model", "objective"], "", _SECTIONS)
    model = section(merged.get("model"), "model")
    name = model.pop("family", "llama" if initial is None else initial.family)
    built = Config(
        model=model_config(name, model) if initial is None else continued(initial, name, model),
        family=name,
        objective=objective_config(name, section(merged.get("objective"), "objective")),
        given=frozenset(n for n in FROM_DATA if n in model or initial is not None),
        **{key: build(cls, section(merged.get(key), key), f"{key}.") for key, cls in _SECTIONS.items()},
    )
    if initial is not None and built.data.tokenizer != "model":
        raise ConfigError(f"data.tokenizer={built.data.tokenizer}, and the model to go on from has its own: leave it out")
    check(built)
    return built


_SECTIONS: dict[str, type] = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


def family_of(name: object) -> Family:
    """The row of a family."""
    if not isinstance(name, str) or name not in FAMILIES:
        near = nearest(str(name), list(FAMILIES))
        raise ConfigError(f"model.family={shown(name)} is not one of {', '.join(FAMILIES)}{near}")
    return FAMILIES[name]


def model_config(family: object, given: Mapping[str, Any]) -> Any:
    """The config of a family: small, unless given otherwise."""
    row = family_of(family)
    return build(row.config, row.settings(given), "model.")


def objective_config(family: object, given: Mapping[str, Any]) -> Objective:
    """One of a family's objectives, its first unless another is named."""
    known = family_of(family).model.objectives
    values = dict(given)
    name = values.pop("name", next(iter(known)))
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"objective.name={shown(name)}: a {family} learns by {' or '.join(known)}{nearest(str(name), list(known))}"
        )
    return build(known[name], values, "objective.")


def continued(initial: Model, family: object, given: Mapping[str, Any]) -> Any:
    """The config of a model that training goes on from; settings that contradict it are refused."""
    family_of(initial.family)
    was = initial.config
    wanted = build(type(was), {**{f.name: getattr(was, f.name) for f in fields(was)}, **given}, "model.")
    pairs = [("family", family, initial.family)]
    pairs += [(n, getattr(wanted, n), getattr(was, n)) for n in given if n not in LIVE]
    other = [f"model.{n}={shown(mine)}, which is {shown(theirs)} there" for n, mine, theirs in pairs if mine != theirs]
    if other:
        raise ConfigError(f"the model to go on from has its own config; leave out {'; '.join(other)}")
    return wanted


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
    return {key if isinstance(key, str) else shown(key): value for key, value in tree.items()}


def from_yaml(text: str, name: str) -> object:
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
        plain = from_yaml(value, "") if value.strip() else ""
    except ConfigError:
        plain = value  # a spec such as `cosine | topk(4)` needs no quotes
    # YAML would read `entmax(1.5): x` or a leading `|` as structure; a setting here is a value or a list of values.
    tree: dict[str, Any] = {parts[-1]: value if isinstance(plain, dict) else plain}
    for part in reversed(parts[:-1]):
        tree = {part: tree}
    return tree


def yaml() -> Any:
    # No ConfigError: an override that is no YAML is taken as text, and a missing package is something else.
    with needs_extra("train"):
        import yaml as module
    return module


def _merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(a)
    for key, value in b.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a dataclass as YAML has them: lists for tuples."""
    return {k: _plain(v) if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def check(c: Config) -> None:
    """Refuse settings that make no sense, alone or beside each other."""
    for prefix, part in (
        ("data.", c.data),
        ("optim.", c.optim),
        ("train.", c.train),
        ("model.", c.model),
        ("objective.", c.objective),
    ):
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
