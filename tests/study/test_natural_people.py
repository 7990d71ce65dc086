"""People who talk naturally: what is told is where it is said to be, the listener gives nothing away, and no two pools are alike."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations

import pytest
from lives import letters, speaking

from regard.study.people import recall
from regard.study.people.diary import Diarist, diary
from regard.study.people.generator import Conversation
from regard.study.people.life import SHORTEST, life
from regard.study.people.natural import (
    NaturalFact,
    NaturalPerson,
    WrongCount,
    about_document,
    contains,
    everyday,
    natural,
    tokens,
)
from regard.study.people.natural_data import POOLS, NaturalPool, Phrasebook, UnknownPool, phrasebook
from regard.study.people.written import WrittenPool, written, written_everyday

PAIRS = list(combinations(POOLS, 2))
LETTERS = re.compile(r"[^\W\d_]")


@cache
def crowd(pool: NaturalPool, short: bool = False) -> list[NaturalPerson]:
    return natural(80, 5, pool, short)


@cache
def writers(pool: NaturalPool) -> list[Diarist]:
    return diary(60, 5, pool)


def said(*conversations: Conversation, role: str = "") -> list[str]:
    return [m["content"] for c in conversations for m in c if role in ("", m["role"])]


def spellings(pool: NaturalPool) -> set[str]:
    values = (value for subject in phrasebook(pool).subjects.values() for value in subject.values)
    return {spelling.casefold() for value in values for spelling in value.split("|")}


def phrases(book: Phrasebook) -> set[str]:
    every = {
        *book.silent,
        *book.remarks,
        *book.denies,
        *book.apologies,
        *book.talk,
        *book.never,
        *book.everyday,
        *book.scenes.frames,
    }
    every |= {
        *book.scenes.x,
        *book.scenes.y,
        *book.scenes.z,
        *book.diary.openings,
        *book.diary.between,
        *book.diary.later_openings,
    }
    every |= {line for exchange in (*book.tasks, *book.asks_world, *book.sums) for line in exchange}
    for register in book.registers:
        every |= {*register.openers, *register.closers, *register.returns}
    for subject in book.subjects.values():
        every |= {line for tell in subject.tells for line in tell[1:]} | {part for ask in subject.asks for part in ask}
        every |= {
            *subject.replies,
            *subject.wrong,
            *subject.questions,
            *subject.diary,
            *subject.later,
            *subject.slot,
            subject.inverse,
        }
    return {phrase.casefold().removeprefix("> ") for phrase in every if phrase}


@cache
def frames(pool: NaturalPool) -> frozenset[str]:
    """Every sentence of many people with the values and the slots taken out."""
    found: set[str] = set()
    slots = [slot for subject in phrasebook(pool).subjects.values() for slot in subject.slot]
    for person in crowd(pool):
        values = [v for fact in person.facts for v in (fact.value, fact.old) if v]
        gone = re.compile(
            "|".join(rf"(?:\ban? )?\b{re.escape(v)}\b" for v in sorted([*values, *slots], key=len, reverse=True)), re.I
        )
        texts = [*said(*person.history, person.next), *(q.text for q in person.questions), *person.unanswerable]
        for sentence in (s for text in texts for s in re.split(r"(?<=[.!?])\s+|\n", gone.sub("_", text.casefold()))):
            if LETTERS.search(sentence.replace("_", "")):
                found.add(sentence.strip("-. ?!,:;"))
    return frozenset(found)


def message(person: NaturalPerson, fact: NaturalFact, old: bool = False) -> str:
    turn = fact.old_turn if old and fact.old_turn is not None else fact.turn
    spoken = person.history[turn[0]][turn[1]]
    assert spoken["role"] == "user"
    return spoken["content"]


def words_of(texts: Iterable[str]) -> float:
    return sum(tokens(text) for text in texts)


@pytest.mark.parametrize("pool", POOLS)
def test_same_seed_gives_the_same_people_and_another_seed_others(pool: NaturalPool) -> None:
    assert natural(8, 3, pool) == natural(8, 3, pool)
    assert natural(8, 3, pool)[:3] == natural(3, 3, pool)
    assert natural(8, 3, pool) != natural(8, 4, pool)
    assert diary(4, 3, pool) == diary(4, 3, pool)
    assert life(1000, 3, pool) == life(1000, 3, pool)


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownPool, match="'nowhere'"):
        everyday("nowhere")  # type: ignore[arg-type]
    with pytest.raises(WrongCount, match="-1"):
        natural(-1)
    with pytest.raises(WrongCount, match="-2"):
        diary(-2)
    with pytest.raises(WrongCount, match=str(SHORTEST - 1)):
        life(SHORTEST - 1)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_pools_share_no_value_and_no_phrase(one: NaturalPool, other: NaturalPool) -> None:
    assert not spellings(one) & spellings(other)
    assert not phrases(phrasebook(one)) & phrases(phrasebook(other))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_pools_share_no_sentence_frame_once_the_values_are_gone(one: NaturalPool, other: NaturalPool) -> None:
    assert not frames(one) & frames(other)


@pytest.mark.parametrize("pool", POOLS)
def test_no_phrase_and_no_other_value_names_a_value(pool: NaturalPool) -> None:
    book = phrasebook(pool)
    told = "|".join(sorted(map(re.escape, spellings(pool)), key=len, reverse=True))
    named = re.compile(rf"(?<!\w)(?:{told})(?!\w)", re.I)
    assert [(m[0], phrase) for phrase in phrases(book) for m in [named.search(phrase)] if m] == []
    values = [value.split("|")[0] for subject in book.subjects.values() for value in subject.values]
    assert [(a, b) for a in values for b in values if a != b and a.casefold() in b.casefold() and contains(b, a)] == []


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_has_enough_to_say(pool: NaturalPool) -> None:
    book = phrasebook(pool)
    assert len(book.subjects) >= 16
    assert all(len(set(subject.values)) == len(subject.values) >= 16 for subject in book.subjects.values())
    assert len(set(everyday(pool))) == len(everyday(pool)) >= 24
    assert {register.name for register in book.registers} == {p.register for p in crowd(pool)}
    assert {p.listener for p in crowd(pool)} == {"silent", "natural", "wrong"}
    assert all(len(register.openers) >= 6 for register in book.registers)


@pytest.mark.parametrize("pool", POOLS)
def test_every_fact_is_told_in_its_turn_with_what_the_question_asks_by(pool: NaturalPool) -> None:
    for person in (*crowd(pool), *crowd(pool, short=True)):
        for fact in person.facts:
            text = message(person, fact)
            assert contains(text, fact.value), (fact, text)
            slot = fact.key.partition(" ")[2]
            assert contains(text, slot) or any(
                contains(m["content"], slot) for m in person.history[fact.turn[0]][: fact.turn[1]]
            ), fact


@pytest.mark.parametrize("pool", POOLS)
def test_updates_come_in_a_later_conversation_and_corrections_in_the_same_one(pool: NaturalPool) -> None:
    for person in crowd(pool):
        for fact in person.facts:
            assert bool(fact.old) == (fact.kind in ("update", "correction"))
            if fact.kind == "update":
                assert fact.old_turn is not None
                assert fact.old_turn[0] < fact.turn[0]
                assert contains(message(person, fact, old=True), fact.old)
            if fact.kind == "correction":
                before = person.history[fact.turn[0]][: fact.turn[1] + 1]
                assert any(contains(m["content"], fact.old) for m in before)
    kinds = {fact.kind for person in crowd(pool) for fact in person.facts}
    assert kinds == {"plain", "passing", "third", "negated", "number", "update", "correction"}


@pytest.mark.parametrize("pool", POOLS)
def test_the_listener_never_says_what_it_was_told(pool: NaturalPool) -> None:
    misheard = 0
    for person in crowd(pool):
        heard = said(*person.history, role="assistant")
        for fact in person.facts:
            assert not any(contains(text, v) for text in heard for v in (fact.value, fact.old) if v), (fact, heard)
        wrong = [
            q.choices[bool(person.facts[q.fact].old)] for q in person.questions if q.answers == person.facts[q.fact].accepted
        ]
        believed = sum(contains(text, v) for text in heard for v in wrong)
        misheard += believed
        assert person.listener == "wrong" or not believed
    assert misheard > 0


@pytest.mark.parametrize("pool", POOLS)
def test_the_silent_listener_is_silent(pool: NaturalPool) -> None:
    for person in crowd(pool):
        if person.listener == "silent":
            assert set(said(*person.history, role="assistant")) <= set(phrasebook(pool).silent)


@pytest.mark.parametrize("pool", POOLS)
def test_in_the_next_conversation_only_the_assistant_names_the_values(pool: NaturalPool) -> None:
    for person in crowd(pool):
        asked, answered = said(person.next, role="user"), said(person.next, role="assistant")
        assert len(asked) == len(answered)
        for fact in person.facts:
            assert not any(contains(text, v) for text in asked for v in (fact.value, fact.old) if v)
            assert any(contains(text, fact.value) for text in answered)


@pytest.mark.parametrize("pool", POOLS)
def test_questions_have_one_right_answer_and_wrong_ones_of_its_kind(pool: NaturalPool) -> None:
    for person in crowd(pool):
        assert {q.fact for q in person.questions} == set(range(len(person.facts)))
        for q in person.questions:
            fact = person.facts[q.fact]
            assert q.turn == fact.turn
            assert q.right(f"I think it is {q.value}.")
            assert not any(q.right(choice) for choice in q.choices)
            assert len(q.choices) == len(set(q.choices)) >= 3
            about_value = q.answers == fact.accepted
            assert contains(q.text, fact.value) != about_value
            assert not about_value or not fact.old or q.choices[0] == fact.old


@pytest.mark.parametrize("pool", POOLS)
def test_unanswerable_questions_are_none_of_those_that_are_answered(pool: NaturalPool) -> None:
    for person in crowd(pool):
        assert len(person.unanswerable) >= 4
        told = {(person.facts[q.fact].key) for q in person.questions}
        asked = {
            (f"{key} {slot}".strip(), question.format(r=slot))
            for key, subject in phrasebook(pool).subjects.items()
            for slot in subject.slot or ("",)
            for question in subject.questions
        }
        answered = {text for key, text in asked if key in told}
        assert not answered & set(person.unanswerable)


@pytest.mark.parametrize("pool", POOLS)
def test_histories_are_as_long_as_they_should_be(pool: NaturalPool) -> None:
    for person in crowd(pool):
        assert 3 <= len(person.history) <= 6
        assert 300 <= words_of(said(*person.history)) <= 700
        assert 8 <= len(person.facts) <= 10
    for person in crowd(pool, short=True):
        assert len(person.history) == 3
        assert 140 <= words_of(said(*person.history)) <= 310
    for person in crowd(pool):
        for conversation in person.history:
            roles = [m["role"] for m in conversation]
            assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("pool", POOLS)
def test_a_document_is_what_the_person_said(pool: NaturalPool) -> None:
    person = crowd(pool)[0]
    assert all(text in person.document for text in said(*person.history, role="user"))
    assert not any(text in person.document for text in said(*person.history, role="assistant") if len(text) > 20)
    asked = about_document(person.document, "Who?")
    assert person.document in asked
    assert asked.endswith("Who?")


@pytest.mark.parametrize("pool", POOLS)
def test_diaries_are_prose_that_holds_its_facts(pool: NaturalPool) -> None:
    for writer in writers(pool):
        assert 100 <= tokens(writer.prose) <= 300
        for fact in writer.facts:
            paragraph, piece = fact.turn
            assert contains(writer.paragraphs[paragraph][piece], fact.value)
            assert contains(writer.later, fact.value)
        assert not set(re.split(r"(?<=[.!?])\s+", writer.prose)) & set(re.split(r"(?<=[.!?])\s+", writer.later))
        assert len(writer.questions) >= len(writer.facts) >= 6


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("length", [1000, 4000, 16000])
def test_a_life_is_as_long_as_was_asked_and_knows_the_age_of_its_facts(pool: NaturalPool, length: int) -> None:
    lived = life(length, 2, pool)
    assert length <= lived.tokens
    assert lived.tokens - words_of(said(lived.conversations[-1])) <= length + 1
    texts = [
        (c, m, message["role"], message["content"])
        for c, talk in enumerate(lived.conversations)
        for m, message in enumerate(talk)
    ]
    heard = "\n".join(text for *_, role, text in texts if role == "assistant")
    for q in lived.questions:
        fact = lived.facts[q.fact]
        assert contains(lived.conversations[fact.turn[0]][fact.turn[1]]["content"], fact.value)
        assert not contains(heard, fact.value)
        after = words_of(text for c, m, _, text in texts if (c, m) > fact.turn)
        assert q.age == pytest.approx(after, abs=1)
        assert q.updated == bool(fact.old)
        if fact.kind == "update":
            assert fact.old_turn is not None
            assert fact.old_turn < fact.turn
            assert q.old_age > q.age
    assert any(q.updated for q in lived.questions)
    ages = [q.age for q in lived.questions]
    assert min(ages) < 0.35 * length
    assert max(ages) > 0.8 * length


@pytest.mark.parametrize("pool", POOLS)
def test_a_life_counts_tokens_as_it_is_told_to(pool: NaturalPool) -> None:
    characters = life(20_000, 2, pool, count=len)
    assert 20_000 <= characters.tokens <= 22_000
    assert characters.tokens == sum(len(text) for text in said(*characters.conversations))


def test_recall_counts_the_answers_that_contain_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    person = natural(1, 0, "choose", short=True)[0]
    values = [q.value for q in person.questions]
    prompts: list[str] = []

    def told(_body: object, _tokenizer: object, _chat: object, asked: list[str], _longest: int) -> list[str]:
        prompts.extend(asked)
        return [f"It is {values[0]}." for _ in asked]

    monkeypatch.setattr(recall, "_said", told)
    measured = recall.in_context(speaking(), letters(), person, ("turn", "chat"))
    assert measured["turn"] == measured["chat"] == values.count(values[0]) / len(values)
    assert measured["base"] > 0
    assert measured["context"] > 0
    for q, prompt in zip(person.questions, prompts, strict=False):
        assert prompt == about_document(person.history[q.turn[0]][q.turn[1]]["content"], q.text)
        assert contains(prompt, person.facts[q.fact].value)


@pytest.mark.parametrize(
    ("pool", "people", "everyday"),
    [("first", 8, 64), ("second", 8, 64), ("third", 10, 64), ("fourth", 16, 93), ("many", 60, 230), ("more", 96, 473)],
)
def test_people_written_by_hand_told_what_they_are_asked_and_were_answered_by_another(
    pool: WrittenPool, people: int, everyday: int
) -> None:
    crowd = written(pool)
    assert len(crowd) == people
    assert len(set(written_everyday(pool))) == everyday
    for person in crowd:
        for conversation in person.history:
            assert [m["role"] for m in conversation] == [("user", "assistant")[n % 2] for n in range(len(conversation))]
        for q in person.questions:
            said = person.history[q.turn[0]][q.turn[1]]["content"].casefold()
            assert q.value.casefold() in said
            assert not q.right(q.text), "a question does not answer itself"
            earlier = [m["content"].casefold() for c in person.history[: q.turn[0] + 1] for m in c]
            assert all(any(old.casefold() in m for m in earlier) for old in q.choices)
        asked = {q.text for q in person.questions}
        assert not asked & {*person.unanswerable, *written_everyday(pool)}
