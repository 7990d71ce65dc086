"""OpenAI's own client, as people have it: the newest of version 2, which others build on, and the newest there is."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import Any

import httpx
import openai
import pytest
from harness import Server, regard

ASK = [{"role": "user", "content": "What is the name of my boat?"}]


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none is needed", max_retries=0)


def ask(client: openai.OpenAI, model: str, text: str = "Hello", **more: Any) -> Any:
    more = {"max_tokens": 8} | more
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def head(http: httpx.Client, name: str) -> str:
    return http.get(f"/v1/identities/{name}").raise_for_status().json()["head"]


# -- the model itself ------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, base: str) -> None:
    listed = client.models.list().data
    assert listed[0].id == base
    assert client.models.retrieve(base).id == base
    with pytest.raises(openai.NotFoundError) as gone:
        client.models.retrieve("nobody-has-this")
    assert gone.value.code == "model_not_found"


def test_answer_has_all_that_the_client_reads(client: openai.OpenAI, base: str) -> None:
    whole = ask(client, base)
    assert whole.object == "chat.completion"
    assert whole.model == base
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    assert whole.system_fingerprint
    assert abs(whole.created - time.time()) < 600
    assert whole._request_id


def test_both_names_of_the_length_are_known(client: openai.OpenAI, base: str) -> None:
    old = ask(client, base, max_tokens=5).choices[0].message.content
    new = client.chat.completions.create(model=base, messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=5)
    assert new.choices[0].message.content == old
    assert new.usage is not None
    assert new.usage.completion_tokens == 5


def test_stream_says_what_the_whole_answer_says(client: openai.OpenAI, base: str) -> None:
    whole = ask(client, base, max_tokens=24).choices[0].message.content
    chunks = list(ask(client, base, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 24
    assert len({c.id for c in chunks}) == 1


def test_stream_helper_of_the_client_collects_a_stream(client: openai.OpenAI, base: str) -> None:
    free = ask(client, base, max_tokens=12, temperature=1, seed=2).choices[0].message.content
    drawn: dict[str, Any] = {"model": base, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    # It refuses answers that were cut off, so this one ends by itself.
    drawn |= {"temperature": 1, "seed": 2, "stop": free[6]}
    with client.chat.completions.stream(**drawn) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == free[: free.index(free[6])]


def test_sixteen_at_once_get_what_each_gets_alone(server: Server, client: openai.OpenAI, base: str) -> None:
    questions = [f"Question {i}: {'why ' * i}?" for i in range(16)]
    alone = [ask(client, base, q, max_tokens=12).choices[0].message.content for q in questions]

    async def one(several: openai.AsyncOpenAI, text: str) -> str:
        stream = await several.chat.completions.create(
            model=base, messages=[{"role": "user", "content": text}], max_tokens=12, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as several:
            return await asyncio.gather(*(one(several, q) for q in questions))

    assert asyncio.run(all_of_them()) == alone


def test_logprobs_are_of_the_tokens_that_were_written(client: openai.OpenAI, base: str) -> None:
    whole = ask(client, base, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace") == whole.choices[0].message.content
    for token in content:
        best = [t.logprob for t in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3
        assert token.logprob == best[0] <= 0
    streamed = [c.choices[0].logprobs for c in ask(client, base, logprobs=True, top_logprobs=3, stream=True) if c.choices]
    assert [t.logprob for one in streamed if one for t in one.content] == [t.logprob for t in content]


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI, base: str) -> None:
    said = [[c.message.content for c in ask(client, base, n=3, temperature=1, seed=5).choices] for _ in range(2)]
    assert said[0] == said[1]
    assert len(set(said[0])) == 3
    other = [c.message.content for c in ask(client, base, n=3, temperature=1, seed=99).choices]
    assert other != said[0]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in ask(client, base, n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == said[0]


def test_stop_ends_an_answer_and_is_not_in_it(client: openai.OpenAI, base: str) -> None:
    free = ask(client, base, max_tokens=40, temperature=1, seed=3).choices[0].message.content
    stop = free[10:12]
    cut = ask(client, base, max_tokens=40, temperature=1, seed=3, stop=[stop, "never this"])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == free[: free.index(stop)]


def test_bias_of_a_token_is_obeyed(client: openai.OpenAI, base: str) -> None:
    token = ask(client, base, logprobs=True, max_tokens=1).choices[0].logprobs.content[0]
    again = ask(client, base, logprobs=True, max_tokens=1, logit_bias={str(i): -100 for i in range(200)})
    assert again.choices[0].logprobs.content[0].token != token.token or token.bytes[0] >= 200


# -- completions, embeddings -----------------------------------------------------------------------------------------------


def test_echo_scores_the_prompt_itself(client: openai.OpenAI, base: str) -> None:
    made = client.completions.create(model=base, prompt="a boat", max_tokens=1, logprobs=2, echo=True)
    choice = made.choices[0]
    assert choice.text.startswith("a boat")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens[:6] == list("a boat")
    assert len(logprobs.token_logprobs) == 7
    assert logprobs.token_logprobs[0] is None
    assert all(x is not None and x <= 0 for x in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6]


def test_prompts_may_be_texts_or_tokens_one_or_several(client: openai.OpenAI, http: httpx.Client, base: str) -> None:
    ids = [http.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in ("one", "three")]
    texts = [c.text for c in client.completions.create(model=base, prompt=["one", "three"], max_tokens=6).choices]
    assert [c.text for c in client.completions.create(model=base, prompt=ids, max_tokens=6).choices] == texts
    assert client.completions.create(model=base, prompt=ids[0], max_tokens=6).choices[0].text == texts[0]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(model=base, prompt=["one", "three"], max_tokens=6, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts


def test_suffix_is_refused_by_name(client: openai.OpenAI, base: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=base, prompt="a", suffix="b", max_tokens=1)
    assert refused.value.param == "suffix"


def test_embeddings_are_the_same_in_both_forms(client: openai.OpenAI) -> None:
    # The client asks for base64 unless told otherwise, and decodes it.
    texts = ["a cat sleeps", "a kitten is sleeping", "interest rates rose"]
    decoded = client.embeddings.create(model="minilm", input=texts)
    plain = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    raw = client.embeddings.with_raw_response.create(model="minilm", input=texts, encoding_format="base64")
    packed = raw.http_response.json()["data"][0]["embedding"]
    a, b, c = ([float(x) for x in d.embedding] for d in plain.data)
    assert len(a) == 384
    assert list(decoded.data[0].embedding) == pytest.approx(a, abs=1e-6)
    assert list(struct.unpack("<384f", base64.b64decode(packed))) == pytest.approx(a, abs=1e-6)

    def near(x: list[float], y: list[float]) -> float:
        return sum(p * q for p, q in zip(x, y, strict=True)) / (sum(p * p for p in x) * sum(q * q for q in y)) ** 0.5

    assert near(a, b) > near(a, c)


# -- errors, headers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"logit_bias": {"no token": 1}}, "logit_bias"),
        ({"extra_body": {"identity": "mara", "model": "tiny:nils"}}, None),
    ],
)
def test_what_is_wrong_is_a_bad_request_that_names_it(
    client: openai.OpenAI, base: str, change: dict[str, Any], param: str | None
) -> None:
    if "extra_body" in change:
        change = {"extra_body": {"identity": "mara", "model": f"{base}:nils"}}
        param = "identity"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, base, **change)
    assert refused.value.param == param
    assert refused.value.code
    assert refused.value.type == "invalid_request_error"


def test_unknown_fields_are_ignored_with_a_warning(client: openai.OpenAI, base: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=base, messages=ASK, max_tokens=2, extra_body={"sprinkles": True}
    )
    assert "sprinkles" in raw.headers["warning"]
    assert raw.headers["x-request-id"] == raw.parse()._request_id


def test_message_parts_and_developer_are_read(client: openai.OpenAI, base: str) -> None:
    plain = client.chat.completions.create(
        model=base, max_tokens=6, messages=[{"role": "system", "content": "Short."}, {"role": "user", "content": "Hello"}]
    )
    parts = client.chat.completions.create(
        model=base, max_tokens=6,
        messages=[{"role": "developer", "content": "Short."}, {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
    )  # fmt: skip
    assert parts.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=base,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
        )


def test_client_that_hangs_up_stops_the_work_and_commits_nothing(
    client: openai.OpenAI, http: httpx.Client, base: str, person: str
) -> None:
    before, turns = head(http, person), metric(http, "regard_turns_committed_total")
    stream = ask(client, f"{base}:{person}", "Tell me everything.", max_tokens=1500, stream=True)
    for i, _ in enumerate(stream):
        if i == 3:
            break
    stream.close()
    until = time.monotonic() + 30
    while metric(http, "regard_running") and time.monotonic() < until:
        time.sleep(0.05)
    written = metric(http, "regard_completion_tokens_total")
    time.sleep(0.5)
    assert metric(http, "regard_running") == 0
    assert metric(http, "regard_completion_tokens_total") == written
    assert metric(http, "regard_turns_committed_total") == turns
    assert head(http, person) == before


# -- people ----------------------------------------------------------------------------------------------------------------


def test_a_person_is_chosen_in_three_ways_that_say_the_same(
    client: openai.OpenAI, http: httpx.Client, base: str, person: str
) -> None:
    ask(client, f"{base}:{person}", "My boat is called Petrichor.")
    assert client.models.retrieve(f"{base}:{person}").id == f"{base}:{person}"
    assert f"{base}:{person}" in [m.id for m in client.models.list().data]
    quiet = {"remember": False}
    ways = [
        ask(client, f"{base}:{person}", extra_body=quiet),
        ask(client, base, extra_body=quiet | {"identity": person}),
        ask(client, base, extra_body=quiet, extra_headers={"X-Regard-Identity": person}),
    ]
    assert len({w.choices[0].message.content for w in ways}) == 1
    assert {w.model for w in ways} == {f"{base}:{person}"}


def test_memory_lasts_across_requests_and_reading_writes_nothing(
    client: openai.OpenAI, http: httpx.Client, base: str, person: str
) -> None:
    model = f"{base}:{person}"
    told = ask(client, model, "The name of my boat is Petrichor.")
    assert told.model_extra["regard"]["commit"] == head(http, person)
    asked = client.chat.completions.create(model=model, messages=ASK, max_tokens=8, extra_body={"remember": False})
    recalled = [r["text"] for r in asked.model_extra["regard"]["recalled"]]
    assert any("Petrichor" in text for text in recalled), recalled
    assert asked.model_extra["regard"]["commit"] is None
    assert head(http, person) == told.model_extra["regard"]["commit"]


def test_the_same_key_again_is_the_same_turn_once(client: openai.OpenAI, http: httpx.Client, base: str, person: str) -> None:
    def turn(text: str, stream: bool = False) -> Any:
        return ask(client, f"{base}:{person}", text, stream=stream, temperature=1, extra_headers={"Idempotency-Key": "turn-1"})

    first = turn("I was born in Kyoto.")
    again = turn("I was born in Kyoto.")
    last = list(turn("I was born in Kyoto.", stream=True))[-1]
    assert again.model_extra["regard"]["commit"] == first.model_extra["regard"]["commit"]
    assert last.model_extra["regard"]["commit"] == first.model_extra["regard"]["commit"]
    log = http.get(f"/v1/identities/{person}/log").json()["data"]
    assert [entry["kind"] for entry in log].count("imprint") == 1
    with pytest.raises(openai.ConflictError):
        turn("I was born in Osaka.")


# -- keys ------------------------------------------------------------------------------------------------------------------


def test_keys_open_what_they_own_and_nothing_else(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keys")
    keys = {
        "admin": ("--scope", "admin"),
        "mara": ("--scope", "write", "--own", "mara"),
        "nils": ("--scope", "read", "--own", "nils"),
    }
    tokens = {name: regard(folder, "serve", "key", "new", name, *flags).strip() for name, flags in keys.items()}
    with Server(folder, model=server.model) as guarded:
        clients = {
            name: openai.OpenAI(base_url=guarded.url + "/v1", api_key=token, max_retries=0)
            for name, token in {**tokens, "stranger": "rg-none"}.items()
        }
        base = clients["admin"].models.list().data[0].id
        admin = {"authorization": f"Bearer {tokens['admin']}"}
        for name in ("mara", "nils"):
            assert httpx.post(guarded.url + "/v1/identities", json={"id": name}, headers=admin).status_code == 201
        with pytest.raises(openai.AuthenticationError):
            ask(clients["stranger"], base)
        assert [m.id for m in clients["mara"].models.list()] == [base, f"{base}:mara"]
        assert ask(clients["mara"], f"{base}:mara").model_extra["regard"]["commit"]
        with pytest.raises(openai.NotFoundError) as other:
            ask(clients["mara"], f"{base}:nils")
        with pytest.raises(openai.NotFoundError) as nobody:
            ask(clients["mara"], f"{base}:oona")
        assert other.value.message.replace("nils", "oona") == nobody.value.message
        assert ask(clients["nils"], f"{base}:nils").model_extra["regard"]["commit"] is None
        with pytest.raises(openai.PermissionDeniedError):
            ask(clients["nils"], f"{base}:nils", extra_body={"remember": True})
        regard(folder, "serve", "key", "revoke", "mara")
        with pytest.raises(openai.AuthenticationError):
            ask(clients["mara"], base)


def test_full_queue_is_a_rate_limit_that_says_when(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Server(tmp_path_factory.mktemp("small"), "--rows", "1", "--queue", "1", model=server.model) as small:

        async def one(client: openai.AsyncOpenAI) -> openai.RateLimitError | None:
            try:
                await client.chat.completions.create(model=small_base, messages=ASK, max_tokens=400)
            except openai.RateLimitError as error:
                return error
            return None

        async def crowd() -> list[openai.RateLimitError]:
            async with openai.AsyncOpenAI(base_url=small.url + "/v1", api_key="-", max_retries=0) as client:
                return [e for e in await asyncio.gather(*(one(client) for _ in range(12))) if e is not None]

        small_base = openai.OpenAI(base_url=small.url + "/v1", api_key="-").models.list().data[0].id
        refused = asyncio.run(crowd())
        assert refused
        assert all(int(e.response.headers["retry-after"]) >= 1 and e.code == "queue_full" for e in refused)
        # The client waits as it is told, and tries again.
        patient = openai.OpenAI(base_url=small.url + "/v1", api_key="-", max_retries=5)
        assert ask(patient, small_base).choices[0].finish_reason == "length"
