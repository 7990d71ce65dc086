"""People as people talk: what an identity must hold when the listener does not repeat the facts.

    for person in natural(20, seed=1, pool="choose"):
        person.history        three to six conversations: facts in passing, about others, negated, corrected, updated; talk and tasks
        person.facts          what was told, where (conversation, message), and how
        person.questions      natural questions, with the answers that count and wrong ones of the same kind
        person.next           a later conversation that asks for the facts; only the assistant names them
        person.unanswerable   natural questions that the history does not answer

The listener is silent ("Mm."), natural (asks back, comments, helps with tasks) or wrong (misremembers: a value that must not be believed),
and never says a value that the person told. The pools "train", "choose", "test", "final", "fresh", "guest" and "visitor" share no value
and no sentence, and their sentences are built differently: statements with the subject first; subordinate clauses and answers to the
listener's questions; fronted, cleft and clipped sentences and small stories; letters, lists and interrupted talk; posts, spoken memos,
mails to a desk and bullets; requests to an assistant, with the fact as their reason, inside the instruction or in a pasted message;
anecdotes as they are spoken, with reported speech, questions to nobody, then and now, and repair in mid-sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from ...errors import RegardError
from .conversing import Step, converse
from .generator import Conversation, Deck, Message
from .natural_data import LISTENER, FactKind, ListenerKind, NaturalPool, Phrasebook, Register, Subject, phrasebook

Turn = tuple[int, int]
"""The index of a conversation, and of a message in it."""
LATER: tuple[FactKind, ...] = ("update", "correction")
"""Kinds that also name a value that is no longer right."""
LENGTH, LENGTH_SHORT = (330, 560), (150, 200)
"""Tokens of a history at least, before its greetings."""
TOKENS_PER_WORD = 1.33


class WrongCount(RegardError):
    """A number of people or of tokens that makes no sense."""


@dataclass(frozen=True)
class NaturalFact:
    """One thing to know about a person, and where it was told."""

    key: str
    value: str
    accepted: tuple[str, ...]
    """The value first, then its other spellings."""
    turn: Turn
    kind: FactKind
    old: str = ""
    """What an update or a correction replaces."""
    old_turn: Turn | None = None


@dataclass(frozen=True)
class NaturalQuestion:
    """A question for a fresh chat: right if the answer contains one of `answers`."""

    text: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    """Wrong ones of the same kind: first the old value, then what a listener got wrong."""
    fact: int
    turn: Turn
    key: str

    @property
    def value(self) -> str:
        return self.answers[0]

    def right(self, said: str) -> bool:
        """Does what was said contain an accepted answer, as whole words?"""
        return any(contains(said, answer) for answer in self.answers)


@dataclass(frozen=True)
class NaturalPerson:
    name: str
    register: str
    listener: ListenerKind
    facts: tuple[NaturalFact, ...]
    history: tuple[Conversation, ...]
    next: Conversation
    questions: tuple[NaturalQuestion, ...]
    unanswerable: tuple[str, ...]

    @property
    def document(self) -> str:
        """What the person said, without the listener: a paragraph for each conversation."""
        return "\n\n".join("\n".join(m["content"] for m in c if m["role"] == "user") for c in self.history)


def about_document(document: str, question: str) -> str:
    """A question about what somebody wrote, in one message: a small model reads a text where it only echoes a chat."""
    return f"Read the text and answer the question.\n\nText: {document}\n\nQuestion: {question}"


def contains(text: str, value: str) -> bool:
    """Is the value in the text, as whole words, in capitals or not?"""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def natural(count: int, seed: int = 0, pool: NaturalPool = "choose", short: bool = False) -> list[NaturalPerson]:
    """`count` people, the same ones for the same seed: about 300 to 700 tokens of history, or 150 to 250 if `short`."""
    book = phrasebook(pool)
    if count < 0:
        raise WrongCount(f"count is {count}; it is the number of people, 0 or more")
    cast = Casting(book, Random(f"natural {pool} {seed} {short}"))
    return [_person(cast, short) for _ in range(count)]


def everyday(pool: NaturalPool) -> tuple[str, ...]:
    """Questions that have nothing to do with anybody: the world, small tasks, openers of a chat."""
    return phrasebook(pool).everyday


@dataclass
class Told:
    """A fact that is going to be told: chosen values and words, before it has a place."""

    key: str
    subject: Subject
    slot: str
    accepted: tuple[str, ...]
    tell: tuple[str, ...]
    old: str = ""
    misheard: str = ""
    believed: bool = False
    """Has the listener said `misheard` as if it were so?"""
    turn: Turn = (0, 0)
    old_turn: Turn | None = None

    @property
    def kind(self) -> FactKind:
        return self.tell[0]  # type: ignore[return-value]

    def fill(self, frame: str, value: str = "") -> str:
        v = value or self.accepted[0]
        o, w = self.old, self.misheard
        words = {"v": v, "a": article(v), "o": o, "b": article(o), "w": w, "c": article(w), "r": self.slot}
        return filled(frame, words)

    def placed(self, turn: Turn, old: bool) -> None:
        """Where it was told: the value, or the old one."""
        if old:
            self.old_turn = turn
        else:
            self.turn = turn

    def fact(self) -> NaturalFact:
        return NaturalFact(self.key, self.accepted[0], self.accepted, self.turn, self.kind, self.old, self.old_turn)


def filled(frame: str, words: Mapping[str, str]) -> str:
    """The frame with these words in it; a sentence that begins with one of them begins with a capital."""
    frame = re.sub(r"(^|[.!?]\s+|\n)\{(\w)\}", lambda m: f"{m[1]}{{{m[2].upper()}}}", frame)
    return frame.format(**words, **{key.upper(): text[:1].upper() + text[1:] for key, text in words.items()})


def article(value: str) -> str:
    return f"{'an' if value[:1] in 'aeiou' else 'a'} {value}"


@dataclass
class Casting:
    """Deals subjects, values and frames: none returns before all others of its kind were used."""

    book: Phrasebook
    rng: Random
    decks: dict[str, Deck] = field(default_factory=dict[str, Deck])
    taken: set[str] = field(default_factory=set[str])
    """Values that the present person has named: what is wrong of one fact is never right of another."""
    subjects: Deck = field(init=False)

    def __post_init__(self) -> None:
        self.subjects = Deck([key for key in self.book.subjects if key != "name"], self.rng)

    def deal(self, name: str, cards: Sequence[str], without: Sequence[str] = ()) -> str:
        deck = self.decks.setdefault(name, Deck(cards, self.rng))
        return deck.deal(set(without))

    def told(self, key: str, kinds: Sequence[FactKind] = (), silent: bool = False, slots: Sequence[str] = ()) -> Told:
        """A fact of this subject; of one of `kinds` if there is a frame for it, else told once and for all."""
        subject = self.book.subjects[key]
        tells = [t for t in subject.tells if t[0] in kinds] or [t for t in subject.tells if t[0] not in LATER]
        if silent:
            tells = [t for t in tells if not any(line.startswith(LISTENER) for line in t)] or tells
        kind = self.rng.choice(sorted({t[0] for t in tells}))
        tell = self.rng.choice([t for t in tells if t[0] == kind])
        slot = self.deal(f"{key} slot", subject.slot, slots) if subject.slot else ""
        dealt = self.deal(f"{key} value", subject.values, tuple(self.taken))
        accepted = tuple(dealt.split("|"))
        others = self.rng.sample([v for v in subject.values if v != dealt and v not in self.taken], 2)
        self.taken.update((dealt, *others))
        old = others[0].split("|")[0] if tell[0] in LATER else ""
        misheard = others[1].split("|")[0]
        return Told(f"{key} {slot}" if slot else key, subject, slot, accepted, tell, old, misheard)


def _person(cast: Casting, short: bool) -> NaturalPerson:
    book, rng = cast.book, cast.rng
    cast.taken.clear()
    register = rng.choices(book.registers, [r.weight for r in book.registers])[0]
    listener: ListenerKind = rng.choices(list(book.listeners), list(book.listeners.values()))[0]
    facts = _facts(cast, listener == "silent", short)
    voice = Voice(book, register, listener, rng)
    history = _history(voice, facts, 3 if short else rng.choice((3, 4, 4, 5, 6)), short)
    known = [told.fact() for told in facts]
    return NaturalPerson(
        name=known[0].value,
        register=register.name,
        listener=listener,
        facts=tuple(known),
        history=history,
        next=later_chat(rng, facts, rng.choice(register.returns)),
        questions=tuple(q for index, told in enumerate(facts) for q in questions(rng, told, index)),
        unanswerable=unanswerable(rng, book, facts),
    )


def _facts(cast: Casting, silent: bool, short: bool) -> list[Told]:
    """The name and a few more, one of them updated; in a long history one more is corrected."""
    keys: list[str] = []
    for _ in range(cast.rng.choice((3, 4)) if short else cast.rng.choice((7, 8, 9))):
        keys.append(cast.subjects.deal(set(keys)))
    facts = [cast.told("name", silent=silent)]
    due = list(LATER[:1] if short else LATER)
    for key in keys:
        kinds: list[FactKind] = [kind for kind in due if cast.book.subjects[key].told_as(kind)]
        for kind in kinds[:1]:
            due.remove(kind)
        facts.append(cast.told(key, kinds[:1], silent))
    return facts


@dataclass(frozen=True)
class Voice:
    """Who speaks and who listens."""

    book: Phrasebook
    register: Register
    listener: ListenerKind
    rng: Random

    @property
    def breath(self) -> tuple[float, int]:
        return self.book.join, self.book.breath

    def spoken(self, told: Told, frame: str, value: str = "") -> str:
        """A line of a frame: the person's in their register, the listener's as it is."""
        if frame.startswith(LISTENER):
            return told.fill(frame, value)
        return self.styled(told.fill(self.reworded(frame), value))

    def reworded(self, frame: str) -> str:
        for word, other in self.register.replace:
            frame = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", other, frame)
        return frame

    def styled(self, text: str) -> str:
        return text.lower() if self.register.lower else text

    def step(self, told: Told, frames: Sequence[str], value: str = "") -> Step:
        """The telling of a fact; a wrong listener hears something else now and then, and may be told so."""
        lines = [self.spoken(told, frame, value) for frame in frames]
        if self.listener == "silent":
            return Step(lines, self.rng.sample(self.book.silent, 2))
        remark = [self.rng.choice(self.book.remarks)] if self.rng.random() < 0.25 else []
        replies = [*remark, *self.rng.sample(told.subject.replies, 2)][: sum(not line.startswith(LISTENER) for line in lines)]
        if self.listener == "wrong" and not value and self.rng.random() < 0.4:
            told.believed = True
            replies[-1] = told.fill(self.rng.choice(told.subject.wrong))
            if self.rng.random() < 0.5:
                denied = self.styled(self.reworded(self.rng.choice(self.book.denies)))
                return Step([*lines, denied], [*replies, self.rng.choice(self.book.apologies)], ends=len(lines) - 1)
        return Step(lines, replies)

    def fillers(self) -> list[Step]:
        """Everything that is about nobody, in a random order. Whoever is silent is told small talk only."""
        silent = self.listener == "silent"
        replies = self.book.silent if silent else self.book.remarks
        talk = [Step([self.styled(self.reworded(line))], [self.rng.choice(replies)]) for line in self.book.talk]
        asked = [] if silent else [*self.book.tasks, *self.book.asks_world]
        tasks = [Step([self.styled(self.reworded(first)), *said], ends=0) for first, *said in asked]
        return self.rng.sample([*talk, *tasks], len(talk) + len(tasks))


def _history(voice: Voice, facts: Sequence[Told], count: int, short: bool) -> tuple[Conversation, ...]:
    """All facts in `count` conversations, with as much talk about nobody as makes the history long enough."""
    rng = voice.rng
    places = _places(rng, facts, count)
    mixed: list[list[tuple[Told | None, bool, Step]]] = [[(t, old, telling(voice, t, old)) for t, old in p] for p in places]
    wanted = rng.randrange(*(LENGTH_SHORT if short else LENGTH))
    for filler in voice.fillers():
        empty = [part for part in mixed if not part]
        if not empty and _length(mixed) >= wanted:
            break
        part = empty[0] if empty else rng.choice(mixed)
        # The name stays in front of the first conversation.
        part.insert(rng.randrange(part is mixed[0], len(part) + 1), (None, False, filler))
    openers = rng.sample(voice.register.openers, count)
    conversations: list[Conversation] = []
    for index, part in enumerate(mixed):
        closer = rng.choice(voice.register.closers) if rng.random() < voice.book.closing else ""
        messages, at = converse(
            [step for *_, step in part], voice.styled(openers[index]), voice.styled(closer), rng, *voice.breath
        )
        for (told, old, _), message in zip(part, at, strict=True):
            if told is not None:
                told.placed((index, message), old)
        conversations.append(messages)
    return tuple(conversations)


def _places(rng: Random, facts: Sequence[Told], count: int) -> list[list[tuple[Told, bool]]]:
    """Which facts are told in which conversation; True stands for the value that an update replaces, which was told earlier."""
    places: list[list[tuple[Told, bool]]] = [[] for _ in range(count)]
    order = rng.sample(range(count), count)
    for index, told in enumerate(facts):
        if told.kind == "update":
            earlier, later = sorted(rng.sample(range(count), 2))
            places[earlier].append((told, True))
            places[later].append((told, False))
        else:
            places[0 if index == 0 else order[index % count]].append((told, False))
    first, *others = places
    return [[*first[:1], *rng.sample(first[1:], len(first) - 1)], *(rng.sample(place, len(place)) for place in others)]


def _length(mixed: Sequence[Sequence[tuple[Told | None, bool, Step]]]) -> float:
    return sum(tokens(text) for part in mixed for *_, step in part for text in (*step.lines, *step.replies))


def tokens(text: str) -> float:
    """About as many as a small model's tokenizer makes of English."""
    return TOKENS_PER_WORD * len(text.split())


