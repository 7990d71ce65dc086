"""People who write and do not chat: first-person prose, a later page that says the same in other words, and questions.

for writer in diary(12, seed=1, pool="choose"):
    writer.prose     about 100 to 300 tokens
    writer.later     another page, for the nats of a writer's own words
    writer.questions, writer.unanswerable, writer.facts    as those of natural people; a turn is (paragraph, piece)
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .natural import Casting, NaturalFact, NaturalQuestion, Told, WrongCount, questions, unanswerable
from .natural_data import NaturalPool, phrasebook


@dataclass(frozen=True)
class Diarist:
    name: str
    paragraphs: tuple[tuple[str, ...], ...]
    facts: tuple[NaturalFact, ...]
    later: str
    questions: tuple[NaturalQuestion, ...]
    unanswerable: tuple[str, ...]

    @property
    def prose(self) -> str:
        return "\n\n".join(" ".join(pieces) for pieces in self.paragraphs)


def diary(count: int, seed: int = 0, pool: NaturalPool = "choose") -> list[Diarist]:
    """`count` people who write a diary, the same ones for the same seed."""
    book = phrasebook(pool)
    if count < 0:
        raise WrongCount(f"count is {count}; it is the number of people, 0 or more")
    cast = Casting(book, Random(f"diary {pool} {seed}"))
    return [_diarist(cast) for _ in range(count)]


def _diarist(cast: Casting) -> Diarist:
    rng, phrases = cast.rng, cast.book.diary
    cast.taken.clear()
    keys: list[str] = []
    for _ in range(rng.choice((5, 6, 7))):
        keys.append(cast.subjects.deal(set(keys)))
    facts = [cast.told(key) for key in ("name", *keys)]
    paragraphs = _paragraphs(rng, facts, rng.sample(phrases.openings, 3), rng.sample(phrases.between, 4))
    later = [told.fill(rng.choice(told.subject.later)) for told in rng.sample(facts, len(facts))]
    known = tuple(told.fact() for told in facts)
    return Diarist(
        name=known[0].value,
        paragraphs=paragraphs,
        facts=known,
        later=" ".join([rng.choice(phrases.later_openings), *later]),
        questions=tuple(q for index, told in enumerate(facts) for q in questions(rng, told, index)),
        unanswerable=unanswerable(rng, cast.book, facts),
    )


def _paragraphs(rng: Random, facts: list[Told], openings: list[str], between: list[str]) -> tuple[tuple[str, ...], ...]:
    """A paragraph for each opening; what is about nobody stands anywhere behind it."""
    paragraphs: list[list[str]] = []
    order = rng.sample(facts, len(facts))
    for index, opening in enumerate(openings):
        pieces: list[Told | str] = [*order[index :: len(openings)]]
        for other in between[index :: len(openings)]:
            pieces.insert(rng.randrange(len(pieces) + 1), other)
        written = [opening]
        for piece in pieces:
            if isinstance(piece, Told):
                piece.turn = (index, len(written))
                written.append(piece.fill(rng.choice(piece.subject.diary)))
            else:
                written.append(piece)
        paragraphs.append(written)
    return tuple(tuple(written) for written in paragraphs)


__all__ = ["Diarist", "diary"]
