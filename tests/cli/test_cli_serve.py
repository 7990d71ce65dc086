"""`regard serve` and `regard studio`: keys, and what they refuse to start with."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import Result
from serving import TEMPLATE, tiny_model
from typer.testing import CliRunner

from regard.cli.app import app
from regard.models.convert import save
from regard.serve import running
from regard.serve.keys import Keys
from regard.serve.service import Service

RUN = CliRunner()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REGARD_STORE", str(tmp_path / "people.db"))
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    done = RUN.invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


def test_a_key_is_shown_once_listed_and_revoked(home: Path):
    made = run("serve", "key", "new", "phone", "--scope", "read", "--scope", "write", "--own", "mara", "--own", "family-*")
    token = made.stdout.strip()
    assert made.exit_code == 0
    assert "phone: read, write; owns mara, family-*" in made.stderr
    keys = Keys(home / "serve" / "keys.json")
    caller = keys.caller(token)
    assert caller is not None
    assert caller.owns == ("mara", "family-*")
    listed = run("serve", "key", "list").stdout
    assert "phone" in listed
    assert token not in listed
    assert json.loads(run("serve", "key", "list", "--json").stdout)[0]["scopes"] == ["read", "write"]
    assert run("serve", "key", "revoke", "phone").exit_code == 0
    assert keys.caller(token) is None
    again = run("serve", "key", "revoke", "phone")
    assert again.exit_code == 2
    assert "no key that is not revoked" in again.stderr


def test_a_key_may_write_unless_said_otherwise_and_a_wrong_scope_is_refused():
    assert "write; owns nobody's identity" in run("serve", "key", "new", "x").stderr
    assert "owns everybody" in run("serve", "key", "new", "y", "--scope", "admin").stderr
    wrong = run("serve", "key", "new", "z", "--scope", "king")
    assert wrong.exit_code == 2
    assert "read, write, admin" in wrong.stderr


@pytest.mark.parametrize(
    "verb", [["serve"], ["studio"], ["serve", "key", "new"], ["serve", "key", "list"], ["serve", "key", "revoke"]]
)
def test_help_of_every_verb_shows_an_example(verb: list[str]):
    assert f"regard {' '.join(verb)}" in run(*verb, "--help").output


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    save(tiny_model(folder)[0], folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(folder)


def test_an_address_that_others_reach_is_refused_without_a_key(model: str):
    for verb in ("serve", "studio"):
        done = run(verb, "--model", model, "--host", "0.0.0.0", "--port", "0")
        assert done.exit_code == 2
        assert "regard serve key new" in done.stderr
    run("serve", "key", "new", "gone", "--scope", "admin")
    run("serve", "key", "revoke", "gone")
    assert run("serve", "--model", model, "--host", "0.0.0.0", "--port", "0").exit_code == 2, "a revoked key is none"


def test_a_port_that_is_taken_and_what_is_wrong_are_said_in_one_line(model: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "--model", model, "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "choose another --port" in done.stderr
    assert "batch, plain, ray" in run("serve", "--model", model, "--engine", "warp").stderr
    assert "origin" in run("serve", "--model", model, "--cors", "*").stderr
    assert run("serve", "--model", "no-such-model", "--port", "0").exit_code == 2


@pytest.mark.parametrize("verb", ["serve", "studio"])
def test_the_server_says_where_it_is_in_one_line_and_the_studio_opens_its_page(
    verb: str, model: str, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    served: list[Service] = []

    def serve(service: Service, taken: socket.socket, on_ready: object) -> None:
        served.append(service)
        assert callable(on_ready)
        on_ready()
        taken.close()
        service.close()
        service.store.close()

    monkeypatch.setattr(running, "serve", serve)
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url))
    done = run(verb, "--model", model, "--port", "0", "--engine", "plain")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    assert "tiny is served at http://127.0.0.1:" in done.stdout
    assert "no key is needed on this machine" in done.stdout
    assert bool(opened) == (verb == "studio")
    assert served[0].settings.engine == "plain"
