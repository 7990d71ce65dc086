"""POST /v1/completions, and what lm-eval reads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving import begin, code, events, make_service, post, tiny_model

from regard.models.decode.generate import logits_of
from regard.serve.engine import Engine
from regard.serve.service import Service


def complete(service: Service, prompt: Any = "My cat is", **more: Any) -> Any:
    answer = post(service, "/v1/completions", {"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rates(service: Service, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(logits_of(service.model, tokens), -1)


def test_a_prompt_is_a_text_texts_token_ids_or_lists_of_them(service: Service):
    ids = service.tokenizer.encode("My cat is")
    text = complete(service)["choices"][0]["text"]
    assert complete(service, ids)["choices"][0]["text"] == text
    for many in (["My cat is", "I live in"], [ids, service.tokenizer.encode("I live in")]):
        choices = complete(service, many)["choices"]
        assert [c["index"] for c in choices] == [0, 1]
        assert choices[0]["text"] == text
        assert choices[1]["text"] == complete(service, "I live in")["choices"][0]["text"]


def test_more_prompts_than_rows_and_several_choices_each_come_in_order(service: Service):
    prompts = [f"Number {i} is" for i in range(12)]
    choices = complete(service, prompts, n=2, temperature=1, seed=4, max_tokens=3)["choices"]
    assert [c["index"] for c in choices] == list(range(24))
    alone = complete(service, prompts[7], temperature=1, seed=5, max_tokens=3)["choices"][0]["text"]
    assert choices[15]["text"] == alone


@pytest.mark.parametrize("engine", ["plain", "batch"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_log_probabilities_of_the_prompts_own_tokens(tmp_path: Path, engine: str, stream: bool):
    pair = tiny_model(tmp_path / "model")
    service = make_service(tmp_path, engine=Engine(*pair) if engine == "batch" else None, pair=pair)
    ids = service.tokenizer.encode("My cat is called Mochi.")
    body = {"prompt": [ids, ids[:6]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, "stream": stream}
    answer = post(service, "/v1/completions", body)
    for index, prompt in enumerate((ids, ids[:6])):
        if stream:
            parts = [c["choices"][0] for c in events(answer.text) if c["choices"][0]["index"] == index]
            logprobs = {k: [x for p in parts for x in p["logprobs"][k]] for k in parts[0]["logprobs"]}
            text = "".join(p["text"] for p in parts)
        else:
            choice = answer.json()["choices"][index]
            logprobs, text = choice["logprobs"], choice["text"]
        row = rates(service, prompt)
        want = [float(row[i, t]) for i, t in enumerate(prompt[1:])]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-4)
        for i, (own, top) in enumerate(zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True)):
            greedy = int(row[i].argmax()) == prompt[i + 1]
            assert (own == max(top.values())) == greedy, "how lm-eval tells whether a continuation is the likeliest"
        assert len(logprobs["tokens"]) == len(prompt) + 1, "one token more than the prompt, which lm-eval cuts off"
        assert text.startswith(service.tokenizer.decode(prompt))
        assert [text[a:b] for a, b in zip(logprobs["text_offset"], logprobs["text_offset"][1:], strict=False)] == logprobs[
            "tokens"
        ][:-1]
    service.close()


def test_echo_without_a_token_to_write_scores_the_prompt_alone(service: Service):
    answer = complete(service, max_tokens=0, echo=True, logprobs=2)
    choice = answer["choices"][0]
    assert choice["text"] == "My cat is"
    assert len(choice["logprobs"]["tokens"]) == len(service.tokenizer.encode("My cat is"))
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_logprobs_of_what_is_written_hold_the_chosen_token_and_the_likeliest(service: Service):
    choice = complete(service, max_tokens=3, logprobs=2, temperature=1, seed=9)["choices"][0]
    for token, own, top in zip(*(choice["logprobs"][k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == own
        assert len(top) in (2, 3)
    assert choice["logprobs"]["text_offset"][0] == len("My cat is")


def test_a_stream_says_what_the_whole_answer_says(service: Service):
    chunks = events(
        post(service, "/v1/completions", {"prompt": "My cat", "stream": True, "stream_options": {"include_usage": True}}).text
    )
    whole = complete(service, "My cat")
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"]


def test_sixteen_tokens_are_written_where_no_number_is_named(service: Service):
    object.__setattr__(service.settings, "max_tokens", 100)
    assert complete(service)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"remember": True}, "remember"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a"] * 500}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_400_and_named(service: Service, field: dict[str, Any], param: str):
    answer = post(service, "/v1/completions", {"prompt": "a", **field})
    assert answer.status_code == 400, answer.text
    assert code(answer)
    assert answer.json()["error"]["param"] == param


def test_a_person_continues_a_text_and_nothing_is_written(service: Service):
    begin(service, "mara")
    before = service.store.head("mara").id
    answer = complete(service, model="tiny:mara")
    assert answer["model"] == "tiny:mara"
    assert answer["regard"]["read_commit"] == before == service.store.head("mara").id
