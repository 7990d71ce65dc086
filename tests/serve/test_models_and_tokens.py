"""/v1/models, /v1/embeddings, /tokenize, /detokenize, /tokenizer_info and /v1/responses."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
import torch
from serving import begin, call, code, events, post, secret_key

from regard.models import downloads
from regard.serve.kept import Kept, Responses
from regard.serve.routes import embeddings
from regard.serve.service import Service


def test_the_base_comes_first_and_people_have_it_as_their_parent(service: Service):
    begin(service, "mara", "tom")
    listed = call(service, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [(m["id"], m["parent"], m["object"]) for m in listed["data"]] == [
        ("tiny", None, "model"), ("tiny:mara", "tiny", "model"), ("tiny:tom", "tiny", "model")]  # fmt: skip
    assert all(isinstance(m["created"], int) for m in listed["data"])
    for model in listed["data"]:
        assert call(service, "GET", f"/v1/models/{model['id']}").json() == model
    assert code(call(service, "GET", "/v1/models/tiny:nobody")) == "identity_not_found"
    assert code(call(service, "GET", "/v1/models/other")) == "model_not_found"


def test_a_key_sees_its_own_people_alone(service: Service):
    begin(service, "mara", "tom", "family-a")
    token = secret_key(service, "her", ["read"], ["mara", "family-*"])
    assert [m["id"] for m in call(service, "GET", "/v1/models", token).json()["data"]] == ["tiny", "tiny:family-a", "tiny:mara"]
    hers, nobodys = (call(service, "GET", f"/v1/models/tiny:{n}", token) for n in ("tom", "nobody"))
    assert (hers.status_code, hers.text.replace("tom", "nobody")) == (nobodys.status_code, nobodys.text)


def test_people_of_another_model_are_not_listed(service: Service):
    from dataclasses import replace

    from regard.identity.state import Identity

    service.store.new("stranger", Identity.new(replace(service.base, fingerprint="0" * 64)))
    assert [m["id"] for m in call(service, "GET", "/v1/models").json()["data"]] == ["tiny"]
    assert call(service, "GET", "/v1/models/tiny:stranger").status_code == 404


def test_tokens_go_there_and_back_as_a_remote_tokenizer_asks_for_them(service: Service):
    made = post(service, "/tokenize", {"prompt": "Olá, Mochi", "add_special_tokens": False}).json()
    assert made["tokens"] == service.tokenizer.encode("Olá, Mochi", bos=False)
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 1024
    assert post(service, "/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "Olá, Mochi"}
    info = call(service, "GET", "/tokenizer_info").json()
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(info)
    messages = [{"role": "user", "content": "Hello"}]
    chat = post(service, "/tokenize", {"messages": messages}).json()["tokens"]
    assert chat == service.tokenizer.encode(service.tokenizer.chat(messages))


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}), ("/detokenize", {"tokens": [999]}), ("/detokenize", {"tokens": "a"})])  # fmt: skip
def test_what_cannot_be_tokens_is_400(service: Service, path: str, body: Any):
    assert post(service, path, body).status_code == 400


class _Encoder:
    """Stands for MiniLM: the vector of a text is made of its ids."""

    context = 8

    class config:
        vocabulary = 100

    def __call__(self, tokens: torch.Tensor) -> Any:
        rows = torch.stack([tokens[0].float() + 1, torch.ones(tokens.shape[1])], -1)[None]
        return type("Out", (), {"last": rows})


class _Letters:
    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        return [ord(c) % 100 for c in text]


def test_embeddings_come_as_floats_or_base64_of_texts_or_ids(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloads, "present", lambda name: True)
    monkeypatch.setattr(embeddings, "_opened", lambda: (_Encoder(), _Letters()))
    floats = post(service, "/v1/embeddings", {"input": ["ab", "cd"], "encoding_format": "float", "model": "minilm"}).json()
    assert [d["index"] for d in floats["data"]] == [0, 1]
    assert floats["usage"]["prompt_tokens"] == 4
    coded = post(service, "/v1/embeddings", {"input": ["ab", "cd"], "encoding_format": "base64"}).json()
    for a, b in zip(floats["data"], coded["data"], strict=True):
        assert struct.unpack("<2f", base64.b64decode(b["embedding"])) == pytest.approx(a["embedding"])
    ids = [ord(c) % 100 for c in "ab"]
    assert post(service, "/v1/embeddings", {"input": ids}).json()["data"][0] == floats["data"][0]
    for wrong in ({"input": [[500]]}, {"input": []}, {"input": ""}, {"input": "a", "dimensions": 7}, {"input": "a" * 20}):
        assert post(service, "/v1/embeddings", wrong).status_code == 400, wrong
    assert post(service, "/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"}).status_code == 404


def test_without_an_encoder_embeddings_say_what_to_install(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloads, "present", lambda name: False)
    answer = post(service, "/v1/embeddings", {"input": "a"})
    assert (answer.status_code, code(answer)) == (404, "encoder_not_installed")
    assert "regard models get minilm" in answer.text


def respond(service: Service, body: dict[str, Any], token: str | None = None) -> Any:
    return post(service, "/v1/responses", {"max_output_tokens": 4, **body}, token)


def test_a_response_goes_on_where_the_one_before_it_ended(service: Service):
    first = respond(service, {"input": "My cat is Mochi.", "instructions": "Be brief."}).json()
    assert (first["object"], first["status"]) == ("response", "incomplete")
    said = first["output"][0]["content"][0]["text"]
    second = respond(service, {"input": "And my dog?", "previous_response_id": first["id"]}).json()
    messages = [{"role": "user", "content": "My cat is Mochi."}, {"role": "assistant", "content": said}, {"role": "user", "content": "And my dog?"}]  # fmt: skip
    same = respond(service, {"input": [{"type": "message", **m} for m in messages]}).json()
    assert second["usage"] == same["usage"]
    assert second["output"][0]["content"] == same["output"][0]["content"]
    assert call(service, "GET", f"/v1/responses/{first['id']}").json() == first
    assert call(service, "DELETE", f"/v1/responses/{first['id']}").json()["deleted"] is True
    lost = respond(service, {"input": "And?", "previous_response_id": first["id"]})
    assert (lost.status_code, code(lost)) == (400, "previous_response_not_found")


def test_a_response_that_is_not_to_be_stored_is_not_there(service: Service):
    made = respond(service, {"input": "Hello", "store": False}).json()
    assert call(service, "GET", f"/v1/responses/{made['id']}").status_code == 404


def test_responses_are_each_keys_own_and_the_oldest_leave_first(service: Service):
    a, b = (secret_key(service, name, ["write"]) for name in ("a", "b"))
    made = respond(service, {"input": "Hello"}, a).json()
    assert call(service, "GET", f"/v1/responses/{made['id']}", b).status_code == 404
    assert respond(service, {"input": "x", "previous_response_id": made["id"]}, b).status_code == 400
    object.__setattr__(service.settings, "responses", 2)
    ids = [respond(service, {"input": "Hello"}, a).json()["id"] for _ in range(2)]
    assert [call(service, "GET", f"/v1/responses/{i}", a).status_code for i in (made["id"], *ids)] == [404, 200, 200]


def test_what_somebody_answered_is_not_kept_once_they_are_let_go(service: Service):
    begin(service, "mara", "tom")
    hers, his, nobodys = (
        respond(service, {"input": "Hello", "model": m}).json()["id"] for m in ("tiny:mara", "tiny:tom", "tiny")
    )
    service.let_go("mara")
    assert [call(service, "GET", f"/v1/responses/{i}").status_code for i in (hers, his, nobodys)] == [404, 200, 200]


def test_kept_responses_are_bounded_in_bytes_over_all_keys():
    kept = Responses(most_bytes=20_000)
    for i in range(10):
        kept.keep(f"key-{i}", Kept([{"role": "user", "content": "x" * 100}], {"id": f"r{i}"}), most=5)
    assert [kept.get(f"key-{i}", f"r{i}") is not None for i in range(10)] == [False] * 6 + [True] * 4


def test_a_stream_of_a_response_ends_with_the_response_itself(service: Service):
    begin(service, "mara")
    answer = respond(service, {"input": "My cat is Mochi.", "model": "tiny:mara", "stream": True})
    told = events(answer.text)
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    assert told[0]["type"] == "response.created"
    text = "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta")
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert told[-1]["response"]["regard"]["commit"] == service.store.head("mara").id
    assert answer.text.count("event: response.") == len(told)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"tools": [{}]}, "tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0"),
        ({"input": []}, "input"),
    ],
    ids=str,
)
def test_what_a_response_cannot_do_is_400_and_named(service: Service, field: dict[str, Any], param: str):
    answer = respond(service, {"input": "Hello", **field})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
