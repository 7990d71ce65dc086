"""Facts: what was said is listed line by line, imprints marked where they stand, and one line can be struck out."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from lives import letters, says, speaking

from regard.errors import SpecError
from regard.identity import Person, Rule
from regard.identity.facts import facts, still_named
from regard.identity.wording import words
from regard.models.base import Model

CAT = "I live in Porto. My cat is called Mochi."


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture
def mara(model: Model, tmp_path: Path) -> Generator[Person]:
    with Person("mara", model, letters(), rule=Rule(keep="shock"), store=tmp_path / "people.db") as person:
        yield person


def imprinted(person: Person) -> str:
    """All words in brackets, in order."""
    return "".join(f.text[a:b] for f in person.facts() for a, b in f.imprinted)


def test_lines_are_numbered_from_the_oldest_and_imprints_are_marked_where_they_stand(mara: Person):
    assert mara.facts() == []
    mara.tell(CAT, source="diary")
    mara.tell(says("Ich heiße Zoë.", "Hello!", "Am I here?", "Yes."), source="chat")
    listed = mara.facts()
    assert [(f.number, f.text, f.line.answer) for f in listed] == [
        (1, "I live in Porto.", ""), (2, "My cat is called Mochi.", ""), (3, "Ich heiße Zoë.", "Hello!"), (4, "Am I here?", "Yes."),
    ]  # fmt: skip
    assert [f.event.source for f in listed] == ["diary", "diary", "chat", "chat"]
    assert [f.asks for f in listed] == [False, False, False, True]
    assert all(f.marked.replace("[", "").replace("]", "") == f.text for f in listed)
    assert str(listed[1]) == f"   2  {listed[1].marked}"


@pytest.mark.parametrize("keep", ["recency", "shock"])
def test_every_imprint_of_what_the_person_said_is_marked_and_nothing_else(model: Model, tmp_path: Path, keep: str):
    rule = Rule(keep=keep, budget=20)
    with Person("mara", model, letters(), rule=rule, store=tmp_path / "people.db") as mara:
        mara.tell("Abcdefghij klm", source="one")
        mara.tell("Nopqrstuvw xyz", source="two")
        held = sorted("".join(words(mara.identity, mara.tokenizer)).replace("␣", "").replace(" ", ""))
        assert sorted(imprinted(mara).replace(" ", "")) == held
        assert len(held) > 10


def test_a_message_that_is_read_in_pieces_is_marked_in_all_of_them(model: Model, tmp_path: Path):
    short = speaking()
    short.context = 40
    with Person(
        "mara", short, letters(), rule=Rule(keep="recency", budget=200, share=1.0, episodes=False), store=tmp_path / "x.db"
    ) as mara:
        mara.tell(says("Some words. " * 6 + "The last of them."), source="chat")
        assert mara.identity.life.experiences > 2
        assert imprinted(mara).replace(" ", "") == ("Some words. " * 6 + "The last of them.").replace(" ", "")


def test_without_a_tokenizer_the_lines_are_there_and_nothing_is_marked(mara: Person):
    mara.tell(CAT)
    assert [f.marked for f in facts(mara.store.journal("mara"), mara.identity)] == CAT.replace(". ", ".|").split("|")


def test_a_line_that_is_struck_is_gone_and_the_others_are_as_if_it_had_never_been_said(
    mara: Person, model: Model, tmp_path: Path
):
    mara.tell(CAT, source="diary")
    mara.tell(says("My boat is green.", "Nice."), source="chat")
    proof = mara.strike(2)
    assert [f.text for f in mara.facts()] == ["I live in Porto.", "My boat is green."]
    assert proof.after == mara.identity.digest()
    assert (proof.whole, proof.scrubbed) == (False, True)
    with Person("tom", model, letters(), rule=mara.rule, store=tmp_path / "tom.db") as tom:
        tom.tell("I live in Porto.", source="diary")
        tom.tell(says("My boat is green.", "Nice."), source="chat")
        assert tom.identity.digest() == mara.identity.digest()
    for wrong in (0, 3, "one"):
        with pytest.raises(SpecError, match="there are lines 1 to 2"):
            mara.strike(wrong)  # pyright: ignore
    assert len(mara.facts()) == 2


def test_names_and_numbers_that_other_lines_or_answers_hold_are_named(mara: Person):
    said = says("Our cat Mochi is 12.", "Mochi is a fine name.", "She sleeps.", "Good for Mochi.", "I am 120.", "Oh.")
    mara.tell(said, source="a")
    struck = mara.facts()[0]
    assert still_named(struck, mara.facts()[1:]) == {"Mochi": [2]}
    assert [f.mentions("mochi") for f in mara.facts()] == [True, True, False]
    mara.tell(says("Tobias bakes. My oven is old. My boat is new.", "Say hello to Tobias."), source="b")
    tobias, oven, boat = mara.facts()[3:]
    assert still_named(tobias, [oven, boat]) == {"Tobias": [5, 6]}, "a name, also where a sentence begins with it"
    assert boat.mentions("My")
    assert "My" not in still_named(oven, [boat]), "a word that only begins sentences is no name"
