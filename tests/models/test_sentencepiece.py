"""`.model` files of SentencePiece: the ids are those that the package sentencepiece 0.2.2 gives.

bpe.model falls back to bytes and keeps spaces as they are; unigram.model has rules for characters (Ａ, ﬁ, tabs), joins spaces, has a
piece `<sep>` that a user defined, and no beginning of a text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard import CheckpointError
from regard.models.sentencepiece import BPE, UNIGRAM, read_model
from regard.models.tokenizer import load_tokenizer

HERE = Path(__file__).parent / "sentencepiece"
EXPECTED: dict[str, list[tuple[str, list[int]]]] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_text_becomes_the_ids_that_sentencepiece_gives(name: str) -> None:
    words = load_tokenizer(HERE / f"{name}.model")
    for text, ids in EXPECTED[name]:
        assert words.encode(text, bos=False) == ids, text


def test_bytes_bring_every_text_back() -> None:
    words = load_tokenizer(HERE / "bpe.model")
    for text, ids in EXPECTED["bpe"]:
        assert words.decode(ids) == text


def test_the_file_says_which_ids_are_special() -> None:
    bpe, unigram = (load_tokenizer(HERE / f"{name}.model").special for name in ("bpe", "unigram"))
    assert (bpe.unknown, bpe.bos, bpe.eos, bpe.pad, bpe.add_bos) == (0, 1, 2, None, True)
    assert (unigram.unknown, unigram.bos, unigram.eos, unigram.pad, unigram.add_bos) == (2, None, 1, 3, False)
    assert [read_model(HERE / f"{name}.model").kind for name in ("bpe", "unigram")] == [BPE, UNIGRAM]


def test_a_piece_that_a_user_defined_is_never_cut() -> None:
    words = load_tokenizer(HERE / "unigram.model")
    assert len([i for i in words.encode("a<sep>b") if words.decode([i], special=True) == "<sep>"]) == 1


def test_a_folder_is_read_with_its_model_and_saved_as_tokenizer_json(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes((HERE / "bpe.model").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "chat_template": "{{ messages }}"}')
    words = load_tokenizer(folder)
    assert (words.special.add_bos, words.template) == (False, "{{ messages }}")
    words.save(tmp_path)
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.special == words.special
    for text, ids in EXPECTED["bpe"]:
        assert again.encode(text) == ids


@pytest.mark.parametrize("cut", [1, 7, 500, 9000])
def test_a_damaged_model_is_refused_by_name(cut: int, tmp_path: Path) -> None:
    data = (HERE / "bpe.model").read_bytes()
    (tmp_path / "x.model").write_bytes(data[:cut] + b"\xff" * 16)
    with pytest.raises(CheckpointError, match=r"x\.model"):
        load_tokenizer(tmp_path / "x.model")


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "0 pieces"), (b"not a model at all", "x.model"), (b"\x0a\x02\x0a\x00" * 2, "each once")]
)
def test_what_is_no_model_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(tmp_path / "x.model")


def test_a_kind_that_is_not_read_says_what_to_do(tmp_path: Path) -> None:
    # The last field of a message wins: a trainer_spec behind the others, whose model_type is 4, characters.
    (tmp_path / "x.model").write_bytes((HERE / "bpe.model").read_bytes() + b"\x12\x02\x18\x04")
    with pytest.raises(CheckpointError, match=r"of type 4.*tokenizer\.json"):
        load_tokenizer(tmp_path / "x.model")
