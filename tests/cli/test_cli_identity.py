"""The verbs about identities: what is said is kept, can be asked about, and can be taken back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from lives import short_sleeps
from typer.testing import CliRunner

from regard.cli.app import app
from regard.identity import IdentityStore
from regard.identity.sleep.rule import SleepRule
from regard.models import LlamaConfig
from regard.models.convert import save

RUN = CliRunner()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny(folder: Path, seed: int, *, template: bool = True) -> Path:
    """A model of 256 tokens, one per byte, that can chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(seed)
    save(LlamaConfig(vocabulary=256, width=32, depth=2, heads=4, key_heads=2, hidden=48).build(), folder)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=letters, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.save(str(folder / "tokenizer.json"))
    if template:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(tmp_path_factory.mktemp("tiny"), 0))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(tmp_path_factory.mktemp("other"), 1, template=False))


@pytest.fixture(autouse=True)
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REGARD_STORE", str(tmp_path / "people.db"))
    return tmp_path / "people.db"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    done = RUN.invoke(app, list(arguments), input=stdin)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


def good(*arguments: str, stdin: str | None = None) -> str:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    return done.stdout


def refused(*arguments: str, stdin: str | bytes | None = None) -> str:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


def imprint(model: str, text: str = "I am Mara. My cat is called Mochi.", name: str = "mara", source: str = "diary") -> str:
    return good("imprint", "-", "-i", name, "-m", model, "--source", source, "--keep", "shock", stdin=text)


def chat(model: str, *lines: str, more: tuple[str, ...] = ()) -> Result:
    return run(
        "chat", "-m", model, "-n", "6", "--keep", "shock", "--source", "talk", *more, stdin="".join(f"{x}\n" for x in lines)
    )


def shown(name: str, model: str) -> dict[str, Any]:
    return json.loads(good("identity", "show", name, "-m", model, "--json"))


@pytest.mark.parametrize("verb", [["chat"], ["imprint"], ["sleep"], *(["identity", x] for x in (
    "new", "list", "show", "facts", "log", "diff", "fork", "rollback", "forget", "export", "import", "delete", "check", "backup", "restore", "gc"))])  # fmt: skip
def test_help_of_every_verb_shows_an_example(verb: list[str]):
    assert f"regard {' '.join(verb)}" in good(*verb, "--help")


def test_a_life_from_its_beginning_to_its_export(model: str, tmp_path: Path):
    assert "an empty identity" in good("identity", "new", "mara", "-m", model)
    said = imprint(model)
    assert "kept 16 of 33 tokens from diary: " in said
    assert "16 imprints, 1 experience" in said
    listed = json.loads(good("identity", "list", "--json"))
    assert [(x["name"], x["experiences"], x["kind"]) for x in listed] == [("mara", 1, "imprint")]
    found = shown("mara", model)
    assert found["sources"] == ["diary"]
    assert all(x["text"] in "I am Mara. My cat is called Mochi." for x in found["imprints"])
    text = good("identity", "show", "mara", "-m", model)
    assert "1 experience, 33 tokens, 0 sleeps" in text
    assert "diary (16)" in text
    good("identity", "fork", "mara", "tom")
    imprint(model, "The boat leaves at nine.", source="letter")
    assert "+letter" in good("identity", "diff", "tom", "mara")
    assert json.loads(good("identity", "diff", "tom", "mara", "--json"))["experiences"] == 1
    assert "back to" in good("identity", "rollback", "mara")
    assert json.loads(good("identity", "diff", "tom", "mara", "--json"))["same"]
    kinds = [x["kind"] for x in json.loads(good("identity", "log", "mara", "--json"))]
    assert kinds == ["rollback", "imprint", "imprint", "new"]
    assert len(good("identity", "log", "mara", "-n", "2").splitlines()) == 2
    good("identity", "export", "mara", str(tmp_path / "mara.safetensors"))
    assert "1 experience" in good("identity", "import", str(tmp_path / "mara.safetensors"), "again", "-m", model)
    assert json.loads(good("identity", "diff", "mara", "again", "--json"))["same"]
    assert "gone" in good("identity", "delete", "again", "--yes")
    assert "again" not in good("identity", "list")


