"""A continuation reads as it would after its prompt, whatever the tokenizer, whole or token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from corpus import TOKENIZERS, pieces, write_tokenizer
from exports import write_bin

from regard.models import LlamaConfig
from regard.models.continuation import Continuation
from regard.models.decode.generate import Sampling, Token, generate
from regard.models.decode.stream import Stream
from regard.models.sentencepiece import tokenizer_bin
from regard.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["once upon a time", "on  ce\nup 日本 é.", "a don't upon. s"]


@pytest.fixture(params=[*TOKENIZERS, "pieces"])
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "pieces":
        (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(pieces()))
    else:
        write_tokenizer(tmp_path, TOKENIZERS[request.param]())
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bos", [True, False])
def test_prompt_and_continuation_make_the_whole_text_at_every_cut(words: Tokenizer, text: str, bos: bool) -> None:
    ids = words.encode(text, bos=bos)
    whole = words.decode(ids)
    for cut in range(len(ids) + 1):
        start = words.decode(ids[:cut])
        if "\ufffd" in start:
            # The cut goes through a character; what is whole before it stays.
            start = start.rstrip("\ufffd")
        assert start + words.decode(ids[cut:], after=ids[:cut]) == whole, cut
        written = Continuation(words.decode, ids[:cut])
        for i in ids[cut:]:
            written.push(i)
        assert start + written.text == whole, cut
        assert written.text == written.stable


def test_sentencepiece_keeps_the_space_before_a_continued_word(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(pieces()))
    words = load_tokenizer(tmp_path)
    prompt = words.encode("once")
    assert words.decode(words.encode("once upon a")[len(prompt) :], after=prompt) == " upon a"
    assert words.decode(prompt) == "once"


def test_a_long_prompt_of_special_tokens_still_gives_the_space(words: Tokenizer) -> None:
    first, second = words.encode("once", bos=False), words.encode("once upon", bos=False)
    prompt = [*first, *[2] * 50]
    assert words.decode(prompt) == "once"
    assert words.decode([*prompt, *second[len(first) :]]) == words.decode(second)
    assert "once" + words.decode(second[len(first) :], after=prompt) == words.decode(second)


@pytest.mark.parametrize("stop", [(), ("upon a",), ("zzz", "n a t")])
def test_streamed_pieces_make_the_text_and_stop_texts_never_show(words: Tokenizer, stop: tuple[str, ...]) -> None:
    ids = words.encode(TEXTS[0], bos=False)
    if words.decode(ids) != TEXTS[0]:
        pytest.skip("a vocabulary without these words")
    seen: list[Token] = []
    stream = Stream(0, ids[:1], Sampling(max_tokens=99, stop=stop), words, seen.append)
    for n, i in enumerate(ids[1:], 2):
        stream.push(i, torch.zeros(1), last=n == len(ids))
    expected = TEXTS[0][len(words.decode(ids[:1])) :]
    for end in stop:
        expected = expected.partition(end)[0]
    assert stream.text() == expected
    assert "".join(t.text for t in seen) == expected
    assert stream.ending == ("stop" if stop else "length")


def test_bytes_that_are_no_character_are_given_out_and_do_not_pile_up() -> None:
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return bytes(ids).decode("utf-8", errors="replace")

    written = Continuation(decode, list(b"prompt"))
    for byte in b"\xff" * 200 + b"ok":
        written.push(byte)
    assert written.stable == "\ufffd" * 200 + "ok"
    assert max(calls) < 30


def test_a_story_of_llama2c_ends_where_the_next_would_begin(tmp_path: Path) -> None:
    write_bin(tmp_path / "m.bin", versioned=True, tied=True)
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(pieces()))
    words = load_tokenizer(tmp_path / "m.bin")
    assert words.eos_ids == (2, 1)
    model = LlamaConfig(vocabulary=len(pieces().pieces), width=16, depth=1, heads=2, key_heads=1, hidden=8).build()
    with torch.no_grad():
        # Every next token is BOS.
        model.norm.weight.zero_()
        model.norm.weight[0] = 1
        model.embed.weight[:, 0] = 1
        model.embed.weight[1, 0] = 100
        model.embed.weight[:, 1:] = 0
    out = generate(model, "once upon", Sampling(max_tokens=9, temperature=0.0), tokenizer=words)
    assert (out.tokens, out.finish) == ([[]], ["stop"])


def test_ids_beyond_the_vocabulary_say_nothing(words: Tokenizer) -> None:
    ids = words.encode("once upon", bos=False)
    assert words.decode([*ids, 10**6]) == words.decode(ids)


def test_a_tokenizer_saved_beside_its_model_keeps_its_ids(words: Tokenizer, tmp_path: Path) -> None:
    other = Tokenizer(words.coder, type(words.special)(1, 2, 0, 0, True, (5, 7)), "{{ messages[0].content }}")
    (tmp_path / "saved").mkdir()
    other.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.special == other.special
    assert again.eos_ids == (2, 5, 7)
    assert again.chat([{"role": "user", "content": "hi"}]) == "hi"
    assert again.encode("once upon") == other.encode("once upon")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text()) == {"eos_token_id": [2, 5, 7]}
