"""Long work: one at a time, bounded, asked after by whoever owns the identity, cancelled without losing what was committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from lives import short_sleeps
from serving import begin, secret_key
from test_identities import ask, ended, finish, run, tell

from regard.serve.contract import DrainingError, QueueFullError
from regard.serve.errors import ApiError
from regard.serve.jobs import Job, Jobs, Tell
from regard.serve.service import Service


def wait(job: Job) -> Job:
    while not job.over:
        time.sleep(0.005)
    return job


def held(gate: threading.Event) -> Callable[[Tell], dict[str, Any]]:
    """Work that says something again and again until a gate opens."""

    def work(tell: Tell) -> dict[str, Any]:
        while not gate.is_set():
            tell("working", 0.5)
            time.sleep(0.005)
        return {"well": True}

    return work


@pytest.fixture
def jobs():
    made = Jobs(waiting=8, kept=3)
    yield made
    made.close()


def test_work_is_done_in_order_one_at_a_time(jobs: Jobs):
    running, most, order, lock = 0, 0, list[int](), threading.Lock()

    def work(n: int) -> Callable[[Tell], dict[str, Any]]:
        def one(tell: Tell) -> dict[str, Any]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= 1
            order.append(n)
            return {"n": n}

        return one

    gate = threading.Event()
    first = jobs.submit("sleep", "x", held(gate))
    while first.status == "queued":
        time.sleep(0.001)
    made = [jobs.submit("sleep", f"p{i}", work(i)) for i in range(2)]
    gate.set()
    assert [wait(j).result for j in made] == [{"n": 0}, {"n": 1}]
    assert (order, most) == ([0, 1], 1)


def test_too_many_are_refused_and_so_is_the_same_twice(jobs: Jobs):
    gate = threading.Event()
    first = jobs.submit("sleep", "x", held(gate))
    while first.status == "queued":
        time.sleep(0.001)
    with pytest.raises(ApiError, match="under way already"):
        jobs.submit("sleep", "x", held(gate))
    for i in range(2):
        jobs.submit("sleep", f"p{i}", held(gate), by="one")
    with pytest.raises(QueueFullError):
        jobs.submit("sleep", "one too many of one key", held(gate), by="one")
    for i in range(6):
        jobs.submit("sleep", f"q{i}", held(gate), by=str(i))
    with pytest.raises(QueueFullError):
        jobs.submit("sleep", "one too many", held(gate), by="another")
    gate.set()


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_at_its_next_word(jobs: Jobs):
    gate = threading.Event()
    first, second = jobs.submit("sleep", "a", held(gate)), jobs.submit("forget", "b", held(gate))
    jobs.cancel(second)
    assert (second.status, second.result) == ("cancelled", {"kept": "nothing", "commit": None})
    jobs.cancel(first)
    assert wait(first).status == "cancelled"
    jobs.cancel(first)
    assert first.status == "cancelled"


def test_work_that_keeps_what_it_has_when_interrupted_says_so(jobs: Jobs):
    def work(tell: Tell) -> dict[str, Any]:
        try:
            held(threading.Event())(tell)
        except KeyboardInterrupt:
            tell("ending", 1.0)
            return {"kept": "best"}
        return {}

    job = jobs.submit("sleep", "a", work, interrupts=True)
    jobs.cancel(job)
    # Before it began it has nothing to keep.
    assert wait(job).result in ({"kept": "best"}, {"kept": "nothing", "commit": None})
    job = jobs.submit("sleep", "a", work, interrupts=True)
    while job.what != "working":
        time.sleep(0.001)
    jobs.cancel(job)
    assert (wait(job).status, job.result) == ("cancelled", {"kept": "best"})


def test_what_breaks_says_nothing_of_its_insides(jobs: Jobs, caplog: pytest.LogCaptureFixture):
    def broken(tell: Tell) -> dict[str, Any]:
        raise RuntimeError("a secret path")

    job = wait(jobs.submit("sleep", "a", broken))
    assert job.status == "failed"
    assert "secret" not in str(job.body())
    assert "secret" in caplog.text


def test_ended_jobs_can_be_asked_for_and_are_let_go_in_time(jobs: Jobs):
    made = [wait(jobs.submit("sleep", f"p{i}", lambda tell: {})) for i in range(5)]
    assert [jobs.get(j.id) is not None for j in made] == [False, False, True, True, True]
    made[-1].ended = time.time() - 3601
    assert jobs.get(made[-1].id) is None


def test_closing_cancels_what_runs_and_waits_and_takes_nothing_new(jobs: Jobs):
    gate = threading.Event()
    first, second = jobs.submit("sleep", "a", held(gate)), jobs.submit("sleep", "b", held(gate))
    jobs.close()
    assert {first.status, second.status} == {"cancelled"}
    with pytest.raises(DrainingError):
        jobs.submit("sleep", "c", held(gate))


def test_the_model_of_the_jobs_shares_every_weight_and_answers_alike(service: Service):
    apart = service.jobs.model(service.model)
    assert apart is not service.model
    assert apart is service.jobs.model(service.model)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(apart.parameters(), service.model.parameters(), strict=True))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(apart(tokens).logits, service.model(tokens).logits)


def test_a_cancelled_night_keeps_the_best_so_far_and_says_so(service: Service, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    begin(service, "mara")
    tell(service)

    async def work(c: httpx.AsyncClient) -> dict[str, Any]:
        job = (await c.post("/v1/identities/mara/sleep", json={"steps": 2000})).json()
        while (job := (await c.get(f"/v1/jobs/{job['id']}")).json())["progress"]["share"] in (None, 0) or job["progress"][
            "what"
        ] != "sleeping":
            assert job["status"] in ("queued", "running"), job
            await asyncio.sleep(0.005)
        await c.post(f"/v1/jobs/{job['id']}/cancel")
        return await ended(c, job)

    job = run(service, work)
    assert job["status"] == "cancelled"
    assert (job["result"]["kept"], job["result"]["interrupted"]) == ("best", True)
    assert job["result"]["commit"] == service.store.head("mara").id
    rest = finish(service, "/v1/identities/mara/sleep", {"resume": True, "steps": 3})
    assert rest["status"] == "done", rest
    assert rest["result"]["resumed"] is True


def test_a_night_that_did_not_help_keeps_nothing_and_says_so(service: Service, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch, helps=False)
    begin(service, "mara")
    head = tell(service)["commit"]
    job = finish(service, "/v1/identities/mara/sleep", {"steps": 1})
    assert (job["status"], job["result"]["kept"], job["result"]["commit"]) == ("done", "nothing", None)
    assert service.store.head("mara").id == head


def test_a_cancelled_forgetting_changes_nothing(service: Service, monkeypatch: pytest.MonkeyPatch):
    begin(service, "mara")
    tell(service, source="diary")
    tell(service, text="Theo likes boats, and he has two.", source="theo")
    before = service.store.log("mara")
    started, gate = threading.Event(), threading.Event()
    real = service.jobs.model

    def slowly(model: Any) -> Any:
        started.set()
        gate.wait(20)
        return real(model)

    monkeypatch.setattr(service.jobs, "model", slowly)

    async def work(c: httpx.AsyncClient) -> dict[str, Any]:
        job = (await c.post("/v1/identities/mara/forget", json={"source": "diary"})).json()
        await asyncio.to_thread(started.wait, 20)
        await c.post(f"/v1/jobs/{job['id']}/cancel")
        gate.set()
        return await ended(c, job)

    assert run(service, work)["status"] == "cancelled"
    assert service.store.log("mara") == before


def test_a_server_that_goes_down_keeps_the_night_so_far(service: Service, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    begin(service, "mara")
    told = tell(service)["commit"]

    async def work(c: httpx.AsyncClient) -> None:
        job = (await c.post("/v1/identities/mara/sleep", json={"steps": 2000})).json()
        while (now := (await c.get(f"/v1/jobs/{job['id']}")).json())["progress"]["what"] != "sleeping" or not now["progress"][
            "share"
        ]:
            await asyncio.sleep(0.005)

    run(service, work)
    service.jobs.close()
    (job,) = service.jobs.every()
    assert (job.status, (job.result or {})["kept"]) == ("cancelled", "best")
    assert [x.kind for x in service.store.log("mara")] == ["sleep", "imprint", "new"]
    assert service.store.log("mara")[1].id == told
    assert ask(service, "POST", "/v1/identities/mara/sleep", {}).status_code == 503


def test_anothers_job_is_not_there(service: Service):
    begin(service, "hers", "mine")
    job = service.jobs.submit("sleep", "hers", lambda tell: {"secret": 1})
    token = secret_key(service, "me", ["write"], ["mine"])
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/events")):
        theirs, none = (ask(service, method, f"/v1/jobs/{i}{path}", token=token) for i in (job.id, "job-0"))
        assert theirs.status_code == none.status_code == 404
        assert theirs.json() == {
            "error": {**none.json()["error"], "message": none.json()["error"]["message"].replace("job-0", job.id)}
        }
    assert ask(service, "GET", "/v1/jobs", token=token).json()["data"] == []
    reader = secret_key(service, "reader", ["read"], ["hers"])
    assert ask(service, "GET", f"/v1/jobs/{job.id}", token=reader).status_code == 200
    assert ask(service, "POST", f"/v1/jobs/{job.id}/cancel", token=reader).status_code == 403
