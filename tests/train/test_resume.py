"""A run goes on with the model and the data it began with, or is refused with every file as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from regard.cli.train import train as train_verb
from regard.errors import RegardError
from regard.models.downloads import open_model
from regard.train import CheckpointError, ConfigError, DataError, TokenizerError, TrainError, train
from regard.train.checkpoint import iter_metrics
from regard.train.loop import Trainer

from .conftest import TEXT

app = typer.Typer()
app.command()(train_verb)


def contents(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Every file and link with its time and its bytes."""
    return {
        str(p.relative_to(folder)): (
            p.lstat().st_mtime_ns,
            os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "",
        )
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def run(small, tmp_path) -> Path:
    train(small("train.steps=4"), tmp_path / "run", quiet=True)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.width=32"], r"model\.width=32 here, 16 in the run"),
        (["model.depth=2"], r"model\.depth=2 here, 1 in the run"),
        # Its tensors have the same shapes: only the settings tell.
        (["model.heads=4"], r"model\.heads=4 here, 2 in the run"),
        (["model.attention=cosine"], r"model\.attention='cosine' here"),
        (["model.rope.base=500"], r"model\.rope="),
        (["model.family=gpt2"], r"model\.family='gpt2' here, 'llama' in the run"),
        (["data.tokenizer=byte"], r"data\.tokenizer='byte' here, 'char' in the run"),
        (["data.context=16"], r"what changed: data\.context=16 \(8 then\)"),
        (["data.validation=0.2"], r"what changed: data\.validation=0\.2 \(0\.1 then\)"),
        (["train.steps=3"], r"train\.steps=3, but .* is at step 4 already"),
        (["train.device=tpuu"], "no device of torch"),
        (["train.accumulate=2", "model.vocabulary=3"], "vocabulary=3"),
    ],
)
def test_a_refused_resume_leaves_every_byte_as_it_was(small, run, overrides, says):
    before = contents(run)
    with pytest.raises(RegardError, match=says):
        train(small("train.steps=6", *overrides), run, resume=True, quiet=True)
    assert contents(run) == before
    assert train(small("train.steps=6"), run, resume=True, quiet=True).progress.step == 6


def test_other_text_is_noticed_and_named(small, run, text):
    before = contents(run)
    # The same characters, so that no tokenizer could tell.
    text.write_text(TEXT.replace("mercy", "mecry"))
    with pytest.raises(TrainError, match=r"what changed: the text of data\.source=.*text\.txt .*--new-data"):
        train(small("train.steps=6"), run, resume=True, quiet=True)
    assert contents(run) == before


