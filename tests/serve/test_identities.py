"""/v1/identities: every verb of a store over the wire, for whoever owns the name and for nobody else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from lives import short_sleeps
from serving import begin, client, events, make_service, secret_key, tiny_model

from regard.identity.store import IdentityStore
from regard.serve.service import Service

TOLD = "My cat is called Mochi. I live in Lisbon, near the river."
OCTETS = {"content-type": "application/octet-stream"}


def run(service: Service, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], token: str | None = None) -> Any:
    async def go() -> Any:
        async with client(service, token) as c:
            return await work(c)

    return asyncio.run(go())


def ask(service: Service, method: str, path: str, body: Any = None, token: str | None = None, **more: Any) -> httpx.Response:
    if body is not None:
        more["json"] = body
    return run(service, lambda c: c.request(method, path, **more), token)


def tell(service: Service, name: str = "mara", text: str = TOLD, **more: Any) -> dict[str, Any]:
    return ask(service, "POST", f"/v1/identities/{name}/imprint", {"text": text, **more}).json()


async def ended(c: httpx.AsyncClient, job: dict[str, Any]) -> dict[str, Any]:
    """A job, when it is over."""
    while job["status"] in ("queued", "running"):
        await asyncio.sleep(0.02)
        job = (await c.get(f"/v1/jobs/{job['id']}")).json()
    return job


def finish(service: Service, path: str, body: Any) -> dict[str, Any]:
    async def work(c: httpx.AsyncClient) -> dict[str, Any]:
        answer = await c.post(path, json=body)
        assert answer.status_code == 202, answer.text
        assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
        return await ended(c, answer.json())

    return run(service, work)


def test_somebody_is_begun_listed_told_something_and_shown(service: Service):
    made = ask(service, "POST", "/v1/identities", {"id": "mara"})
    assert made.status_code == 201
    assert (made.json()["object"], made.json()["base"], made.json()["experiences"]) == ("identity", "tiny", 0)
    told = tell(service, source="diary")
    assert (told["recognised"], told["source"]) == (False, "diary")
    assert told["kept"] > 0
    shown = ask(service, "GET", "/v1/identities/mara").json()
    assert (shown["experiences"], shown["sources"], shown["head"]) == (1, ["diary"], told["commit"])
    assert shown["imprints"] == told["kept"]
    assert {k["source"] for k in shown["kept"]} == {"diary"}
    assert sum(len(k["words"]) for k in shown["kept"]) == shown["imprints"]
    assert (
        all(len(shown["trace"]["spectrum"][layer]) <= shown["trace"]["rank"] for layer in range(2)) if shown["trace"] else True
    )
    listed = ask(service, "GET", "/v1/identities").json()
    assert [x["id"] for x in listed["data"]] == ["mara"]
    assert listed["data"][0] == {k: shown[k] for k in listed["data"][0]}


def test_a_list_comes_in_pages_and_misses_nobody(service: Service):
    begin(service, *(f"p{i}" for i in range(5)))
    names, after = list[str](), None
    for _ in range(3):
        page = ask(service, "GET", "/v1/identities", params={"limit": 2, **({"after": after} if after else {})}).json()
        names += [x["id"] for x in page["data"]]
        after = page["last_id"]
    assert names == [f"p{i}" for i in range(5)]
    assert page["has_more"] is False


def test_what_was_told_already_is_recognised_and_a_key_writes_once(service: Service):
    begin(service, "mara")
    first = tell(service)
    assert tell(service)["recognised"] is True
    assert service.store.head("mara").id == first["commit"]
    heads = [
        ask(
            service,
            "POST",
            "/v1/identities/mara/imprint",
            {"text": "A second text, which is new."},
            headers={"idempotency-key": "k1"},
        )
        for _ in range(2)
    ]
    assert [h.status_code for h in heads] == [200, 200]
    assert heads[0].json()["commit"] == heads[1].json()["commit"]
    assert [h.json()["recognised"] for h in heads] == [False, True]
    other = ask(service, "POST", "/v1/identities/mara/imprint", {"text": "Something else."}, headers={"idempotency-key": "k1"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")
    assert len(service.store.log("mara")) == 3


def test_a_log_has_every_commit_and_the_way_of_the_self(service: Service):
    begin(service, "mara")
    for text in ("One thing happened today.", "Then another thing happened."):
        tell(service, text=text)
    rows = ask(service, "GET", "/v1/identities/mara/log").json()["data"]
    assert [r["number"] for r in rows] == [2, 1, 0]
    assert [r["kind"] for r in rows] == ["imprint", "imprint", "new"]
    assert rows[0]["parent"] == rows[1]["id"]
    assert all(r["self"] is None or len(r["self"]) == 2 for r in rows)
    assert [r["id"] for r in ask(service, "GET", "/v1/identities/mara/log?limit=1").json()["data"]] == [rows[0]["id"]]


def test_a_fork_goes_its_own_way_and_a_rollback_is_a_further_commit(service: Service):
    begin(service, "mara")
    first = service.store.head("mara").id
    told = tell(service)["commit"]
    forked = ask(service, "POST", "/v1/identities/mara/fork", {"id": "twin", "at": first[:12]})
    assert (forked.status_code, forked.json()["head"]) == (201, first)
    back = ask(service, "POST", "/v1/identities/mara/rollback", {"to": 1}).json()
    assert (back["to"], back["imprints"]) == (first, 0)
    again = ask(service, "POST", "/v1/identities/mara/rollback", {"to": told[:8]}).json()
    assert again["imprints"] > 0
    diff = ask(service, "GET", "/v1/identities/mara/diff", params={"other": "twin"}).json()
    assert diff["added"] == again["imprints"]
    assert "imprints" in diff["text"]


def test_facts_are_lines_with_what_was_imprinted_of_them(service: Service):
    begin(service, "mara")
    tell(service, source="diary")
    rows = ask(service, "GET", "/v1/identities/mara/facts").json()["data"]
    assert [r["text"] for r in rows] == ["My cat is called Mochi.", "I live in Lisbon, near the river."]
    assert {r["source"] for r in rows} == {"diary"}
    assert any(r["imprinted"] for r in rows)


def test_forgetting_a_source_is_a_job_that_ends_with_its_proof(service: Service):
    begin(service, "mara")
    tell(service, source="diary")
    tell(service, text="Theo likes boats.", source="theo")
    job = finish(service, "/v1/identities/mara/forget", {"source": "diary"})
    assert job["status"] == "done", job
    proof = job["result"]
    assert (proof["verified"], proof["events_removed"], proof["events_kept"], proof["left"]) == (True, 1, 1, 0)
    assert proof["unreachable"]
    assert [r["source"] for r in ask(service, "GET", "/v1/identities/mara/facts").json()["data"]] == ["theo"]
    assert "Mochi" not in json.dumps(ask(service, "GET", "/v1/identities/mara").json())


def test_a_line_is_struck_and_the_others_stay(service: Service):
    begin(service, "mara")
    tell(service)
    job = finish(service, "/v1/identities/mara/forget", {"line": 1})
    assert (job["status"], job["result"]["whole"]) == ("done", False)
    assert [r["text"] for r in ask(service, "GET", "/v1/identities/mara/facts").json()["data"]] == [
        "I live in Lisbon, near the river."
    ]
    assert ask(service, "POST", "/v1/identities/mara/forget", {"line": 9}).status_code == 400


def test_an_export_is_imported_as_somebody_else_with_the_same_life(service: Service):
    begin(service, "mara")
    tell(service, source="diary")
    file = ask(service, "GET", "/v1/identities/mara/export")
    assert file.headers["content-type"] == "application/octet-stream"
    assert 'filename="mara.safetensors"' in file.headers["content-disposition"]
    made = ask(service, "POST", "/v1/identities/copy/import", content=file.content, headers=OCTETS)
    assert made.status_code == 201, made.text
    assert service.store.head("copy").digest == service.store.head("mara").digest
    assert ask(service, "POST", "/v1/identities/copy/import", content=file.content, headers=OCTETS).status_code == 409


@pytest.mark.parametrize("what", ["empty", "cut", "noise", "huge header", "json", "another model's"])
def test_a_file_that_is_no_identity_is_refused_and_nobody_is_begun(service: Service, tmp_path: Path, what: str):
    begin(service, "mara")
    tell(service)
    data = ask(service, "GET", "/v1/identities/mara/export").content
    if what == "another model's":
        other = make_service(tmp_path / "another", pair=tiny_model(tmp_path / "m2", seed=7))
        begin(other, "x")
        data = ask(other, "GET", "/v1/identities/x/export").content
        other.close()
    sent = {"empty": b"", "cut": data[: len(data) // 2], "noise": bytes(range(256)) * 40, "json": b'{"a": 1}',
            "huge header": (1 << 40).to_bytes(8, "little") + data[8:]}.get(what, data)  # fmt: skip
    answer = ask(service, "POST", "/v1/identities/copy/import", content=sent, headers=OCTETS)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_file"
    assert str(tmp_path) not in answer.text
    assert "/tmp" not in answer.text
    assert list(service.store.names()) == ["mara"]
    assert service.store.check().sound


def test_a_file_beyond_the_limit_is_refused_and_so_is_json(service: Service, tmp_path: Path):
    from regard.serve.settings import Settings

    small = make_service(tmp_path / "small", Settings(max_tokens=8, upload_bytes=1000))
    answer = ask(small, "POST", "/v1/identities/copy/import", content=b"x" * 1001, headers=OCTETS)
    assert answer.status_code == 413
    small.close()
    assert ask(service, "POST", "/v1/identities/copy/import", {"a": 1}).status_code == 415


def test_who_is_deleted_is_gone(service: Service):
    begin(service, "mara")
    tell(service)
    gone = ask(service, "DELETE", "/v1/identities/mara").json()
    assert (gone["deleted"], gone["commits"]) == (True, 2)
    assert ask(service, "GET", "/v1/identities/mara").status_code == 404
    assert list(service.store.blobs.every()) == []


PATHS = [
    ("GET", "/v1/identities/{}"), ("DELETE", "/v1/identities/{}"), ("GET", "/v1/identities/{}/log"), ("GET", "/v1/identities/{}/facts"),
    ("GET", "/v1/identities/{}/diff?other=abcd"), ("POST", "/v1/identities/{}/fork"), ("POST", "/v1/identities/{}/rollback"),
    ("POST", "/v1/identities/{}/imprint"), ("POST", "/v1/identities/{}/forget"), ("POST", "/v1/identities/{}/sleep"),
    ("GET", "/v1/identities/{}/export"),
]  # fmt: skip
BODIES = {
    "fork": {"id": "mine-x"},
    "rollback": {"to": 1},
    "imprint": {"text": "abc def"},
    "forget": {"source": "diary"},
    "sleep": {},
}


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_anothers_identity_is_answered_as_one_that_is_not_there(service: Service, method: str, path: str):
    begin(service, "hers", "mine")
    token = secret_key(service, "me", ["read", "write"], ["mine*"])
    body = BODIES.get(path.rpartition("/")[2])
    theirs, none = (ask(service, method, path.format(n), body, token) for n in ("hers", "nobody"))
    assert theirs.status_code == 404
    assert theirs.json() == json.loads(none.text.replace("nobody", "hers"))
    assert len(service.store.names()) == 2


@pytest.mark.parametrize(("method", "path"), [p for p in PATHS if p[0] != "GET"])
def test_a_key_that_may_read_changes_nothing(service: Service, method: str, path: str):
    begin(service, "mine")
    token = secret_key(service, "me", ["read"], ["mine*"])
    assert ask(service, method, path.format("mine"), BODIES.get(path.rpartition("/")[2]), token).status_code == 403
    assert len(service.store.log("mine")) == 1


def test_a_key_sees_its_own_names_and_cannot_take_others(service: Service):
    begin(service, "hers", "mine-1", "mine-2")
    token = secret_key(service, "me", ["write"], ["mine-*"])
    assert [x["id"] for x in ask(service, "GET", "/v1/identities", token=token).json()["data"]] == ["mine-1", "mine-2"]
    for name in ("hers", "somebody"):
        assert ask(service, "POST", "/v1/identities", {"id": name}, token).status_code == 403
        assert ask(service, "POST", "/v1/identities/mine-1/fork", {"id": name}, token).status_code == 403
        assert (
            ask(service, "POST", f"/v1/identities/{name}/import", token=token, content=b"x", headers=OCTETS).status_code == 403
        )
    hers = service.store.head("hers").id
    for path, body in (("fork", {"id": "mine-3", "at": hers}), ("rollback", {"to": hers})):
        assert ask(service, "POST", f"/v1/identities/mine-1/{path}", body, token).status_code == 404
    for ref in (hers, hers[:8], "hers"):
        assert ask(service, "GET", f"/v1/identities/mine-1/diff?other={ref}", token=token).status_code == 404


HOSTILE: list[tuple[str, str, Any]] = [
    ("POST", "/v1/identities", {"id": bad}) for bad in ("", "../x", "a b", ".hidden", "x" * 65, 7, None, ["a"], "a\u0000b", "é")
] + [
    ("POST", "/v1/identities/mara/imprint", bad)
    for bad in ({}, {"text": ""}, {"text": "a", "messages": []}, {"text": 3}, {"messages": [{"role": "root", "content": "x"}]},
                {"text": "abc", "affect": 7}, {"text": "abc", "affect": "very"}, {"text": "abc", "source": "a\nb"}, {"text": "x" * 40000},
                {"text": "abc", "source": "x" * 300}, {"messages": [{"role": "user", "content": "x" * 30000}] * 2})
] + [
    ("POST", "/v1/identities/mara/rollback", bad) for bad in ({}, {"to": 0}, {"to": -1}, {"to": 10**12}, {"to": 1.5}, {"to": True}, {"to": ""})
] + [
    ("POST", "/v1/identities/mara/forget", bad) for bad in ({}, {"source": "x", "line": 1}, {"line": 0}, {"line": "1"}, {"source": ""})
] + [
    ("POST", "/v1/identities/mara/sleep", bad) for bad in ({"steps": 0}, {"steps": 10**9}, {"seed": -1}, {"seed": 10**30}, {"resume": 3})
] + [
    ("GET", f"/v1/identities{q}", None) for q in ("?limit=0", "?limit=9999", "?limit=x", f"?after={'x' * 100}", "/mara/log?limit=0",
                                                  "/mara/diff", "/mara/diff?other=")
]  # fmt: skip


def test_what_does_not_fit_is_400_in_our_words_and_changes_nothing(service: Service):
    begin(service, "mara")

    async def every(c: httpx.AsyncClient) -> None:
        for method, path, body in HOSTILE:
            answer = await c.request(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code == 400, (method, path, body, answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(service, every)
    assert len(service.store.log("mara")) == 1
    assert list(service.store.names()) == ["mara"]


@pytest.mark.parametrize(
    "id", ["..%2F..%2Fetc%2Fpasswd", "%00", "a%20b", "%F0%9F%98%80", "x" * 300, "..", "mara%0d%0ax-evil:1"]
)
def test_a_name_that_is_none_is_404(service: Service, id: str):
    for path in (f"/v1/identities/{id}", f"/v1/identities/{id}/log", f"/v1/identities/{id}/export"):
        assert ask(service, "GET", path).status_code == 404


def test_an_unknown_source_fails_the_job_and_changes_nothing(service: Service):
    begin(service, "mara", "other")
    tell(service)
    job = finish(service, "/v1/identities/mara/forget", {"source": "nobody"})
    assert job["status"] == "failed"
    assert "wrote nothing" in job["error"]["message"]
    assert len(service.store.log("mara")) == 2


def test_sleep_is_a_job_with_progress_that_can_be_watched(service: Service, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    begin(service, "mara")
    tell(service)

    async def work(c: httpx.AsyncClient) -> tuple[dict[str, Any], str]:
        job = (await c.post("/v1/identities/mara/sleep", json={"steps": 2})).json()
        stream = await c.get(f"/v1/jobs/{job['id']}/events")
        assert stream.headers["content-type"].startswith("text/event-stream")
        return await ended(c, job), stream.text

    job, stream = run(service, work)
    assert (job["status"], job["kind"]) == ("done", "sleep"), job
    assert (job["result"]["kept"], job["result"]["commit"]) == ("best", service.store.head("mara").id)
    assert ask(service, "GET", "/v1/identities/mara").json()["sleeps"] == 1
    seen = events(stream)
    assert {"asking about what was said", "sleeping"} & {x["progress"]["what"] for x in seen}
    assert seen[-1] == job
    assert stream.endswith("data: [DONE]\n\n")


def test_who_sleeps_without_a_life_fails_with_the_reason(service: Service):
    begin(service, "mara")
    job = finish(service, "/v1/identities/mara/sleep", {})
    assert job["status"] == "failed"
    assert "lived through nothing" in job["error"]["message"]


def test_a_chat_is_answered_and_imprinted_while_somebody_sleeps(service: Service, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    begin(service, "mara", "theo")
    tell(service)

    async def work(c: httpx.AsyncClient) -> tuple[str, int]:
        job = (await c.post("/v1/identities/mara/sleep", json={"steps": 2000})).json()
        while (await c.get(f"/v1/jobs/{job['id']}")).json()["status"] == "queued":
            await asyncio.sleep(0.01)
        said = await c.post(
            "/v1/chat/completions", json={"model": "tiny:theo", "messages": [{"role": "user", "content": "Hello, I am Theo."}]}
        )
        running = (await c.get(f"/v1/jobs/{job['id']}")).json()["status"]
        await c.post(f"/v1/jobs/{job['id']}/cancel")
        assert (await ended(c, job))["status"] == "cancelled"
        return running, said.status_code

    assert run(service, work) == ("running", 200)
    assert service.store.head("theo").experiences == 1


def test_a_turn_during_a_forgetting_waits_for_it_and_is_not_lost(service: Service):
    begin(service, "mara")
    tell(service, source="diary")
    tell(service, text="Theo likes boats, and he has two of them.", source="theo")

    async def work(c: httpx.AsyncClient) -> dict[str, Any]:
        job = (await c.post("/v1/identities/mara/forget", json={"source": "diary"})).json()
        told = await c.post("/v1/identities/mara/imprint", json={"text": "Something new in the middle."})
        assert told.status_code == 200, told.text
        return await ended(c, job)

    job = run(service, work)
    texts = [e.text for e in service.store.journal("mara") if e.text]
    assert "Something new in the middle." in texts
    assert job["status"] == "done" or job["error"]["code"] == "conflict", job
    assert service.store.verify("mara") >= 3


def test_a_store_in_an_object_store_serves_alike(tmp_path: Path):
    service = make_service(tmp_path)
    service.store.close()
    service.store = IdentityStore(tmp_path / "x.db", blobs=f"memory://{time.time_ns()}")
    begin(service, "mara")
    tell(service, source="diary")
    assert finish(service, "/v1/identities/mara/forget", {"source": "diary"})["result"]["verified"]
    service.close()
    service.store.close()
