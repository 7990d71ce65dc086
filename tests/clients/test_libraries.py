"""LiteLLM and LangChain, as their users call them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import pytest
from harness import Server

# Neither may ask anybody else for anything: prices, encodings, telemetry.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false", "OPENAI_API_KEY": "-"}


def plain(http: httpx.Client, base: str, text: str, **more: Any) -> str:
    body = {"model": base, "messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="session")
def lite(server: Server, base: str) -> dict[str, Any]:
    return {"model": f"openai/{base}", "api_base": server.url + "/v1", "api_key": "-", "max_tokens": 12, "num_retries": 0}


def test_litellm_completes_streams_and_awaits(lite: dict[str, Any], http: httpx.Client, base: str) -> None:
    import litellm

    litellm.telemetry = False
    messages = [{"role": "user", "content": "Hello"}]
    want = plain(http, base, "Hello")
    whole = litellm.completion(messages=messages, **lite)
    assert whole.choices[0].message.content == want
    assert whole.usage.completion_tokens == 12
    parts = [c.choices[0].delta.content or "" for c in litellm.completion(messages=messages, stream=True, **lite)]
    assert "".join(parts) == want
    assert len(parts) > 2
    awaited = asyncio.run(litellm.acompletion(messages=messages, **lite))
    assert awaited.choices[0].message.content == want


def test_litellm_tells_errors_by_their_class(lite: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=[{"role": "user", "content": "x"}], **lite | {"model": "openai/nobody"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=[{"role": "user", "content": "x"}], **lite | {"temperature": 9})


def test_litellm_reaches_a_person(lite: dict[str, Any], http: httpx.Client, base: str, person: str) -> None:
    import litellm

    messages = [{"role": "user", "content": "The name of my boat is Petrichor."}]
    litellm.completion(messages=messages, **lite | {"model": f"openai/{base}:{person}"})
    litellm.completion(messages=messages, extra_body={"identity": person, "remember": False}, **lite)
    log = http.get(f"/v1/identities/{person}/log").json()["data"]
    assert [entry["kind"] for entry in log].count("imprint") == 1


def test_litellm_embeds(lite: dict[str, Any]) -> None:
    import litellm

    made = litellm.embedding(model="openai/minilm", input=["a cat"], api_base=lite["api_base"], api_key="-")
    assert len(made.data[0]["embedding"]) == 384


def test_langchain_chats_and_streams(server: Server, http: httpx.Client, base: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=base, base_url=server.url + "/v1", api_key="-", max_tokens=12, max_retries=0, temperature=0)
    want = plain(http, base, "Hello", temperature=0)
    told = chat.invoke("Hello")
    assert told.content == want
    assert told.usage_metadata["output_tokens"] == 12
    assert "".join(c.content for c in chat.stream("Hello")) == want
    history = [SystemMessage("Short."), HumanMessage("Hello"), AIMessage("Hi."), HumanMessage("Again?")]
    assert chat.invoke(history).content
    logged = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(logged.response_metadata["logprobs"]["content"]) == 12
    assert asyncio.run(chat.ainvoke("Hello")).content == want


def test_langchain_speaks_to_a_person(server: Server, http: httpx.Client, base: str, person: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=f"{base}:{person}", base_url=server.url + "/v1", api_key="-", max_tokens=6, max_retries=0)
    chat.invoke("The name of my boat is Petrichor.")
    quiet = chat.bind(extra_body={"remember": False})
    quiet.invoke("What is the name of my boat?")
    log = http.get(f"/v1/identities/{person}/log").json()["data"]
    assert [entry["kind"] for entry in log].count("imprint") == 1


def test_langchain_completes_and_embeds(server: Server, http: httpx.Client, base: str) -> None:
    from langchain_openai import OpenAI, OpenAIEmbeddings

    complete = OpenAI(model=base, base_url=server.url + "/v1", api_key="-", max_tokens=12, max_retries=0, temperature=0)
    body = {"model": base, "prompt": "Once", "max_tokens": 12, "temperature": 0}
    want = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert complete.invoke("Once") == want
    assert "".join(complete.stream("Once")) == want
    # It counts tokens with OpenAI's own vocabulary unless told not to.
    embed = OpenAIEmbeddings(model="minilm", base_url=server.url + "/v1", api_key="-", check_embedding_ctx_length=False)
    assert len(embed.embed_query("a cat")) == 384
