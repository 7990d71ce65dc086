"""Settings where training breaks are refused by name, with what is allowed, before anything is on disk."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from regard.cli.train import train as train_verb
from regard.models import FAMILIES
from regard.models.downloads import open_model
from regard.models.schema import RANGES, shown
from regard.train import ConfigError, DataError, TrainError, config, train
from regard.train.settings import read

app = typer.Typer()
app.command()(train_verb)
NEVER = [math.nan, math.inf, -math.inf, -1, -1e-9, 10**30, 1e300]
"""Nonsense for nearly any number; what else is outside of a range is computed from it."""


def number_fields(cls: type, prefix: str):
    """The dotted names of all numbers that can be set, with their types."""
    for name, hint in typing.get_type_hints(cls).items():
        if name not in {f.name for f in dataclasses.fields(cls)}:
            continue
        parts = {hint, *typing.get_args(hint)}
        if dataclasses.is_dataclass(hint):
            yield from number_fields(hint, f"{prefix}{name}.")
        elif parts & {int, float}:
            yield f"{prefix}{name}", int if int in parts else float


def all_numbers() -> dict[str, tuple[str, type]]:
    """Each with a family that has it."""
    found = {}
    for family in FAMILIES:
        c = config({}, [f"model.family={family}"])
        for prefix, part in (
            ("data.", c.data),
            ("optim.", c.optim),
            ("train.", c.train),
            ("model.", c.model),
            ("objective.", c.objective),
        ):
            found |= {name: (family, kind) for name, kind in number_fields(type(part), prefix)}
    return found


NUMBERS = all_numbers()


def outside(name: str, kind: type) -> list[object]:
    r = RANGES[name]
    found: list[float] = [*(x for x in NEVER if not r.low <= x <= r.high), r.low - 1, r.high * 2 + 1]
    found += ([r.low] if r.above else []) + ([r.high] if r.below else [])
    return [x for x in found if kind is float or isinstance(x, int) or not math.isfinite(x) or x != int(x)]


def test_every_number_that_can_be_set_has_a_range():
    assert NUMBERS.keys() == RANGES.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_of_its_range_is_refused_by_name_whether_from_a_file_or_an_override(name):
    family, kind = NUMBERS[name]
    section, key = name.split(".", 1)
    for value in outside(name, kind):
        tree: dict[str, object] = {}
        for part in reversed(key.split(".")):
            tree = {part: tree or value}
        whole = {section: tree, **({} if section == "model" else {"model": {}})}
        whole["model"] = {**whole["model"], "family": family}
        said = []
        for given in ((whole, []), ({"model": {"family": family}}, [f"{name}={value}"])):
            with pytest.raises(ConfigError) as caught:
                config(*given)
            said.append(str(caught.value))
            assert name in said[-1]
            assert "should be" in said[-1]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["true", "[1]", "{a: 1}", "x", "2020-01-01", "''", "[[[[]]]]"])
def test_what_is_no_number_is_refused_by_name(name, value):
    family, _ = NUMBERS[name]
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        config({}, [f"model.family={family}", f"{name}={value}"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.batch=6", "train.accumulate=4"], "cannot be cut into train.accumulate=4 equal parts"),
        (["train.batch=2", "train.accumulate=4"], "cannot be cut"),
        (["optim.lr=5", "optim.weight_decay=0.2"], "at least 1"),
        (["model.family=routing", "model.depth=1024", "model.experts=4096"], "at most 65,536"),
        (["data.source="], "data.source is empty"),
        (["data.source=a\0b"], "null character"),
        (["train.steps=" + "9" * 5000], "should be a whole number"),
        (["train.steps=0x" + "f" * 5000], "a number of 20,000 bits is out of range"),
        (["model.family=[llama]"], "is not one of gpt2"),
        (["model.family=null"], "is not one of gpt2"),
        (["data.tokenizer=[[byte]]"], "is not one of byte"),
        (["model=[1, 2]"], "it is a section"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        config({}, overrides)


def test_a_config_changed_in_code_is_checked_too(small, tmp_path):
    c = small()
    with pytest.raises(ConfigError, match=r"optim\.lr=nan is out of range"):
        train(replace(c, optim=replace(c.optim, lr=math.nan)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.width=18", "model.heads=4"], "18"),
        (["model.heads=3", "model.key_heads=2"], "this model cannot be built"),
        (["model.width=6", "model.heads=2"], "even number"),
        (["model.attention=[dot, dot]"], "this model cannot be built"),
        (["model.attention=nonsense"], "nonsense"),
        (["model.family=routing", "model.experts=2", "model.chosen=3"], "chosen=3 of experts=2"),
        (["model.family=gpt2", "model.width=65536", "model.depth=64", "model.heads=64"], "this machine has"),
        (["model.vocabulary=5"], r"model\.vocabulary=5 is too small: the char tokenizer of the data has \d+"),
        (["model.context=5"], r"model\.context=5 is too small: data\.context is 8"),
        (["data.context=16777216"], "too few"),
        (["train.device=meta"], "nothing is trained on meta"),
        (["train.device=cuda:7"], "CUDA device"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_a_folder_is_made(small, tmp_path, overrides, says):
    with pytest.raises((ConfigError, DataError), match=says):
        train(small(*overrides), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_sizes_of_the_model_follow_the_data_unless_they_are_given(small, tmp_path):
    train(small("train.steps=1"), tmp_path / "follows", quiet=True)
    train(small("train.steps=1", "model.vocabulary=96", "model.context=32"), tmp_path / "given", quiet=True)
    (follows, words), (given, _) = open_model(tmp_path / "follows"), open_model(tmp_path / "given")
    assert (follows.config.vocabulary, follows.config.context) == (words.size, 8)
    assert (given.config.vocabulary, given.config.context) == (96, 32)
    assert given.head.weight.shape[0] == 96
    assert words.decode([0, 95]) == words.decode([0])
    tree = config().tree()["model"]
    assert "vocabulary" not in tree
    assert "context" not in tree
    again = config(read(tmp_path / "given" / "config.yaml"))
    assert (again.model.vocabulary, again.model.context) == (96, 32)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB.encode(), "alias"),
        (MERGES.encode(), "alias"),
        (b"a: &a [*a]", "alias"),
        (b"[" * 5000, "is not YAML"),
        (b"train: {steps: !!bool 7}", "is not YAML"),
        (b"train: {steps: !!timestamp 7}", "is not YAML"),
        (b"train: {steps: !!python/object/apply:os.system [ls]}", "is not YAML"),
        (b"train: {steps: 2020-99-99}", "is not YAML"),
        (b"train: {steps: " + b"9" * 5000 + b"}", "is not YAML"),
        (b"a: \xff", "UnicodeDecodeError"),
        (b"a: \x00", "is not YAML"),
        (b"x" * ((1 << 20) + 1), "at most 1,048,576 are read"),
        (b"- 1", "holds a list"),
    ],
    ids=["bomb", "merges", "loop", "deep", "bool", "timestamp", "python", "date", "digits", "utf8", "null", "long", "list"],
)
def test_a_hostile_config_file_is_refused(tmp_path, text, says):
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_what_is_no_config_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, says in ((".", "no plain file|Is a directory"), ("pipe", "no plain file"), ("absent", "is not there")):
        with pytest.raises(ConfigError, match=says):
            read(tmp_path / name)
    with pytest.raises(ConfigError, match="no plain file"):
        read("/dev/zero")


def test_sources_that_would_never_end_are_refused(small, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    long = "x" * 5000
    for source in (str(tmp_path / "pipe.txt"), "/dev/zero", "~nobody-of-this-name/x.txt", long):
        with pytest.raises(DataError, match=r"no plain file|no file or folder|home|name too long"):
            train(small(f"data.source={source}"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_places_that_cannot_be_written_are_named(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot write to"):
        train(small(), tmp_path / "file" / "run", quiet=True)
    with pytest.raises((TrainError, ValueError), match="file"):
        train(small(), tmp_path / "file", quiet=True)
    with pytest.raises(DataError, match="cannot be written to"):
        train(small(f"data.cache={tmp_path / 'file' / 'cache'}"), tmp_path / "run", quiet=True)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("given", ["optim.lr=.nan", "train.batch=0", "model.heads=5", "data.source=/dev/zero"])
def test_the_command_says_one_line_and_writes_nothing(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    found = CliRunner().invoke(app, [given, "model.width=16", "data.context=8", "train.steps=1", "-q"])
    assert found.exit_code == 2
    assert found.output.startswith("error: ")
    assert found.output.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_values_in_errors_are_short_whatever_they_are():
    for value in (10**5000, 1 << 40000, "x" * 10**6, [[[[[1]]]]] * 1000, math.nan, None):
        assert len(shown(value)) < 200
