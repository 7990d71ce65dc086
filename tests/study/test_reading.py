"""How a reader is learned, on a tiny model: zeros change nothing, learning lowers the loss, and what is shipped is what was learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lives import letters, speaking

from regard.identity.body import frozen
from regard.identity.read import reader
from regard.identity.read.finding import finder_of
from regard.study.people import reading
from regard.study.people.asking import Examiner
from regard.study.people.natural import NaturalFact, NaturalPerson, NaturalQuestion
from regard.study.people.reading import Example, Moves, examples, learned, loss_of, save
from regard.study.people.written import written, written_replies

TOLD = ("My cat is called Mochi.", "The boat leaves at nine.")


def person() -> NaturalPerson:
    chat = ({"role": "user", "content": TOLD[0]}, {"role": "assistant", "content": "Mm."}, {"role": "user", "content": TOLD[1]})
    asked = (("What is my cat called?", "Mochi", 0), ("When does the boat leave?", "nine", 2))
    facts = tuple(NaturalFact(f"fact {n}", a, (a,), (0, m), "plain", None) for n, (_, a, m) in enumerate(asked))
    questions = tuple(NaturalQuestion(q, (a,), (), n, (0, m), f"fact {n}") for n, (q, a, m) in enumerate(asked))
    return NaturalPerson("Ada", "own", "natural", facts, (chat,), (), questions, ())


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(speaking(), letters())


@pytest.fixture(scope="module")
def some(examiner: Examiner) -> list[Example]:
    return examples(examiner, [person()], [["It is Mochi.", None]])


def test_examples_are_questions_that_somebody_wrote_a_sentence_for(some: list[Example]) -> None:
    assert [(e.answer, e.sentence) for e in some] == [("Mochi", "It is Mochi.")]


def test_zeros_change_nothing_and_learning_lowers_the_loss(
    examiner: Examiner, some: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "EPOCHS", 12)
    monkeypatch.setattr(reading, "BATCH", 2)
    with frozen(examiner.model):
        finder = finder_of(examiner.body, examiner.tokenizer)
        plain, moves = (loss_of(examiner, m, some[0], "Mochi", ends=True).item() for m in (None, Moves(finder, some[0].reads)))
        assert moves == pytest.approx(plain, abs=1e-5)
        found = learned(examiner, some)
        assert loss_of(examiner, found, some[0], "Mochi", ends=True).item() < plain - 0.01


def test_what_is_shipped_is_the_share_of_what_was_learned(
    examiner: Examiner, some: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(finder_of(examiner.body, examiner.tokenizer), some[0].reads)
    with torch.no_grad():
        for p in moves.parameters():
            p.normal_()
    save(moves, "x", tmp_path / "reader.safetensors")
    monkeypatch.setattr(reader, "FILE", tmp_path / "reader.safetensors")
    reader.shipped.cache_clear()
    try:
        mine = reader.shipped()
    finally:
        monkeypatch.undo()
        reader.shipped.cache_clear()
    named = moves.named()
    for name, x in zip(("before.k", "before.v", "after.k", "after.v"), (*mine.before, *mine.after), strict=True):
        torch.testing.assert_close(x, reading.SHARE * named[name].detach(), atol=1e-2, rtol=1e-2)
    assert mine.fingerprint == "x"


@pytest.mark.parametrize("pool", ["many", "more"])
def test_sentences_hold_the_answers_that_they_were_written_around(pool: str) -> None:
    crowd, replies = written(pool), written_replies(pool)  # pyright: ignore
    said = [(q.value, x) for p, row in zip(crowd, replies, strict=True) for q, x in zip(p.questions, row, strict=True) if x]
    assert len(said) > 300
    assert all(value.casefold() in sentence.casefold() for value, sentence in said)
    assert {len(r) for r in replies} == {len(p.questions) for p in crowd}
