"""The small data that studies share: tables of scikit-learn, questions with answers, nouns that a pronoun tells apart."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import iris_rows

import regard
from regard.study.tasks.antecedents import FIRST, PRONOUN, SECOND, VERBS, not_told_apart, sentences, told_apart
from regard.study.tasks.questions import is_right, questions
from regard.study.tasks.tables import digits, iris, split, standardised, wine


def test_tables_have_their_published_sizes_and_classes() -> None:
    for table, shape, classes in ((iris(), (150, 4), 3), (wine(), (178, 13), 3), (digits(), (1797, 64), 10)):
        assert tuple(table.features.shape) == shape
        assert sorted(table.labels.unique().tolist()) == list(range(classes))
    assert digits().features.amax() == 16


def test_iris_is_the_one_that_the_other_tests_read() -> None:
    features, labels = iris_rows()
    assert torch.allclose(standardised(iris().features), features)
    assert torch.equal(iris().labels, labels)


def test_what_a_caller_does_to_a_table_stays_with_the_caller() -> None:
    iris().features.zero_()
    assert iris().features.sum() > 0


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.study.tasks import tables

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    tables._load.cache_clear()
    try:
        with pytest.raises(regard.CheckpointError, match=r"regard\[study\]"):
            tables.iris()
    finally:
        tables._load.cache_clear()


def test_standardised_columns_have_mean_zero_and_deviation_one_where_measured() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [9.0, 7.0]], dtype=torch.float64)
    assert standardised(x, torch.tensor([0, 1])).tolist() == [[-1, 0], [1, 0], [7, 2]]


def test_split_takes_every_row_once_and_the_same_for_the_same_seed() -> None:
    one, two = split(10, seed=3, share=0.4)
    assert len(one) == 4
    assert sorted([*one.tolist(), *two.tolist()]) == list(range(10))
    assert torch.equal(one, split(10, seed=3, share=0.4)[0])
    with pytest.raises(regard.ShapeError, match="share"):
        split(10, seed=0, share=1.0)


@pytest.mark.parametrize(
    ("said", "answers", "right"),
    [
        ("Paris, which", ("Paris",), True),
        ("paris", ("Paris",), True),
        ("Parisian food", ("Paris",), False),
        ("the city of\nParis", ("Paris",), False),
        ("Au.", ("Au",), True),
        ("au", ("Au",), False),
        ("120", ("12",), False),
        ("shut", ("closed", "shut"), True),
        ("anything", (), False),
    ],
)
def test_an_answer_is_right_when_it_stands_in_the_first_line_as_whole_words(
    said: str, answers: tuple[str, ...], right: bool
) -> None:
    assert is_right(said, answers) is right


def test_there_are_enough_questions_and_nothing_is_right_of_what_does_not_exist() -> None:
    every = questions(seed=0)
    assert sum(bool(q.answers) for q in every) >= 150
    assert all(bool(q.answers) != q.kind.startswith("made-up") for q in every)
    assert len({q.text for q in every}) == len(every)
    for seed in (1, 2):
        assert not {q.text for q in every} & {q.text for q in questions(seed)}
    # Nothing but a quotient may be read off its own question.
    assert {q.subject for q in every if is_right(q.text, q.answers)} == {"36 / 6", "81 / 9"}


def test_there_are_fifty_pairs_of_nouns_and_more_and_each_sentence_has_its_words_in_their_places() -> None:
    pairs = told_apart()
    assert len(set(pairs)) == len(pairs) >= 50
    for pair in [*pairs, *not_told_apart()]:
        made = sentences(pair, VERBS[0])
        assert len(made) == 4
        for text, place in made:
            words = text.split()
            assert len(words) == PRONOUN + 1
            assert {words[FIRST], words[SECOND]} == {pair.one, pair.other}
            assert words[place] == (pair.one if words[PRONOUN] == pair.its_pronoun else pair.other)
