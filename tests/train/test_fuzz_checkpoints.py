"""Damaged runs and token caches: refused by name, made again, or read right; never another error, and never other numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import damages
import pytest
import torch
from damages import bytes_damaged, header_damaged, json_damaged

from regard.errors import RegardError
from regard.models import Sampling, generate
from regard.models.downloads import open_model
from regard.models.objectives import Marks
from regard.models.runs import digest, sealed
from regard.train import config, train
from regard.train import data as data_module
from regard.train.begin import same_run
from regard.train.checkpoint import Store, iter_metrics
from regard.train.distributed import Ranks
from regard.train.examples import Drawing, Windows
from regard.train.optim import adamw
from regard.train.restore import read_progress
from regard.train.settings import dump, read, yaml

from .conftest import SMALL, TEXT

ROUNDS = damages.rounds(90)
KINDS = ["char", "bpe"]
NAMES = [
    "state.json", "config.json", "train.yaml", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    "optimizer.safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A finished run with each tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    for kind in KINDS:
        given = [f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", f"data.tokenizer={kind}"]
        train(config({}, [*SMALL, *given, "data.vocabulary=280", "train.steps=2"]), folder / kind, quiet=True)
    return folder


def damaged(name: str, data: bytes, r: random.Random) -> bytes:
    if r.randrange(2) or name.endswith("jsonl"):
        return bytes_damaged(data, r)
    if name.endswith(".safetensors"):
        return header_damaged(data, r)
    if name.endswith(".yaml"):
        try:
            return dump(json_damaged(yaml().safe_load(data), r)).encode()
        except (UnicodeEncodeError, ValueError):
            return b"\xff"
    return json.dumps(json_damaged(json.loads(data), r)).encode()


def resealed(folder: Path) -> None:
    """As somebody would who wants the damage to be believed; or an earlier version, which had no digests."""
    path = folder / "state.json"
    try:
        record = json.loads(path.read_bytes())
        record.pop("check", None)
        record["files"] = {n: digest((folder / n).read_bytes()) for n in NAMES[1:]}
        path.write_text(json.dumps(sealed(record)))
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError):
        return


def everything(run: Path, c, model, optimizer) -> torch.Tensor:
    """All that reads a run: its model, its progress, its optimizer, its metrics."""
    loaded, tokenizer = open_model(run)
    tokens = tokenizer.encode("mercy") or [0]
    generate(loaded, [tokens], Sampling(max_tokens=1))
    logits = loaded(torch.tensor([tokens])).logits
    tokenizer.decode(tokens)
    store = Store(run, Ranks())
    last = store.last()
    assert last is not None
    progress = read_progress(last)
    same_run(c, last, loaded, progress, progress.source.text if progress.source else "", False)
    store.load(model, optimizer)
    assert all(isinstance(r, dict) for r in iter_metrics(run))
    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("believed", [False, True], ids=["as it is", "with its digests made anew"])
def test_a_damaged_run_is_refused_by_name(runs, tmp_path, kind, believed):
    run = tmp_path / "run"
    shutil.copytree(runs / kind, run, symlinks=True)
    folder = (run / "checkpoints" / "last").resolve()
    c = config(read(run / "config.yaml"))
    whole = everything(run, c, model := c.model.build(), optimizer := adamw(model, c.optim))
    kept = {path: path.read_bytes() for path in [*(folder / n for n in NAMES), run / "metrics.jsonl"]}
    r, refused = random.Random(f"{kind} {believed}"), 0
    for n in range(ROUNDS):
        path = r.choice(list(kept))
        new = damaged(path.name, kept[path], r)
        path.write_bytes(new)
        if believed:
            resealed(folder)
        try:
            found = everything(run, c, model, optimizer)
            if not believed and path.name != "state.json":
                # A digest was right: so is what was read.
                assert torch.equal(found, whole), f"round {n}, {path.name}"
                assert path.name == "metrics.jsonl" or new == kept[path], f"round {n}, {path.name}"
        except RegardError:
            refused += 1
        finally:
            for p in {path, folder / "state.json"}:
                p.write_bytes(kept[p])
    assert refused > ROUNDS // 4
    assert torch.equal(everything(run, c, model, optimizer), whole)


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "gone", "device"])
@pytest.mark.parametrize("name", [*NAMES, "metrics.jsonl"])
def test_what_is_no_plain_file_is_never_read(runs, tmp_path, name, what):
    run = tmp_path / "run"
    shutil.copytree(runs / "char", run, symlinks=True)
    path = run / name if name == "metrics.jsonl" else (run / "checkpoints" / "last").resolve() / name
    c = config(read(run / "config.yaml"))
    path.unlink()
    match what:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(run / "nowhere")
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            pass
    with pytest.raises(RegardError):
        everything(run, c, model := c.model.build(), adamw(model, c.optim))
    if name == "metrics.jsonl" and what in ("pipe", "folder", "device"):
        with pytest.raises(RegardError, match=r"metrics\.jsonl"):
            train(config(read(run / "config.yaml"), ["train.steps=4"]), run, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("num_hidden_layers=1024", "asks for 1024 layers"),
        ("num_hidden_layers=1073741824", "it must be a whole number in"),
        ("vocab_size=16777216", "the configuration asks for"),
        ("hidden_size=65536", "the configuration asks for"),
        ("intermediate_size=1048576", "the configuration asks for"),
    ],
)
def test_a_config_that_claims_more_than_the_file_holds_is_refused_before_memory_is_asked_for(
    runs, tmp_path, setting, says, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(runs / "char", run, symlinks=True)
    folder = (run / "checkpoints" / "last").resolve()
    name, value = setting.split("=")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: int(value)}))
    resealed(folder)
    built = []
    # Only the outline, on the device that holds no numbers, may be made.
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *a, **k: built.append(self.device.type) or self)
    with pytest.raises(RegardError, match=says):
        open_model(run)
    assert set(built) <= {"meta"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_token_cache_is_made_again(runs, tmp_path, kind):
    run = read(runs / kind / "config.yaml")
    c = config({"data": {**run["data"], "cache": str(tmp_path / "cache")}}).data
    folder = data_module.tokens(c).folder
    kept = {p: p.read_bytes() for p in folder.iterdir()}
    whole = data_module.tokens(c).values.tolist()
    r = random.Random(kind)
    for n in range(ROUNDS):
        path = r.choice(list(kept))
        path.write_bytes(damaged(path.name if path.suffix == ".json" else "x.jsonl", kept[path], r))
        if path.name == "tokenizer.json":
            # It has no digest; what is read has to be a tokenizer all the same.
            found = data_module.opened(folder)
            assert found is None or found.tokenizer.size > 0
        else:
            assert data_module.tokens(c).values.tolist() == whole, f"round {n}, {path.name}"
        for p, data in kept.items():
            p.write_bytes(data)


def test_a_token_beyond_the_vocabulary_is_damage(runs):
    c = config(read(runs / "char" / "config.yaml"))
    found = data_module.tokens(c.data)
    w = Windows(found.values, 8, Drawing(4, 0, marks=Marks(3)))
    with pytest.raises(data_module.DataError, match="of a vocabulary of 3: it is damaged"):
        w.at(0)
