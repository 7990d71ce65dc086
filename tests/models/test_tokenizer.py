"""Tokenizers of checkpoints, and chat templates, which are strangers' programs."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from regard import CheckpointError
from regard.models.chat import render
from regard.models.sentencepiece import Pieces, read_tokenizer_bin, tokenizer_bin
from regard.models.tokenizer import from_gguf, load_tokenizer

SPECIAL = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256))]
WORDS = [b" ", b"a", b"b", b"c", b"ab", b" ab", b"bc", b"abc", "é".encode()]
SCORES = [0.0] * 259 + [-9.0, -8.0, -8.0, -8.0, -2.0, -1.0, -3.0, -4.0, -5.0]


@pytest.fixture
def pieces() -> Pieces:
    return Pieces(SPECIAL + WORDS, SCORES)


def test_the_best_pair_anywhere_is_joined_first(pieces: Pieces) -> None:
    said = [pieces.pieces[i] for i in pieces.encode("abc ab")]
    assert said == [b" ab", b"c", b" ab"]


def test_a_character_that_is_no_piece_becomes_its_bytes(pieces: Pieces) -> None:
    assert pieces.encode("日")[1:] == [3 + b for b in "日".encode()]
    for text in ("abc", "日本 é", "  a", "\n"):
        assert pieces.decode(pieces.encode(text)) == text
    assert pieces.encode("") == []


def naive(pieces: Pieces, ids: list[int]) -> list[int]:
    """llama2.c's own loop: try every pair, join the best, start again."""
    table = {p: i for i, p in reversed(list(enumerate(pieces.pieces))) if i > 2}
    while True:
        found = [
            (pieces.scores[table[j]], -n)
            for n in range(len(ids) - 1)
            if (j := pieces.pieces[ids[n]] + pieces.pieces[ids[n + 1]]) in table
        ]
        if not found:
            return ids
        n = -max(found)[1]
        ids = [*ids[:n], table[pieces.pieces[ids[n]] + pieces.pieces[ids[n + 1]]], *ids[n + 2 :]]


@pytest.mark.parametrize("text", ["abcabcab ab bc", "cab bac abcb", "aaa bbb ccc", "abbc" * 9])
def test_the_heap_joins_as_the_plain_loop_does(pieces: Pieces, text: str) -> None:
    singles = [pieces.pieces.index(c.encode()) for c in " " + text]
    assert pieces.encode(text) == naive(pieces, singles)


def test_tokenizer_bin_comes_back_and_a_cut_one_is_refused(pieces: Pieces, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(pieces))
    words = load_tokenizer(tmp_path)
    assert words.encode("abc") == [1, *pieces.encode("abc")]
    assert words.decode(words.encode("abc")) == "abc"
    raw = (tmp_path / "tokenizer.bin").read_bytes()
    (tmp_path / "tokenizer.bin").write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match="says that it has"):
        read_tokenizer_bin(tmp_path / "tokenizer.bin")
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<ifi", 5, 0.0, -3))
    with pytest.raises(CheckpointError, match="-3 bytes"):
        read_tokenizer_bin(tmp_path / "tokenizer.bin")


def test_pieces_of_a_gguf_file_are_read() -> None:
    tokens = [p.decode().replace(" ", "▁") for p in SPECIAL + WORDS]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    words = from_gguf(metadata, "m.gguf")
    assert words.decode(words.encode("abc ab")) == "abc ab"
    with pytest.raises(CheckpointError, match="eos_token_id is 9999"):
        from_gguf({**metadata, "tokenizer.ggml.eos_token_id": 9999}, "m.gguf")
    with pytest.raises(CheckpointError, match="no whole tokenizer"):
        from_gguf({**metadata, "tokenizer.ggml.token_type": [1]}, "m.gguf")


def test_a_saved_tokenizer_is_transformers_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    words = load_tokenizer(smollm2)
    words.save(tmp_path)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi, 42 times?"}]
    text = words.chat(talk)
    assert text == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == ours.chat(talk)
    assert words.encode(text) == theirs.encode(text) == ours.encode(text)
    assert ours.special == words.special


def test_a_template_sees_messages_and_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    text = render(template, [{"role": "user", "content": "<b> & 1"}], bos_token="<s>", add_generation_prompt=True)
    assert text == "<s>user: <b> & 1\n>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ raise_exception('no system role') }}",
        "{% if %}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_a_hostile_or_broken_template_is_refused(template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        render(template, [{"role": "user", "content": "hello"}])


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path, pieces: Pieces) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(pieces))
    with pytest.raises(CheckpointError, match="without a chat template"):
        load_tokenizer(tmp_path).chat([{"role": "user", "content": "hello"}])
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "elsewhere")
