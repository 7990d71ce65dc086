"""A long life: facts at known ages, some of them updated later, and talk about nobody between.

life(16_000, seed=1, pool="choose")
    .conversations   as many as there are tokens for
    .questions       natural questions, each with the tokens since its answer was told, and the old value if there is one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2
from random import Random

from .conversing import Step, converse
from .generator import Conversation
from .natural import (
    LATER,
    Casting,
    NaturalFact,
    NaturalQuestion,
    Told,
    Turn,
    Voice,
    WrongCount,
    filled,
    questions,
    telling,
    tokens,
    unanswerable,
)
from .natural_data import FactKind, ListenerKind, NaturalPool, phrasebook

SHORTEST = 500
"""Tokens of a life at least: a shorter one has no room for its facts."""
YOUNGEST = 100
"""Tokens before the end within which hardly anything is told."""
FACTS_PER_DOUBLING = 6
STEPS = (3, 7)
"""Things that are said in one conversation."""


@dataclass(frozen=True)
class LifeQuestion(NaturalQuestion):
    """A question at the end of a life."""

    age: int = 0
    """Tokens said since the message that answers it."""
    old: str = ""
    """The value that an update or a correction replaced, or nothing."""
    old_age: int = 0

    @property
    def updated(self) -> bool:
        return bool(self.old)


@dataclass(frozen=True)
class Life:
    name: str
    register: str
    listener: ListenerKind
    conversations: tuple[Conversation, ...]
    facts: tuple[NaturalFact, ...]
    questions: tuple[LifeQuestion, ...]
    unanswerable: tuple[str, ...]
    tokens: int


def life(length: int, seed: int = 0, pool: NaturalPool = "choose", count: Callable[[str], float] = tokens) -> Life:
    """A life of about `length` tokens as `count` counts them, the same one for the same seed."""
    book = phrasebook(pool)
    if length < SHORTEST:
        raise WrongCount(f"length is {length}; a life has {SHORTEST} tokens or more")
    rng = Random(f"life {pool} {seed} {length}")
    cast = Casting(book, rng)
    register = rng.choices(book.registers, [r.weight for r in book.registers])[0]
    # Whoever is silent for a whole life is no listener.
    heard: dict[ListenerKind, int] = {kind: weight for kind, weight in book.listeners.items() if kind != "silent"}
    voice = Voice(book, register, rng.choices(list(heard), list(heard.values()))[0], rng)
    facts = _facts(cast, length)
    conversations = _conversations(voice, _events(rng, facts, length), length, count)
    since = _since(conversations, count)
    asked = [(told, q) for index, told in enumerate(facts) for q in questions(rng, told, index)]
    return Life(
        name=facts[0].accepted[0],
        register=register.name,
        listener=voice.listener,
        conversations=conversations,
        facts=tuple(told.fact() for told in facts),
        questions=tuple(_aged(told, question, since) for told, question in asked),
        unanswerable=unanswerable(rng, book, facts),
        tokens=round(sum(count(message["content"]) for c in conversations for message in c)),
    )


def _facts(cast: Casting, length: int) -> list[Told]:
    """The name, and more facts for every doubling of the length while there are subjects; two in three that may change do."""
    every = [(key, slot) for key, s in cast.book.subjects.items() if key != "name" for slot in s.slot or ("",)]
    chosen = cast.rng.sample(every, min(len(every), round(FACTS_PER_DOUBLING * log2(length / SHORTEST))))
    facts = [cast.told("name")]
    may_change = 0
    for key, slot in chosen:
        subject = cast.book.subjects[key]
        kinds: list[FactKind] = [kind for kind in LATER if subject.told_as(kind)]
        may_change += bool(kinds)
        facts.append(cast.told(key, kinds[:1] if may_change % 3 else (), slots=[s for s in subject.slot if s != slot]))
    return facts


def _events(rng: Random, facts: list[Told], length: int) -> list[tuple[float, Told, bool]]:
    """When each fact is told, in tokens from the start; half of them anywhere, half near the end, the nearer the more."""
    events: list[tuple[float, Told, bool]] = [(0.0, facts[0], False)]
    for index, told in enumerate(facts[1:]):
        age = rng.random() if index % 2 else 2 ** -(rng.random() * log2(length / YOUNGEST))
        at = 0.97 * length * (1 - age)
        if told.kind == "update":
            at = max(at, 0.1 * length)
            events.append((rng.random() * 0.8 * at, told, True))
        events.append((at, told, False))
    return sorted(events, key=lambda event: event[0])


def _conversations(voice: Voice, events: list[tuple[float, Told, bool]], length: int, count: Callable[[str], float]):
    rng, fillers = voice.rng, _fillers(voice)
    conversations: list[Conversation] = []
    said, waiting = 0.0, list(events)
    while said < length or waiting:
        parts: list[tuple[Told | None, bool, Step]] = []
        begun = said
        told_here: set[str] = set()
        for _ in range(rng.randrange(*STEPS)):
            # An update is never told in the conversation in which its old value was.
            if waiting and waiting[0][0] <= begun and waiting[0][1].key not in told_here:
                _, told, old = waiting.pop(0)
                told_here.add(told.key)
                parts.append((told, old, telling(voice, told, old)))
            else:
                parts.append((None, False, next(fillers)))
            begun += sum(count(text) for text in (*parts[-1][2].lines, *parts[-1][2].replies))
        opener, closer = rng.choice(voice.register.openers), rng.choice(voice.register.closers)
        closer = closer if rng.random() < voice.book.closing else ""
        messages, at = converse([step for *_, step in parts], voice.styled(opener), voice.styled(closer), rng, *voice.breath)
        for (told, old, _), message in zip(parts, at, strict=True):
            if told is not None:
                told.placed((len(conversations), message), old)
        conversations.append(messages)
        said += sum(count(message["content"]) for message in messages)
    return tuple(conversations)


def _fillers(voice: Voice) -> Iterator[Step]:
    """What a pool can say about nobody twice over, among scenes and sums that hardly ever return."""
    book, rng = voice.book, voice.rng
    known = [*voice.fillers(), *voice.fillers()]
    numbers = {value for subject in book.subjects.values() for value in subject.values}
    while True:
        sort = rng.random()
        if known and sort < 0.3:
            yield known.pop()
        elif sort < 0.45:
            x, y = rng.randrange(11, 99), rng.randrange(11, 99)
            if not numbers & {str(x), str(y), str(x + y)}:
                ask, say = (line.format(x=x, y=y, z=x + y) for line in rng.choice(book.sums))
                yield Step([voice.styled(ask), say], ends=0)
        else:
            scenes = [_scene(voice) for _ in range(rng.choice((1, 1, 2)))]
            yield Step([voice.styled(" ".join(scenes))], [rng.choice(book.remarks)])


def _scene(voice: Voice) -> str:
    scenes, rng = voice.book.scenes, voice.rng
    x, y, z = (rng.choice(part) for part in (scenes.x, scenes.y, scenes.z))
    return filled(rng.choice(scenes.frames), {"x": x, "y": y, "z": z})


def _since(conversations: tuple[Conversation, ...], count: Callable[[str], float]) -> dict[Turn, float]:
    """The tokens said after every message."""
    after: dict[Turn, float] = {}
    total = 0.0
    for c in range(len(conversations) - 1, -1, -1):
        for m in range(len(conversations[c]) - 1, -1, -1):
            after[c, m] = total
            total += count(conversations[c][m]["content"])
    return after


def _aged(told: Told, q: NaturalQuestion, since: dict[Turn, float]) -> LifeQuestion:
    old_age = round(since[told.old_turn]) if told.old_turn is not None else 0
    return LifeQuestion(q.text, q.answers, q.choices, q.fact, q.turn, q.key, round(since[told.turn]), told.old, old_age)


__all__ = ["Life", "LifeQuestion", "life"]
