"""Person: what is told is remembered, can be asked about and taken back, here and from the command line alike."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import letters, says, short_sleeps, speaking
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.errors import RegardError, SpecError, StateError
from regard.identity import IdentityStore, Person, Rule, generate, recall
from regard.identity.person import _Lines
from regard.identity.read.frame import READ
from regard.identity.store import StaleError
from regard.identity.why import along
from regard.models.base import Model
from regard.models.convert import save
from regard.models.decode.sampling import Sampling
from regard.models.tokenizer import Specials

CAT = "I live in Porto and my cat is called Mochi."
BOAT = "The boat leaves at nine."
RULE = Rule(keep="shock")


@pytest.fixture(autouse=True)
def anything_comes_to_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """How well a random model's episodes cohere with a question says nothing."""
    monkeypatch.setattr("regard.identity.read.recall.THRESHOLD", {True: -1e9, False: -1e9})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes and its tokenizer, on disk."""
    at = tmp_path_factory.mktemp("tiny")
    save(speaking(), at)
    letters().save(at)
    return at


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(autouse=True)
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_STORE", str(tmp_path / "people.db"))
    return tmp_path / "people.db"


@pytest.fixture
def mara(model: Model) -> Generator[Person]:
    with Person("mara", model, letters(), rule=RULE) as person:
        yield person


def ask(person: Person, question: str = "Who?", **more: Any) -> str:
    return person.ask(question, **{"max_tokens": 6, **more})


def stream(person: Person, question: str = "Who?", **more: Any) -> Iterator[str]:
    return person.ask(question, stream=True, **{"max_tokens": 6, **more})


def kinds(person: Person) -> list[str | None]:
    return [c.kind for c in person.log()]


def cli(*arguments: str, stdin: str | None = None) -> str:
    done = CliRunner().invoke(app, list(arguments), input=stdin)
    assert done.exit_code == 0, done.output
    return done.stdout


# -- telling -----------------------------------------------------------------------------------------------------------


def test_what_is_told_is_one_commit_and_is_said_in_words(mara: Person):
    done = mara.tell(CAT, source="diary")
    assert kinds(mara) == ["imprint", "new"]
    assert (done.commit, done.source, done.begun) == (mara.log()[0].id, "diary", True)
    assert done.count == len(mara.identity.imprints) > 0
    assert done.tokens == len(CAT) - 1, "the first is nobody's: nothing stands before it"
    assert all(word in CAT or word == "␣" for word in done.words)
    assert str(done).startswith(f"kept {done.count} of {done.tokens} tokens from diary: {done.words[0]}")
    assert not mara.tell(BOAT).begun
    assert repr(mara) == f"Person('mara', model='llama': 2 experiences, {len(mara.identity.imprints)} imprints, 2 episodes)"


def test_the_same_words_are_recognised_whatever_they_are_called(mara: Person):
    mara.tell(CAT, source="diary")
    before = mara.log()
    again = mara.tell(CAT, source="letter")
    assert (again.commit, again.source, again.count) == (None, "diary", 0)
    assert re.search(r"mara has lived through this text already, as diary on \d{4}-\d\d-\d\d: nothing was written", str(again))
    assert mara.log() == before
    assert mara.tell(CAT, again=True).commit is not None
    mara.rollback(2)
    assert mara.tell(CAT).commit is not None, "what was rolled back was not lived through"


def test_a_text_a_chat_and_files_can_be_told(mara: Person, tmp_path: Path):
    talk = says("I live in Porto.", "Lovely!")
    (tmp_path / "diary.txt").write_text(CAT)
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, says("Mochi sleeps."))))
    assert mara.tell(tmp_path / "diary.txt").source.startswith("diary@")
    assert mara.tell(tmp_path / "talk.json", affect="estimated").source.startswith("talk@")
    assert mara.tell(tmp_path / "more.jsonl").source.startswith("more@")
    assert mara.tell(talk).commit is None, "a chat is recognised wherever it comes from"
    events = [e for e in mara.store.journal("mara") if e.kind == "imprint"]
    assert [e.text if i == 0 else json.loads(e.text or "") for i, e in enumerate(events)] == [CAT, talk, says("Mochi sleeps.")]
    assert events[1].rule["affect"] == "estimated"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("  ", "nothing to imprint"),
        ([], "nothing to imprint"),
        ({"role": "user", "content": "x"}, "give a text, a list of messages"),
        (7, "give a text, a list of messages"),
        ([{"role": "user"}], "message 1 is no message"),
        (Path("nowhere.txt"), "there is no file nowhere.txt"),
    ],
)
def test_what_cannot_be_told_is_refused_and_nobody_is_begun(mara: Person, what: Any, says: str):
    with pytest.raises(RegardError, match=re.escape(says)):
        mara.tell(what)
    with pytest.raises(RegardError, match="affect"):
        mara.tell(CAT, affect=3)
    with pytest.raises(RegardError, match="cannot name a source"):
        mara.tell(CAT, source="\n")
    assert mara.store.names() == {}
    assert mara.log() == []


def test_writers_of_one_name_take_turns_and_the_same_words_at_once_are_one(model: Model, db: Path):
    texts = [f"Day {i}: the boat left at {i}." for i in range(3)]
    failed: list[BaseException] = []

    def live(own: str) -> None:
        try:
            with Person("mara", model, letters(), rule=RULE) as mara:
                for text in texts:
                    mara.tell(text)
                    mara.tell(f"{own} {text}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=live, args=(own,)) for own in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with IdentityStore(db) as store:
        written = [e.text for e in store.journal("mara") if e.kind == "imprint"]
        assert sorted(map(str, written)) == sorted([*texts, *(f"{own} {t}" for own in "ab" for t in texts)])
        assert store.load("mara").life.experiences == len(written)


# -- asking ------------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_identity_s_own_and_writes_nothing(mara: Person, model: Model):
    prompt = letters().chat([{"role": "user", "content": "Who?"}])

    def plain(identity: Any) -> str:
        return generate(model, prompt, Sampling(6), identity=identity, tokenizer=letters()).text[0].strip()  # pyright: ignore

    assert ask(mara, repetition_penalty=1.0) == plain(None), "before anything is told, the model answers"
    mara.tell(CAT)
    before = mara.log()
    assert ask(mara, repetition_penalty=1.0) == plain(mara.identity)
    assert ask(mara) != plain(None)
    assert ask(mara, temperature=2.0, seed=1) == ask(mara, temperature=2.0, seed=1) != ask(mara, temperature=2.0, seed=2)
    assert isinstance(ask(mara, weights="int8"), str)
    assert mara.log() == before


def test_streams_of_two_people_on_one_model_may_be_read_in_turns(mara: Person, model: Model):
    mara.tell(CAT)
    with Person("tom", model, letters(), rule=RULE) as tom:
        tom.tell(BOAT * 3)
        first, second = stream(mara), stream(tom)
        pieces: tuple[list[str], list[str]] = ([], [])
        for both in zip_longest(first, second):
            for said, piece in zip(pieces, both, strict=True):
                said += [piece] if piece is not None else []
        assert len(pieces[0]) > 1
        assert ["".join(x).strip() for x in pieces] == [ask(mara), ask(tom)]
        assert ask(mara) != ask(tom)


def test_what_is_wrong_with_a_question_is_said_before_its_first_piece(mara: Person):
    for wrong in ("", " ", 7):
        with pytest.raises(StateError, match="is no question"):
            mara.ask(wrong, stream=True)  # pyright: ignore
    with pytest.raises(SpecError, match="max_tokens"):
        mara.ask("Who?", max_tokens=0)
    with pytest.raises(StateError, match=r"mara\.conversation\(messages\)"):
        mara.ask("Who?", conversation=[])  # pyright: ignore


def ending(model: Model, store: Path, after: int = 4) -> Person:
    """Somebody whose first answer to "Who?" ends by itself."""
    with Person("nobody", model, letters(), store=store) as free:
        talk = free.conversation()
        ask(free, conversation=talk)
        assert talk.last is not None
        stop = talk.last.tokens[after]
        assert stop not in talk.last.tokens[:after]
    return Person("mara", model, replace(letters(), special=Specials(stops=(stop,))), rule=RULE, store=store)


def test_a_turn_is_remembered_when_asked_for_and_finished(model: Model, db: Path):
    mara = ending(model, db)
    answer = ask(mara, remember=True)
    assert kinds(mara) == ["imprint", "new"]
    event = mara.store.journal("mara")[-1]
    assert json.loads(event.text or "") == says("Who?", answer)
    ask(mara, remember=True, max_tokens=2)
    assert json.loads(mara.store.journal("mara")[-1].text or "") == says("Who?"), "an answer that was cut off is not remembered"
    mara.rollback()
    assert re.fullmatch(r"chat-\d{4}-\d\d-\d\d@[0-9a-f]{8}", str(event.source))
    pieces = stream(mara, remember=True)
    next(pieces)
    assert isinstance(pieces, Generator)
    pieces.close()
    assert kinds(mara)[0] == "rollback", "an answer that was interrupted is not remembered, nor its question"
    list(stream(mara, remember=True))
    assert kinds(mara)[0] == "imprint"
    assert {e.source for e in mara.store.journal("mara")} == {None, event.source}, (
        "one source for all that one person remembers"
    )
    mara.close()


def test_a_conversation_goes_on_with_who_it_began_with(mara: Person):
    mara.tell(CAT)
    talk = mara.conversation(says("Hello.", "Hi!"), system="Be brief.")
    began = talk.identity
    first = ask(mara, conversation=talk, remember=True)
    assert talk.messages == says("Hello.", "Hi!", "Who?", first)
    assert talk.identity is began
    assert began is not None
    assert mara.identity.life.experiences == began.life.experiences + 1
    second = "".join(stream(mara, "Where?", conversation=talk)).strip()
    assert talk.messages[-2:] == says("Where?", second)
    assert ask(mara) == ask(mara), "without one, each question stands alone"
    assert len(talk.messages) == 6


def test_a_penalty_keeps_an_answer_from_repeating_itself(mara: Person):
    plain, shy = (ask(mara, max_tokens=40, repetition_penalty=x) for x in (1.0, 3.0))
    assert len(set(shy)) > len(set(plain))
    with pytest.raises(SpecError, match="repetition_penalty"):
        ask(mara, repetition_penalty=0)


def test_why_names_words_and_sources_of_the_last_answer(mara: Person):
    with pytest.raises(StateError, match="answered nothing yet"):
        mara.why()
    ask(mara)
    with pytest.raises(StateError, match="the answer is the model's own"):
        mara.why()
    mara.tell(CAT, source="diary")
    list(stream(mara))
    every = [mara.why(i) for i in range(1, 7)]
    found = mara.why()
    assert found.base == pytest.approx(max(x.base for x in every), rel=1e-3)
    assert {m.source for m in found.moments.values()} == {"diary"}
    around = "".join(READ).replace("\n", "⏎")
    assert all(m.word in CAT + around or m.word == "␣" for m in found.moments.values())
    assert re.match(r"token \d, '.*': \d+\.\d{4} nats from the model itself\nlikely   ", str(found))
    assert "  diary" in str(found)
    with pytest.raises(SpecError, match="tokens 1 to 6"):
        mara.why(7)


# -- sleeping ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look after every step, and a measure by which every step helps: a random model has nothing to learn."""
    short_sleeps(monkeypatch)