def telling(voice: Voice, told: Told, old: bool) -> Step:
    if not old:
        return voice.step(told, told.tell[1:])
    first = [t for t in told.subject.tells if t[0] not in LATER and len(t) == 2]
    return voice.step(told, voice.rng.choice(first)[1:], told.old)


def later_chat(rng: Random, facts: Sequence[Told], opener: str) -> Conversation:
    """Every fact asked for in other words than it was told, two in one turn: the name first, the others in a random order."""
    pairs = [tuple(told.fill(part) for part in rng.choice(told.subject.asks)) for told in facts]
    pairs = [pairs[0], *rng.sample(pairs[1:], len(pairs) - 1)]
    messages: list[Message] = []
    for start in range(0, len(pairs), 2):
        turn = pairs[start : start + 2]
        asked = " ".join([*([] if start else [opener]), *(ask for ask, _ in turn)])
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": " ".join(said for _, said in turn)}]
    return tuple(messages)


def questions(rng: Random, told: Told, index: int) -> list[NaturalQuestion]:
    """One about the value; about a third person sometimes also who it is."""
    subject, fact = told.subject, told.fact()
    first = [v for v in (told.old, told.misheard if told.believed else "") if v]
    every = [v.split("|")[0] for v in subject.values]
    choices = (*first, *(v for v in every if v not in (fact.value, *first)))
    asked = [NaturalQuestion(told.fill(rng.choice(subject.questions)), fact.accepted, choices, index, fact.turn, fact.key)]
    if subject.inverse and rng.random() < 0.5:
        others = tuple(slot for slot in subject.slot if slot != told.slot)
        asked.append(NaturalQuestion(told.fill(subject.inverse), (told.slot,), others, index, fact.turn, fact.key))
    return asked


def unanswerable(rng: Random, book: Phrasebook, facts: Sequence[Told]) -> tuple[str, ...]:
    """Two about what nobody tells, two about what this person never told, and one about somebody else than those they told about."""
    told = {(fact.subject.questions, fact.slot) for fact in facts}
    subjects = {questions for questions, _ in told}
    untold = [
        (s.questions, slot) for s in book.subjects.values() for slot in s.slot or ("",) if (s.questions, slot) not in told
    ]
    others = [pair for pair in untold if pair[0] not in subjects]
    near = [pair for pair in untold if pair[0] in subjects]
    asked = [*rng.sample(others, min(2, len(others))), *rng.sample(near, min(1, len(near)))]
    return (*rng.sample(book.never, 2), *(rng.choice(questions).format(r=slot) for questions, slot in asked))
