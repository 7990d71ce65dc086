"""People who were made up: the same for the same seed, never two pools alike, never a sentence twice."""

import re
from itertools import combinations

import pytest

from regard.study.people.data import PHRASES, REPLIES, STYLES, VALUES
from regard.study.people.generator import Conversation, Message, Person, Pool, neutral, people, speakers

POOLS: tuple[Pool, ...] = ("train", "test")
ARTICLES = ("job", "pet", "bike_colour", "favourite_colour")
"""Kinds whose values are ever written after "a" or "an"."""


def crowd(pool: Pool) -> list[Person]:
    return people(300, seed=5, pool=pool)


def text_of(*conversations: Conversation, role: str = "") -> str:
    return "\n".join(message["content"] for c in conversations for message in c if role in ("", message["role"]))


def sentences(text: str) -> set[str]:
    return {part.strip().casefold() for part in re.split(r"(?<=[.!?])\s+", text)}


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words inside one line."""
    found: set[tuple[str, ...]] = set()
    for line in text.casefold().splitlines():
        words = re.findall(r"[\w'-]+", line)
        found.update(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    return found


def names(text: str, value: str) -> bool:
    return re.search(rf"\b{re.escape(value)}\b", text) is not None


def phrases(pool: Pool) -> set[str]:
    found: set[str] = set(REPLIES[pool])
    for kind in PHRASES[pool].values():
        found.update((*kind.tells, kind.echo, kind.question, *(part for pair in (*kind.asks, *kind.more) for part in pair)))
    for style in STYLES[pool]:
        found.update((*style.greetings, *style.links, *style.endings, *style.returns))
    return {phrase.casefold() for phrase in found}


@pytest.mark.parametrize("pool", POOLS)
def test_same_seed_gives_the_same_people_and_another_seed_others(pool: Pool) -> None:
    assert people(20, 3, pool) == people(20, 3, pool)
    assert people(20, 3, pool) != people(20, 4, pool)
    assert people(20, 3, pool)[:5] == people(5, 3, pool)


def test_pools_share_no_value() -> None:
    train, test = ({v.casefold() for known in VALUES[pool].values() for v in known} for pool in POOLS)
    assert not train & test


def test_no_value_is_part_of_another_value() -> None:
    every = {value.casefold() for pool in POOLS for known in VALUES[pool].values() for value in known}
    inside = [(a, b) for a in every for b in every if a != b and a in b and names(b, a)]
    assert inside == []
    for known in (known for pool in POOLS for known in VALUES[pool].values()):
        assert [(a, b) for a in known for b in known if a != b and a.casefold() in b.casefold()] == []


@pytest.mark.parametrize("pool", POOLS)
def test_no_phrase_happens_to_name_a_value(pool: Pool) -> None:
    every = {value.casefold() for known in VALUES[pool].values() for value in known}
    assert [(value, phrase) for phrase in phrases(pool) for value in every if value in phrase and names(phrase, value)] == []


def test_pools_share_no_phrase() -> None:
    train, test = (phrases(pool) for pool in POOLS)
    assert not train & test


def test_pools_share_no_sentence_once_written() -> None:
    train, test = (sentences(text_of(*(c for p in crowd(pool) for c in (*p.history, p.next, *p.rewordings)))) for pool in POOLS)
    assert not train & test


@pytest.mark.parametrize("pool", POOLS)
def test_every_kind_has_phrases_and_dozens_of_values(pool: Pool) -> None:
    assert VALUES[pool].keys() == PHRASES[pool].keys()
    assert len(VALUES[pool]) >= 20
    for key, known in VALUES[pool].items():
        assert len(known) == len(set(known)) >= 24, key


@pytest.mark.parametrize("pool", POOLS)
def test_everyone_has_seven_or_eight_facts_of_different_kinds_and_values(pool: Pool) -> None:
    for person in crowd(pool):
        assert len(person.facts) in (7, 8)
        assert len({fact.key for fact in person.facts}) == len({fact.value for fact in person.facts}) == len(person.facts)
        assert person.facts[0].key == "name"
        assert person.facts[0].value == person.name
        assert len({"cat_name", "dog_name", "pet"} & {fact.key for fact in person.facts}) <= 1


@pytest.mark.parametrize("pool", POOLS)
def test_forty_people_share_no_value_of_a_kind(pool: Pool) -> None:
    for seed in range(20):
        facts = [(fact.key, fact.value) for person in people(40, seed, pool) for fact in person.facts]
        assert len(facts) == len(set(facts))


@pytest.mark.parametrize("pool", POOLS)
def test_history_tells_every_fact(pool: Pool) -> None:
    for person in crowd(pool):
        told = text_of(*person.history, role="user")
        assert len(person.history) == 3
        assert all(names(told, fact.value) for fact in person.facts)


@pytest.mark.parametrize("pool", POOLS)
def test_next_conversation_answers_every_fact_and_the_user_names_none(pool: Pool) -> None:
    for person in crowd(pool):
        for conversation in (person.next, *person.rewordings):
            asked, answered = (text_of(conversation, role=role) for role in ("user", "assistant"))
            for fact in person.facts:
                assert re.search(rf"\b{re.escape(fact.value)}\b", answered, re.IGNORECASE), fact
                assert not names(asked, fact.value), fact


@pytest.mark.parametrize("pool", POOLS)
def test_roles_alternate_from_the_user_to_the_assistant(pool: Pool) -> None:
    for person in crowd(pool):
        for conversation in (*person.history, person.next, *person.rewordings):
            roles = [message["role"] for message in conversation]
            assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("pool", POOLS)
def test_no_sentence_of_one_part_is_repeated_in_another(pool: Pool) -> None:
    for person in crowd(pool):
        asked = "\n".join(question.text for question in person.questions)
        parts = [text_of(*person.history), text_of(person.next), asked, *(text_of(c) for c in person.rewordings)]
        for one, other in combinations(map(sentences, parts), 2):
            assert not one & other


@pytest.mark.parametrize("pool", POOLS)
def test_history_itself_says_nothing_twice(pool: Pool) -> None:
    for person in crowd(pool):
        said = re.split(r"(?<=[.!?])\s+", text_of(*person.history))
        assert len(said) == len(set(said))


@pytest.mark.parametrize("pool", POOLS)
def test_later_conversations_share_no_six_words_with_history(pool: Pool) -> None:
    for person in crowd(pool):
        earlier = runs(text_of(*person.history), 6)
        later = runs("\n".join((text_of(person.next, *person.rewordings), *(q.text for q in person.questions))), 6)
        assert not earlier & later


@pytest.mark.parametrize("pool", POOLS)
def test_questions_are_plain_and_their_choices_are_other_values(pool: Pool) -> None:
    for person in crowd(pool):
        assert [(q.key, q.value) for q in person.questions] == [(f.key, f.value) for f in person.facts]
        for question in person.questions:
            assert question.text.endswith("?")
            assert not names(question.text, question.value)
            assert question.value not in question.choices
            assert len(question.choices) >= 20


def test_only_training_people_have_rewordings() -> None:
    assert all(len(person.rewordings) == 2 for person in crowd("train"))
    assert all(person.rewordings == () for person in crowd("test"))


@pytest.mark.parametrize("pool", POOLS)
def test_conversations_are_short(pool: Pool) -> None:
    histories = [len(text_of(*person.history).split()) for person in crowd(pool)]
    later = [len(text_of(person.next).split()) for person in crowd(pool)]
    assert 110 <= sum(histories) / len(histories) <= 150
    assert 75 <= min(histories) <= max(histories) <= 180
    assert 70 <= sum(later) / len(later) <= 90
    assert 60 <= min(later) <= max(later) <= 110


@pytest.mark.parametrize("pool", POOLS)
def test_articles_fit_the_word_after_them(pool: Pool) -> None:
    for key in ARTICLES:
        # Words that begin with a vowel and sound otherwise, or the reverse, would need a rule of their own.
        assert not [value for value in VALUES[pool][key] if re.match(r"uni|uk|use|eu|one|hour|hono|heir", value)]
    for key, kind in PHRASES[pool].items():
        written = "\n".join((*kind.tells, kind.echo, *(part for pair in (*kind.asks, *kind.more) for part in pair)))
        assert not re.search(r"\b[Aa]n? \{v\}", written), key
        assert key in ARTICLES or not re.search(r"\{[aA]\}", written), key
    everything = "\n".join(text_of(*p.history, p.next, *p.rewordings) for p in crowd(pool))
    assert not re.search(r"\b(a [aeio]|an [^aeiou\s])\w+", everything, re.IGNORECASE)


@pytest.mark.parametrize("pool", POOLS)
def test_sentences_begin_with_a_capital_and_end_with_a_mark(pool: Pool) -> None:
    def fits(message: Message) -> bool:
        text = message["content"]
        return (
            "{" not in text
            and "  " not in text
            and all(s[0].isupper() and s[-1] in ".!?" for s in re.split(r"(?<=[.!?]) ", text))
        )

    assert [m for p in crowd(pool) for c in (*p.history, p.next, *p.rewordings) for m in c if not fits(m)] == []


def test_neutral_texts_are_many_and_short_and_differ_between_the_pools() -> None:
    train, test = (neutral(pool) for pool in POOLS)
    assert not sentences("\n".join(train)) & sentences("\n".join(test))
    for texts in (train, test):
        assert len(set(texts)) == len(texts) >= 12
        assert all(25 <= len(text.split()) <= 50 for text in texts)


def test_unknown_pool_and_negative_count_are_refused() -> None:
    with pytest.raises(ValueError, match="there are test, train"):
        people(1, pool="valid")  # pyright: ignore
    with pytest.raises(ValueError, match="count is -1"):
        people(-1)


PLAY = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak.

First Citizen:
You are all resolved rather to die than to famish?
First, you know Caius Marcius is chief enemy to the people.

MENENIUS:
What work's, my countrymen, in hand? where go you

First Citizen:
Let us kill him, and we'll have corn at our own price.
Is't a verdict?
"""


def test_speakers_say_whole_lines_earlier_and_the_lines_after_those_later() -> None:
    (citizen,) = speakers(PLAY, least=3, words_earlier=15, words_later=8)
    assert citizen.name == "First Citizen"
    assert citizen.earlier == (
        "Before we proceed any further, hear me speak.\nYou are all resolved rather to die than to famish?"
    )
    assert citizen.later == "First, you know Caius Marcius is chief enemy to the people."


def test_speakers_with_too_few_lines_or_words_are_left_out() -> None:
    assert speakers(PLAY, least=6, words_earlier=8, words_later=8) == []
    assert speakers(PLAY, least=1, words_earlier=40, words_later=8) == []
