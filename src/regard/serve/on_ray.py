"""The same application on Ray Serve: several replicas, on several machines, and each person's requests to the same one.

    deploy(Setup("smollm2", "postgresql://regard@db/people", "s3://bucket/people"), replicas=4)

A request goes to the replica that the name of its identity stands for, so that what is held in memory of somebody (their state, prefixes,
jobs, responses) is held once; one without an identity goes by its key. That is a matter of speed: the store's heads are compared and set,
so that a write is right wherever it happens, also when two replicas write to one person at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from ..errors import needs_extra
from .jobs import mark_of
from .keys import Keys
from .settings import Settings

Message = dict[str, Any]
PASSED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "server", "client")
"""Of a scope; the rest are objects of the process that received it."""
IDENTITY = re.compile(r"/v1/identities/([^/]+)")
JOB = re.compile(r"/v1/jobs/job-([0-9a-f]{8})")
APPLICATION = "regard"


@dataclass(frozen=True)
class Setup:
    """What each replica opens; the model, the store and the keys must be there on every machine."""

    model: str
    store: str | None = None
    blobs: str | None = None
    keys: Path | None = None
    settings: Settings = field(default_factory=Settings)


class Replica:
    """One process with a model, its engine and the whole application."""

    def __init__(self, setup: Setup) -> None:
        from .app import create_app
        from .running import open_service

        settings = replace(setup.settings, engine="batch")
        self.service = open_service(setup.model, setup.store, settings, setup.keys, blobs=setup.blobs)
        self.app = create_app(self.service)
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def answer(self, scope: Message, body: bytes) -> AsyncGenerator[Message]:
        """What the application sends; whoever stops listening is gone for it too."""
        async with self._starting:
            if not self._started:
                await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
                self._started = True
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        first = True

        async def receive() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await self.app({**scope, "state": {}}, receive, cast(Any, sent.put))
            finally:
                await sent.put(None)

        task = asyncio.create_task(work())
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            gone.set()
            await asyncio.wait([task])

    def close(self) -> None:
        self.service.close()
        self.service.store.close()

    def __del__(self) -> None:
        # Ray calls this when it takes a replica down: a night that runs keeps its best so far.
        if hasattr(self, "service"):
            self.close()


Ask = Callable[[int, Message, bytes], AsyncIterator[Message]]


class Router:
    """The application that receives: it reads whom a request is about, and hands it on."""

    def __init__(self, replicas: int, settings: Settings, ask: Ask) -> None:
        self.replicas, self.settings, self.ask = replicas, settings, ask

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        body = await self._body(receive)
        if body is None:
            words = json.dumps(
                {
                    "error": {
                        "message": "the body is too large",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "too_large",
                    }
                }
            )
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": words.encode()})
            return
        passed = {k: scope[k] for k in PASSED if k in scope}
        if scope["method"] == "GET" and scope["path"].rstrip("/") == "/v1/jobs":
            await self._merged(passed, send)
            return
        async for message in self.ask(shard(passed, body, self.replicas), passed, body):
            await send(message)

    async def _body(self, receive: Callable[[], Awaitable[Message]]) -> bytes | None:
        """All of it; None where it is more than any route takes. Which route takes how much is said by the replica."""
        parts, size = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max(self.settings.body_bytes, self.settings.upload_bytes):
                return None
            if not message.get("more_body"):
                return b"".join(parts)

    async def _merged(self, scope: Message, send: Callable[[Message], Awaitable[None]]) -> None:
        """The jobs of all replicas, the youngest first; an error of one is the answer."""
        found = list[dict[str, Any]]()
        start: Message = {}
        for i in range(self.replicas):
            messages = [m async for m in self.ask(i, scope, b"")]
            start = messages[0]
            said = b"".join(m.get("body", b"") for m in messages[1:])
            if start["status"] != 200:
                for message in messages:
                    await send(message)
                return
            found += json.loads(said)["data"]
        found.sort(key=lambda job: -job["created"])
        body = json.dumps({"object": "list", "data": found, "has_more": False}).encode()
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


async def _live(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


def shard(scope: Message, body: bytes, replicas: int) -> int:
    """The number of the replica for a request; the same for all that are about one person."""
    job = JOB.match(scope["path"])
    return int(job[1] if job else mark_of(_about(scope, body)), 16) % replicas


def _about(scope: Message, body: bytes) -> str:
    """The name of the identity that a request is about; its key where there is none."""
    headers = {bytes(k).lower(): bytes(v) for k, v in scope["headers"]}
    found = IDENTITY.match(scope["path"])
    if found:
        return unquote(found[1])
    if name := headers.get(b"x-regard-identity"):
        return name.decode("latin-1")
    if headers.get(b"content-type", b"").startswith(b"application/json"):
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict):
            said = cast(dict[str, Any], fields)
            model = said.get("model")
            for name in (said.get("identity"), model.partition(":")[2] if isinstance(model, str) else None):
                if isinstance(name, str) and name:
                    return name
            if scope["path"].rstrip("/") == "/v1/identities" and isinstance(said.get("id"), str):
                return said["id"]
    return "key " + hashlib.sha256(headers.get(b"authorization", b"")).hexdigest()


def _ray(name: str) -> Any:
    with needs_extra("ray"):
        return importlib.import_module(name)


def application(setup: Setup, replicas: int) -> Any:
    """What `ray.serve.run` takes: a router in front of replicas, each a deployment of one."""
    serve = _ray("ray.serve")
    settings, most = setup.settings, 4 * (setup.settings.queue + setup.settings.rows)
    names = [f"people-{i}" for i in range(replicas)]

    def router() -> Router:
        handles = [serve.get_deployment_handle(name, app_name=APPLICATION).options(stream=True) for name in names]
        return Router(replicas, settings, lambda i, scope, body: handles[i].answer.remote(scope, body))

    each = [
        serve.deployment(Replica)
        .options(name=name, max_ongoing_requests=most, graceful_shutdown_timeout_s=settings.drain)
        .bind(setup)
        for name in names
    ]
    entrance = serve.deployment(serve.ingress(router)())
    # It only hands on: a core that it reserved would be one replica less.
    return entrance.options(name="entrance", max_ongoing_requests=most * replicas, ray_actor_options={"num_cpus": 0}).bind(
        *each
    )


def deploy(setup: Setup, replicas: int = 2) -> str:
    """Start it on the Ray that RAY_ADDRESS names, or on one of this machine; the address that it answers at."""
    from .running import expect_keys

    ray, serve = _ray("ray"), _ray("ray.serve")
    expect_keys(setup.settings, Keys(setup.keys))
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": setup.settings.host, "port": setup.settings.port})
    serve.run(application(setup, replicas), name=APPLICATION, route_prefix="/")
    return f"http://{setup.settings.host}:{setup.settings.port}"


def serve_on_ray(setup: Setup, replicas: int, on_ready: Callable[[str], None]) -> None:
    """Answer until a signal ends it; replicas finish what they have begun."""
    serve = _ray("ray.serve")
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    before = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        on_ready(deploy(setup, replicas))
        while not ended:
            signal.pause()
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        serve.shutdown()


__all__ = ["Replica", "Router", "Setup", "application", "deploy", "serve_on_ray", "shard"]
