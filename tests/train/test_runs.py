"""What is trained is a model like any other: it is generated from, talked with, shown, converted, and trained on from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from regard.cli.app import app
from regard.models import BertConfig, GPT2Config, LlamaConfig, from_pretrained, open_model
from regard.train import CheckpointError, ConfigError, TrainError, config, train
from regard.train.checkpoint import iter_metrics
from regard.train.tokenizer import learn

from .conftest import SMALL, TEXT

FAMILIES = ["llama", "gpt2", "ngpt", "routing", "recurrent"]


def run(*arguments: object, input: str | None = None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    family = request.param
    base = [o for o in SMALL if family == "llama" or "key_heads" not in o]
    given = [
        f"model.family={family}",
        "data.context=48",
        f"data.source={folder / 'text.txt'}",
        f"data.cache={folder / 'cache'}",
    ]
    done = run("train", *base, *given, "--out", folder / "run", "-q")
    assert done.exit_code == 0, done.output
    return folder / "run"


def test_a_run_is_generated_from(trained):
    for source in (trained, trained / "checkpoints" / "last", (trained / "checkpoints" / "best").resolve()):
        done = run("generate", "The rain", "-m", source, "-n", 6)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("The rain")
        assert len(done.stdout.rstrip("\n")) == len("The rain") + 6


def test_a_character_that_a_run_does_not_know_is_named(trained):
    done = run("generate", "Ω", "-m", trained)
    assert done.exit_code != 0
    assert "'Ω' was not in the corpus" in done.output


def test_a_run_is_talked_with(trained, tmp_path):
    done = run("chat", "-m", trained, "-n", 5, "--store", tmp_path / "store.db", input="The rain\n/quit\n")
    assert done.exit_code == 0, done.output


def test_a_run_is_shown_and_imprinted(trained, tmp_path):
    done = run("models", "show", trained)
    assert done.exit_code == 0, done.output
    assert "width" in done.output
    (tmp_path / "diary.txt").write_text("It is twice blest.")
    store = ("--store", tmp_path / "store.db")
    assert run("identity", "new", "mara", "-m", trained, *store).exit_code == 0
    done = run("imprint", tmp_path / "diary.txt", "-i", "mara", "-m", trained, *store)
    assert done.exit_code == 0, done.output


def test_a_run_is_converted_to_what_transformers_reads(trained, tmp_path):
    done = run("models", "convert", trained, tmp_path / "hf")
    assert done.exit_code == 0, done.output
    model, tokenizer = open_model(trained)
    for folder in (tmp_path / "hf", trained / "checkpoints" / "last"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        words = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode("The quality of mercy")
        assert words("The quality of mercy", add_special_tokens=False)["input_ids"] == ids
        assert words.decode(ids) == "The quality of mercy"
        with torch.no_grad():
            torch.testing.assert_close(theirs(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)


def test_a_run_is_its_best_checkpoint(trained):
    best = from_pretrained((trained / "checkpoints" / "best").resolve())
    for name, p in from_pretrained(trained).named_parameters():
        assert torch.equal(p, best.get_parameter(name))


def test_no_character_ends_a_text_unless_the_tokenizer_says_so(trained):
    model, tokenizer = open_model(trained)
    assert model.generation_info.eos_ids == tokenizer.eos_ids == ()


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        open_model(tmp_path / "run")


def test_a_flipped_bit_is_refused_by_every_reader(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy, symlinks=True)
    path = copy / "checkpoints" / os.readlink(copy / "checkpoints" / "best") / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for command in (
        ("generate", "The rain", "-m", copy),
        ("models", "show", copy),
        ("models", "convert", copy, tmp_path / "x"),
    ):
        done = run(*command)
        assert done.exit_code != 0
        assert "model.safetensors is damaged" in done.output


@pytest.mark.parametrize("family", FAMILIES)
def test_what_hugging_face_has_no_word_for_is_trained_and_read_back(small, tmp_path, family):
    own = {"gpt2": ["model.bias=false"], "llama": ["model.window=5", "model.mlp_bias=true", "model.rope.base=500"]}
    c = small(f"model.family={family}", "model.attention=cosine", *own.get(family, []))
    train(c, tmp_path / "run", quiet=True)
    found = from_pretrained(tmp_path / "run")
    assert {n: v for n, v in vars(c.model).items() if n not in ("vocabulary", "context")}.items() <= vars(found.config).items()
    assert train(small(f"model.family={family}", "model.attention=cosine", *own.get(family, []), "train.steps=8"),
                 tmp_path / "run", resume=True, quiet=True).progress.step == 8  # fmt: skip


# --init


@pytest.fixture(params=["llama", "gpt2"])
def pretrained(request, tmp_path) -> Path:
    """A folder as it comes from somewhere else: a model and a tokenizer of byte pairs."""
    words = learn("bpe", [TEXT], 300)
    sizes = {"vocabulary": 320, "width": 16, "depth": 2, "heads": 2, "context": 64}
    c = GPT2Config(**sizes) if request.param == "gpt2" else LlamaConfig(**sizes, key_heads=1, hidden=24)
    c.build().save_pretrained(tmp_path / "model")
    words.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def given(tmp_path, text) -> list[str]:
    own = [o for o in SMALL if not o.startswith("model.")]
    return [*own, f"data.source={text}", f"data.cache={tmp_path / 'cache'}"]


def test_training_goes_on_from_a_model_with_its_tokenizer_and_its_config(pretrained, given, tmp_path):
    done = run("train", "--init", pretrained, *given, "--out", tmp_path / "run", "-q")
    assert done.exit_code == 0, done.output
    (was, words), (now, again) = open_model(pretrained), open_model(tmp_path / "run")
    assert now.config == was.config
    assert again.files() == words.files()
    ids = torch.tensor([words.encode("The quality of mercy")])
    # Six steps at a small rate: it is the same model, a little further.
    assert 0 < (now(ids).logits - was(ids).logits).abs().max() < 0.5
    done = run("train", "--resume", "--out", tmp_path / "run", "train.steps=8", "-q")
    assert "finished at step 8" in done.output, done.output
    losses = [r["loss"] for r in iter_metrics(tmp_path / "run") if "loss" in r]
    assert len(losses) == 8


def test_a_run_is_a_model_to_go_on_from(trained, given, tmp_path):
    done = run("train", "--init", trained, *given, "--out", tmp_path / "next", "-q")
    assert done.exit_code == 0, done.output
    assert open_model(tmp_path / "next")[0].config == open_model(trained)[0].config


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.width=32", r"leave out model\.width=32, which is 16 there"),
        ("model.attention=cosine", r"model\.attention='cosine', which is 'dot \| softmax' there"),
        ("model.family=ngpt", r"model\.family='ngpt'"),
        ("data.tokenizer=byte", "the model to go on from has its own"),
        ("data.context=65", r"model\.context=64 is too small: data\.context is 65"),
        ("data.tokenizer=model", None),
        ("model.width=16", None),
    ],
)
def test_settings_that_contradict_the_model_are_refused_by_name(pretrained, given, tmp_path, setting, says):
    start = open_model(pretrained)
    if says is None:
        train(config({}, [*given, setting], initial=start[0]), tmp_path / "run", initial=start, quiet=True)
        return
    with pytest.raises(ConfigError, match=says):
        train(config({}, [*given, setting], initial=start[0]), tmp_path / "run", initial=start, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_model_whose_tokenizer_has_no_mask_cannot_learn_to_fill_one_in(pretrained, given, tmp_path):
    tokenizer = open_model(pretrained)[1]
    model = BertConfig(vocabulary=tokenizer.size, width=16, depth=1, heads=2, hidden=8).build()
    with pytest.raises(ConfigError, match="no token <mask>"):
        train(config({}, given, initial=model), tmp_path / "run", initial=(model, tokenizer), quiet=True)


def test_a_model_to_go_on_from_and_a_run_to_go_on_with_are_not_both_taken(pretrained, given, tmp_path):
    start = open_model(pretrained)
    c = config({}, given, initial=start[0])
    train(c, tmp_path / "run", initial=start, quiet=True)
    with pytest.raises(TrainError, match="leave one out"):
        train(c, tmp_path / "run", initial=start, resume=True, quiet=True)
    with pytest.raises(ConfigError, match="goes with it"):
        train(c, tmp_path / "other", quiet=True)
