"""Keys: made, kept, refused; and a table of all routes against all kinds of keys."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import begin, call, chat, client, code, make_service, secret_key

from regard.errors import CheckpointError, SpecError
from regard.serve.access import Needs
from regard.serve.app import api_routes, create_app
from regard.serve.keys import Caller, Keys
from regard.serve.service import Service
from regard.serve.settings import Settings


def test_the_file_holds_no_token_and_is_its_owners_alone(tmp_path: Path):
    keys = Keys(tmp_path / "serve" / "keys.json")
    token, key = keys.new("phone", ["read", "write"], ["mara", "family-*"])
    text = keys.path.read_text()
    assert token not in text
    assert key.hash in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.path.parent.stat().st_mode) == 0o700
    assert len(token) > 40
    caller = keys.caller(token)
    assert caller is not None
    assert [caller.may(n) for n in ("mara", "family-1", "tom", "mar", "mara2", "family")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_key_that_another_process_made_or_revoked_is_known_at_once(tmp_path: Path):
    ours, theirs = Keys(tmp_path / "keys.json"), Keys(tmp_path / "keys.json")
    assert not ours.required
    token, key = theirs.new("phone", ["read"])
    assert ours.caller(token) is not None
    theirs.revoke("phone")
    assert ours.caller(token) is None
    assert ours.required, "a server that had keys does not open when the last one is revoked"
    with pytest.raises(SpecError, match="no key that is not revoked"):
        ours.revoke(key.id)


def test_a_file_of_keys_that_was_removed_lets_nobody_in(tmp_path: Path):
    keys = Keys(tmp_path / "keys.json")
    token, _ = keys.new("phone", ["read"])
    keys.path.unlink()
    assert keys.required
    assert keys.caller(token) is not None, "who was let in stays so until the file says otherwise"
    assert keys.caller("rg-wrong") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"keys": [{}]}',
        '{"keys": [{"id": "a", "label": "b", "hash": "c", "scopes": ["king"], "owns": []}]}',
        "[]",
    ],
)
def test_a_damaged_file_of_keys_lets_nobody_in(tmp_path: Path, text: str):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(CheckpointError, match="nobody is let in"):
        Keys(tmp_path / "keys.json").caller("rg-x")
    service = make_service(tmp_path)
    answer = chat(service)
    assert answer.status_code == 500
    service.close()


@pytest.mark.parametrize(("label", "scopes", "owns"), [("", ["read"], []), ("a\n", ["read"], []), ("a", [], []), ("a", ["king"], []), ("a", ["read"], ["../x"]), ("a", ["read"], ["a*b"]), ("x" * 65, ["read"], [])])  # fmt: skip
def test_what_makes_no_key_is_refused(tmp_path: Path, label: str, scopes: list[str], owns: list[str]):
    with pytest.raises(SpecError):
        Keys(tmp_path / "keys.json").new(label, scopes, owns)


def test_scopes_hold_what_they_say():
    read, write, admin = (Caller("x", frozenset({s})) for s in ("read", "write", "admin"))
    assert [read.holds(s) for s in ("open", "read", "write", "admin")] == [True, True, False, False]
    assert [write.holds(s) for s in ("open", "read", "write", "admin")] == [True, True, True, False]
    assert [admin.holds(s) for s in ("open", "read", "write", "admin")] == [True] * 4


# -- the table -------------------------------------------------------------------------------------------------------------

SECRET = "Mochi-7319"
"""What only mara's identity holds."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str | None]]]:
    service = make_service(tmp_path_factory.mktemp("guarded"), Settings(max_tokens=2))
    begin(service, "mara", "tom")
    chat(service, f"My cat is called {SECRET}.", model="tiny:mara", max_tokens=1)
    tokens: dict[str, str | None] = {
        "none": None,
        "wrong": "rg-" + "x" * 43,
        "read": secret_key(service, "read", ["read"], ["mara"]),
        "other": secret_key(service, "other", ["write"], ["tom"]),
        "own": secret_key(service, "own", ["write"], ["mara"]),
        "admin": secret_key(service, "admin", ["admin"]),
    }
    yield service, tokens
    service.close()
    service.store.close()


def routes() -> list[tuple[str, str, str]]:
    """Every method, path and need of the application."""
    found: list[tuple[str, str, str]] = []
    for route in api_routes():
        need = next((d.call.scope for d in route.dependant.dependencies if isinstance(d.call, Needs)), "open")
        found += [(method, route.path, need) for method in sorted(route.methods or ())]
    return found


