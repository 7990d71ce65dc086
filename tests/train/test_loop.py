from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardWarning
from regard.models import FAMILIES
from regard.models.downloads import open_model
from regard.train import CheckpointError, ConfigError, TrainError, config, precision, train
from regard.train import checkpoint as checkpoint_module
from regard.train.checkpoint import iter_metrics
from regard.train.distributed import pick_device
from regard.train.loop import Trainer
from regard.train.precision import uses_bfloat16


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in iter_metrics(run) if "loss" in r}


def validations(run: Path) -> dict[int, float]:
    return {r["step"]: r["validation"] for r in iter_metrics(run) if "validation" in r}


def held(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / which
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


@pytest.fixture
def stop_after(monkeypatch):
    """Make a run behave as if Ctrl-C had been pressed during a step."""

    def set_step(n: int) -> None:
        plain = Trainer.step

        def step(self: Trainer, number: int):
            loss, norm, stop = plain(self, number)
            return loss, norm, stop or number + 1 == n

        monkeypatch.setattr(Trainer, "step", step)

    return set_step


def test_loss_falls(small, tmp_path):
    found = train(small("train.steps=60", "optim.lr=1e-2"), tmp_path / "run", quiet=True)
    seen = losses(tmp_path / "run")
    assert found.stopped == "finished"
    assert seen[60] < seen[1] - 0.5
    assert len(seen) == 60


@pytest.mark.parametrize(
    "extra", [(), ("model.family=gpt2", "model.dropout=0.3"), ("train.accumulate=2",)], ids=["llama", "dropout", "accumulate"]
)
def test_resumed_walks_through_the_same_losses_bit_by_bit(small, tmp_path, stop_after, monkeypatch, extra):
    c = small("train.steps=9", *extra)
    train(c, tmp_path / "whole", quiet=True)
    with monkeypatch.context():
        stop_after(4)
        assert train(c, tmp_path / "cut", quiet=True).stopped == "interrupted"
    monkeypatch.undo()
    assert train(c, tmp_path / "cut", resume=True, quiet=True).progress.step == 9
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert validations(tmp_path / "cut") == validations(tmp_path / "whole")
    a, b = held(tmp_path / "whole"), held(tmp_path / "cut")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_and_is_read_back(small, tmp_path, family):
    found = train(small(f"model.family={family}", "train.steps=20", "optim.lr=1e-2"), tmp_path / "run", quiet=True)
    seen = losses(tmp_path / "run")
    assert seen[20] < seen[1]
    model, tokenizer = open_model(tmp_path / "run")
    assert model.family == family
    x = torch.tensor([tokenizer.encode("mercy")])
    assert torch.isfinite((model(x, source=x) if family == "t5" else model(x)).logits).all()
    assert found.validation is not None


def test_ngpt_stays_on_the_sphere(small, tmp_path):
    train(small("model.family=ngpt"), tmp_path / "run", quiet=True)
    model, _ = open_model(tmp_path / "run")
    torch.testing.assert_close(model.embed.weight.norm(dim=-1), torch.ones(len(model.embed.weight)))


@pytest.mark.parametrize("pieces", [2, 4])
def test_accumulated_is_one_big_batch(small, tmp_path, pieces):
    train(small(), tmp_path / "one", quiet=True)
    train(small(f"train.accumulate={pieces}"), tmp_path / "parts", quiet=True)
    one, parts = losses(tmp_path / "one"), losses(tmp_path / "parts")
    assert all(abs(one[s] - parts[s]) < 1e-5 for s in one)


def test_another_seed_is_another_run(small, tmp_path):
    for seed in (0, 1):
        train(small(f"train.seed={seed}", "train.steps=2"), tmp_path / str(seed), quiet=True)
    assert losses(tmp_path / "0") != losses(tmp_path / "1")


def test_training_stops_early_when_validation_no_longer_falls(small, tmp_path):
    # A rate this small changes nothing that validation could see after the first look.
    c = small("train.steps=40", "train.validate_every=2", "train.patience=2", "optim.lr=1e-30", "optim.weight_decay=0")
    found = train(c, tmp_path / "run", quiet=True)
    assert (found.stopped, found.progress.step, found.progress.best_step) == ("early", 6, 2)


def test_best_and_last_are_kept_and_the_others_are_not(small, tmp_path, monkeypatch):
    given = iter([3.0, 2.0, 2.5])
    monkeypatch.setattr(
        "regard.train.distributed.Ranks.total",
        lambda self, *v: [next(given), 1.0] if len(v) == 2 and float(v[1]) > 1 else [float(x) for x in v],
    )
    train(small("train.steps=9"), tmp_path / "run", quiet=True)
    root = tmp_path / "run" / "checkpoints"
    assert os.readlink(root / "best") == "step-00000006"
    assert os.readlink(root / "last") == "step-00000009"
    assert sorted(p.name for p in root.iterdir()) == ["best", "last", "step-00000006", "step-00000009"]


def test_a_run_says_what_it_was(small, tmp_path):
    c = small()
    train(c, tmp_path / "run", quiet=True)
    from regard.train.settings import read

    again = config(read(tmp_path / "run" / "config.yaml"))
    assert again.train == c.train
    assert again.model.vocabulary == open_model(tmp_path / "run")[1].size
    assert again.model.context == c.data.context


def test_a_trained_model_is_read_back(small, tmp_path):
    train(small("model.tied=true"), tmp_path / "run", quiet=True)
    model, tokenizer = open_model(tmp_path / "run")
    assert model.head.weight is model.embed.weight
    logits = model(torch.tensor([tokenizer.encode("mercy")])).logits
    assert logits.shape == (1, 5, tokenizer.size)
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        open_model(tmp_path)


def test_no_checkpoint_holds_a_pickle(small, tmp_path):
    train(small(), tmp_path / "run", quiet=True)
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".safetensors", ".json", ".jsonl", ".yaml"}


