"""A conversation that outgrows the model's context: what leaves it is read as it was imprinted, and it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lives import letters, says, speaking

from regard.errors import RegardWarning, ShapeError
from regard.identity import Person, Rule
from regard.models.base import Model

CAT = "I live in Porto and my cat is called Mochi."
RULE = Rule(keep="shock", episodes=False)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "people.db"


def ask(person: Person, question: str = "Who?", **more: Any) -> str:
    return person.ask(question, **{"max_tokens": 6, **more})


def narrow(context: int) -> Model:
    """The same weights, trained on texts of so many tokens."""
    made = speaking()
    made.context = context
    return made


def test_the_oldest_turns_leave_a_full_context_and_are_read_as_they_were_imprinted(db: Path):
    with Person("mara", narrow(160), letters(), rule=RULE, store=db) as mara:
        mara.tell(CAT)
        talk = mara.conversation()
        began, life = talk.identity, mara.identity.life.experiences
        commits: list[str] = []
        for i in range(2):
            ask(mara, f"The number {i} is told here.", conversation=talk, remember=True)
            commits.append(mara.log()[0].id)
        assert talk.identity is began, "all of it still stands in the context"
        with pytest.warns(
            RegardWarning, match=r"context of 160 tokens is full: the oldest 2 messages left it; what was imprinted"
        ):
            ask(mara, "And the number 2 is told here as well.", conversation=talk, remember=True)
        assert next(m["content"] for m in talk.messages if m["role"] == "user") == "The number 1 is told here."
        assert talk.identity is not None
        assert talk.identity.parent == commits[0], (
            "whoever has lived through what left, and through nothing that is still there"
        )
        assert talk.identity.life.experiences == life + 1
        assert talk.last is not None
        assert len(talk.last.prompt) + 6 <= 160 * 3 // 4


def test_turns_that_nobody_imprinted_are_said_to_be_lost_and_messages_that_do_not_fit_are_refused(db: Path):
    with Person("mara", narrow(100), letters(), rule=RULE, store=db) as mara:
        talk = mara.conversation(says("Hello there, who is it?", "It is me, and nobody else is here."), system="Brief.")
        began = talk.identity
        with pytest.warns(RegardWarning, match="2 messages left it; they were not imprinted, and are not known any more"):
            ask(mara, "Who is it that you said?", conversation=talk)
        assert talk.identity is began
        before = list(talk.messages)
        with pytest.raises(
            ShapeError, match=r"answer up to 90, and the model's context has 100: ask for at most 7\d \(max_tokens=7"
        ):
            ask(mara, max_tokens=90)
        with pytest.raises(ShapeError, match=r"this message has 143 tokens .* give it in pieces, or imprint it"):
            ask(mara, "long " * 22, conversation=talk)
        assert talk.messages == before, "a message that was refused changes nothing"
        assert mara.log() == []


def test_a_turn_that_was_forgotten_meanwhile_is_read_as_the_name_is_now(db: Path):
    with Person("mara", narrow(160), letters(), rule=RULE, store=db) as mara:
        mara.tell(CAT, source="cat")
        talk = mara.conversation()
        for i in range(2):
            ask(mara, f"The number {i} is told here.", conversation=talk, remember=True)
        mara.forget("cat")
        with pytest.warns(RegardWarning, match="full"):
            ask(mara, "And the number 2 is told here as well.", conversation=talk)
        assert talk.identity is not None
        assert talk.identity.parent == mara.log()[0].id


def test_words_of_the_person_are_not_penalised_and_those_of_earlier_answers_are(db: Path, monkeypatch: pytest.MonkeyPatch):
    from regard.identity import conversation as module

    given: list[Any] = []
    generate = module.generate

    def heard(model: Any, prompt: Any, sampling: Any, **more: Any) -> Any:
        given.append(sampling.penalised)
        return generate(model, prompt, sampling, **more)

    monkeypatch.setattr(module, "generate", heard)
    with Person("mara", speaking(), letters(), rule=RULE, store=db) as mara:
        talk = mara.conversation(says("xyz", "abba"))
        ask(mara, "xyz?", conversation=talk)
        ask(mara, "xyz?", conversation=talk, repetition_penalty=1.0)
    assert given == [tuple(sorted({letters().encode(c)[0] for c in "ab"})), None]
