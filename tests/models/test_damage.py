"""Every file kind, damaged in every way: a model and a tokenizer that work, or our own error that says so.

REGARD_FUZZ=20000 runs as many damages instead of a few for each file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from corpus import TALK, Damage, files, sentencepiece, write_checkpoints, write_tokenizer
from tokenizers import Tokenizer as Inner

from regard import CheckpointError
from regard.models.convert import load
from regard.models.tokenizer import load_tokenizer

EACH = 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(root)
    return root


def read(path: Path) -> list[str]:
    """What stands beside a damaged file, read as a user would; which readers refused it."""
    source = path if path.suffix == ".gguf" else path.parent / "m.bin" if "bin" in path.parent.name else path.parent
    refused: list[str] = []
    try:
        model = load(source)
        assert sum(p.numel() for p in model.parameters()) < 1 << 20
        assert not any(p.is_meta for p in model.parameters())
    except CheckpointError:
        refused.append("model")
    try:
        words = load_tokenizer(source)
        ids = words.encode("once upon a time é 日\n")
        words.decode(ids[2:], after=ids[:2])
        words.decode(ids, special=True)
        assert all(isinstance(i, int) for i in words.eos_ids)
        words.encode(words.chat(TALK))
    except CheckpointError:
        refused.append("tokenizer")
    return refused


def test_every_damage_is_read_or_refused_by_name(checkpoints: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = files(checkpoints)
    count = int(os.environ.get("REGARD_FUZZ", EACH * len(found)))
    seen = {"model": 0, "tokenizer": 0}
    for seed in range(count):
        path = found[seed % len(found)]
        whole = path.read_bytes()
        try:
            path.write_bytes(Damage(seed)(whole, path.suffix == ".json"))
            for what in read(path):
                seen[what] += 1
        except BaseException as error:
            pytest.fail(f"damage {seed} to {path.parent.name}/{path.name}: {type(error).__name__}: {error}")
        finally:
            path.write_bytes(whole)
    # Panics of libraries in Rust are said on stderr before they become our error.
    capfd.readouterr()
    with capfd.disabled():
        print(f" {count} damages: {seen['model']} models and {seen['tokenizer']} tokenizers refused ", end="")
    assert min(seen.values()) > count // 20, "damage that nobody notices damages nothing"


def test_undamaged_checkpoints_are_read(checkpoints: Path) -> None:
    for path in files(checkpoints):
        assert read(path) in ([], ["tokenizer"])
    with torch.no_grad():
        assert load(checkpoints / "routing")(torch.tensor([[1, 2]])).logits.shape == (1, 2, 40)


def test_a_panic_of_the_tokenizers_library_is_our_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, sentencepiece())
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(values))
    with pytest.raises(BaseException, match="no entry found for key") as raw:
        Inner.from_file(str(path)).encode("once", add_special_tokens=True)
    assert not isinstance(raw.value, Exception), "the library raises an Exception now: find another panic"
    with pytest.raises(CheckpointError, match="PanicException"):
        load_tokenizer(tmp_path).encode("once", framed=True)