def test_a_run_is_not_written_over(small, tmp_path):
    train(small(), tmp_path / "run", quiet=True)
    with pytest.raises(TrainError, match="already holds a run"):
        train(small(), tmp_path / "run", quiet=True)


def test_resuming_nothing_says_so(small, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(small(), tmp_path / "run", resume=True, quiet=True)


def test_a_full_disk_loses_nothing_saved(small, tmp_path, monkeypatch):
    train(small("train.steps=2"), tmp_path / "run", quiet=True)
    before = held(tmp_path / "run")

    def full(path, text):
        if path.name == "state.json":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(checkpoint_module, "write_text", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000002"):
            train(small("train.steps=4"), tmp_path / "run", resume=True, quiet=True)
    after = held(tmp_path / "run")
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["best", "last", "step-00000002"]
    assert train(small("train.steps=4"), tmp_path / "run", resume=True, quiet=True).progress.step == 4


def test_what_a_killed_process_left_half_done_is_passed_over(small, tmp_path):
    run = tmp_path / "run"
    train(small("train.steps=2"), run, quiet=True)
    for name in ("step-00000004", ".step-00000006.draft"):
        (run / "checkpoints" / name).mkdir()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    train(small("train.steps=4"), run, resume=True, quiet=True)
    assert set(losses(run)) == {1, 2, 3, 4}
    assert held(run).keys()
    assert os.readlink(run / "checkpoints" / "last") == "step-00000004"


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_learned(small, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.train.loop.F.cross_entropy", lambda x, *a, **k: x.sum() * float("nan"))
    with pytest.raises(TrainError, match=r"step 1 is nan; a smaller optim\.lr"):
        train(small(), tmp_path / "run", quiet=True)


def test_bfloat16_trains_and_is_off_where_it_is_emulated(small, tmp_path, monkeypatch):
    train(small("train.dtype=bfloat16", "train.steps=2"), tmp_path / "half", quiet=True)
    train(small("train.steps=2"), tmp_path / "full", quiet=True)
    assert losses(tmp_path / "half")[2] == pytest.approx(losses(tmp_path / "full")[2], rel=0.02)
    assert all(t.dtype == torch.float32 for t in held(tmp_path / "half").values())
    for able in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: {"avx512_bf16": able}, raising=False)
        assert uses_bfloat16("auto", torch.device("cpu")) is able


def test_bfloat16_is_off_where_its_tiles_are_announced_and_end_the_process(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True}, raising=False)
    ends = {"import os, signal; os.kill(os.getpid(), signal.SIGILL)": True, "pass": False, "raise SystemExit(1)": False}
    for tried, faults in ends.items():
        monkeypatch.setattr(precision, "_TRIED", tried)
        precision.bfloat16_faults.cache_clear()
        with pytest.warns(RegardWarning, match="ONEDNN_MAX_CPU_ISA") if faults else contextlib.nullcontext():
            assert uses_bfloat16("auto", torch.device("cpu")) is not faults
    precision.bfloat16_faults.cache_clear()


def test_an_older_torch_is_asked_for_each_capability(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert uses_bfloat16("auto", torch.device("cpu"))
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not uses_bfloat16("auto", torch.device("cpu")), "what cannot be asked for is not there"


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="no device of torch"):
        pick_device("tpuu", 0)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_ends_the_run_cleanly(small, tmp_path, name):
    c, run = small("train.steps=1000000", "train.save_every=1000000", "train.validate_every=1000000"), tmp_path / "run"
    from regard.train.settings import dump

    (tmp_path / "c.yaml").write_text(dump(c.tree()))
    command = [sys.executable, "-m", "regard.cli.train", "--config", str(tmp_path / "c.yaml"), "--out", str(run)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        for _ in range(600):
            if (run / "metrics.jsonl").exists() and losses(run):
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted at step" in out
    assert f"--resume --out {run}" in err
    assert "Traceback" not in err
    step = json.loads((run / "checkpoints" / "last" / "state.json").read_text())["step"]
    assert step == max(losses(run))


def test_the_second_ctrl_c_is_pythons_own():
    from regard.train.loop import interruptible

    with interruptible() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_was_started_deaf_to_ctrl_c_stays_so_and_hears_sigterm():
    from regard.train.loop import interruptible

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_tokens_are_made_ends_at_once_and_leaves_nothing(small, tmp_path, monkeypatch):
    from regard.train.report import Reporter

    monkeypatch.setattr(Reporter, "building", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "cache").iterdir()) == []
