"""Invented people, and what they say: the evidence for experiments on identities.

    for person in people(40, seed=1):
        person.history      three short conversations, in which the person tells seven or eight facts
        person.next         a later conversation that asks for all of them in other words
        person.questions    one plain question for each fact

The pools "train" and "test" share no value and no sentence, so what is learned from the people of one says nothing about the
people of the other. In `next` only the assistant names a value: whoever asks gives nothing away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .data import ALONE, NEUTRAL, PHRASES, REPLIES, STYLES, VALUES, Pool, Style

Message = dict[str, str]
"""{"role": "user" or "assistant", "content": text}"""
Conversation = tuple[Message, ...]


@dataclass(frozen=True)
class Fact:
    """One thing to know about a person."""

    key: str
    value: str


@dataclass(frozen=True)
class Question:
    """A plain question for a fresh chat, the value that a right answer contains, and other values of the same kind."""

    text: str
    value: str
    key: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Person:
    name: str
    facts: tuple[Fact, ...]
    history: tuple[Conversation, ...]
    next: Conversation
    questions: tuple[Question, ...]
    rewordings: tuple[Conversation, ...] = ()


@dataclass(frozen=True)
class Speaker:
    """Someone in a play: what they say first, and what they say after that."""

    name: str
    earlier: str
    later: str


def people(count: int, seed: int = 0, pool: Pool = "test") -> list[Person]:
    """`count` people; the same ones for the same seed. A value returns only after all others of its kind were used."""
    _check(pool)
    if count < 0:
        raise ValueError(f"count is {count}; it is the number of people, 0 or more")
    rng = Random(f"{pool} {seed}")
    values = {key: Deck(known, rng) for key, known in VALUES[pool].items()}
    kinds = Deck([key for key in VALUES[pool] if key != "name"], rng)
    return [_person(rng, pool, kinds, values) for _ in range(count)]


def neutral(pool: Pool) -> tuple[str, ...]:
    """Short texts about the world that say nothing about anybody."""
    _check(pool)
    return NEUTRAL[pool]


def speakers(text: str, least: int = 8, words_earlier: int = 120, words_later: int = 60) -> list[Speaker]:
    """The speakers of a play written as "NAME:" and lines, who have at least `least` lines and enough words for both parts.

    Whole lines go to `earlier` until it has `words_earlier` words, the lines after those to `later` until it has `words_later`.
    """
    lines: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text):
        name, _, said = block.strip().partition("\n")
        if re.fullmatch(r"[A-Z][A-Za-z' -]{0,40}:", name) and name[:-1].casefold() not in _TOGETHER:
            lines.setdefault(name[:-1], []).extend(line.strip() for line in said.splitlines() if line.strip())
    chosen: list[Speaker] = []
    for name, spoken in lines.items():
        rest = iter(spoken)
        earlier, later = _until(rest, words_earlier), _until(rest, words_later)
        if len(spoken) >= least and earlier and later:
            chosen.append(Speaker(name, earlier, later))
    return chosen


_TOGETHER = frozenset({"all", "both", "others", "lords", "citizens", "all citizens", "commons"})


def _until(lines: Iterator[str], words: int) -> str:
    """The next lines, up to `words` words or just over; nothing if there are not as many."""
    taken: list[str] = []
    count = 0
    for line in lines:
        taken.append(line)
        count += len(line.split())
        if count >= words:
            return "\n".join(taken)
    return ""


def _check(pool: str) -> None:
    if pool not in VALUES:
        raise ValueError(f"pool is {pool!r}; there are {', '.join(sorted(VALUES))}")


class Deck:
    """Cards that are dealt in a random order, and shuffled again when they run out."""

    def __init__(self, cards: Sequence[str], rng: Random) -> None:
        self.cards, self.rng, self.left = tuple(cards), rng, list[str]()

    def deal(self, without: set[str]) -> str:
        """The next card that is not in `without`; those that are stay on top for the next time."""
        for index in range(len(self.left) - 1, -1, -1):
            if self.left[index] not in without:
                return self.left.pop(index)
        self.left = [*self.rng.sample(self.cards, len(self.cards)), *self.left]
        return self.deal(without)


def _person(rng: Random, pool: Pool, kinds: Deck, values: dict[str, Deck]) -> Person:
    keys = {"name": None}
    barred: set[str] = set()
    for _ in range(rng.choice((6, 7))):
        key = kinds.deal(barred | keys.keys())
        keys[key] = None
        barred.update(*(group for group in ALONE if key in group))
    facts: list[Fact] = []
    for key in keys:
        facts.append(Fact(key, values[key].deal({fact.value for fact in facts})))
    style = rng.choice(STYLES[pool])
    conversations = _exchanges(rng, pool, facts, style)
    return Person(
        name=facts[0].value,
        facts=tuple(facts),
        history=conversations,
        next=_asking(rng, facts, [rng.choice(PHRASES[pool][fact.key].asks) for fact in facts], rng.choice(style.returns)),
        questions=tuple(_question(pool, fact) for fact in facts),
        rewordings=_rewordings(rng, pool, facts),
    )


def _question(pool: Pool, fact: Fact) -> Question:
    others = tuple(value for value in VALUES[pool][fact.key] if value != fact.value)
    return Question(PHRASES[pool][fact.key].question, fact.value, fact.key, others)


def _exchanges(rng: Random, pool: Pool, facts: Sequence[Fact], style: Style) -> tuple[Conversation, ...]:
    """Three conversations in which all facts are told, each once, in the person's style."""
    greetings, links = (iter(rng.sample(words, len(words))) for words in (style.greetings, style.links))
    reply = rng.choice(REPLIES[pool])
    ending = rng.choice(style.endings) if rng.random() < 0.5 else ""
    parts = [facts[:3], facts[3:5], facts[5:]] if len(facts) < 8 else [facts[:3], facts[3:6], facts[6:]]
    conversations: list[Conversation] = []
    for part in parts:
        told = [_told(rng, pool, fact, style) for fact in part]
        told[1] = _linked(next(links, ""), told[1], part[1])
        messages = [_says("user", next(greetings), *told[:2]), _heard(pool, part[:2], reply)]
        if len(part) > 2:
            messages += [_says("user", *told[2:]), _heard(pool, part[2:], reply)]
        conversations.append(tuple(messages))
    if ending:
        *before, asked, heard = conversations[-1]
        conversations[-1] = (*before, _says("user", asked["content"], ending), heard)
    return tuple(conversations)


