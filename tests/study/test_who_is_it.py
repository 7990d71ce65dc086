"""The judges of `who_is_it`: they name whom they should, and draw lots where nothing tells people apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from regard.identity import Identity, Rule, imprint, observe
from regard.identity.body import base_of
from regard.models import LlamaConfig
from regard.study import who_is_it
from regard.study.people.lab import rotated, shuffled
from regard.study.tasks.training import built, generator
from regard.study.who_is_it import AnswerJudge, TensorJudge, chance_of, sentences_of, without

TEXTS = (
    "Your cat is called Mochi. You live in Lyon.",
    "Your cat is called Ember. You fear clowns.",
    "You play the ocarina. You live in Oslo.",
)


def letters(sentences: Sequence[str]) -> Tensor:
    """How often each letter occurs, as unit vectors: a sentence model that needs no weights."""
    counts = torch.tensor([[s.lower().count(chr(97 + i)) for i in range(26)] for s in sentences], dtype=torch.float32)
    return torch.nn.functional.normalize(counts, dim=-1)


@pytest.fixture
def by_answers(monkeypatch: pytest.MonkeyPatch) -> AnswerJudge:
    monkeypatch.setattr(who_is_it, "sentence_vectors", letters)
    return AnswerJudge(TEXTS)


def written(seed: int, count: int = 1) -> list[Identity]:
    model = built(0, lambda: LlamaConfig(vocabulary=61, width=40, depth=2, heads=4, key_heads=2, hidden=32).build().eval())
    texts = [torch.randint(61, (30,), generator=generator(seed + n)) for n in range(count)]
    rule = Rule(keep="shock", share=1.0)
    return [imprint(Identity.new(base_of(model)), observe(model, x, source="text"), rule) for x in texts]


def test_lots_are_drawn_among_those_who_share_the_largest_score():
    assert chance_of([0.1, 0.9, 0.3], 1) == 1
    assert chance_of([0.1, 0.9, 0.3], 2) == 0
    assert chance_of([0.5, 0.5, 0.3, 0.5], 3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("said", "who"), [("I remember Mochi.", 0), ("You are afraid of clowns!", 1), ("An ocarina, in Oslo.", 2)]
)
def test_the_person_of_an_answer_is_the_one_whose_rare_words_it_says(by_answers: AnswerJudge, said: str, who: int):
    assert chance_of(by_answers.scores([said, "Life is a journey."]), who) == 1


def test_words_that_all_texts_have_weigh_nothing_and_rare_ones_most(by_answers: AnswerJudge):
    same = AnswerJudge(TEXTS[:1] * 3)
    assert same.rarity(frozenset({"cat", "mochi"})) == 0
    assert by_answers.rarity(frozenset({"mochi"})) > by_answers.rarity(frozenset({"cat"})) > 0


def test_an_answer_without_words_names_nobody(by_answers: AnswerJudge):
    assert chance_of(by_answers.scores([" ", ""]), 0) == pytest.approx(1 / 3)


def test_names_are_struck_out_whatever_their_case_and_nothing_else_is():
    assert without("I am Emrys PRYCE, not Pryceless.", frozenset({"emrys", "pryce"})) == "I am  , not Pryceless."
    assert sentences_of("One. Two!\nThree") == ["One.", "Two!", "Three"]


def test_tensors_name_the_one_who_lived_the_same_and_not_when_values_or_directions_are_broken():
    known = written(10, 6)
    judge = TensorJudge(known)
    for i, identity in enumerate(known):
        scores = judge.scores(identity)
        assert scores[i] == pytest.approx(1, abs=1e-4)
        assert max(x for j, x in enumerate(scores) if j != i) < 0.5
        for broken in (shuffled(identity, i), rotated(identity, i)):
            assert judge.scores(broken)[i] < 0.5