@pytest.mark.usefixtures("short_nights")
def test_a_sleep_that_helped_is_committed_and_one_that_was_interrupted_goes_on(mara: Person, db: Path):
    with pytest.raises(RegardError, match="no identity 'mara'"):
        mara.sleep()
    mara.tell(CAT)
    with pytest.raises(StateError, match="no night of mara was interrupted"):
        mara.sleep(resume=True)
    whole = mara.fork("whole")
    assert whole.sleep(steps=3).commit == whole.log()[0].id

    def stop(what: str, share: float | None) -> None:
        if what == "sleeping" and share and share > 0.5:
            raise KeyboardInterrupt

    first = mara.sleep(steps=3, progress=stop)
    assert first.helped
    assert first.interrupted
    assert kinds(mara) == ["sleep", "imprint", "new"]
    rest = mara.sleep(resume=True)
    assert not rest.interrupted
    assert "slept over 1 conversation: " in str(rest)
    assert mara.identity.digest() == whole.identity.digest(), "the same morning as without the interruption"
    assert [e.kind for e in mara.store.journal("mara")] == ["new", "imprint", "sleep"]
    assert not list(db.parent.glob("people.nights/*"))
    whole.close()


def test_a_sleep_that_did_not_help_changes_nothing(mara: Person, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch, helps=False)
    mara.tell(CAT)
    before = mara.log()
    done = mara.sleep(steps=1)
    assert (done.commit, done.helped) == (None, False)
    assert "nothing was changed: no state was 2% nearer to the teacher" in str(done)
    assert mara.log() == before


