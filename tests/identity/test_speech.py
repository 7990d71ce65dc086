"""Who speaks: roles, sentences, questions and words, by punctuation and letters of any script."""

from __future__ import annotations

import pytest
import torch
from lives import TEXT, letters, llama, says, speaking

from regard.errors import ShapeError
from regard.identity.experience import Experience, observe, tokenised
from regard.identity.speech import ASSISTANT, MARKUP, USER, Speech, is_question, token_texts

CHAT = [
    {"role": "system", "content": "Be kind."},
    *says("I am Mara. Who are you? My cat is 3.5 kg!", "Hello Mara! How are you?"),
]


def spoken(chat: list[dict[str, str]] | str) -> tuple[list[int], Speech]:
    ids, roles = tokenised(chat, letters())
    return ids, Speech.of(ids, roles, letters())


def parts(ids: list[int], number: torch.Tensor) -> list[str]:
    """The text of every sentence or word."""
    texts = token_texts(ids, letters())
    return ["".join(t for t, n in zip(texts, number.tolist(), strict=True) if n == m) for m in range(int(number.max()) + 1)]


def test_every_token_of_a_chat_has_its_speaker_and_the_system_is_markup():
    ids, speech = spoken(CHAT)
    texts = token_texts(ids, letters())
    said = {
        role: "".join(t for t, r in zip(texts, speech.role.tolist(), strict=True) if r == role) for role in (USER, ASSISTANT)
    }
    assert said == {USER: CHAT[1]["content"], ASSISTANT: CHAT[2]["content"]}
    assert bool((speech.sentence[speech.role == MARKUP] == -1).all())
    assert bool((speech.word[speech.role == MARKUP] == -1).all())


def test_a_plain_text_is_the_users_own_words_but_for_its_sink():
    ids, speech = spoken("I am Mara.")
    assert speech.role.tolist() == [MARKUP] + [USER] * (len(ids) - 1)


def test_sentences_end_at_their_marks_and_with_their_speaker_and_questions_are_known():
    ids, speech = spoken(CHAT)
    sentences = ["I am Mara.", " Who are you?", " My cat is 3.5 kg!", "Hello Mara!", " How are you?"]
    assert parts(ids, speech.sentence) == sentences
    assert speech.asks.tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("sentence", "asks"),
    [("どこですか？", True), ("猫です。", False), ("¿Qué tal?", True), ("أين؟", True), ('"Really?"', True), ("No.", False), ("", False), ("A? b", False)],
)  # fmt: skip
def test_a_question_is_known_by_its_mark_in_any_script(sentence: str, asks: bool):
    assert is_question(sentence) is asks


def test_letters_and_digits_that_touch_are_one_word_and_marks_stand_alone():
    ids, speech = spoken([{"role": "user", "content": "Tom's cat, 35 kg"}])
    assert parts(ids, speech.word) == ["Tom", "'", "s", " ", "cat", ",", " ", "35", " ", "kg"]
    texts = token_texts(ids, letters())
    marks = [t for t, known, r in zip(texts, speech.letters.tolist(), speech.role.tolist(), strict=True) if r and not known]
    assert marks == ["'", " ", ",", " ", " "]


def test_token_ids_alone_are_one_sentence_in_which_every_token_is_a_word():
    e = observe(llama(), TEXT)
    assert set(e.speech.sentence[e.content].tolist()) == {0}
    assert e.speech.word[e.content].tolist() == list(range(int(e.content.sum())))
    assert not e.speech.asks.any()


def test_a_speech_of_another_length_is_refused():
    e = observe(speaking(), CHAT, letters())
    with pytest.raises(ShapeError, match="every token has one"):
        Experience(e.base, e.tokens, e.content, e.shock, e.q, e.k, e.v, e.body, speech=Speech.plain([False, True]))
