"""A server from its start to its end: what it is made of, the signal that ends it, and what that waits for.

SIGTERM and Ctrl-C let it drain: /ready says no, whatever is new is refused with 503, and turns that run are finished and committed;
then it exits with 0. A second signal, or the end of `Settings.drain`, stops what still runs: nothing of that was acknowledged.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..errors import SpecError, needs_extra

with needs_extra("serve"):
    import uvicorn

from ..identity.opened import Tell, opened
from ..identity.store import IdentityStore
from ..models.base import Model
from ..models.tokenizer import Tokenizer
from .app import create_app
from .contract import EngineLike
from .engine import Engine
from .keys import Keys
from .plain import PlainEngine
from .service import Service
from .settings import Settings

LOG = logging.getLogger("regard.serve")
CONNECTIONS = 2048
LOOK = 0.05
"""Seconds between two looks at whether everything has ended."""
AFTER = 1.0
"""Seconds that connections have to close once nothing runs."""


def open_service(
    model: str | Path,
    store: str | None = None,
    settings: Settings | None = None,
    keys: Path | None = None,
    tell: Tell = lambda what, share: None,
    blobs: str | None = None,
) -> Service:
    """A model, its store and its keys; refused where strangers could reach it without a key."""
    settings, known = settings or Settings(), Keys(keys)
    expect_keys(settings, known)
    # Before the model, which takes longer: a store that cannot be opened is said at once.
    people = IdentityStore(store, blobs=blobs)
    try:
        loaded, tokenizer, base = opened(model, tell)
        return Service(loaded, tokenizer, base, make_engine(loaded, tokenizer, settings), people, known, settings)
    except BaseException:
        people.close()
        raise


def make_engine(model: Model, tokenizer: Tokenizer, s: Settings) -> EngineLike:
    if s.engine == "ray":
        raise SpecError("engine='ray' deploys this application on a cluster, and is not one engine in one process")
    if s.engine == "plain":
        return PlainEngine(model, tokenizer, weights=s.weights, cache=s.cache, queue=s.queue)
    return Engine(model, tokenizer, weights=s.weights, cache=s.cache, rows=s.rows, queue=s.queue, cache_bytes=s.cache_bytes)


def expect_keys(settings: Settings, keys: Keys) -> None:
    if not settings.loopback and not any(k.revoked is None for k in keys.all()):
        raise SpecError(
            f"{settings.host} can be reached from other machines, and there is no key in {keys.path}: make one with "
            "`regard serve key new NAME`, or serve on 127.0.0.1"
        )


def listening(settings: Settings) -> socket.socket:
    """The address, taken before the model is loaded: one that is taken already is said at once."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, settings.port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise SpecError(
            f"{settings.host}:{settings.port} cannot be served on: {error.strerror or error}; choose another --port"
        ) from error


def address(taken: socket.socket) -> str:
    """As a browser takes it; an address that stands for all of them is shown as this machine's own."""
    host, port = taken.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which drains before it stops."""

    def __init__(self, service: Service, on_ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            create_app(service), log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
            limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=max(1, round(AFTER)), lifespan="on",
        )  # fmt: skip
        super().__init__(config)
        self.service, self.on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not handed on to uvicorn, which would raise the signal again at the end: a drained server exits with 0.
        if self.service.draining:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        LOG.info("draining: %d requests are being answered", self.service.in_flight)
        threading.Thread(target=self._drain, name="regard-drain", daemon=True).start()

    def _drain(self) -> None:
        until = time.monotonic() + self.service.settings.drain
        while self.service.in_flight and time.monotonic() < until:
            time.sleep(LOOK)
        if self.service.in_flight:
            LOG.warning("%d requests were not finished in time; nothing of them was acknowledged", self.service.in_flight)
        self.should_exit = True


def serve(service: Service, taken: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Answer until a signal ends it."""
    try:
        Server(service, on_ready).run(sockets=[taken])
    finally:
        taken.close()
        service.close()
        service.store.close()


__all__ = ["Server", "address", "expect_keys", "listening", "make_engine", "open_service", "serve"]
