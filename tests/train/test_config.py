from __future__ import annotations

import pytest

from regard.models import FAMILIES, GPT2Config, LlamaConfig
from regard.train import ConfigError, config
from regard.train.settings import dump, parse_override, read, yaml


def test_overrides_come_after_the_file_and_the_file_after_the_defaults():
    c = config({"train": {"steps": 7, "batch": 3}}, ["train.batch=5", "model.width=96"])
    assert (c.train.steps, c.train.batch, c.train.accumulate, c.model.width) == (7, 5, 1, 96)


def test_a_resolved_config_reads_back_to_itself():
    c = config({}, ["model.rope.base=500", "model.attention=[dot, cosine]", "optim.lr=1e-3", "model.depth=2"])
    assert c.model.attention == ("dot", "cosine")
    assert config(yaml().safe_load(dump(c.tree()))) == c


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_small_size_that_builds(name):
    c = config({}, [f"model.family={name}", "model.vocabulary=11"])
    assert sum(p.numel() for p in c.model.build().parameters()) < 5_000_000


def test_a_family_brings_its_own_settings():
    assert isinstance(config({}, ["model.family=gpt2", "model.dropout=0.1"]).model, GPT2Config)
    assert isinstance(config().model, LlamaConfig)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stpes=1", "did you mean train.steps"),
        ("trian.steps=1", "did you mean train"),
        ("steps=1", "did you mean train.steps"),
        ("model.widht=3", "did you mean model.width"),
        ("model.rope.bse=3", "did you mean model.rope.base"),
        ("model.family=lama", "did you mean llama"),
        ("model.family=elmo", "is not one of gpt2, llama"),
        ("objective.rate=0.3", "there is no setting objective.rate"),
        ("objective.name=masked", "a llama learns by next_token"),
        ("model.norm=middle", "is not one of pre, post"),
        ("model.activation=swigloo", "did you mean swiglu"),
        ("data.tokenizer=bytes", "did you mean byte"),
        ("train.steps=many", "'many' is a str; it should be a whole number"),
        ("train.steps=1.5", "it should be a whole number"),
        ("train.steps=true", "it should be a whole number"),
        ("optim.lr=fast", "it should be a number"),
        ("model.tied=3", "it should be true or false"),
        ("model.window=wide", "a whole number or null"),
        ("model.attention=[1, [2]]", "should be"),
        ("train=3", "it is a section"),
        ("train.steps=0", "train.steps=0 is out of range: it should be at least 1"),
        ("data.validation=1.5", "above 0 and below 1"),
        ("optim.lr=-1", "above 0"),
        ("model.rope.fraction=2", "fraction"),
        ("train.steps", "write section.name=value"),
        (".steps=3", "write section.name=value"),
    ],
)
def test_a_wrong_setting_says_what_to_write_instead(override, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        config({}, [override])


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=3", 3), ("a.b=0.1", 0.1), ("a.b=null", None), ("a.b=true", True), ("a.b=[x, y]", ["x", "y"]), ("a.b=x=y", "x=y"), ("a.b=", "")],
)  # fmt: skip
def test_an_override_is_read_as_yaml(text, value):
    assert parse_override(text) == {"a": {"b": value}}


def test_settings_follow_the_one_they_are_a_multiple_of_unless_given():
    assert config({}, ["model.width=96", "model.heads=3"]).model.key_heads == 3
    assert config({}, ["model.width=96", "model.heads=3"]).model.hidden == 288
    assert config({}, ["model.hidden=7"]).model.hidden == 7


def test_a_spec_needs_no_quotes():
    c = config({}, ["model.attention=cosine(temperature=0.2) | topk(4)"])
    assert c.model.attention == "cosine(temperature=0.2) | topk(4)"


def test_numbers_without_a_point_are_numbers():
    assert config({}, ["optim.lr=1e-3"]).optim.lr == 1e-3


def test_a_config_file_that_is_no_map_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds a list"):
        read(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        read(path)
    with pytest.raises(ConfigError, match="no config file"):
        read(tmp_path / "absent.yaml")