def filled(path: str, name: str) -> str:
    """A path with somebody in it."""
    return re.sub(r"\{(\w+)(:path)?\}", lambda m: f"tiny:{name}" if path.startswith("/v1/models") else name, path)


def test_the_table_knows_all_routes():
    known = {path for _, path, _ in routes()}
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/embeddings",
        "/v1/responses",
        "/tokenize",
        "/metrics",
    } <= known


def test_every_route_against_every_kind_of_key(guarded: tuple[Service, dict[str, str | None]]):
    """A stranger gets 401, a key without the scope 403; nobody but their owner and the admin gets at somebody."""
    service, tokens = guarded
    app = create_app(service)
    service.engine.start()
    needed = {
        "open": set(tokens),
        "read": {"read", "other", "own", "admin"},
        "write": {"other", "own", "admin"},
        "admin": {"admin"},
    }

    async def ask() -> list[str]:
        wrong: list[str] = []
        for who, token in tokens.items():
            async with client(app, token) as c:
                for method, path, need in routes():
                    # A body that no route takes: whoever may ask is told so, and nothing is changed.
                    options: dict[str, Any] = (
                        {}
                        if method in ("GET", "HEAD")
                        else {"content": b"[0]", "headers": {"content-type": "application/json"}}
                    )
                    if method == "DELETE" or path.endswith("/events"):
                        path = filled(path, "nobody-at-all")
                    answer = await c.request(method, filled(path, "mara"), **options)
                    status = answer.status_code
                    expected = 401 if who in ("none", "wrong") and need != "open" else 403 if who not in needed[need] else None
                    if expected is not None and status != expected:
                        wrong.append(f"{who}: {method} {path} gave {status}, not {expected}")
                    if (expected is None and status in (401, 403)) or (status >= 500 and status not in (501, 507)):
                        wrong.append(f"{who}: {method} {path} gave {status}: {answer.text[:200]}")
                    if who in ("none", "wrong", "other") and SECRET in answer.text:
                        wrong.append(f"{who}: {method} {path} tells of mara")
        return wrong

    assert asyncio.run(ask()) == []


WAYS: list[dict[str, Any]] = [
    {"path": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Who?"}]}},
    {"path": "/v1/completions", "body": {"prompt": "Who?"}},
    {"path": "/v1/responses", "body": {"input": "Who?"}},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w["path"])
def test_anothers_identity_is_as_if_it_were_not_there(guarded: tuple[Service, dict[str, str | None]], way: dict[str, Any]):
    service, tokens = guarded

    def ask(name: str, form: str) -> httpx.Response:
        body, headers = dict(way["body"]), {"content-type": "application/json"}
        if form == "model":
            body["model"] = f"tiny:{name}"
        elif form == "field":
            body["identity"] = name
        else:
            headers["x-regard-identity"] = name
        return call(service, "POST", way["path"], tokens["other"], content=json.dumps(body).encode(), headers=headers)

    for form in ("model", "field", "header"):
        hers, nobodys = ask("mara", form), ask("nobo", form)
        assert (hers.status_code, code(hers)) == (404, "identity_not_found")
        assert hers.text.replace("mara", "nobo") == nobodys.text


def test_a_wrong_key_is_refused_before_its_body_is_read(guarded: tuple[Service, dict[str, str | None]]):
    service, tokens = guarded
    answer = call(
        service,
        "POST",
        "/v1/chat/completions",
        tokens["wrong"],
        content=b"x" * (8 << 20),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_any_or_no_bearer_will_do_where_there_are_no_keys(service: Service):
    assert chat(service).status_code == chat(service, token="sk-anything").status_code == 200


def test_an_origin_that_was_named_may_call_and_is_told_so(tmp_path: Path):
    service = make_service(tmp_path, Settings(max_tokens=2, cors=("https://app.example",)))
    hello = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = call(service, "OPTIONS", "/v1/chat/completions", headers=hello)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert (
        call(service, "GET", "/health", headers={"origin": "https://app.example"}).headers["access-control-allow-origin"]
        == "https://app.example"
    )
    assert call(service, "GET", "/health", headers={"origin": "https://evil.example"}).status_code == 403
    service.close()


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/path", "ftp://x", "https://*.example"])
def test_what_is_no_origin_cannot_be_named(origin: str):
    with pytest.raises(SpecError, match="cors"):
        Settings(cors=(origin,))


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.9.1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)])  # fmt: skip
def test_loopback_is_known_by_its_address(host: str, loopback: bool):
    assert Settings(host=host).loopback is loopback
