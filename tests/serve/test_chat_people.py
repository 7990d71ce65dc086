"""POST /v1/chat/completions with a person: who answers, what is remembered, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import GatedEngine, begin, chat, client, code, events, make_service, post, secret_key, tiny_model

from regard.identity.read import recall as recalling
from regard.serve.choosing import split_model
from regard.serve.engine import Engine
from regard.serve.service import Service
from regard.serve.settings import Settings


@pytest.fixture
def people(service: Service) -> Service:
    begin(service, "mara", "tom")
    return service


def turns(service: Service, name: str) -> list[Any]:
    """What was imprinted into somebody, turn by turn."""
    return [json.loads(e.text) for e in service.store.journal(name) if e.kind == "imprint" and e.text]


def test_model_field_and_header_name_the_same_person(people: Service):
    body = {"messages": [{"role": "user", "content": "Hello"}], "remember": False}
    by_model = post(people, "/v1/chat/completions", {**body, "model": "tiny:mara"})
    by_field = post(people, "/v1/chat/completions", {**body, "identity": "mara"})
    by_header = post(people, "/v1/chat/completions", {**body, "model": "tiny"}, x_regard_identity="mara")
    assert [a.json()["regard"]["identity"] for a in (by_model, by_field, by_header)] == ["mara"] * 3
    assert by_header.json()["model"] == "tiny:mara"


@pytest.mark.parametrize(
    ("model", "field", "header"), [("tiny:mara", "tom", None), ("tiny:mara", None, "tom"), (None, "mara", "tom")]
)
def test_two_ways_that_name_different_people_are_400(people: Service, model: str | None, field: str | None, header: str | None):
    body = {"messages": [{"role": "user", "content": "Hello"}], "model": model, "identity": field}
    answer = post(people, "/v1/chat/completions", body, **({"x_regard_identity": header} if header else {}))
    assert (answer.status_code, code(answer)) == (400, "identity_conflict")


@pytest.mark.parametrize("name", ["nobody", "../mara", "mara ", "", "a" * 200, "mara:tom"])
def test_nobody_is_404(people: Service, name: str):
    answer = chat(people, model=f"tiny:{name}")
    assert (answer.status_code, code(answer)) == (404, "identity_not_found" if name else "model_not_found")


def test_a_base_with_a_colon_or_an_at_is_known_whole_and_the_longest_first():
    bases = ("llama:8b", "llama", "qwen@v2")
    assert split_model("llama:8b", bases) == ("llama:8b", None)
    assert split_model("llama:8b:mara", bases) == ("llama:8b", "mara")
    assert split_model("llama%3A8b:mara", bases) == ("llama:8b", "mara")
    assert split_model("llama:mara", bases) == ("llama", "mara")
    assert split_model("qwen%40v2:tom", bases) == split_model("qwen@v2:tom", bases) == ("qwen@v2", "tom")


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_turn_is_committed_once_and_of_a_cut_answer_only_the_question(people: Service, stream: bool):
    before = people.store.head("mara")
    how = {"model": "tiny:mara", "max_tokens": 12, "temperature": 1, "seed": 3, "repetition_penalty": 1.0}
    free = chat(people, "My cat is Mochi.", remember=False, **how).json()["choices"][0]["message"]["content"]
    answer = chat(people, "My cat is Mochi.", stop=free[6:8], stream=stream, **how)
    told = events(answer.text)[-1]["regard"] if stream else answer.json()["regard"]
    head = people.store.head("mara")
    assert (told["read_commit"], told["commit"]) == (before.id, head.id)
    assert head.number == before.number + 1
    said = free[: free.index(free[6:8])].strip()
    assert turns(people, "mara") == [[{"role": "user", "content": "My cat is Mochi."}, {"role": "assistant", "content": said}]]
    chat(people, "And my dog is Rex.", model="tiny:mara", max_tokens=2, stream=stream)
    assert turns(people, "mara")[1:] == [[{"role": "user", "content": "And my dog is Rex."}]]


def test_remember_false_and_the_model_itself_write_nothing(people: Service):
    before = {n: c.id for n, c in people.store.names().items()}
    assert chat(people, model="tiny:mara", remember=False).json()["regard"]["commit"] is None
    chat(people)
    assert {n: c.id for n, c in people.store.names().items()} == before


def test_only_the_last_question_and_its_answer_are_imprinted(people: Service):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "I am Mara."},
                {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "My cat is Mochi."}]  # fmt: skip
    post(people, "/v1/chat/completions", {"model": "tiny:mara", "messages": messages, "max_tokens": 1})
    assert turns(people, "mara") == [[messages[-1]]]
    post(people, "/v1/chat/completions", {"model": "tiny:mara", "messages": messages[:3], "max_tokens": 1})
    assert len(turns(people, "mara")) == 1, "nobody has asked anything since the last answer"


def test_turns_of_one_conversation_have_one_source_and_a_source_may_be_named(people: Service):
    first = {"role": "user", "content": "I am Mara."}
    for more in ([], [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "My cat is Mochi."}]):
        post(people, "/v1/chat/completions", {"model": "tiny:mara", "messages": [first, *more], "max_tokens": 1})
    chat(people, "Something else.", model="tiny:mara", max_tokens=1)
    chat(people, "And more.", model="tiny:mara", max_tokens=1, source="phone")
    sources = [e.source for e in people.store.journal("mara") if e.kind == "imprint"]
    assert sources[0] == sources[1] != sources[2]
    assert sources[3] == "phone"


def test_several_choices_cannot_be_remembered(people: Service):
    assert chat(people, model="tiny:mara", n=2).status_code == 400
    assert chat(people, model="tiny:mara", n=2, remember=False).status_code == 200


def test_what_came_to_mind_is_told_and_what_the_messages_hold_is_not_brought_again(
    people: Service, monkeypatch: pytest.MonkeyPatch
):
    # A random model's keys mean nothing: let everything cohere, to see what is offered.
    monkeypatch.setattr(recalling, "THRESHOLD", {True: -1e9, False: -1e9})
    chat(people, "My cat is called Mochi.", model="tiny:mara", max_tokens=1, source="monday")
    told = chat(people, "What is my cat called?", model="tiny:mara", remember=False).json()["regard"]
    assert [(r["text"], r["source"]) for r in told["recalled"]] == [("My cat is called Mochi.", "monday")]
    assert len(told["coherence"]) == 1
    messages = [{"role": "user", "content": "My cat is called Mochi."}, {"role": "assistant", "content": "How nice."},
                {"role": "user", "content": "What is my cat called?"}]  # fmt: skip
    body = {"model": "tiny:mara", "messages": messages, "remember": False}
    assert post(people, "/v1/chat/completions", body).json()["regard"]["recalled"] == []


def test_one_idempotency_key_is_one_turn_with_one_answer(people: Service):
    likely = {str(people.tokenizer.encode("e")[0]): 3}
    body = {"model": "tiny:mara", "messages": [{"role": "user", "content": "My cat is Mochi."}], "temperature": 1, "stop": "e", "max_tokens": 64, "logit_bias": likely}  # fmt: skip
    first = post(people, "/v1/chat/completions", {**body, "seed": 1}, idempotency_key="turn-1").json()
    assert first["choices"][0]["finish_reason"] == "stop"
    again = post(people, "/v1/chat/completions", {**body, "seed": 2}, idempotency_key="turn-1").json()
    assert again["regard"]["commit"] == first["regard"]["commit"]
    assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"].strip() != ""
    streamed = events(post(people, "/v1/chat/completions", {**body, "stream": True}, idempotency_key="turn-1").text)
    assert streamed[-1]["regard"]["commit"] == first["regard"]["commit"]
    assert len(turns(people, "mara")) == 1
    other = {**body, "messages": [{"role": "user", "content": "My dog is Rex."}]}
    assert code(post(people, "/v1/chat/completions", other, idempotency_key="turn-1")) == "idempotency_mismatch"
    post(people, "/v1/chat/completions", body, idempotency_key="turn-2")
    assert len(turns(people, "mara")) == 2
    long = post(people, "/v1/chat/completions", body, idempotency_key="x" * 300)
    assert (long.status_code, code(long)) == (400, "invalid_header")


def test_an_idempotency_key_that_comes_twice_at_once_is_one_turn(people: Service):
    async def both() -> list[httpx.Response]:
        async with client(people) as c:
            body = {"model": "tiny:mara", "messages": [{"role": "user", "content": "My cat is Mochi."}], "max_tokens": 4}
            ask = [c.post("/v1/chat/completions", json=body, headers={"idempotency-key": "same"}) for _ in range(2)]
            return list(await asyncio.gather(*ask))

    commits = {a.json()["regard"]["commit"] for a in asyncio.run(both())}
    assert len(commits) == 1
    assert len(turns(people, "mara")) == 1


def test_requests_that_write_one_person_at_once_all_leave_their_turn(people: Service):
    async def all_at_once() -> list[httpx.Response]:
        async with client(people) as c:
            ask = [
                c.post("/v1/chat/completions", json={"model": f"tiny:{who}", "messages": [{"role": "user", "content": f"I am number {i}."}], "max_tokens": 2})
                for i in range(4)
                for who in ("mara", "tom")
            ]  # fmt: skip
            return list(await asyncio.gather(*ask))

    answers = asyncio.run(all_at_once())
    assert [a.status_code for a in answers] == [200] * 8
    for who in ("mara", "tom"):
        assert sorted(t[0]["content"] for t in turns(people, who)) == [f"I am number {i}." for i in range(4)]
        told = [a.json()["regard"] for a in answers]
        commits = {t["commit"] for t in told if t["identity"] == who}
        assert {c.id for c in people.store.log(who)[:-1]} == commits, "each acknowledged turn is one commit of its own"


def test_a_key_that_may_only_read_is_answered_and_nothing_is_written(people: Service):
    token = secret_key(people, "reader", ["read"], ["mara"])
    assert chat(people, "My cat is Mochi.", token, model="tiny:mara").json()["regard"]["commit"] is None
    asked = chat(people, "My cat is Mochi.", token, model="tiny:mara", remember=True)
    assert (asked.status_code, code(asked)) == (403, "insufficient_scope")
    assert turns(people, "mara") == []


def test_both_engines_give_the_same_answers_and_write_the_same_turns(tmp_path: Path):
    pair = tiny_model(tmp_path / "model")
    said: list[list[Any]] = []
    for kind, engine in (("plain", None), ("batch", Engine(*pair, rows=3))):
        service = make_service(tmp_path / kind, engine=engine, pair=pair)
        begin(service, "mara", "tom")

        async def ask(service: Service) -> list[Any]:
            async with client(service) as c:
                bodies = [{"model": f"tiny:{who}", "messages": [{"role": "user", "content": f"{who} has {i} cats."}], "temperature": i, "seed": i, "logprobs": True, "max_tokens": 9}
                          for who in ("mara", "tom") for i in range(2)]  # fmt: skip
                answers = await asyncio.gather(*(c.post("/v1/chat/completions", json=b) for b in bodies))
                return [a.json()["choices"] for a in answers]

        said.append(asyncio.run(ask(service)))
        assert [sorted(t[0]["content"] for t in turns(service, who)) for who in ("mara", "tom")] == [
            [f"{who} has {i} cats." for i in range(2)] for who in ("mara", "tom")]  # fmt: skip
        service.close()
        service.store.close()
    texts = [[c[0]["message"] for c in choices] for choices in said]
    assert texts[0] == texts[1]
    for a, b in zip(*said, strict=True):
        rates = [[x["logprob"] for x in c[0]["logprobs"]["content"]] for c in (a, b)]
        assert rates[0] == pytest.approx(rates[1], abs=1e-4)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Service, GatedEngine]]:
    pair = tiny_model(tmp_path / "model")
    engine = GatedEngine(*pair)
    service = make_service(tmp_path, Settings(max_tokens=50), engine, pair=pair)
    begin(service, "mara")
    yield service, engine
    service.close()
    service.store.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_work_and_commits_nothing(gated: tuple[Service, GatedEngine], stream: bool):
    service, engine = gated
    body = json.dumps(
        {"model": "tiny:mara", "messages": [{"role": "user", "content": "My cat is Mochi."}], "stream": stream}
    ).encode()

    async def leave() -> None:
        from regard.serve.app import create_app

        app = create_app(service)
        engine.start()
        gone = asyncio.Event()
        parts: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        headers = [
            (b"host", b"127.0.0.1:8000"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "path": "/v1/chat/completions",
                 "raw_path": b"/v1/chat/completions", "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http",
                 "root_path": "", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1)}  # fmt: skip
        request = asyncio.create_task(app(scope, receive, send))
        engine.gate.release(3)
        while engine.fallen < 3:
            await asyncio.sleep(0.005)
        gone.set()
        await request

    asyncio.run(leave())
    engine.gate.release(100)
    assert service.engine.drain(10)
    assert engine.fallen <= 5, "the token that was under way, and the word that it was cancelled"
    assert turns(service, "mara") == []
    assert service.in_flight == 0