def _heard(pool: Pool, facts: Sequence[Fact], reply: str) -> Message:
    """The listener repeats what it was told; one fact alone is not all that it says."""
    clauses = [_fill(PHRASES[pool][fact.key].echo, fact) for fact in facts]
    said = ", and ".join(clauses) if len(clauses) > 1 else f"{clauses[0]}, {reply}"
    return _says("assistant", said[0].upper() + said[1:] + ".")


def _told(rng: Random, pool: Pool, fact: Fact, style: Style) -> str:
    """The fact in a sentence, mostly of the length that the person likes."""
    length = style.length if rng.random() < 0.6 else rng.randrange(3)
    return _fill(PHRASES[pool][fact.key].tells[length], fact)


def _linked(link: str, sentence: str, fact: Fact) -> str:
    if not link or ":" in sentence:
        return sentence
    keeps = sentence.startswith(fact.value) or re.match(r"I\b", sentence)
    return link + (sentence if keeps else sentence[0].lower() + sentence[1:])


def _asking(rng: Random, facts: Sequence[Fact], pairs: Sequence[tuple[str, str]], opener: str = "") -> Conversation:
    """The pairs of question and answer, two in one turn: the name first, the others in a random order."""
    order = [0, *rng.sample(range(1, len(facts)), len(facts) - 1)]
    messages: list[Message] = []
    for start in range(0, len(order), 2):
        turn = order[start : start + 2]
        asked = [_fill(pairs[index][0], facts[index]) for index in turn]
        messages.append(_says("user", *([opener] if opener and not start else []), *asked))
        messages.append(_says("assistant", *(_fill(pairs[index][1], facts[index]) for index in turn)))
    return tuple(messages)


def _rewordings(rng: Random, pool: Pool, facts: Sequence[Fact]) -> tuple[Conversation, ...]:
    """As many further conversations as the pool has further words for every kind of fact."""
    count = min(len(PHRASES[pool][fact.key].more) for fact in facts)
    return tuple(_asking(rng, facts, [PHRASES[pool][fact.key].more[index] for fact in facts]) for index in range(count))


def _fill(phrase: str, fact: Fact) -> str:
    value = fact.value
    with_article = f"{'an' if value[0] in 'aeiou' else 'a'} {value}"
    return phrase.format(v=value, a=with_article, A=with_article[0].upper() + with_article[1:])


def _says(role: str, *sentences: str) -> Message:
    return {"role": role, "content": " ".join(sentences)}


__all__ = ["Conversation", "Deck", "Fact", "Message", "Person", "Pool", "Question", "Speaker", "neutral", "people", "speakers"]