def test_the_same_text_elsewhere_is_the_same_data(small, run, text, tmp_path):
    moved = tmp_path / "elsewhere.txt"
    shutil.move(text, moved)
    with pytest.raises(DataError, match="no file or folder"):
        train(small("train.steps=6"), run, resume=True, quiet=True)
    assert train(small("train.steps=6", f"data.source={moved}"), run, resume=True, quiet=True).stopped == "finished"


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_other_text_is_taken_when_asked_for_and_cut_by_the_runs_own_tokenizer(small, tmp_path, text, kind):
    settings, run = [f"data.tokenizer={kind}", "data.vocabulary=300"], tmp_path / "run"
    train(small("train.steps=3", *settings), run, quiet=True)
    tokenizer = open_model(run)[1].files()
    text.write_text(TEXT[: len(TEXT) // 2].replace("heaven", "raven") + "the rain in the place\n" * 40)
    found = train(small("train.steps=6", *settings), run, resume=True, new_data=True, quiet=True)
    assert found.progress.step == 6
    assert found.progress.best_step > 3, "losses on other text are not compared"
    assert open_model(run)[1].files() == tokenizer
    # It is the run's text from now on: nothing has to be said again.
    assert train(small("train.steps=8", *settings), run, resume=True, quiet=True).progress.step == 8
    model, words = open_model(run)
    assert torch.isfinite(model(torch.tensor([words.encode("rain")])).logits).all()


def test_text_with_characters_that_the_run_does_not_know_is_refused(small, run, text):
    before = contents(run)
    text.write_text(TEXT + "ß")
    with pytest.raises(TokenizerError, match="'ß' was not in the corpus"):
        train(small("train.steps=6"), run, resume=True, new_data=True, quiet=True)
    assert contents(run) == before


def test_new_data_without_a_run_is_refused(small, tmp_path):
    with pytest.raises(TrainError, match="add --resume"):
        train(small(), tmp_path / "run", new_data=True, quiet=True)
    assert not (tmp_path / "run").exists()


def test_settings_that_change_neither_model_nor_data_may_change(small, run):
    found = train(small("train.steps=6", "optim.lr=1e-4", "train.batch=2", "train.save_every=1"), run, resume=True, quiet=True)
    assert found.progress.step == 6
    assert "save_every: 1" in (run / "config.yaml").read_text()


def test_the_command_takes_new_data(run, text, tmp_path):
    before = contents(run)
    text.write_text(TEXT.replace("mercy", "mecry"))
    found = CliRunner().invoke(app, ["--resume", "--out", str(run), "train.steps=5", "-q"])
    assert found.exit_code == 2
    assert "what changed: the text" in found.output
    assert contents(run) == before
    found = CliRunner().invoke(app, ["--resume", "--new-data", "--out", str(run), "train.steps=5", "-q"])
    assert found.exit_code == 0, found.output


def test_a_run_of_an_earlier_version_says_what_to_do(small, run):
    path = run / "checkpoints" / "last" / "state.json"
    path.write_text(path.read_text().replace("regard-checkpoint-2", "regard-checkpoint-1"))
    before = contents(run)
    for read in (lambda: open_model(run), lambda: train(small("train.steps=6"), run, resume=True, quiet=True)):
        with pytest.raises(CheckpointError, match=r"earlier version.*go on with it there, or train anew"):
            read()
    assert contents(run) == before


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize(
    ("target", "says"),
    [("step-00000099", "not there or not whole"), ("../..", "not to one of the steps"), ("/etc", "not to one of the steps")],
)
def test_a_link_that_names_no_step_beside_it_is_refused(small, run, which, target, says):
    link = run / "checkpoints" / which
    link.unlink()
    link.symlink_to(target)
    before = contents(run)
    with pytest.raises(CheckpointError, match=says):
        open_model(run) if which == "best" else train(small("train.steps=6"), run, resume=True, quiet=True)
    # And a run is not begun over what is left of one.
    with pytest.raises(TrainError, match="already holds a run"):
        train(small(), run, quiet=True)
    assert contents(run) == before


def test_a_checkpoint_that_was_written_but_not_yet_named_serves_and_stays(small, run, monkeypatch):
    for name in ("last", "best"):
        (run / "checkpoints" / name).unlink()
    open_model(run)
    with pytest.raises(TrainError, match="already holds a run"):
        train(small(), run, quiet=True)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Trainer, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(small("train.steps=6"), run, resume=True, quiet=True)
    open_model(run)
    assert train(small("train.steps=6"), run, resume=True, quiet=True).progress.step == 6


def test_a_run_copied_without_its_links_is_read_and_not_gone_on_with(small, run):
    link = run / "checkpoints" / "last"
    target = os.readlink(link)
    link.unlink()
    shutil.copytree(run / "checkpoints" / target, link)
    open_model(run)
    with pytest.raises(CheckpointError, match="is no link to one of the steps"):
        train(small("train.steps=6"), run, resume=True, quiet=True)


def test_two_processes_never_train_in_one_folder(small, run, monkeypatch):
    plain, seen = Trainer.step, []

    def step(self: Trainer, number: int):
        for resume in (True, False):
            with pytest.raises(TrainError, match=r"another process trains in|already holds a run"):
                train(small("train.steps=9"), run, resume=resume, quiet=True)
        seen.append(number)
        monkeypatch.setattr(Trainer, "step", plain)
        return plain(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    assert train(small("train.steps=6"), run, resume=True, quiet=True).progress.step == 6
    assert seen == [4]
    assert [r["event"] for r in iter_metrics(run) if "event" in r] == ["start", "finished", "resume", "finished"]


def test_a_source_that_is_no_text_for_a_dataset_row_is_named():
    from regard.train.corpus import Rows

    with pytest.raises(DataError, match="row 2 has 7 for text"):
        list(Rows("x", [{"text": "a"}, {"text": 7}], "text").pieces())


def test_a_rank_that_is_no_number_is_refused(small, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        with monkeypatch.context() as m:
            m.setenv(name, "first")
            with pytest.raises(ConfigError, match=f"{name}=first"):
                train(small(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
