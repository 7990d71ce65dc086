from __future__ import annotations

import typer
from typer.testing import CliRunner

from regard.cli.train import train
from regard.train.settings import read

from .conftest import SMALL

app = typer.Typer()
app.command()(train)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_a_run_is_named_found_again_and_resumed(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [*SMALL, f"data.source={text}", f"data.cache={tmp_path / 'cache'}"]
    assert run(*given, "-q").exit_code == 0
    assert run(*given, "-q").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["text-llama", "text-llama-2"]
    found = run("--resume", "train.steps=8", "-q")
    assert "finished at step 8" in found.output
    assert read(tmp_path / "runs" / "text-llama-2" / "config.yaml")["train"]["steps"] == 8


def test_a_mistake_is_one_line_without_a_traceback():
    found = run("train.stpes=3")
    assert found.exit_code == 2
    assert found.output.startswith("error: there is no setting train.stpes; did you mean train.steps?")


def test_nothing_to_resume_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in runs/" in run("--resume").output


def test_the_resolved_config_is_shown_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run("--show", "train.steps=3")
    assert "steps: 3" in found.output
    assert list(tmp_path.iterdir()) == []
