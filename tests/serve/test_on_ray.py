"""The same application on a real Ray with two replicas: each person has one, and a write is right on either."""

from __future__ import annotations

import json
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import tiny_model

from regard.identity.store import IdentityStore
from regard.models.convert import save
from regard.serve.on_ray import Router, Setup, deploy, shard
from regard.serve.settings import Settings


def request(path: str, body: Any = None, **headers: str) -> tuple[dict[str, Any], bytes]:
    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    if body is not None:
        raw.append((b"content-type", b"application/json"))
    return {"path": path, "headers": raw}, b"" if body is None else json.dumps(body).encode()


def test_all_that_is_about_one_person_goes_to_one_replica():
    mara = [
        request("/v1/identities/mara"), request("/v1/identities/mara/imprint", {"text": "x"}), request("/v1/identities", {"id": "mara"}),
        request("/v1/chat/completions", {"model": "tiny:mara"}), request("/v1/chat/completions", {"model": "tiny", "identity": "mara"}),
        request("/v1/chat/completions", {"model": "tiny"}, x_regard_identity="mara"),
    ]  # fmt: skip
    assert len({shard(*x, 1000) for x in mara}) == 1
    from regard.serve.jobs import Job

    assert shard(*request(f"/v1/jobs/{Job('sleep', 'mara', None).id}/cancel"), 1000) == shard(*mara[0], 1000)
    assert len({shard(*request(f"/v1/identities/p{i}"), 1000) for i in range(200)}) > 150
    keys = [shard(*request("/v1/models", authorization=f"Bearer {i}"), 1000) for i in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"model": 3}', b'{"identity": {"a": 1}}', b"[" * 100_000, b"\xff\xfe"])
def test_a_body_that_says_nothing_goes_somewhere_and_is_refused_there(body: bytes):
    scope = {"path": "/v1/chat/completions", "headers": [(b"content-type", b"application/json")]}
    assert 0 <= shard(scope, body, 3) < 3


def test_a_body_beyond_every_limit_is_not_handed_on():
    import asyncio

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 600, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    router = Router(2, Settings(body_bytes=1000, upload_bytes=1000), lambda *_: pytest.fail("it was handed on"))
    asyncio.run(router({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send))
    assert sent[0]["status"] == 413


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """PostgreSQL where there is one, and a file where there is none."""
    server = os.environ.get("REGARD_TEST_POSTGRES", "")
    if not server:
        return {"url": str(tmp_path / "people.db"), "blobs": str(tmp_path / "people.blobs")}
    from sqlalchemy import create_engine, make_url, text

    name = f"regard_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as c:
        c.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    url = make_url(server).set(database=name).render_as_string(hide_password=False)
    return {"url": url, "blobs": str(tmp_path / "people.blobs")}


@pytest.mark.filterwarnings("ignore")
def test_two_replicas_answer_as_one_and_lose_and_double_no_write(
    tmp_path: Path, place: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    ray = pytest.importorskip("ray", reason="Ray is in the extra `ray`; .ci/run installs it and runs this file")
    from ray import serve

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model, _ = tiny_model(tmp_path / "model")
    save(model, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    setup = Setup(
        str(tmp_path / "model"), place["url"], place["blobs"], tmp_path / "keys.json", Settings(port=port, max_tokens=8)
    )
    try:
        url = deploy(setup, replicas=2)
        with httpx.Client(base_url=url, timeout=120) as c:
            base = c.get("/v1/models").json()["data"][0]["id"]
            assert c.post("/v1/identities", json={"id": "mara"}).status_code == 201
            assert c.get("/v1/identities/mara", headers={"host": "evil.example"}).status_code == 421
            body = {"model": f"{base}:mara", "messages": [{"role": "user", "content": "I am Mara."}], "stream": True}
            with c.stream("POST", "/v1/chat/completions", json=body) as stream:
                assert stream.status_code == 200
                assert list(stream.iter_lines())[-2:] == ["data: [DONE]", ""]
            job = c.post("/v1/identities/mara/sleep", json={}).json()
            assert c.get(f"/v1/jobs/{job['id']}").status_code == 200
            assert [j["id"] for j in c.get("/v1/jobs").json()["data"]] == [job["id"]]
        handles = [serve.get_deployment_handle(f"people-{i}", app_name="regard").options(stream=True) for i in range(2)]

        def tell(n: int) -> int:
            """One text, by whichever replica: as if routing had changed in the middle."""
            body = json.dumps({"text": f"Number {n} of the things that happened."}).encode()
            scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
                     "path": "/v1/identities/mara/imprint", "raw_path": b"", "query_string": b"", "server": ("127.0.0.1", port),
                     "client": ("127.0.0.1", 1), "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"),
                                                             (b"content-length", str(len(body)).encode())]}  # fmt: skip
            return next(iter(handles[n % 2].answer.remote(scope, body)))["status"]

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(tell, range(24))) == {200}
    finally:
        serve.shutdown()
        ray.shutdown()
    with IdentityStore(**place) as store:
        texts = [e.text for e in store.journal("mara") if e.text and e.text.startswith("Number")]
        assert sorted(texts) == sorted(f"Number {n} of the things that happened." for n in range(24))
        assert store.verify("mara") == 26
        assert store.check().problems == []
