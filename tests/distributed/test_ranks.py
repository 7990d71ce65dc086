"""Two gloo ranks on the loopback, started as a user starts them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.models.downloads import open_model
from regard.train import Config, ConfigError, config, train
from regard.train.checkpoint import iter_metrics
from regard.train.distributed import joined

TEXT = "Now is the winter of our discontent made glorious summer by this sun of York;\n" * 30
SETTINGS = [
    "train.batch=8",
    "train.log_every=1",
    "train.validate_every=4",
    "train.save_every=4",
    "data.context=8",
    "optim.warmup=2",
    "train.dtype=float32",
    "model.width=16",
    "model.depth=2",
    "model.heads=2",
    "model.key_heads=1",
    "model.hidden=24",
    "train.device=cpu",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text(TEXT)
    return folder


def settings(place: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"data.source={place / 'text.txt'}", f"data.cache={place / 'cache'}", *more]


def one_rank(place: Path, *more: str) -> Config:
    return config({}, settings(place, *more))


def two_ranks(place: Path, out: str, *more: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", "regard.cli.train", "-q", "--out", str(place / out), *settings(place, *more),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert found.returncode == 0, found.stderr


def metrics(run: Path) -> dict[tuple[int, str], float]:
    return {(r["step"], k): r[k] for r in iter_metrics(run) for k in ("loss", "validation", "norm") if k in r}


@pytest.fixture(scope="module")
def alone(place) -> Path:
    """A run of one rank: eight steps, then four more; and a copy of it after the first eight."""
    torch.set_num_threads(1)
    train(one_rank(place, "train.steps=8"), place / "one", quiet=True)
    shutil.copytree(place / "one", place / "eight", symlinks=True)
    train(one_rank(place, "train.steps=12"), place / "one", resume=True, quiet=True)
    return place / "one"


def assert_agree(a: Path, b: Path) -> None:
    found, wanted = metrics(a), metrics(b)
    assert found.keys() == wanted.keys()
    assert {s for s, _ in found} == set(range(1, 13))
    assert max(abs(found[k] - wanted[k]) for k in wanted) < 1e-4
    mine, theirs = (load_file(r / "checkpoints" / "last" / "model.safetensors") for r in (a, b))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[n] - theirs[n]).abs().max()) for n in mine) < 1e-3


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_walk_through_one_ranks_losses_and_one_rank_goes_on(kind, place, alone):
    two_ranks(place, kind, "train.steps=8", f"train.parallel={kind}", "train.accumulate=2")
    # Only the first rank writes: each step has one line. And nothing on disk is a pickle.
    assert sum("loss" in r for r in iter_metrics(place / kind)) == 8
    files = {p.suffix for p in (place / kind).rglob("*") if p.is_file()}
    assert files == {".safetensors", ".json", ".jsonl", ".yaml"}
    model, tokenizer = open_model(place / kind)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("York")])).logits).all()
    train(one_rank(place, "train.steps=12"), place / kind, resume=True, quiet=True)
    assert_agree(place / kind, alone)


def test_a_run_of_one_rank_goes_on_sharded_over_two(place, alone):
    two_ranks(place, "eight", "train.steps=12", "train.parallel=fsdp", "--resume")
    assert_agree(place / "eight", alone)


@pytest.mark.parametrize(
    ("change", "says"), [("train.batch=3", "does not divide among 2 ranks"), ("train.parallel=none", "separate models")]
)
def test_settings_that_do_not_fit_several_ranks_are_refused(change, says, place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=says), joined(one_rank(place, change).train):
        pass
