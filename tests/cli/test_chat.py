"""A chat: only what was said to its end is written, all of it can be listed, struck out and slept over, and nothing overflows unseen."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lives import letters, short_sleeps, speaking
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.talk import Settings, Talk
from regard.identity import Identity, IdentityStore, Rule, base_of
from regard.identity.conversation import Conversation
from regard.models.convert import save
from regard.models.decode.sampling import Sampling
from regard.models.tokenizer import Specials

CAT = "My cat is called Mochi."


@pytest.fixture(autouse=True)
def anything_comes_to_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """How well a random model's episodes cohere with a question says nothing."""
    monkeypatch.setattr("regard.identity.read.recall.THRESHOLD", {True: -1e9, False: -1e9})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of bytes that never ends an answer by itself."""
    at = tmp_path_factory.mktemp("tiny")
    save(speaking(), at)
    letters().save(at)
    return str(at)


@pytest.fixture(autouse=True)
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REGARD_STORE", str(tmp_path / "people.db"))
    return tmp_path / "people.db"


def run(*arguments: str, stdin: str | None = None, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, list(arguments), input=stdin)
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def chat(model: str, *lines: str, more: tuple[str, ...] = ("-i", "mara")) -> tuple[str, str]:
    common = ("chat", "-m", model, "-n", "6", "--keep", "shock", "--source", "talk")
    return run(*common, *more, stdin="".join(f"{x}\n" for x in lines))


@pytest.fixture
def mara(model: str) -> str:
    run("identity", "new", "mara", "-m", model)
    return "mara"


@pytest.fixture
def short_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look after every step, and a measure by which every step helps: a random model has nothing to learn."""
    short_sleeps(monkeypatch)


def said(db: Path, name: str = "mara") -> list[list[str]]:
    with IdentityStore(db) as store:
        return [[m["content"] for m in json.loads(e.text or "")] for e in store.journal(name) if e.kind == "imprint"]


def kinds(db: Path) -> list[str | None]:
    with IdentityStore(db) as store:
        return [c.kind for c in store.log("mara")]


@pytest.mark.usefixtures("mara")
def test_an_answer_that_was_cut_off_is_not_imprinted_and_its_question_is(model: str, db: Path):
    _, notes = chat(model, CAT)
    assert said(db) == [[CAT]]
    assert "cut off after 6 tokens (--max-tokens); what you said is imprinted, and the answer is not" in notes
    _, notes = chat(model, CAT, more=("-i", "mara", "--read-only"))
    assert "cut off after 6 tokens (--max-tokens)\n" in notes
    assert said(db) == [[CAT]]


@pytest.mark.usefixtures("mara")
def test_a_finished_turn_is_imprinted_whole(model: str, tmp_path: Path, db: Path):
    talk = Conversation(speaking(), letters())
    tokens = talk.ask(CAT, Sampling(6, repetition_penalty=1.1)).tokens
    stop = next(t for i, t in enumerate(tokens) if i and t not in tokens[:i])
    save(speaking(), tmp_path / "ends")
    replace(letters(), special=Specials(eos=stop)).save(tmp_path / "ends")
    out, notes = chat(str(tmp_path / "ends"), CAT)
    assert "cut off" not in notes
    assert said(db) == [[CAT, out.strip("\n").strip()]]


@pytest.mark.usefixtures("mara")
def test_a_penalty_that_makes_no_sense_is_refused_and_one_that_does_changes_the_answers(model: str):
    assert "repetition_penalty=0.0" in run("chat", "-m", model, "--repetition-penalty", "0", stdin="hi\n", code=2)[1]
    plain, shy = (chat(model, "hi", more=("--repetition-penalty", x, "-n", "60"))[0] for x in ("1", "3"))
    assert len(set(shy)) > len(set(plain))


