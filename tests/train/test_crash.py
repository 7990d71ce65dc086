"""A disk that is full, a Ctrl-C that does not wait and a kill −9, at every place where a run writes: nothing saved is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardError
from regard.models.downloads import open_model
from regard.train import Config, train
from regard.train.checkpoint import iter_metrics
from regard.train.settings import dump

WRITES = ("replace", "fsync", "symlink", "mkdir")
"""Calls of `os` between which a run's files are written."""


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in iter_metrics(run) if "loss" in r}


def held(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / "last"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


class Points:
    """Counts the calls that write; at one of them something happens."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, happens: Callable[[], object]) -> None:
        self.count = 0
        for name in WRITES:
            patch.setattr(os, name, self.watched(getattr(os, name), at, happens))

    def watched(self, plain: Callable[..., object], at: int, happens: Callable[[], object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.count += 1
            if self.count - 1 == at:
                happens()
            return plain(*args, **kwargs)

        return call


@pytest.fixture
def half(small, tmp_path) -> SimpleNamespace:
    """A run at step 2 of 4, the one that was never disturbed, and how many times the second half writes."""
    c: Config = small("train.steps=4", "train.validate_every=2")
    first = small("train.steps=2", "train.validate_every=2")
    train(first, tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "half", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        points = Points(patch, -1, lambda: None)
        train(c, tmp_path / "whole", resume=True, quiet=True)
    return SimpleNamespace(c=c, path=tmp_path / "half", whole=tmp_path / "whole", points=points.count)


def again(half: SimpleNamespace, at: int) -> Path:
    run = half.path.with_name(f"run-{at}")
    shutil.copytree(half.path, run, symlinks=True)
    return run


def check(half: SimpleNamespace, run: Path) -> None:
    """It loads, goes on, ends as if nothing had happened, and what was left half done is gone."""
    open_model(run)
    train(half.c, run, resume=True, quiet=True)
    assert losses(run) == losses(half.whole)
    mine, theirs = held(run), held(half.whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in theirs)
    steps = {os.readlink(run / "checkpoints" / n) for n in ("last", "best")}
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"last", "best", *steps}
    assert {p.name for p in run.iterdir()} == {"checkpoints", "config.yaml", "metrics.jsonl"}
    shutil.rmtree(run)


def test_a_full_disk_at_any_write_is_our_error_and_loses_nothing(half):
    def full() -> None:
        raise OSError(28, "No space left on device")

    assert half.points > 20
    for at in range(0, half.points, 2):
        run = again(half, at)
        with pytest.MonkeyPatch.context() as patch:
            Points(patch, at, full)
            with pytest.raises(RegardError, match="No space left on device"):
                train(half.c, run, resume=True, quiet=True)
        check(half, run)


def test_a_second_ctrl_c_at_any_write_loses_nothing(half):
    def press() -> None:
        raise KeyboardInterrupt

    for at in range(1, half.points, 3):
        run = again(half, at)
        with pytest.MonkeyPatch.context() as patch:
            Points(patch, at, press)
            with pytest.raises(KeyboardInterrupt):
                train(half.c, run, resume=True, quiet=True)
        check(half, run)


def test_a_kill_at_any_write_loses_nothing(half):
    for at in range(half.points):
        run = again(half, at)
        child = os.fork()
        if child == 0:
            try:
                Points(pytest.MonkeyPatch(), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
                train(half.c, run, resume=True, quiet=True)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status)
        check(half, run)


LIMITED = """
import resource, sys
from regard.train import config, train
from regard.train.settings import read
c = config(read(sys.argv[1]), ["train.steps=4"])
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
train(c, sys.argv[2], resume=True, quiet=True)
"""


def test_files_that_may_not_grow_are_our_error_too(half, tmp_path):
    """The system itself refuses here, in the middle of writing tensors."""
    size = (half.path / "checkpoints" / "last" / "model.safetensors").stat().st_size
    assert size > 6000 > (half.path / "metrics.jsonl").stat().st_size * 3
    (tmp_path / "c.yaml").write_text(dump(half.c.tree()))
    run = again(half, 0)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "c.yaml"), str(run)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CheckpointError: cannot save to" in done.stderr
    assert "step-00000002" in done.stderr.splitlines()[-1]
    check(half, run)


def test_metrics_on_a_full_disk_are_our_error(half):
    from regard.train.report import Metrics

    run = again(half, 0)
    with Metrics(run / "metrics.jsonl", True) as metrics:
        metrics.file.close()
        metrics.file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(RegardError, match=r"cannot write to .*metrics\.jsonl: No space left"):
            metrics.add(step=1)