def test_what_is_forgotten_is_gone_and_the_proof_is_printed(model: str):
    imprint(model)
    imprint(model, "The boat leaves at nine.", source="letter")
    imprint(model, "The boat leaves at nine.", name="tom", source="letter")
    assert "say --yes" in refused("identity", "forget", "mara", "diary", "-m", model)
    proof = good("identity", "forget", "mara", "diary", "--yes", "-m", model)
    assert "1 events removed, 1 replayed" in proof
    assert json.loads(good("identity", "diff", "mara", "tom", "--json"))["same"]
    assert "wrote nothing" in refused("identity", "forget", "mara", "diary", "--yes", "-m", model)


def test_two_who_chatted_on_one_day_are_two_sources_and_a_forgetting_says_what_it_read(model: str):
    for name, words in (("mara", "I am Mara"), ("theo", "I am Theo")):
        good("identity", "new", name, "-m", model)
        done = run("chat", "-m", model, "-i", name, "-n", "4", "--keep", "shock", stdin=f"{words}\n")
        assert done.exit_code == 0, done.output
    [mine], [other] = (shown(name, model)["sources"] for name in ("mara", "theo"))
    assert mine != other
    label = mine.partition("@")[0]
    assert label == other.partition("@")[0]
    assert label.startswith("chat-")
    proof = good("identity", "forget", "mara", label, "--yes", "-m", model)
    assert f"'{mine}' is forgotten" in proof
    assert "theo" not in proof
    assert "nothing of it is there: people.db" in proof
    assert "cannot be read from here, and may keep it: copies, exports and backups" in proof


def test_a_store_is_checked_backed_up_damaged_and_restored(model: str, db: Path, tmp_path: Path):
    imprint(model)
    assert "1 name, 2 commits, 2 events, 1 episode, 2 blobs: sound" in good("identity", "check")
    assert "1 identity" in good("identity", "backup", str(tmp_path / "monday"))
    assert "sound" in good("identity", "check", "--store", str(tmp_path / "monday" / "identities.db"))
    assert "there already" in refused("identity", "backup", str(tmp_path / "monday"))
    assert "--replace" in refused("identity", "restore", str(tmp_path / "monday"))
    assert "no folder" in refused("identity", "restore", str(tmp_path / "tuesday"))
    db.write_bytes(db.read_bytes()[:8192])
    done = run("identity", "check")
    assert done.exit_code == 1, done.output
    assert "damaged" in done.stdout
    assert "restore a backup" in done.stdout
    assert not json.loads(run("identity", "check", "--json").stdout)["sound"]
    assert "restored 1 name, 2 commits" in good("identity", "restore", str(tmp_path / "monday"), "--replace")
    assert shown("mara", model)["sources"] == ["diary"]
    assert json.loads(good("identity", "check", "--json"))["problems"] == []
    assert "removed" in good("identity", "gc")
    assert "no store" in refused("identity", "check", "--store", str(tmp_path / "none.db"))


def test_a_password_never_reaches_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for url in ("postgresql:/me:hunter2secret@host/db", "postgresql://me:hunter2secret@127.0.0.1:9/db?password=hunter2secret"):
        done = run("identity", "list", "--store", url)
        assert done.exit_code == 2, done.output
        assert "hunter2secret" not in done.output
        assert "hunter2secret" not in str(list(tmp_path.rglob("*")))


@pytest.mark.usefixtures("short_nights")
def test_a_night_whose_commit_is_forgotten_meanwhile_is_not_kept(model: str, db: Path, monkeypatch: pytest.MonkeyPatch):
    import regard.identity.sleep.stored as module

    imprint(model)
    real = module.write_checkpoint

    def then_deleted(*given: Any) -> None:
        real(*given)
        with IdentityStore(db) as store:
            store.delete("mara")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_checkpoint", then_deleted)
        done = sleep(model)
    assert done.exit_code == 2, done.output
    assert "the night was not kept" in done.stderr
    assert not list(db.parent.glob("people.nights/*"))