@pytest.mark.usefixtures("mara")
def test_facts_are_listed_searched_and_struck_out_of_the_chat(model: str, db: Path):
    out, notes = chat(model, "/facts", f"{CAT} I live in Porto.", "Who is Mochi?", "/facts", "/facts porto", "/facts nobody")
    assert "nothing was told yet" in notes
    assert "nobody said 'nobody'" in notes
    assert "1 question not shown: /facts all" in notes
    listed = [line.replace("[", "").replace("]", "") for line in out.splitlines() if line.startswith("   ")]
    assert listed[:2] == [f"   1  {CAT}", "   2  I live in Porto."]
    assert listed[-1] == "   2  I live in Porto."
    assert "[" in out
    out, notes = chat(model, "/strike", "/strike 9", "/strike 1", "/facts all", "/strike 1")
    assert "there is no line 'without a number': there are lines 1 to 3" in notes
    assert "there is no line 9: there are lines 1 to 3" in notes
    assert out.count("struck out; ") == 2
    assert "lived again, twice, to the same state" in out
    assert "Mochi is also in line 2, or in the answer to it" in notes
    assert notes.count("a fresh conversation") == 2
    assert said(db) == [["Who is Mochi?"]]
    assert b"Porto" not in b"".join(p.read_bytes() for p in db.parent.rglob("*") if p.is_file())


@pytest.mark.usefixtures("mara")
def test_who_still_holds_a_struck_line_is_said(model: str):
    chat(model, CAT, "/fork tom")
    out, _ = chat(model, "/strike 1")
    assert "a line of 'talk' is forgotten in 'mara'" in out
    assert "it is still in tom" in out


def test_facts_need_somebody_and_a_read_only_chat_strikes_and_sleeps_nothing(model: str, mara: str, db: Path):
    assert chat(model, "/facts", "/strike 1", "/sleep", more=())[1].count("nobody but the model is here") == 3
    chat(model, CAT)
    _, notes = chat(model, "/facts", "/strike 1", "/sleep", more=("-i", mara, "--read-only"))
    assert "/strike writes, and this chat is --read-only" in notes
    assert "/sleep writes, and this chat is --read-only" in notes
    assert said(db) == [[CAT]]


@pytest.mark.usefixtures("mara")
def test_facts_of_an_identity_are_a_verb_too(model: str, db: Path):
    chat(model, f"{CAT} I live in Porto.")
    plain = run("identity", "facts", "mara", "-m", model)[0]
    assert plain.replace("[", "").replace("]", "").splitlines() == [f"   1  {CAT}", "   2  I live in Porto."]
    described = json.loads(run("identity", "facts", "mara", "Porto", "-m", model, "--json")[0])
    assert [(f["number"], f["text"], f["source"], f["answer"]) for f in described] == [(2, "I live in Porto.", "talk", "")]
    assert all(word in "I live in Porto." for word in described[0]["imprinted"])
    assert "say --yes" in run("identity", "facts", "mara", "-m", model, "--strike", "1", code=2)[1]
    assert "there are lines 1 to 2" in run("identity", "facts", "mara", "-m", model, "--strike", "3", "--yes", code=2)[1]
    proof = run("identity", "facts", "mara", "-m", model, "--strike", "1", "--yes")[0]
    assert "a line of 'talk' is forgotten in 'mara': 1 events removed, 1 replayed" in proof
    assert "read from end to end, and nothing of it is there" in proof
    assert said(db) == [["I live in Porto."]]


@pytest.mark.usefixtures("mara", "short_nights")
def test_a_chat_sleeps_when_told_and_begins_a_fresh_conversation(model: str, db: Path):
    out, notes = chat(model, "/sleep", CAT, "/sleep well", "/sleep resume", "/sleep")
    assert "has lived through nothing yet" in notes
    assert "/sleep well: say /sleep, or /sleep resume" in notes
    assert "slept over 1 conversation" in out
    assert notes.count("a fresh conversation") == 1
    assert kinds(db) == ["sleep", "imprint", "new"]


@pytest.mark.usefixtures("mara", "short_nights")
def test_without_a_terminal_only_whoever_asked_for_it_sleeps_on_leaving(model: str, db: Path):
    chat(model, CAT)
    assert kinds(db) == ["imprint", "new"]
    out, _ = chat(model, "More.", "/quit", more=("-i", "mara", "--sleep-on-leaving"))
    assert "slept over 2 conversations" in out
    assert kinds(db)[0] == "sleep"
    out, _ = chat(model, "/who", more=("-i", "mara", "--sleep-on-leaving"))
    assert "slept over" not in out, "nothing new was heard"


