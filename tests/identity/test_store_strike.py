"""One event, or one line of it, is taken back alone: the rest of its source stays, and the proof is the one of a forgetting."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from stored import BASE, heard, imprint, replay

from regard.identity.facts import facts, strike
from regard.identity.state import Identity
from regard.identity.store import Event, IdentityStore, StoreError
from regard.identity.store.lines import lines_of, without

CAT = heard("chat", "My cat is called Wintergreen.")
TOWN = heard("chat", "I live in Lisbon near the river.")
BOAT = heard("letter", "The boat leaves at nine.")


@pytest.fixture
def store(tmp_path: Path) -> Generator[IdentityStore]:
    with IdentityStore(tmp_path / "identities.db") as opened:
        yield opened


def begin(store: IdentityStore, name: str, *events: Event) -> None:
    store.new(name, Identity.new(BASE))
    for event in events:
        write(store, name, event)


def write(store: IdentityStore, name: str, event: Event) -> None:
    store.update(name, lambda me: imprint(me, event), event=event)


def holding(store: IdentityStore, word: bytes) -> list[str]:
    folder = store.blobs.folder.parent
    return [p.name for p in folder.rglob("*") if p.is_file() and word in p.read_bytes()]


def lived(*events: Event) -> str:
    return replay(Identity.new(BASE), events).digest()


def turn(*said: str, source: str = "chat") -> Event:
    roles = ("user", "assistant") * len(said)
    return heard(source, json.dumps([{"role": r, "content": s} for r, s in zip(roles, said, strict=False)]))


def test_one_event_goes_and_the_rest_of_its_source_stays(store: IdentityStore) -> None:
    begin(store, "mara", TOWN, CAT, BOAT)
    proof = store.forget("mara", CAT, replay)
    assert proof.after == proof.again == lived(TOWN, BOAT) == store.head("mara").digest
    assert (proof.events_removed, proof.events_kept, proof.whole) == (1, 2, False)
    assert [e.text for e in store.journal("mara") if e.text] == [TOWN.text, BOAT.text]
    assert store.load("mara").sources == ("chat", "letter")
    assert proof.scrubbed
    assert holding(store, b"Wintergreen") == []
    assert holding(store, b"Lisbon") != []
    assert str(proof).startswith("a line of 'chat' is forgotten in 'mara': 1 events removed, 2 replayed")
    assert store.check().problems == []


def test_the_name_of_a_source_goes_with_the_only_event_that_it_wrote(store: IdentityStore) -> None:
    begin(store, "mara", CAT, BOAT)
    store.forget("mara", BOAT, replay)
    assert store.load("mara").sources == ("chat",)
    assert all("letter" not in (c.source, *c.sources) for c in store.log("mara"))
    store.forget("mara", CAT, replay)
    assert store.load("mara").empty
    with pytest.raises(StoreError, match="holds no such event by 'chat', or not any more"):
        store.forget("mara", CAT, replay)


def test_one_line_goes_with_the_answer_to_it_and_the_others_of_its_event_stay(store: IdentityStore) -> None:
    event = turn("I live in Lisbon. My cat is called Wintergreen.", "Wintergreen is a nice name!", "She is three.", "Oh.")
    begin(store, "mara", event, BOAT)
    listed = facts(store.journal("mara"), store.load("mara"))
    assert [f.text for f in listed] == ["I live in Lisbon.", "My cat is called Wintergreen.", "She is three.", BOAT.text]
    proof = strike(store, "mara", listed[1], replay)
    left = without(event, lines_of(event)[1])
    assert left is not None
    assert [m["content"] for m in json.loads(left.text or "")] == ["I live in Lisbon.", "She is three.", "Oh."]
    assert proof.after == lived(left, BOAT)
    assert proof.events_kept == 2
    assert proof.searched.left == ()
    assert holding(store, b"Wintergreen") == []
    assert [f.text for f in facts(store.journal("mara"), store.load("mara"))] == [f.text for f in listed if f is not listed[1]]


def test_forks_that_hold_the_event_are_named_and_those_from_before_it_are_not(store: IdentityStore, tmp_path: Path) -> None:
    begin(store, "mara", TOWN)
    store.fork("mara", "before")
    write(store, "mara", CAT)
    store.fork("mara", "after")
    store.import_(store.export("mara", tmp_path / "out"), "imported")
    store.load("mara").save(tmp_path / "saved")
    store.import_(tmp_path / "saved", "carried")
    store.load("before").save(tmp_path / "saved-before")
    store.import_(tmp_path / "saved-before", "carried-before")
    begin(store, "namesake", heard("chat", "Somebody else."))
    begin(store, "copy", replace(CAT, time=CAT.time + 9))
    proof = store.forget("mara", CAT, replay)
    assert proof.forks == ("after", "carried", "imported")
    assert proof.copies == ("copy",)
    assert "forget it there too" in str(proof)
    assert [e.text for e in store.journal("after") if e.text] == [TOWN.text, CAT.text], "others are left as they are"
    assert store.forget("after", CAT, replay).forks == ("carried", "imported")


def test_what_was_rolled_back_goes_too_and_is_no_line_to_strike(store: IdentityStore) -> None:
    begin(store, "mara", TOWN, CAT)
    store.rollback("mara", 1)
    with pytest.raises(StoreError, match="no such event"):
        store.forget("mara", CAT, replay)
    assert [f.text for f in facts(store.journal("mara"), store.load("mara"))] == [TOWN.text]
    write(store, "mara", BOAT)
    proof = store.forget("mara", BOAT, replay)
    assert proof.after == lived(TOWN)
    assert holding(store, b"Wintergreen") == [], "the whole history is written anew"
    store.rollback("mara", 1)
    assert store.load("mara").empty, "what is left of it is one commit"


def test_the_same_words_said_twice_are_two_lines_and_the_second_is_reported(store: IdentityStore) -> None:
    again = turn("As I said. My cat is called Wintergreen.", "Yes.")
    begin(store, "mara", CAT, again)
    proof = strike(store, "mara", facts(store.journal("mara"), store.load("mara"))[0], replay)
    assert proof.echoes == 1
    assert holding(store, b"Wintergreen") != []
    assert proof.searched.left == (), "what somebody still says proves nothing"


def test_bytes_of_what_came_before_are_not_taken_for_what_was_struck(store: IdentityStore) -> None:
    begin(store, "mara", *(heard("chat", f"word {i}") for i in range(8)))
    (store.blobs.folder / "before.bin").write_bytes(store.blobs.get(store.head("mara").blob))
    for i in range(8):
        write(store, "mara", heard("chat", f"later {i}"))
    (store.blobs.folder / "with.bin").write_bytes(store.blobs.get(store.head("mara").blob))
    event = store.journal("mara")[9]
    assert store.forget("mara", event, replay).searched.left == ("with.bin",)


def test_what_may_stay_instead_is_a_part_of_the_same_event(store: IdentityStore) -> None:
    begin(store, "mara", TOWN, CAT)
    for wrong in (CAT, replace(CAT, source="other")):
        with pytest.raises(StoreError, match="only another imprint by it may stay"):
            store.forget("mara", CAT, replay, instead=wrong)
    with pytest.raises(StoreError, match="is a source, of which nothing does"):
        store.forget("mara", "chat", replay, instead=CAT)
    assert len(store.log("mara")) == 3, "nothing was changed"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith and J. Doe paid 3.5 euros, e.g. for tea.", ["Dr. Smith and J. Doe paid 3.5 euros, e.g. for tea."]),
        ('He said "Go!" Then he left.\n\nA new day', ['He said "Go!"', "Then he left.", "A new day"]),
        ("東京に住んでいます。猫はもちです。", ["東京に住んでいます。", "猫はもちです。"]),
        ("  ", []),
    ],
)  # fmt: skip
def test_a_text_is_cut_into_its_sentences_and_each_can_be_taken_out(text: str, lines: list[str]) -> None:
    event = heard("diary", text)
    listed = lines_of(event)
    assert [line.text for line in listed] == lines
    for line in listed:
        assert text[line.start : line.end] == line.text
        left = without(event, line)
        assert [x.text for x in (lines_of(left) if left else [])] == [x for x in lines if x != line.text]


def test_a_chat_of_which_only_answers_would_be_left_is_gone() -> None:
    event = turn("Hello.", "What is your name?")
    assert [line.answer for line in lines_of(event)] == ["What is your name?"]
    assert without(event, lines_of(event)[0]) is None