@pytest.mark.usefixtures("short_nights")
def test_what_is_told_during_a_sleep_is_not_written_over(mara: Person):
    mara.tell(CAT)

    def meanwhile(what: str, share: float | None) -> None:
        if what == "sleeping" and share == 1:
            mara.tell(BOAT)

    with pytest.raises(StaleError, match="while it slept"):
        mara.sleep(steps=1, progress=meanwhile)
    assert kinds(mara) == ["imprint", "imprint", "new"]
    assert mara.identity.life.experiences == 2


# -- one store with the command line -----------------------------------------------------------------------------------


def test_what_a_person_does_is_seen_and_undone_from_the_command_line(folder: Path):
    model = ("-m", str(folder))
    with Person("mara", folder, rule=RULE) as mara:
        mara.tell(CAT, source="diary")
        mara.tell(BOAT, source="letter")
        ask(mara, remember=True)
        shown = json.loads(cli("identity", "show", "mara", *model, "--json"))
        assert shown["base"]["name"] == folder.name
        assert shown["sources"][:2] == ["diary", "letter"]
        assert [x["id"] for x in json.loads(cli("identity", "log", "mara", "--json"))] == [c.id for c in mara.log()]
        assert "lived through this text already, as diary" in cli("imprint", "-", "-i", "mara", *model, stdin=CAT)
        cli("identity", "rollback", "mara")
        assert kinds(mara)[0] == "rollback"
        assert mara.identity.sources == ("diary", "letter")
        whole = mara.identity
        assert "1 replayed" in cli("identity", "forget", "mara", "diary", "--yes", *model)
        assert mara.identity.sources == ("letter",)
        with Person("tom", folder, rule=RULE) as tom:
            tom.tell(BOAT, source="letter")
            assert tom.identity.digest() == mara.identity.digest() != whole.digest()


