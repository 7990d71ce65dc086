"""POST /v1/chat/completions, as the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving import BASE, call, chat, code, events, post

from regard.models.decode.generate import logits_of
from regard.serve.service import Service


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_an_answer_has_the_shape_that_clients_read(service: Service):
    answer = chat(service, max_tokens=3).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    prompt = len(service.tokenizer.encode(service.tokenizer.chat([{"role": "user", "content": "Hello"}])))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "regard" not in answer


def test_a_stream_says_what_the_whole_answer_says(service: Service):
    how = {"temperature": 1, "seed": 5, "max_tokens": 8}
    whole, streamed = chat(service, **how), chat(service, stream=True, stream_options={"include_usage": True}, **how)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    chunks = events(streamed.text)
    assert {(c["id"], c["created"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk")
    }
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == said(whole)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole.json()["usage"]


def test_without_include_usage_no_chunk_speaks_of_it(service: Service):
    assert all("usage" not in c for c in events(chat(service, stream=True, max_tokens=2).text))


def test_a_stop_ends_the_answer_and_is_not_part_of_it(service: Service):
    how = {"temperature": 1, "seed": 3, "max_tokens": 12, "repetition_penalty": 1.0}
    free = said(chat(service, **how))
    for stop in (free[4:6], [free[4:6], "never said"]):
        answer = chat(service, stop=stop, **how).json()
        assert answer["choices"][0]["message"]["content"] == free[: free.index(free[4:6])]
        assert answer["choices"][0]["finish_reason"] == "stop"
        chunks = events(chat(service, stop=stop, stream=True, **how).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == free[: free.index(free[4:6])]


def test_a_seed_repeats_chance_and_temperature_0_needs_none(service: Service):
    assert said(chat(service, temperature=1, seed=1)) == said(chat(service, temperature=1, seed=1))
    assert said(chat(service, temperature=1, seed=1)) != said(chat(service, temperature=1, seed=2))
    assert (
        said(chat(service))
        == said(chat(service, temperature=0, top_p=0.5, top_k=3))
        == said(chat(service, temperature=1, top_p=0))
    )


def test_several_choices_each_have_a_seed_of_their_own(service: Service):
    many = chat(service, n=3, temperature=1, seed=7).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2]
    texts = [c["message"]["content"] for c in many["choices"]]
    assert texts == [said(chat(service, temperature=1, seed=7 + i)) for i in range(3)]
    chunks = [c for c in events(chat(service, n=3, temperature=1, seed=7, stream=True).text) if c["choices"]]
    streamed = [
        "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == i) for i in range(3)
    ]
    assert streamed == texts
    assert sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model_before_any_penalty(service: Service, stream: bool):
    answer = chat(service, logprobs=True, top_logprobs=2, max_tokens=3, stream=stream)
    choices = [c["choices"][0] for c in events(answer.text)] if stream else answer.json()["choices"]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == 3
    prompt = service.tokenizer.encode(service.tokenizer.chat([{"role": "user", "content": "Hello"}]))
    tokens = [service.tokenizer.encode(e["token"])[0] for e in entries]
    rates = torch.log_softmax(logits_of(service.model, [*prompt, *tokens]), -1)
    for i, (e, t) in enumerate(zip(entries, tokens, strict=True)):
        row = rates[len(prompt) - 1 + i]
        assert e["logprob"] == pytest.approx(float(row[t]), abs=1e-4)
        assert [x["logprob"] for x in e["top_logprobs"]] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert bytes(e["bytes"]).decode() == e["token"]


def test_penalties_and_bias_reach_the_drawing(service: Service):
    plain = said(chat(service, repetition_penalty=1.0, max_tokens=6))
    assert len(set(plain)) == 1, "the tiny model repeats itself, which is what a penalty is for"
    assert len(set(said(chat(service, repetition_penalty=1.0, max_tokens=6, frequency_penalty=2)))) > 1
    token = service.tokenizer.encode("Q")[0]
    assert said(chat(service, logit_bias={str(token): 100}, max_tokens=3)) == "QQQ"
    assert code(chat(service, logit_bias={"256": 1})) == code(chat(service, logit_bias={"x": 1})) == "invalid_value"


def test_content_may_come_in_parts_and_a_developer_is_the_system(service: Service):
    whole = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]}
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    split = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]}
    a, b = (post(service, "/v1/chat/completions", x).json() for x in (whole, split))
    assert a["choices"] == b["choices"]
    assert a["usage"] == b["usage"]


def test_lengths_may_be_named_either_way_and_not_two_ways(service: Service):
    assert chat(service, max_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert chat(service, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert chat(service, max_completion_tokens=2, max_tokens=2).status_code == 200
    assert chat(service, max_completion_tokens=2, max_tokens=3).status_code == 400


def test_unknown_fields_are_ignored_and_named_in_a_header(service: Service):
    answer = chat(service, reasoning_effort="low", metadata={"a": "b"}, **{"bad\r\nname: x": 1})
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 regard "ignored: reasoning_effort, 1 more"'
    assert "warning" not in chat(service, metadata={"a": "b"}, user="me", store=False).headers


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 99}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"stop": [1]}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "Hello"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"remember": True}, "remember"),
    ({"seed": 1 << 70}, "seed"),
]


@pytest.mark.parametrize(("field", "param"), REFUSED, ids=str)
def test_what_cannot_be_had_is_400_and_named(service: Service, field: dict[str, Any], param: str):
    answer = chat(service, **field)
    assert answer.status_code == 400, answer.text
    assert code(answer) is not None
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_empty_tools_are_no_tools(service: Service):
    assert chat(service, tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"]).status_code == 200


def test_another_model_is_404(service: Service):
    answer = chat(service, model="gpt-4o")
    assert (answer.status_code, code(answer)) == (404, "model_not_found")


def test_an_answer_has_the_id_of_its_request_and_takes_one_that_is_plain(service: Service):
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert post(service, "/v1/chat/completions", body, x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    assert post(service, "/v1/chat/completions", body, x_request_id="a b<c>").headers["x-request-id"].startswith("req-")


def test_paths_of_other_base_addresses_lead_to_the_same_routes(service: Service):
    for path in ("/v1//models", "//models", "/models", "//v1/models"):
        assert call(service, "GET", f"{BASE}{path}").status_code == 200, path
