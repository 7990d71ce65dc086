from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.train import TokenizerError
from regard.train.tokenizer import BPE, Byte, Char, learn, load

from .conftest import TEXT

WORDS = learn("bpe", [TEXT], 300)


@given(st.text())
def test_bytes_come_back_as_they_were(text):
    assert Byte().decode(Byte().encode(text)) == text


@given(st.text(min_size=1))
def test_characters_come_back_as_they_were(text):
    tokenizer = learn("char", [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < len(tokenizer) <= len(set(text)) + 1


@settings(deadline=None)
@given(st.text())
def test_byte_pairs_come_back_as_they_were_for_text_never_seen(text):
    assert WORDS.decode(WORDS.encode(text)) == text


def test_byte_pairs_are_fewer_than_bytes():
    assert len(WORDS.encode(TEXT)) < len(TEXT.encode()) / 1.5
    assert len(WORDS) == 300


@pytest.mark.parametrize("tokenizer", [Byte(), Char("abc\n"), WORDS], ids=["byte", "char", "bpe"])
def test_saved_is_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    again = load(tmp_path / "t.json")
    assert type(again) is type(tokenizer)
    assert len(again) == len(tokenizer)
    assert again.end == tokenizer.end
    assert again.encode("cab\n") == tokenizer.encode("cab\n")


def test_a_character_never_seen_is_named():
    with pytest.raises(TokenizerError, match="'z' was not in the corpus"):
        Char("abc").encode("abz")


def test_no_token_of_text_is_the_one_that_ends_a_document():
    assert Byte().end not in Byte().encode("".join(map(chr, range(300))))
    assert isinstance(WORDS, BPE)
    assert WORDS.end is not None


@pytest.mark.parametrize("content", ["{}", "not json", json.dumps({"format": "regard-tokenizer-1", "kind": "other"})])
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(TokenizerError):
        load(tmp_path / "t.json")