def test_messages_from_json_and_jsonl_are_one_conversation(model: str, tmp_path: Path, db: Path):
    talk = [{"role": "user", "content": "I live in Porto."}, {"role": "assistant", "content": "Lovely!"}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(m) + "\n\n" for m in talk))
    for name, file in (("a", "talk.json"), ("b", "talk.jsonl")):
        said = good("imprint", str(tmp_path / file), "-i", name, "-m", model, "--keep", "shock", "--affect", "estimated")
        assert "from talk@" in said
    [source] = shown("a", model)["sources"]
    good("imprint", "-", "-i", "c", "-m", model, "--keep", "shock", "--affect", "estimated", "--source", source, stdin="".join(json.dumps(m) + "\n" for m in talk))  # fmt: skip
    for name in "bc":
        assert json.loads(good("identity", "diff", "a", name, "--json"))["same"]
    with IdentityStore(db) as store:
        event = store.journal("a")[-1]
    assert json.loads(event.text or "") == talk
    assert event.rule["affect"] == "estimated"
    assert event.rule["keep"] == "shock"


def test_a_long_text_is_read_in_pieces_and_the_budget_holds(model: str):
    said = good("imprint", "-", "-i", "mara", "-m", model, "--keep", "shock", "--budget", "5", stdin="One two three. " * 150)
    assert "5 imprints, 3 experiences" in said


