"""Whether a question is about the asker's life, and how the episodes of a life fit it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from math import log

import pytest
import torch
import torch.nn.functional as F
from lives import letters, llama, nobody, says, speaking
from torch import Tensor

from regard.identity import Identity, Rule, imprint, observe
from regard.identity.body import body_of
from regard.identity.episodes import Episode
from regard.identity.packed import Packed
from regard.identity.read import finding, scores
from regard.identity.read.about import (
    CHANGED,
    EVERYDAY,
    LIFE,
    LISTENER,
    TOLD,
    TOLD_FIRST,
    About,
    asks_listener,
    wording,
)
from regard.identity.read.finding import LifeMeanings, finder_of, meanings_within
from regard.identity.read.index import HELD, Index, index_of
from regard.identity.read.scores import scored
from regard.identity.read.slots import slots_of
from regard.identity.read.updates import BACK, Updates, taken_back
from regard.models.base import Model
from regard.study.people.natural_data import POOLS, phrasebook

RULE = Rule(keep=None, episodes=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


def told(model: Model, *texts: str | list[dict[str, str]]) -> Identity:
    me = nobody(model)
    for n, text in enumerate(texts):
        me = imprint(me, observe(model, text, letters(), source=f"day {n}"), RULE)
    return me


@pytest.fixture
def nobody_s_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder whose meaning of a text is which letters it has."""

    def letters_of(texts: list[str]) -> Tensor:
        rows = [[float(text.lower().count(chr(97 + n))) for n in range(26)] for text in texts]
        return F.normalize(torch.tensor(rows) + 1e-3, dim=-1)

    monkeypatch.setattr(finding, "encoder_name", lambda: "letters")
    monkeypatch.setattr("regard.identity.write.episodes.encoder_name", lambda: "letters")
    monkeypatch.setattr(scores, "encoder_name", lambda: "letters")
    monkeypatch.setattr(finding, "meanings", letters_of)
    monkeypatch.setattr(scores, "meanings", letters_of)
    about, mean = About.fitted(letters_of(list(LIFE)), letters_of(list(EVERYDAY))), letters_of(list(LIFE)).mean(0)
    change = About.fitted(letters_of(list(CHANGED)), letters_of(list(TOLD_FIRST)))
    known = LifeMeanings(about, mean, torch.zeros(1, 26), torch.zeros(1, 26), change)
    monkeypatch.setattr(scores, "life_meanings", lambda: known)


# -- about ---------------------------------------------------------------------------------------------------------------------


def test_the_map_is_the_ridge_solution_of_its_definition() -> None:
    g = torch.Generator().manual_seed(0)
    life, everyday = torch.randn(7, 5, generator=g) + 1, torch.randn(11, 5, generator=g)
    about = About.fitted(life, everyday)
    middle = (life.mean(0) + everyday.mean(0)) / 2
    rows = torch.cat([life, everyday]) - middle
    s = rows.pow(2).sum(1).mean().sqrt()
    wanted = torch.cat([torch.ones(7), -torch.ones(11)])
    w = torch.linalg.solve((rows / s).mT @ (rows / s) + torch.eye(5), (rows / s).mT @ wanted)
    x = torch.randn(5, generator=g)
    assert about(x) == pytest.approx(float((x - middle) / s @ w), abs=1e-5)


def test_a_question_between_both_lists_is_about_neither() -> None:
    life, everyday = torch.eye(6)[:3], torch.eye(6)[3:]
    about = About.fitted(life, everyday)
    assert about((life.mean(0) + everyday.mean(0)) / 2) == pytest.approx(0, abs=1e-6)
    assert about(life[0]) > 0 > about(everyday[0])


def test_no_question_of_the_lists_is_one_that_people_are_judged_by() -> None:
    ours = {q.lower() for q in (*LIFE, *EVERYDAY)}
    assert len(ours) == len(LIFE) + len(EVERYDAY)
    for pool in POOLS:
        if pool in ("test", "final", "fresh"):
            book = phrasebook(pool)
            asked = {q.lower() for s in book.subjects.values() for q in s.questions} | {q.lower() for q in book.never}
            assert not ours & (asked | {q.lower() for q in book.everyday})