def test_what_the_command_line_does_is_seen_and_undone_by_a_person(folder: Path, tmp_path: Path):
    (tmp_path / "diary.txt").write_text(CAT)
    one = ("-i", "mara", "-m", str(folder), "--keep", "shock")
    cli("imprint", str(tmp_path / "diary.txt"), *one)
    cli("imprint", "-", *one, "--source", "letter", stdin=BOAT)
    cli("chat", *one, "-n", "4", "--source", "talk", stdin="hello\n")
    with Person("mara", folder, rule=RULE) as mara, Person("twin", folder, rule=RULE) as twin:
        assert kinds(mara) == ["imprint", "imprint", "imprint", "new"]
        assert mara.tell(tmp_path / "diary.txt").commit is None
        source = twin.tell(tmp_path / "diary.txt").source
        assert source in mara.identity.sources, "one file is one source, whoever reads it"
        mara.rollback()
        assert mara.identity.sources == (source, "letter")
        proof = mara.forget("letter")
        assert (proof.events_removed, proof.after) == (1, proof.again)
        assert mara.identity.digest() == twin.identity.digest()
    assert "nothing of it is there" in str(proof)


def test_a_fork_goes_its_own_way(mara: Person):
    mara.tell(CAT)
    with mara.fork("mara-2") as second:
        assert second.model is mara.model
        second.tell(BOAT)
        assert mara.identity.life.experiences == 1
        assert second.identity.life.experiences == 2
        mara.close()
        assert kinds(second) == ["imprint", "imprint", "new"], "each has a store of its own to close"
        with pytest.raises(RegardError, match="in the store already"):
            second.fork("mara")


