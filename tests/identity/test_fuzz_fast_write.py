"""The file of the trained fast write: whole, or refused by name."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import damages
import pytest
import torch
from damages import bytes_damaged, header_damaged
from safetensors.torch import load_file, save_file

from regard.errors import CheckpointError
from regard.identity.write import fast_write as learn


def save(numbers: dict[str, torch.Tensor], path: Path, **about: object) -> None:
    said = {"fingerprint": "x", **about}
    save_file(numbers, path, metadata={"format": "pt", "about": json.dumps(said)})


@pytest.fixture
def numbers() -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in load_file(learn.FILE).items()}


def test_what_is_shipped_is_whole():
    found = learn.read_file(learn.FILE)
    raw = learn.FILE.read_bytes()
    about = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["about"])
    assert about["digest"] == learn.digest(found.numbers)
    assert found.fingerprint == about["fingerprint"]


def test_a_damaged_file_is_refused_or_holds_the_same_numbers(tmp_path, monkeypatch):
    path, data, r = tmp_path / "fast_write.safetensors", learn.FILE.read_bytes(), random.Random(0)
    whole, refused = learn.read_file(learn.FILE).numbers, 0
    monkeypatch.setattr(learn, "FILE", path)
    for n in range(damages.rounds(300)):
        path.write_bytes(bytes_damaged(data, r) if r.randrange(2) else header_damaged(data, r))
        learn.forget_shipped()
        try:
            found = learn.shipped().numbers
        except CheckpointError:
            refused += 1
        else:
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[k], whole[k]) for k in whole), f"round {n}"
    learn.forget_shipped()
    assert refused > damages.rounds(300) // 2


@pytest.mark.parametrize("what", ["absent", "folder", "pipe", "device"])
def test_what_is_no_plain_file_is_refused(tmp_path, what, monkeypatch):
    path = tmp_path / "fast_write.safetensors"
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            pass
    monkeypatch.setattr(learn, "FILE", path)
    learn.forget_shipped()
    with pytest.raises(CheckpointError, match="fast_write"):
        learn.shipped()


def test_numbers_of_another_shape_type_or_that_are_not_finite_are_refused(tmp_path, numbers):
    path = tmp_path / "x.safetensors"
    changes = [
        ({"self.value": None}, "lacks or adds self.value"),
        ({"more": torch.zeros(1)}, "lacks or adds more"),
        ({"self.value": torch.zeros(3)}, r"self\.value is \(3,\)"),
        ({"slots.shift": numbers["slots.shift"].double()}, "float64"),
        ({"self.key": numbers["self.key"] * float("nan")}, "finite"),
        ({"mean.k": torch.zeros(2, 2)}, r"mean\.k is \(2, 2\)"),
        ({"mean.k": torch.zeros(2, 2, 4)}, "should be"),
    ]
    for change, says in changes:
        save({n: x for n, x in {**numbers, **change}.items() if x is not None}, path)
        with pytest.raises(CheckpointError, match=says):
            learn.read_file(path)
    save(numbers, path, digest="0" * 64)
    with pytest.raises(CheckpointError, match="do not match their digest"):
        learn.read_file(path)
    save(numbers, path)
    assert learn.read_file(path).fingerprint == "x"
