"""People whom somebody wrote by hand, message by message, as they would write to an assistant: no grammar generates them.

for person in written("fourth"):
    person.history        four to seven conversations: mails, recipes, code, plans, small talk, pasted text
    person.questions      five or six about what they told, some of it changed later, and one about what the assistant said
    person.unanswerable   about their own life, and never told
written_everyday("fourth")         what anybody asks

The first two pools have eight people each, the third ten, the fourth sixteen, by five authors who knew nothing of how any of this works; each pool was
opened once, and served for tuning after that. "many" are sixty people by six such authors, ten each, and "more" ninety-six by twelve, eight
each: to learn from, never to be judged by.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from .data import frozen_json
from .natural import NaturalFact, NaturalPerson, NaturalQuestion
from .natural_data import FactKind

WrittenPool = Literal["first", "second", "third", "fourth", "many", "more"]


@cache
def written(pool: WrittenPool) -> tuple[NaturalPerson, ...]:
    """All of them; there is no next conversation, and no more of them."""
    return tuple(_person(given) for given in frozen_json(f"written_{pool}.json")["people"])


def written_everyday(pool: WrittenPool) -> tuple[str, ...]:
    return tuple(frozen_json(f"written_{pool}.json")["everyday"])


def written_replies(pool: WrittenPool) -> tuple[tuple[str | None, ...], ...]:
    """Of each person's questions, a sentence that somebody wrote around the answer; None where nobody did."""
    people = frozen_json(f"written_{pool}.json")["people"]
    return tuple(tuple(q.get("said") for q in person["questions"]) for person in people)


def _person(given: dict[str, Any]) -> NaturalPerson:
    asked = [_question(n, q) for n, q in enumerate(given["questions"])]
    return NaturalPerson(
        name=given["name"],
        register="own",
        listener="natural",
        facts=tuple(fact for fact, _ in asked),
        history=tuple(tuple(dict(m) for m in c) for c in given["conversations"]),
        next=(),
        questions=tuple(question for _, question in asked),
        unanswerable=tuple(given["unanswerable"]),
    )


def _question(n: int, given: dict[str, Any]) -> tuple[NaturalFact, NaturalQuestion]:
    kind: FactKind = "update" if given["old"] else "plain"
    answers, turn, old = tuple(given["answers"]), (int(given["turn"][0]), int(given["turn"][1])), given["old"]
    fact = NaturalFact(f"fact {n}", answers[0], answers, turn, kind, old)
    return fact, NaturalQuestion(given["text"], answers, (old,) if old else (), n, turn, fact.key)


__all__ = ["WrittenPool", "written", "written_everyday", "written_replies"]