def test_a_store_that_was_given_stays_open_and_another_model_is_refused(model: Model, tmp_path: Path):
    with IdentityStore(tmp_path / "given.db") as store:
        with Person("mara", model, letters(), store=store, rule=RULE) as mara:
            mara.tell(CAT)
        assert set(store.names()) == {"mara"}
        with pytest.raises(StateError, match="was written on"):
            Person("mara", speaking(1), letters(), store=store)
    assert not (tmp_path / "people.db").exists()
    with pytest.raises(StateError, match="comes with its tokenizer"):
        Person("mara", model)
    with pytest.raises(RegardError, match="cannot name an identity"):
        Person("../mara", "no such model")


# -- the model ---------------------------------------------------------------------------------------------------------


def test_people_of_one_model_share_it_until_nobody_holds_it(folder: Path):
    from regard.identity.opened import _MODELS

    with Person("mara", folder) as mara, Person("tom", str(folder)) as tom:
        assert mara.model is tom.model
        assert mara.tokenizer is tom.tokenizer
    before = len(_MODELS)
    del mara, tom
    gc.collect()
    assert len(_MODELS) == before - 1


def test_progress_is_told_to_whoever_is_given_and_else_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]):
    heard: list[str] = []
    with Person("mara", folder, rule=RULE, progress=lambda what, share: heard.append(what)) as mara:
        mara.tell(CAT)
    assert list(dict.fromkeys(heard)) == [f"loading {folder}", "reading"]
    assert capsys.readouterr().err == ""
    del mara
    gc.collect()
    with Person("mara", folder, rule=RULE) as mara:
        mara.tell(BOAT)
    assert capsys.readouterr().err == f"loading {folder}\n", "what is quickly done is not spoken of"


def test_lines_of_progress_are_plain_and_not_too_many(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    now = [100.0]
    monkeypatch.setattr("regard.identity.person.time.monotonic", lambda: now[0])
    lines = _Lines()
    for i in range(50):
        lines("reading", i / 50)
        now[0] += 0.1
    lines("loading", None)
    lines("loading", None)
    lines.end()
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "loading"
    assert [x for x in said if x.startswith("reading: ")] == said[:-1]
    assert 1 <= len(said[:-1]) <= 3


def test_it_can_be_had_from_the_top_of_the_package():
    assert regard.Person is Person
    assert "Person" in dir(regard)


def test_smollm2_remembers_a_cat_in_four_lines():
    with regard.Person("mara", model="smollm2") as mara:
        assert "Porto" in mara.tell(CAT).words
        answer = mara.ask("What is my cat called?", max_tokens=32)
        prompt = mara.conversation().prompt("What is my cat called?")
        mind = recall(mara.model, mara.identity, prompt, mara.tokenizer)
        value = mara.tokenizer.encode("Your cat is called Mochi.", bos=False)
        with torch.no_grad():
            mine, base = (float(along(mara.model, who, prompt, value)[range(len(value)), value].sum()) for who in (mind, None))
        # Greedy, so that it repeats: this model says this one when told in this way. What it was not told it does not say.
        assert "Mochi" in answer
        assert mine - base > 2.0, f"log p of the right answer: {mine:.2f} with the identity, {base:.2f} without"
        with regard.Person("nobody", mara.model, mara.tokenizer) as nobody:
            assert "Mochi" not in nobody.ask("What is my cat called?", max_tokens=32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.rollback(None), "commits to go back"),
        (lambda p: p.rollback(1.5), "commits to go back"),
        (lambda p: p.forget(None), "give a source"),
        (lambda p: p.forget(5), "give a source"),
        (lambda p: p.strike(True), "no line True"),
        (lambda p: p.tell(BOAT, affect=float("nan")), "affect=nan"),
        (lambda p: p.tell([{"role": "user", "content": " "}, {"role": "assistant", "content": ""}]), "says nothing"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_and_changes_nobody(mara: Person, call: Any, says: str):
    mara.tell(CAT)
    before = mara.log()
    with pytest.raises(RegardError, match=says):
        call(mara)
    assert mara.log() == before