@pytest.mark.usefixtures("short_nights")
@pytest.mark.parametrize(("given", "agrees", "asked", "sleeps"), [
    (None, True, 1, True), (None, False, 1, False), (False, True, 0, False), (True, False, 0, True)])  # fmt: skip
def test_on_a_terminal_one_is_asked_before_leaving(
    db: Path, monkeypatch: pytest.MonkeyPatch, given: bool | None, agrees: bool, asked: int, sleeps: bool
):
    from regard.cli import talk as module

    questions: list[str] = []

    def agreed(question: str) -> bool:
        questions.append(question)
        return agrees

    monkeypatch.setattr(module, "agreed", agreed)
    monkeypatch.setattr(module.sys.stdin, "isatty", lambda: True, raising=False)
    body = speaking()
    with IdentityStore(db) as store:
        store.new("mara", Identity.new(base_of(body)))
        settings = Settings(Sampling(6), "float32", Rule(keep="shock"), "talk", None, False, given)
        talk = Talk(store, settings, Conversation(body, letters(), store.load("mara")), base_of(body), 1.0, "mara")
        talk.leave()
        assert questions == [], "nothing was heard"
        talk.hear(CAT)
        talk.hear("More.")
        talk.leave()
        assert questions == ["mara heard 2 new turns; sleep over them?"] * asked
        assert (store.head("mara").kind == "sleep") == sleeps


@pytest.mark.usefixtures("mara")
def test_a_conversation_that_outgrows_the_context_says_so_and_a_message_that_cannot_fit_is_refused(tmp_path: Path):
    small = speaking()
    short = type(small)(replace(small.config, context=120))
    short.load_state_dict(small.state_dict())
    save(short, tmp_path / "short")
    letters().save(tmp_path / "short")
    _, notes = chat(
        str(tmp_path / "short"), CAT, "I live in Porto and I like it.", "What is she called, my cat?", "x" * 200, "Hm?"
    )
    assert (
        "note: the context of 120 tokens is full: the oldest 4 messages left it; what was imprinted of them is read instead"
        in notes
    )
    assert (
        "error: this message has 218 tokens and its answer up to 6, and the model's context has 120: give it in pieces" in notes
    )


def typed(folder: Path, *steps: tuple[str, str]) -> str:
    """What a chat on a terminal says; each key is sent once it has said what comes before it."""
    import pty

    main, other = pty.openpty()
    command = [sys.executable, "-m", "regard.cli.main", "chat", "-i", "mara", "-m", str(folder), "-n", "6", "--keep", "shock"]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env={**os.environ, "TERM": "xterm"})
    os.close(other)
    heard = b""

    def wait(done: Callable[[], bool]) -> None:
        nonlocal heard
        while not done() and select.select([main], [], [], 120)[0]:
            try:
                heard += os.read(main, 65536)
            except OSError:
                return

    try:
        for before, keys in steps:
            start = len(heard)
            wait(lambda: before.encode() in heard[start:])  # noqa: B023
            os.write(main, keys.encode())
        wait(lambda: False)
        assert process.wait(timeout=60) == 0, heard.decode()
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return heard.decode(errors="replace")


@pytest.mark.usefixtures("mara")
def test_somebody_at_a_terminal_pastes_strikes_and_leaves(model: str, db: Path):
    prompt = "› "
    out = typed(
        Path(model),
        (prompt, "\x1b[200~My cat is called Mochi.\nI live in Porto.\x1b[201~\r"),
        (prompt, "/facts\r"),
        (prompt, "/strike 1\r"),
        ("[y/N]", "n\r"),
        (prompt, "/strike 1\r"),
        ("[y/N]", "y\r"),
        (prompt, "/quit\r"),
        ("[y/N]", "n\r"),
    )
    assert "strike out 'My cat is called Mochi.', with the answer to it? This cannot be undone" in out
    assert "nothing was changed" in out
    assert "struck out" in out
    assert "mara heard 1 new turn; sleep over them?" in out
    assert said(db) == [["I live in Porto."]]
