"""What a server does not do: too long, too many, too late, a full disk, and bodies that mean harm."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import GatedEngine, begin, call, chat, client, code, events, make_service, post, tiny_model

from regard import files
from regard.identity.store import IdentityStore
from regard.serve import answer as answering
from regard.serve import plain
from regard.serve.errors import said
from regard.serve.plain import PlainRun
from regard.serve.service import Service
from regard.serve.settings import Settings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}


def gated(folder: Path, **settings: Any) -> tuple[Service, GatedEngine]:
    pair = tiny_model(folder / "model")
    made = Settings(max_tokens=8, **settings)
    engine = GatedEngine(*pair, queue=made.queue)
    return make_service(folder, made, engine, pair=pair), engine


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    service = make_service(tmp_path, Settings(max_tokens=8, body_bytes=1000, messages=3))
    yield service
    service.close()


def test_a_body_that_is_too_large_is_413_with_and_without_its_length(small: Service):
    long = post(small, CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]})
    assert (long.status_code, code(long)) == (413, "body_too_large")

    async def parts() -> Any:
        for _ in range(10):
            yield b'{"messages": ' + b" " * 200

    async def ask() -> httpx.Response:
        async with client(small) as c:
            return await c.post(CHAT, content=parts(), headers={"content-type": "application/json"})

    assert asyncio.run(ask()).status_code == 413


def test_too_many_messages_are_400(small: Service):
    answer = post(small, CHAT, {"messages": [{"role": "user", "content": "a"}] * 4})
    assert (answer.status_code, code(answer)) == (400, "too_many_messages")


def test_a_prompt_past_the_context_is_400_and_says_how_long_it_is(service: Service):
    answer = chat(service, "x" * 1100)
    assert (answer.status_code, code(answer)) == (400, "context_length_exceeded")
    assert "1,024" in answer.text
    near = chat(service, "x" * 900, max_tokens=200)
    assert (near.status_code, code(near)) == (400, "context_length_exceeded")
    assert post(service, "/v1/completions", {"prompt": "x" * 1100}).status_code == 400


def test_a_full_queue_is_429_and_says_when_to_come_again(tmp_path: Path):
    service, engine = gated(tmp_path, queue=1)

    async def ask() -> list[httpx.Response]:
        async with client(service) as c:
            running = asyncio.create_task(c.post(CHAT, json=BODY))
            while not engine.stats().running:
                await asyncio.sleep(0.005)
            waiting = asyncio.create_task(c.post(CHAT, json=BODY))
            while not engine.stats().queued:
                await asyncio.sleep(0.005)
            refused = await c.post(CHAT, json=BODY)
            streamed = await c.post(CHAT, json={**BODY, "stream": True})
            engine.gate.release(1000)
            return [refused, streamed, await running, await waiting]

    refused, streamed, *others = asyncio.run(ask())
    for answer in (refused, streamed):
        assert (answer.status_code, code(answer)) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert [a.status_code for a in others] == [200, 200]
    service.close()


def test_turns_that_wait_for_their_commit_count_as_waiting(tmp_path: Path):
    service, engine = gated(tmp_path, queue=2)
    begin(service, "mara")
    engine.gate.release(1000)
    held = threading.Event()

    async def ask() -> list[httpx.Response]:
        async with client(service) as c:
            blocked = asyncio.create_task(engine.call(held.wait))
            waiting = [asyncio.create_task(c.post(CHAT, json={**BODY, "model": "tiny:mara"})) for _ in range(2)]
            while service.pending < 2:
                await asyncio.sleep(0.005)
            refused, base = await c.post(CHAT, json={**BODY, "model": "tiny:mara"}), await c.post(CHAT, json=BODY)
            held.set()
            await blocked
            return [refused, base, *[await w for w in waiting]]

    refused, base, *others = asyncio.run(ask())
    assert (refused.status_code, code(refused)) == (429, "queue_full")
    assert [a.status_code for a in (base, *others)] == [200, 200, 200], "the model itself needs no commit"
    assert service.pending == 0
    service.close()


def test_an_answer_that_takes_too_long_is_504_or_an_error_in_the_stream_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    service, engine = gated(tmp_path)
    begin(service, "mara")
    before = service.store.head("mara").id

    async def ask(stream: bool) -> httpx.Response:
        async with client(service) as c:
            engine.fallen = 0
            engine.gate.release(2)
            asked = asyncio.create_task(c.post(CHAT, json={**BODY, "model": "tiny:mara", "stream": stream}))
            while engine.fallen < 2:
                await asyncio.sleep(0.005)
            with monkeypatch.context() as m:
                # The engine's clock strikes here, however fast this machine is.
                m.setattr(plain, "_gone", lambda run: "deadline")
                engine.gate.release(2)
                return await asked

    late = asyncio.run(ask(False))
    assert (late.status_code, code(late)) == (504, "deadline_exceeded")
    streamed = asyncio.run(ask(True))
    assert streamed.status_code == 200, "its beginning was sent already"
    last = events(streamed.text)[-1]["error"]
    assert (last["code"], last["status"]) == ("deadline_exceeded", 504)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert service.store.head("mara").id == before
    service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_keep_its_deadline_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool):
    monkeypatch.setattr(answering, "GRACE", 0.0)
    monkeypatch.setattr(plain, "_gone", lambda run: "cancelled" if run.stopped.is_set() else None)
    service, engine = gated(tmp_path, deadline=0.2)
    runs: list[PlainRun] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda job: runs.append(submit(job)) or runs[-1])

    async def ask() -> httpx.Response:
        async with client(service) as c:
            engine.gate.release(2)
            asked = asyncio.create_task(c.post(CHAT, json={**BODY, "stream": stream}))
            while not (runs and runs[0].stopped.is_set()):
                await asyncio.sleep(0.005)
            engine.gate.release(10)
            return await asked

    answer = asyncio.run(ask())
    # On a machine that is slow, before the first token: then there is no stream yet.
    error = answer.json()["error"] if answer.status_code != 200 else events(answer.text)[-1]["error"]
    assert error["code"] == "deadline_exceeded"
    service.close()


def test_a_full_disk_is_507_and_loses_nothing(service: Service, monkeypatch: pytest.MonkeyPatch):
    begin(service, "mara")
    before = service.store.head("mara").id

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(files, "sync", full)
        whole = chat(service, "My cat is Mochi.", model="tiny:mara")
        streamed = chat(service, "My cat is Mochi.", model="tiny:mara", stream=True)
    assert (whole.status_code, code(whole)) == (507, "disk_full")
    assert "full" in whole.text
    assert events(streamed.text)[-1]["error"]["code"] == "disk_full"
    assert all(not c["choices"][0]["finish_reason"] for c in events(streamed.text)[:-1]), "the turn was not acknowledged"
    assert service.store.head("mara").id == before
    assert chat(service, "My cat is Mochi.", model="tiny:mara").json()["regard"]["commit"] == service.store.head("mara").id


def test_a_disk_that_is_really_full_is_507(tmp_path: Path):
    small = tmp_path / "disk"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        service = make_service(tmp_path)
        service.store.close()
        service.store = IdentityStore(small / "people.db")
        begin(service, "mara")
        acknowledged = 0
        for i in range(200):
            answer = chat(service, f"Number {i} is " + "x" * 300, model="tiny:mara", max_tokens=1)
            if answer.status_code != 200:
                break
            acknowledged += 1
        assert (answer.status_code, code(answer)) == (507, "disk_full"), answer.text
        assert acknowledged > 0
        assert len([e for e in service.store.journal("mara") if e.kind == "imprint"]) == acknowledged
        service.close()
        service.store.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_server_that_drains_takes_nothing_new_and_finishes_what_runs(tmp_path: Path):
    service, engine = gated(tmp_path)
    begin(service, "mara")

    async def ask() -> list[httpx.Response]:
        async with client(service) as c:
            running = asyncio.create_task(c.post(CHAT, json={**BODY, "model": "tiny:mara"}))
            while not engine.stats().running:
                await asyncio.sleep(0.005)
            service.draining = True
            refused = [await c.post(CHAT, json=BODY), await c.get("/v1/models"), await c.get("/ready"), await c.get("/health")]
            engine.gate.release(1000)
            return [*refused, await running]

    new, models, ready, health, running = asyncio.run(ask())
    assert (new.status_code, code(new)) == (models.status_code, code(models)) == (503, "draining")
    assert new.headers["retry-after"] == "5"
    assert (ready.status_code, health.status_code) == (503, 200)
    assert running.json()["regard"]["commit"] == service.store.head("mara").id
    service.close()


DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HOSTILE = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 4000 + b"}",
    b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e3}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "user", "content": {"a": 1}}]}', b'{"messages": {"0": "a"}}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": true}', b'{"messages": [{"role": "user", "content": "a"}], "stop": [[]]}',
    b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": "x"}}', b'{"messages": [{"role": "user", "content": "a"}], "identity": 5}',
    b'{"messages": [{"role": "user", "content": "a"}], "model": ["tiny"]}', DEEP,
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=lambda b: repr(b[:40]) + str(len(b)))
def test_hostile_json_is_400_with_our_words(service: Service, body: bytes):
    answer = post(service, CHAT, body)
    assert answer.status_code == 400, answer.text[:300]
    assert code(answer)
    assert len(answer.content) < 2000
    for path in ("/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"):
        # Elsewhere a field that is wrong here may be unknown, and ignored.
        assert post(service, path, body).status_code in (200, 400), path


def test_words_of_a_body_are_not_repeated_in_its_error(service: Service):
    answer = chat(service, "my secret", temperature="my secret", identity=["my secret"], n="my secret")
    assert answer.status_code == 400
    assert "secret" not in answer.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_of_a_page_could_send_is_refused(service: Service, kind: str):
    answer = call(service, "POST", CHAT, content=b'{"messages": []}', headers={"content-type": kind})
    assert (answer.status_code, code(answer)) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"12, 13")],
        [(b"content-length", b"-1")],
        [(b"host", b"evil.example")],
        [(b"authorization", b"Bearer x")],
    ],
)
def test_a_header_that_is_doubled_or_wrong_is_refused(service: Service, headers: list[tuple[bytes, bytes]]):
    sent: list[Any] = []

    async def ask() -> None:
        from regard.serve.app import create_app

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        service.keys.new("me", ["admin"])
        given = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"authorization", b"Bearer x"), *headers]
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "path": CHAT, "raw_path": b"", "query_string": b"",
                 "headers": given, "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1)}  # fmt: skip
        await create_app(service)(scope, receive, send)

    asyncio.run(ask())
    assert 400 <= sent[0]["status"] < 500


def test_what_breaks_inside_is_500_without_its_words(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise RuntimeError("my secret prompt")

    monkeypatch.setattr(service.engine, "submit", broken)
    answer = chat(service)
    assert (answer.status_code, code(answer)) == (500, "internal")
    assert "secret" not in answer.text + caplog.text
    assert answer.headers["x-request-id"] in caplog.text


def test_a_log_line_names_a_route_and_nobody(service: Service, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "regard.serve")
    begin(service, "mara")
    chat(service, "My cat is Mochi.", model="tiny:mara")
    call(service, "GET", "/v1/models/tiny:mara")
    call(service, "GET", "/v1/identities/mara/nothing-here")
    assert "POST /v1/chat/completions 200" in caplog.text
    assert "mara" not in caplog.text
    assert "Mochi" not in caplog.text
    metrics = call(service, "GET", "/metrics").text
    assert "mara" not in metrics
    assert 'regard_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in metrics
    assert "regard_first_token_seconds_count 1.0" in metrics
    assert "regard_turns_committed_total 1.0" in metrics


def test_a_database_that_does_not_answer_is_503_and_ours():
    from sqlalchemy.exc import OperationalError

    from regard.identity.store import StoreError

    error = StoreError("postgresql://host did not answer")
    error.__cause__ = OperationalError("select", {}, Exception("gone"))
    assert said(error).status == 503
    assert "host" not in said(error).message