def test_hostile_files_are_refused_in_one_line_and_nothing_is_written(model: str, tmp_path: Path):
    def file(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    for path, says in (
        (file("empty.txt", b" \n"), "is empty"),
        (file("x.bin", b"\xff\xfe\x00\x01"), "not text in UTF-8"),
        (file("nul.txt", b"a\0b"), "NUL"),
        (file("big.txt", b"x" * ((1 << 20) + 1)), "more than 1 MB"),
        (file("bad.json", b"[1, 2"), "is not JSON"),
        (file("list.json", b"{}"), "holds no list of messages"),
        (file("m.json", b"[1]"), "message 1 is no message"),
        (file("m.jsonl", b'{"role": "user", "content": "x"}\n{"role": "user"}\n'), "line 2 is no message"),
        (str(tmp_path / "nowhere.txt"), "there is no file"),
        (str(tmp_path), "is a folder"),
    ):
        assert says in refused("imprint", path, "-i", "mara", "-m", model, "--keep", "shock")
    assert json.loads(good("identity", "list", "--json")) == []


def test_wrong_options_teach(model: str):
    imprint(model)
    for arguments, says in (
        (["imprint", "-", "-i", "mara", "--keep", "shoc", "-m", model], "keep='shoc' is not one of"),
        (["imprint", "-", "-i", "mara", "--affect", "2", "-m", model], "number from -1"),
        (["imprint", "-", "-i", "../x", "-m", model], "cannot name an identity"),
        (["chat", "-i", "mara", "--affect", "glad", "-m", model], "number from -1"),
        (["chat", "-i", "mara", "--weights", "int4", "-m", model], "float32, int8 or q4"),
        (["chat", "-i", "mara", "--compare", "a,b", "-m", model], "leave --identity out"),
        (["chat", "--compare", "mara", "-m", model], "two names"),
        (["chat", "-i", "mara"], "regard models get smollm2"),
        (["chat", "-t", "-1", "-m", model], "temperature"),
        (["identity", "rollback", "mara", "9"], "commits to go back"),
        (["identity", "import", "nowhere", "x"], "there is no nowhere"),
        (["sleep", "-i", "mara", "--resume", "-m", model], "no night of mara was interrupted"),
    ):
        assert says in refused(*arguments, stdin="hello there")


@pytest.mark.parametrize("verb", [["chat", "-i"], ["sleep", "-i"], ["identity", "show"], ["identity", "log"], ["identity", "rollback"],
                                  ["chat", "--compare", "mara,nobody", "-n"]])  # fmt: skip
def test_an_unknown_name_is_answered_with_those_that_are_there(verb: list[str], model: str):
    imprint(model)
    name = "6" if verb[-1] == "-n" else "nobody"
    more = [] if verb[:2] in (["identity", "log"], ["identity", "rollback"]) else ["-m", model]
    assert "there are mara" in refused(*verb, name, *more, stdin="hi\n")


def test_another_model_is_refused_before_anything_is_written(model: str, other: str, tmp_path: Path):
    imprint(model)
    head = json.loads(good("identity", "list", "--json"))[0]["id"]
    good("identity", "export", "mara", str(tmp_path / "mara"))
    for arguments in (
        ["imprint", "-", "-i", "mara", "--keep", "shock"],
        ["sleep", "-i", "mara"],
        ["identity", "forget", "mara", "diary", "--yes"],
        ["identity", "import", str(tmp_path / "mara"), "x"],
    ):
        assert "its weights differ" in refused(*arguments, "-m", other, stdin="hello there")
    assert json.loads(good("identity", "list", "--json"))[0]["id"] == head
    done = run("identity", "show", "mara", "-m", other)
    assert done.exit_code == 0
    assert "token numbers" in done.stderr


def test_a_chat_answers_lines_from_a_pipe_and_imprints_each_turn(model: str, db: Path):
    good("identity", "new", "mara", "-m", model)
    done = chat(model, "Hello, I am Mara.", "", "Who am I?", more=("-i", "mara"))
    assert done.exit_code == 0, done.output
    with IdentityStore(db) as store:
        events = [e for e in store.journal("mara") if e.kind == "imprint"]
    talks = [json.loads(e.text or "") for e in events]
    assert [t[0]["content"] for t in talks] == ["Hello, I am Mara.", "Who am I?"]
    assert {e.source for e in events} == {"talk"}
    assert [len(t) for t in talks] == [1, 1], "answers that were cut off are not imprinted"
    assert done.stderr.count("kept") == 2
    assert "\x1b" not in done.stdout
    again = chat(model, "Hello, I am Mara.", "Who am I?", more=("--read-only",))
    # An empty identity is the model itself, and what a chat imprints is not read in that chat.
    assert again.stdout == done.stdout


def test_what_was_imprinted_is_read_after_new_and_not_before(model: str):
    told = "zzzz qqqq zzzz qqqq " * 4
    imprint(model, told, source="noise")
    # A model of random weights finds only what it is asked for word by word.
    one = chat(model, told, "/why", more=("-i", "mara", "--read-only"))
    assert "nats from the model itself" in one.stdout
    good("identity", "new", "tom", "-m", model)
    two = chat(model, told, "/why", "/new", told, "/why", more=("-i", "tom"))
    assert two.exit_code == 0, two.output
    assert two.stderr.count("was empty when this conversation began") == 1
    assert two.stdout.count("nats from the model itself") == 1


def test_read_only_and_compare_write_nothing(model: str):
    imprint(model)
    imprint(model, "The boat leaves at nine.", name="tom", source="letter")
    before = good("identity", "list", "--json")
    chat(model, "hello", "/compare", more=("-i", "mara", "--read-only"))
    done = chat(model, "hello", "/who", "/new", "again", more=("--compare", "mara,tom"))
    assert done.exit_code == 0, done.output
    assert done.stdout.count("mara: ") == done.stdout.count("tom: ") == 2
    assert done.stdout.count("KL(mara ‖ tom)") == 2
    assert "KL(tom ‖ model)" in done.stdout
    assert good("identity", "list", "--json") == before


def test_commands_of_a_chat_do_what_they_say(model: str):
    told = "I am Mara. My cat is called Mochi."
    imprint(model, told)
    # A model of random weights finds only what it is asked for word by word.
    done = chat(
        model, "/help", "/why", told, "/why", "/why 3", "/why most", "/why 99", "/compare", "/affect -0.5", "/affect glad",
        "/who", "/fork tom", "/fork mara", "more", "/rollback", "/rollback 99", "/dance", "/quit", "never said",
        more=("-i", "mara"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for says in ("/rollback [N]", "token 1, ", "token 3, ", "most at token", "without  imprints", "layers   ", "shock "):
        assert says in done.stdout, says
    for says in (
        "nothing was answered yet", "tokens 1 to 6", "affect is -0.5", "affect 'glad'", "tom", "in the store already",
        "back to", "commits to go back", "'/dance' is no command", "will be remembered after /new",
    ):  # fmt: skip
        assert says in done.stderr, says
    names = {x["name"]: x for x in json.loads(good("identity", "list", "--json"))}
    assert names["mara"]["experiences"] == 2
    assert names["tom"]["kind"] == "rollback"
    assert names["tom"]["experiences"] == 2


def test_a_chat_without_identity_is_the_model_and_says_so_when_asked(model: str):
    done = chat(model, "hello", "/who", "/why", "/rollback", "/new", "hello")
    assert done.exit_code == 0
    assert done.stderr.count("nobody but the model is here") == 3
    first, second = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first == second


def test_a_chat_repeats_itself_with_one_seed_and_takes_int8(model: str):
    imprint(model)
    more = ("-i", "mara", "--read-only", "-t", "0.9", "--seed", "3", "--system", "Be brief.")
    assert chat(model, "hello", more=more).stdout == chat(model, "hello", more=more).stdout
    assert chat(model, "hello", more=(*more, "--weights", "int8")).exit_code == 0


def test_models_that_do_not_chat_and_lines_that_are_no_text_are_refused(model: str, other: str):
    assert "chat template" in refused("chat", "-m", other, stdin="hi\n")
    assert "not text in UTF-8" in refused("chat", "-m", model, stdin=b"\xff\xfe\n")


def test_control_characters_never_reach_the_terminal():
    from regard.identity.wording import clean, spark

    assert clean("a\x1b[31mb\x07\n\t") == "a�[31mb�\n\t"
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([]) == ""
    assert len(spark(list(range(100)), 10)) == 10


def sleep(model: str, *more: str) -> Result:
    return run("sleep", "-i", "mara", "-m", model, "--steps", "4", *more)


@pytest.fixture
def short_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look after every step, and a measure by which every step helps: a random model has nothing to learn."""
    short_sleeps(monkeypatch)


@pytest.mark.usefixtures("short_nights")
def test_sleep_commits_what_helped_and_can_be_forgotten_around(model: str, db: Path):
    imprint(model)
    imprint(model, "The boat leaves at nine.", source="letter")
    done = sleep(model)
    assert done.exit_code == 0, done.output
    assert "slept over 2 conversations" in done.stdout
    assert "of 1 questions that were held back" in done.stdout
    assert shown("mara", model)["life"]["sleeps"] == 1
    assert not list(db.parent.glob("people.nights/*.safetensors"))
    assert "2 replayed" in good("identity", "forget", "mara", "letter", "--yes", "-m", model)


@pytest.mark.usefixtures("short_nights")
def test_a_night_that_is_broken_off_goes_on_to_the_same_morning(model: str, db: Path, monkeypatch: pytest.MonkeyPatch):
    imprint(model)
    good("identity", "fork", "mara", "whole")
    assert run("sleep", "-i", "whole", "-m", model, "--steps", "4").exit_code == 0
    import regard.identity.sleep.stored as module

    real = module.write_checkpoint

    def stop(*given: Any) -> None:
        real(*given)
        if given[-1].step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_checkpoint", stop)
        done = sleep(model)
    assert done.exit_code == 130, done.output
    assert "--resume" in done.stderr
    assert len(list(db.parent.glob("people.nights/*.safetensors"))) == 1
    done = run("sleep", "-i", "mara", "-m", model, "--resume")
    assert done.exit_code == 0, done.output
    assert "going on after step 2 of 4" in done.stderr
    assert json.loads(good("identity", "diff", "whole", "mara", "--json"))["same"]
    assert not list(db.parent.glob("people.nights/*.safetensors"))
    with IdentityStore(db) as store:
        assert [e.kind for e in store.journal("mara")] == ["new", "imprint", "sleep"]


@pytest.mark.usefixtures("short_nights")
def test_a_night_that_was_left_behind_goes_when_its_identity_does(model: str, db: Path):
    import regard.identity.sleep.resume as module
    from regard.errors import CheckpointError
    from regard.identity.sleep.consolidate import Look, SleepCheckpoint

    imprint(model)
    with IdentityStore(db) as store:
        head = store.head("mara").id
    file = db.parent / "people.nights" / f"{head}.safetensors"
    one = torch.ones(2)
    looks = [Look(0, 2.0, 1, 0.9), Look(2, 1.5, 2, 0.95)]
    night = SleepCheckpoint(3, {"s": one}, {"s": (one * 2, one * 3)}, {"s": one * 4}, 2, looks)
    module.write_checkpoint(file, SleepRule(steps=9), night)
    rule, again = module.read_checkpoint(file)
    assert rule == SleepRule(steps=9)
    assert (again.step, again.best_step, again.looks) == (3, 2, looks)
    assert torch.equal(again.moments["s"][1], one * 3)
    assert torch.equal(again.best["s"], one * 4)
    good("identity", "delete", "mara", "--yes")
    assert not file.exists()
    file.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="no night that can go on"):
        module.read_checkpoint(file)


def test_nobody_sleeps_who_has_lived_through_nothing(model: str):
    good("identity", "new", "mara", "-m", model)
    assert "lived through nothing" in refused("sleep", "-i", "mara", "-m", model)


def test_ctrl_c_stops_the_chat_in_a_pipe_with_130(model: str):
    command = [sys.executable, "-m", "regard.cli.main", "chat", "-m", model, "-n", "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("hello\n")
        chat.stdin.flush()
        assert chat.stdout.readline()
        time.sleep(0.3)
        os.kill(chat.pid, signal.SIGINT)
        _, errors = chat.communicate(timeout=30)
    assert chat.returncode == 130
    assert "Traceback" not in errors


def test_a_text_that_was_imprinted_already_is_recognised_by_its_words(model: str, tmp_path: Path, db: Path):
    (tmp_path / "diary.txt").write_text("I am Mara. My cat is called Mochi.")
    (tmp_path / "copy.txt").write_text("I am Mara. My cat is called Mochi.")
    one = ("-i", "mara", "-m", model, "--keep", "shock")
    good("imprint", str(tmp_path / "diary.txt"), *one)
    for file in ("diary.txt", "copy.txt"):
        said = good("imprint", str(tmp_path / file), *one)
        assert re.search(r"mara has lived through this text already, as diary@[0-9a-f]{8} on \d{4}-", said)
        assert "nothing was written" in said
    with IdentityStore(str(db)) as store:
        assert [e.kind for e in store.journal("mara")] == ["new", "imprint"]
    assert "kept" in good("imprint", str(tmp_path / "diary.txt"), *one, "--again")
    assert "kept" in good("imprint", str(tmp_path / "diary.txt"), "-i", "tom", "-m", model, "--keep", "shock")
    good("identity", "rollback", "mara", "2")
    assert "kept" in good("imprint", str(tmp_path / "diary.txt"), *one), "what was rolled back was not lived through"


def test_a_long_text_is_cut_to_what_the_model_was_trained_on(tmp_path: Path):
    folder = tiny(tmp_path / "short", 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    said = good("imprint", "-", "-i", "mara", "-m", str(folder), "--keep", "shock", stdin="One two three. " * 20)
    # 300 bytes in pieces of at most 48.
    assert "7 experiences" in said


def test_help_of_sleep_names_the_steps_of_the_rule():
    assert f"default: {SleepRule.steps}]" in " ".join(good("sleep", "--help").split())
