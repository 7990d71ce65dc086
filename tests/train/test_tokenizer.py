from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.models.objectives import END
from regard.models.tokenizer import Bytes, Characters, Subwords, load_tokenizer
from regard.train import TokenizerError
from regard.train.tokenizer import learn

from .conftest import TEXT

BYTES, WORDS = learn("byte", []), learn("bpe", [TEXT], 300)


@given(st.text())
def test_bytes_come_back_as_they_were(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.text(min_size=1))
def test_characters_come_back_as_they_were(text):
    tokenizer = learn("char", [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < tokenizer.size <= len(set(text)) + 1


@given(st.text(min_size=1))
def test_characters_and_bytes_are_what_the_package_reads_from_the_same_file(text):
    for tokenizer in (learn("char", [text]), BYTES):
        assert tokenizer.encode(text) == Subwords(tokenizer.coder.inner).encode(text)


@settings(deadline=None)
@given(st.text())
def test_byte_pairs_come_back_as_they_were_for_text_never_seen(text):
    assert WORDS.decode(WORDS.encode(text)) == text


def test_byte_pairs_are_fewer_than_bytes():
    assert len(WORDS.encode(TEXT)) < len(TEXT.encode()) / 1.5
    assert WORDS.size == 300


@pytest.mark.parametrize(
    ("tokenizer", "coder"),
    [(BYTES, Bytes), (learn("char", ["abc"]), Characters), (WORDS, Subwords)],
    ids=["byte", "char", "bpe"],
)
def test_saved_is_loaded(tokenizer, coder, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again.coder) is type(tokenizer.coder) is coder
    assert again.files() == tokenizer.files()
    assert (again.size, again.special, again.template) == (tokenizer.size, tokenizer.special, tokenizer.template)
    assert again.encode("cab\n") == tokenizer.encode("cab\n")


def test_a_character_never_seen_is_named():
    with pytest.raises(TokenizerError, match="'z' was not in the corpus"):
        learn("char", ["abc"]).encode("abz")


def test_no_byte_of_text_is_the_token_that_ends_a_document():
    assert BYTES.special.eos == 256
    assert 256 not in BYTES.encode(f"a document that spells {END}")
    assert WORDS.special.eos is not None


def test_a_kind_that_cannot_be_learned_is_named():
    with pytest.raises(TokenizerError, match="'model' cannot be learned"):
        learn("model", [TEXT])
