"""A server of a tiny random model, for tests: its service, and clients that talk to it in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from regard.identity import IdentityStore
from regard.identity.body import base_of
from regard.identity.state import Identity
from regard.models import LlamaConfig
from regard.models.base import Model
from regard.models.tokenizer import Tokenizer, load_tokenizer
from regard.serve.app import create_app
from regard.serve.contract import EngineLike
from regard.serve.keys import Keys
from regard.serve.plain import PlainEngine, PlainRun
from regard.serve.service import Service
from regard.serve.settings import Settings

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BASE = "http://127.0.0.1:8000"


def tiny_model(folder: Path, seed: int = 0, context: int = 1024) -> tuple[Model, Tokenizer]:
    """A model of 256 tokens, one per byte, that can chat; a line ends its answers where it writes one."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    torch.manual_seed(seed)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Inner(models.BPE(vocab=letters, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    t.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    model = LlamaConfig(vocabulary=256, width=32, depth=2, heads=4, key_heads=2, hidden=48, context=context).build().eval()
    return model, load_tokenizer(folder)


def make_service(folder: Path, settings: Settings | None = None, engine: EngineLike | None = None, **more: Any) -> Service:
    """A service with a store of its own in `folder`; close it at the end."""
    from dataclasses import replace

    model, tokenizer = more.pop("pair", None) or tiny_model(folder / "model")
    settings = settings or Settings(max_tokens=8)
    return Service(
        model,
        tokenizer,
        replace(base_of(model), name="tiny"),
        engine or PlainEngine(model, tokenizer, queue=settings.queue),
        IdentityStore(folder / "people.db"),
        Keys(folder / "keys.json"),
        settings,
        **more,
    )


def begin(service: Service, *names: str) -> None:
    """Somebody new under each name."""
    for name in names:
        service.store.new(name, Identity.new(service.base))


def client(app: FastAPI | Service, token: str | None = None, **options: Any) -> httpx.AsyncClient:
    """A client of an application in this process; the engine is started."""
    if isinstance(app, Service):
        app.engine.start()
        app = create_app(app)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # What breaks inside is answered with 500, as a server does, and not raised here.
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, **options)


def events(text: str) -> list[Any]:
    """The objects of an event stream, without its last word."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def secret_key(service: Service, label: str, scopes: Sequence[str], owns: Sequence[str] = ()) -> str:
    """The token of a new key."""
    return service.keys.new(label, scopes, owns)[0]


def call(service: Service, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
    """One request and its whole answer."""

    async def ask() -> httpx.Response:
        async with client(service, token) as c:
            return await c.request(method, path, **options)

    return asyncio.run(ask())


def post(service: Service, path: str, body: Any, token: str | None = None, **headers: str) -> httpx.Response:
    # As bytes that a test may make as wrong as it likes; the client's own JSON would refuse to.
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return call(service, "POST", path, token, content=content, headers=given)


def chat(service: Service, content: str = "Hello", token: str | None = None, **more: Any) -> httpx.Response:
    """A conversation of one message."""
    return post(service, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more}, token)


def code(answer: httpx.Response) -> str:
    """The code of an error, which has OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert "Traceback" not in answer.text
    return error["code"]


class GatedEngine(PlainEngine):
    """A plain engine each of whose tokens waits for `gate`, so that a test can stand between two of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gate = threading.Semaphore(0)
        self.fallen = 0

    def _write(self, run: PlainRun) -> Any:
        put = run.put

        def gated(piece: Any) -> None:
            self.gate.acquire()
            self.fallen += 1
            put(piece)

        run.put = gated
        return super()._write(run)

    def close(self) -> None:
        self.gate.release(1 << 20)
        super().close()