def test_texts_of_one_length_read_at_once_have_the_keys_they_have_alone() -> None:
    model = llama()
    body, texts = body_of(model), torch.randint(0, 30, (5, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = body.keys_of_many(texts, range(1, 2))
        alone = torch.stack([torch.stack([h.k for h in body.heads(t)[1:2]]) for t in texts])
        plain = super(type(body), body).keys_of_many(texts, range(1, 2))
    assert together.shape == alone.shape
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together, plain, atol=1e-5)


def test_a_model_tells_the_lists_apart_that_it_was_fitted_on(model: Model) -> None:
    finder = finder_of(body_of(model), letters())

    def mean(some: tuple[str, ...]) -> float:
        asked = [finder.tokenizer.encode(q, bos=False) for q in some[:12]]
        return sum(map(finder.about_life, asked)) / len(asked)

    assert mean(LIFE) > mean(EVERYDAY)


@pytest.mark.parametrize("text", ["Where do I live?", "x", "What did I tell you about the cat, the boat and the garden?"])
def test_a_question_read_once_is_what_it_is_read_twice(model: Model, text: str) -> None:
    finder, asked = finder_of(body_of(model), letters()), letters().encode(text, bos=False)
    keys, about = finder.question(asked)
    assert torch.allclose(keys, finder.asked(asked), atol=1e-5)
    assert about == pytest.approx(finder.about_life(asked), abs=1e-4)


def test_wording_is_the_log_odds_of_the_words_in_both_lists() -> None:
    life, everyday = (sum("grandpa's" in q.lower() for q in some) for some in (LIFE, EVERYDAY))
    assert (life, everyday) == (1, 0)
    odds = log((life + 0.5) / (len(LIFE) + 1)) - log((everyday + 0.5) / (len(EVERYDAY) + 1))
    assert wording("Grandpa's grandpa's zyzzyva!") == pytest.approx(odds / 5)
    assert wording("") == wording("zyzzyva") == 0
    assert wording("my own") > 0 > wording("please")


# -- the index -----------------------------------------------------------------------------------------------------------------


def test_an_index_is_made_once_for_the_same_episodes_and_few_are_held(model: Model) -> None:
    me = told(model, "We moved to Lyon.", "My cat is called Mochi.")
    held = OrderedDict[int, Index]()
    index = index_of(held, me.episodes)
    assert index_of(held, me.episodes) is index
    other = index_of(held, me.episodes[:1] + me.episodes[1:])
    assert other is not index, "others that are equal may be others tomorrow"
    lives = [me.episodes[:1] + me.episodes for _ in range(HELD + 2)]
    for life in lives:
        index_of(held, life)
    assert len(held) == HELD
    assert index_of(held, lives[-1]).episodes is lives[-1]


def test_a_life_that_goes_on_is_found_by_what_was_added(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "encoder_name", lambda: "")
    me = told(model, "We moved to Lyon.", "The weather is grey.")
    assert len(fit(model, me, "cat Mochi").units) == 2
    me = imprint(me, observe(model, "My cat is called Mochi.", letters(), source="a test"), RULE)
    fits = fit(model, me, "cat is called Mochi")
    assert int(fits.rank.argmax()) == 2


@pytest.mark.parametrize("limit", ["CANDIDATES", "BY_KEYS"])
def test_of_a_long_life_only_the_fittest_are_compared_token_by_token(
    nobody_s_encoder: None, model: Model, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "BY_KEYS":
        monkeypatch.setattr(scores, "encoder_name", lambda: "")
    me = told(model, *(f"Number {n} was on the bus." for n in range(9)), "My cat is called Mochi.")
    every = fit(model, me, "cat is called Mochi")
    compared: list[int] = []
    nearness = scores._nearness  # pyright: ignore[reportPrivateUsage]

    def counted(asked: Tensor, episodes: list[Episode]) -> Tensor:
        compared.append(len(episodes))
        return nearness(asked, episodes)

    monkeypatch.setattr(scores, "_nearness", counted)
    monkeypatch.setattr(scores, limit, 4)
    few = fit(model, me, "cat is called Mochi")
    assert compared == [4]
    assert int(few.rank.argmax()) == int(every.rank.argmax()) == 9


# -- what is sought ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "asks"),
    [
        ("What did you suggest for my balcony in our last conversation?", True),
        ("Going through our earlier chat, which of the tools you listed was the third?", True),
        ("Remind me of the opening line you wrote for me.", True),
        ("What is my cat called?", False),
        ("Do you remember where I live?", False),
        ("Can you tell me when I am flying?", False),
        ("", False),
    ],
)
def test_a_question_asks_for_what_the_listener_said_or_for_what_the_asker_did(question: str, asks: bool) -> None:
    assert (asks_listener(question) > 0.4) == asks
    assert 0 <= asks_listener(question) <= 1


def test_what_the_listener_said_comes_first_only_where_it_is_asked_for(nobody_s_encoder: None, model: Model) -> None:
    me = told(model, says("The oak shelf is by the door.", "I recommend the oak shelf by the door."))
    assert [e.role for e in me.episodes] == ["user", "assistant"]
    own, theirs = (int(fit(model, me, q).rank.argmax()) for q in ("Where is my oak shelf?", LISTENER[0]))
    assert (own, theirs) == (0, 1)


def test_what_is_sought_leans_to_how_the_most_alike_question_is_told() -> None:
    axes = torch.eye(4)
    about = About.fitted(axes[:1], axes[1:2])
    known = LifeMeanings(about, torch.zeros(4), axes[:2], axes[2:], about)
    assert torch.allclose(known.sought(axes[0]), axes[0] + finding.TOLD_SHARE * axes[2], atol=1e-5)
    assert torch.allclose(known.sought(axes[1]), axes[1] + finding.TOLD_SHARE * axes[3], atol=1e-5)
    between = known.sought((axes[0] + axes[1]) / 2)
    assert torch.allclose(between[2:], torch.full((2,), finding.TOLD_SHARE / 2), atol=1e-5)


def test_no_sentence_of_the_lists_is_one_of_the_people_it_is_judged_on() -> None:
    listed = {line.lower().strip(" .?!") for some in TOLD for part in some for line in part} | {
        q.lower().strip(" .?!") for q in LISTENER
    }
    for pool in POOLS:
        book = phrasebook(pool)
        said = {line for subject in book.subjects.values() for tell in subject.tells for line in tell[1:]}
        asked = {q for subject in book.subjects.values() for q in subject.questions}
        shared = listed & {line.lower().strip(" .?!>") for line in said | asked}
        # Some questions can hardly be asked otherwise.
        assert all(len(line.split()) <= 6 for line in shared), (pool, shared)


# -- meanings ------------------------------------------------------------------------------------------------------------------


def test_an_episode_means_what_it_says_whole_and_sentence_by_sentence(nobody_s_encoder: None, model: Model) -> None:
    texts = ["We moved to Lyon. The cat is called Mochi. Yes.", "Just one sentence here."]
    rows = meanings_within(texts)
    assert rows is not None
    assert [len(r) for r in rows] == [4, 1]
    assert torch.equal(rows[0][1], finding.meanings(["We moved to Lyon."])[0])  # pyright: ignore[reportOptionalSubscript]
    # A word alone is of the clause before it.
    assert torch.equal(rows[0][3], finding.meanings(["The cat is called Mochi, Yes"])[0])  # pyright: ignore[reportOptionalSubscript]
    me = told(model, *texts)
    assert [len(e.meaning.codes) for e in me.episodes if e.meaning is not None] == [4, 1]
    for e in me.episodes:
        assert Episode.build(e.facts(), e.tensors()).digest == e.digest


def test_an_encoder_that_comes_to_hand_later_is_compared_with_its_own_plain_questions(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's finder is made once and outlives the encoder that it was first used with, or without."""
    finder = finder_of(body_of(model), letters())
    keys = finder.asked(letters().encode("Mochi"))
    for name, width in (("", 0), ("small", 3), ("wide", 5), ("", 0)):
        rows = None if not width else F.normalize(torch.arange(24 * width).view(24, width).float() + 1, dim=-1)
        monkeypatch.setattr(finding, "encoder_name", lambda name=name: name)
        monkeypatch.setattr(finding, "meanings", lambda texts, rows=rows: rows)
        usual = finder.usual(keys, None if rows is None else rows[0])
        assert usual.shape == (4,)
        assert (usual[2:].tolist() == [0.0, 1.0]) == (rows is None)


def test_episodes_with_one_meaning_from_before_are_found_beside_new_ones(nobody_s_encoder: None, model: Model) -> None:
    me = told(model, "We moved to Lyon. The dog is Rex.", "My cat is called Mochi. It eats fish.")
    old = me.episodes[0]
    assert old.meaning is not None
    old = replace(old, meaning=Packed(old.meaning.codes[:1], old.meaning.scale[:1]))
    assert "meanings" not in old.facts(), "its name by content is what it was"
    fits = scored(finder_of(body_of(model), letters()), [old, me.episodes[1]], letters().encode("Mochi cat?"), "Mochi cat?")
    assert fits.has_meanings
    assert int(fits.rank.argmax()) == 1


# -- scores --------------------------------------------------------------------------------------------------------------------


def fit(model: Model, me: Identity, question: str) -> scores.Scores:
    return scored(finder_of(body_of(model), letters()), me.episodes, letters().encode(question), question)


def test_the_sentence_that_fits_counts_beside_the_whole(nobody_s_encoder: None, model: Model) -> None:
    me = told(model, "We moved to Lyon in May. Buzz buzz buzz buzz.", "We went on, and it was long.")
    whole = replace(me, episodes=tuple(replace(e, meaning=Packed(e.meaning.codes[:1], e.meaning.scale[:1])) for e in me.episodes if e.meaning))  # fmt: skip
    a, b = (fit(model, x, "moved to Lyon in May") for x in (me, whole))
    assert float(a.coherence[0]) > float(b.coherence[0])


def test_an_answer_means_what_it_does_with_its_question(nobody_s_encoder: None, model: Model) -> None:
    me = told(model, says("Hello.", "Which fizzy juice?", "Mmm, ok.", "Fine."))
    fits = fit(model, me, "fizzy juice")
    assert fits.units[int(fits.rank.argmax())] == (1, 2)


def test_what_ends_as_a_question_comes_later_but_may_come(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "encoder_name", lambda: "")
    me = told(model, "I bought a red boat, is it dear?", "I bought a red boat, it is dear.")
    fits = fit(model, me, "red boat")
    assert fits.rank[1] > fits.rank[0]
    assert fits.chosen(2, 128) == [0, 1]


def test_coherence_of_what_was_told_does_not_fall_as_more_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "encoder_name", lambda: "")
    me = told(model, "My cat is called Mochi.", *(f"Number {n} was on the bus." for n in range(4)))
    later = told(model, "My cat is called Mochi.", *(f"Number {n} was on the bus." for n in range(40)))
    few, many = (fit(model, x, "cat is called Mochi") for x in (me, later))
    assert int(few.rank.argmax()) == int(many.rank.argmax()) == 0
    assert float(many.coherence[0]) > float(few.coherence[0]) - 0.5


def test_what_corrects_comes_in_the_stead_of_what_it_corrects(model: Model) -> None:
    episodes = told(
        model, "We fly to Rome.", "Rome is off, it is Oslo.", "Oslo is off, it is Bonn.", "The bus was late."
    ).episodes
    fits = scores.Scores(
        episodes, [(0,), (1,), (2,), (3,)], torch.tensor([3.0, -9.0, -9.0, 2.5]), torch.ones(4), True, {0: 1, 1: 2}
    )
    assert fits.chosen(3, 128) == [2, 3], "however far behind it stands, and through several corrections"
    assert fits.chosen(1, 128) == [2]
    assert replace(fits, rank=torch.tensor([3.0, 2.9, 2.8, 2.5])).chosen(3, 128) == [2, 3], "once, whatever it corrects"
    assert replace(fits, newer={}).chosen(3, 128) == [0, 3]


def test_what_may_correct_the_first_comes_beside_it_however_far_behind(model: Model) -> None:
    episodes = told(model, "We fly to Rome.", "It is Oslo now.", "The bus was late.").episodes
    fits = scores.Scores(episodes, [(0,), (1,), (2,)], torch.tensor([3.0, -9.0, 2.5]), torch.ones(3), True, {})
    assert fits.chosen(3, 128) == [0, 2]
    assert replace(fits, beside=1).chosen(3, 128) == [0, 1, 2]
    assert replace(fits, beside=1).chosen(2, 128) == [0, 1], "before others"
    assert replace(fits, beside=1).chosen(1, 128) == [0]
    assert replace(fits, beside=1).chosen(3, len(episodes[0]) + 1) == [0, 1], "though there is no room for more"
    assert replace(fits, beside=2, rank=torch.tensor([3.0, 2.9, -9.0])).chosen(3, 128) == [0, 1, 2]
    assert replace(fits, beside=1, newer={0: 1}).chosen(3, 128) == [1, 2], "once"


def less(turn: str, corrects: str, asked: str, *others: str) -> str:
    """What of a turn is looked at less."""
    ids = letters().encode
    amounts = taken_back(
        ids(turn, bos=False),
        [ids(corrects, bos=False)],
        [ids(x, bos=False) for x in others],
        ids(asked, bos=False),
        letters(),
    )
    assert len(amounts) == len(ids(turn, bos=False))
    assert set(amounts.tolist()) <= {0.0, BACK}
    return "".join(c if x else " " for c, x in zip(turn, amounts.tolist(), strict=True)).strip()


def test_what_a_correction_names_only_to_take_it_back_is_looked_at_less() -> None:
    old = "We fly to Rome."
    assert less("Rome is off, it is Oslo.", old, "Where do I go?") == "Rome"
    assert less("ROME is off, it is Oslo.", old, "Where do I go?") == "ROME", "in capitals or not"
    assert less("Romeo is off, it is Oslo.", old, "Where do I go?") == "", "whole words"
    assert less("Rome is off, it is Oslo.", old, "When is Rome?") == "", "what is asked with is looked at"
    assert less("Rome is off, it is Oslo.", old, "Why Oslo?") == "", "it asks for what both say"
    assert less("Rome is off, it is Rome by bus.", old, "Where do I go?") == "", "it says it once more than what it corrects"
    assert less("Rome is off, it is Oslo.", old, "Where do I go?", "The bus is hot.") == "Rome"
    assert less("Rome is off, it is Oslo.", old, "Where do I go?", "Rome is hot.") == "", "a word of other turns too"


def test_what_was_taken_back_is_read_with_lower_scores(model: Model) -> None:
    me = told(model, "We fly to Rome.", "Rome is off, it is Oslo.")
    body, prompt = body_of(model), letters().encode("Where do we go?")
    finder = finder_of(body, letters())
    fits = fit(model, me, "Where do we go?")
    both, asked = [0, 1], letters().encode("Where do we go?", bos=False)
    none = fits.taken_back(both, asked, letters())
    assert none == [None, None], "nothing is corrected"
    old, new = replace(fits, newer={0: 1}).taken_back(both, asked, letters())
    assert old is None
    assert new is not None
    assert new.tolist() == [BACK] * 4 + [0.0] * (len(me.episodes[1]) - 4)
    plain = slots_of(body, finder, me, list(me.episodes), prompt)
    lower = slots_of(body, finder, me, list(me.episodes), prompt, [old, new])
    changed = (lower.weight - plain.weight)[0, 0]
    assert changed[changed != 0].tolist() == pytest.approx([BACK] * 4)
    said = [letters().decode([t]) for t in lower.token[changed != 0].tolist()]
    assert "".join(said) == "Rome"


def corrected(me: Identity, meant: list[list[float]], rank: list[float], shared: str = "") -> dict[int, int]:
    """What corrects what of turns that mean this; the third number is how much one sounds like news of a change."""
    return updates(me, meant, rank, shared).found()


def beside(me: Identity, meant: list[list[float]], rank: list[float]) -> int | None:
    return updates(me, meant, rank).beside()


def updates(me: Identity, meant: list[list[float]], rank: list[float], shared: str = "") -> Updates:
    rows = [F.normalize(torch.tensor([x]), dim=-1) for x in meant]
    episodes = [replace(e, meaning=Packed.of(x), encoder="plane") for e, x in zip(me.episodes, rows, strict=True)]
    change = About(torch.tensor([0.0, 0.0, 3.0]), torch.zeros(3))
    first = torch.tensor(rank).argsort(descending=True).tolist()
    tokens = letters().encode(shared, bos=False)
    return Updates(Index(episodes), torch.tensor(rank), torch.tensor([1.0, 0.0, 0.0]), tokens, change, first)


def test_only_what_is_younger_and_the_user_s_corrects(model: Model) -> None:
    two = told(model, "We live in Lyon.", "It is Oslo now.")
    first, anew, else_ = [1.0, 0.3, 0.0], [1.0, 0.0, 0.9], [0.0, 1.0, 0.2]
    assert corrected(two, [first, anew], [2.0, 1.0]) == {0: 1}
    assert corrected(two, [first, anew], [1.0, 2.0]) == {0: 1}, "whichever fits better"
    assert corrected(two, [first, else_], [2.0, 1.0]) == {}, "it says something else"
    assert corrected(two, [first, first], [2.0, 1.0]) == {}, "what is told twice is not corrected"
    at_once = replace(two, episodes=tuple(replace(e, source=two.sources[0]) for e in two.episodes))
    assert corrected(at_once, [first, [1.0, 0.1, 0.3]], [2.0, 0.5]) == {}, "a conversation that goes on about a thing"
    assert corrected(two, [first, [1.0, 0.1, 0.3]], [2.0, 0.5]) == {0: 1}
    heard = told(model, says("We live in Lyon.", "It is Oslo now.", "No.", "Sorry."))
    assert corrected(heard, [first, anew, else_, else_], [2.0, 1.0, -9.0, -9.0]) == {}, "a listener corrects nobody"


def test_what_may_correct_is_surer_than_by_chance_and_corrects_only_the_first(model: Model) -> None:
    three = told(model, "We live in Lyon.", "It is Oslo now.", "The bus was late.")
    first, other, bus = [1.0, 0.3, 0.0], [1.0, 0.0, 0.2], [0.0, 1.0, 0.0]
    assert beside(three, [first, other, bus], [2.0, -3.0, 0.0]) == 1
    assert corrected(three, [first, other, bus], [2.0, -3.0, 0.0]) == {}
    assert beside(three, [first, bus, bus], [2.0, 1.0, 0.0]) is None
    assert beside(three, [first, other, bus], [-3.0, 2.0, 0.0]) is None, "it is the first already"


def test_what_stands_far_behind_corrects_only_what_names_the_same(model: Model) -> None:
    two, meant = told(model, "The vet is on Monday.", "The vet said Friday."), [[1.0, 0.6, 0.0], [1.0, 0.0, 0.3]]
    assert corrected(two, meant, [3.0, 2.9]) == {0: 1}
    assert corrected(two, meant, [3.0, -3.0]) == {}
    assert corrected(two, meant, [3.0, -3.0], shared="vet") == {0: 1}


def test_news_of_a_change_corrects_sooner(model: Model) -> None:
    two = told(model, "We fly on Monday.", "Friday it is.")
    first, plain, news = [1.0, -0.3, 0.0], [1.0, 0.2, 0.0], [1.0, 0.2, 1.0]
    assert corrected(two, [first, news], [3.0, 2.0]) == {0: 1}
    assert corrected(two, [first, plain], [3.0, 2.0]) == {}


def test_without_meanings_nothing_is_displaced(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "encoder_name", lambda: "")
    me = told(model, "We live in Lyon now.", "We live in Oslo now.")
    assert fit(model, me, "Where do we live now?").chosen(3, 128) == [0, 1]
