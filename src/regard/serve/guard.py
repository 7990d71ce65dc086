"""The guard: what every request passes before any route sees it, and every response after.

    Host        must be a name of this server: a page whose own name is made to lead here (DNS rebinding) is refused
    Origin      must be this server, or named by --cors
    key         found or not; a body is not read for a stranger
    body        JSON, or an upload where a route takes one; bounded in bytes and in time

The log has one line a request: its route, not its path, so that it names nobody; and no word of any body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import needs_extra

with needs_extra("serve"):
    from fastapi import HTTPException

from .access import unauthorised
from .contract import DrainingError
from .errors import ApiError, GoneError, Said, said, where
from .keys import LOCAL, Caller
from .service import Service

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
LOG = logging.getLogger("regard.serve")
ALWAYS = ("/health", "/ready", "/metrics")
"""Answered while draining too."""
OPENAI = ("chat", "completions", "embeddings", "models", "responses")
GONE = 499
"""In the log and in metrics, of a request whose client hung up before it was answered."""
MUTATIONS = ("POST", "PUT", "PATCH", "DELETE")
READ_SECONDS = 30.0
"""That a body may take to arrive."""
ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
}
"""On every response that does not say otherwise itself."""


class Guard:
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Passing(self.service, scope, send).run(self.app, receive)


class _Passing:
    """One request on its way through."""

    def __init__(self, service: Service, scope: Scope, send: Send) -> None:
        self.service, self.scope, self._send = service, scope, send
        self.began = time.monotonic()
        self.headers = headers_of(scope)
        given = self.headers.get("x-request-id", "")
        self.id = given if ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        self.status = 0
        self.origin: str | None = None
        scope["path"] = usual_path(scope["path"])
        scope["regard.request_id"], scope["regard.began"] = self.id, self.began

    async def run(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], receive: Receive) -> None:
        # What only reads is not waited for when the server ends: a stream of progress may go on for hours.
        counts = self.scope["method"] in MUTATIONS
        self.service.in_flight += counts
        try:
            try:
                refused = self._refused()
                if refused is None and self._preflight():
                    await self._answer(Said(204, "", None, None, {}))
                    return
                if refused is None:
                    receive = await self._body(receive)
            except (ApiError, DrainingError) as error:
                refused = error
            if refused is not None:
                await self._answer(said(refused))
                return
            await app(self.scope, receive, self.send)
        except GoneError:
            self.status = self.status or GONE
        except Exception as error:
            LOG.error("%s failed: %s", self.id, where(error))
            if not self.status:
                await self._answer(said(error))
        finally:
            self.service.in_flight -= counts
            self._record()

    # -- before ------------------------------------------------------------------------------------------------------

    def _refused(self) -> Exception | None:
        """The first reason for which this request goes no further."""
        host = self.headers.get("host", "")
        if hostname(host) not in self.service.settings.allowed_hosts:
            return ApiError(421, "this server is not called so; name its hosts with --allow-host", code="unknown_host")
        if (wrong := self._foreign(host)) is not None:
            return wrong
        self.scope["regard.caller"] = self._caller()
        if self.service.draining and self.scope["path"] not in ALWAYS:
            return DrainingError()
        return None

    def _foreign(self, host: str) -> ApiError | None:
        """Why a page of another origin may not ask; a client that is no browser names none."""
        origin = self.headers.get("origin")
        refusal = ApiError(403, "pages of this origin may not call this server; name it with --cors", code="forbidden_origin")
        if origin is not None:
            if origin in self.service.settings.cors:
                self.origin = origin
                return None
            same = urlsplit(origin)
            return None if same.scheme in ("http", "https") and same.netloc.lower() == host.lower() else refusal
        # Without an origin a browser still says where a request comes from; following a link is no harm.
        crosses = self.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        return refusal if crosses and self.headers.get("sec-fetch-mode") != "navigate" else None

    def _caller(self) -> Caller | None:
        if not self.service.guarded:
            return LOCAL
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return self.service.keys.caller(token.strip()) if scheme.lower() == "bearer" and token.strip() else None

    def _preflight(self) -> bool:
        return self.scope["method"] == "OPTIONS" and self.origin is not None and "access-control-request-method" in self.headers

    async def _body(self, receive: Receive) -> Receive:
        """A way to receive whose body is bounded; JSON is read here whole, an upload as its route reads it."""
        if self.scope["method"] not in MUTATIONS:
            return receive
        if self.scope["regard.caller"] is None:
            raise unauthorised()
        settings = self.service.settings
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        length = self.headers.get("content-length", "0")
        upload = kind == "application/octet-stream"
        limit = settings.upload_bytes if upload else settings.body_bytes
        if not length.isdecimal() or len(length) > 18:
            raise ApiError(400, "content-length is no number", code="invalid_header")
        if int(length) > limit:
            raise too_large(limit)
        has_body = int(length) > 0 or "transfer-encoding" in self.headers
        if has_body and kind not in ("application/json", "application/octet-stream"):
            raise ApiError(415, "send JSON: content-type: application/json", code="unsupported_media_type")
        if upload:
            return _counted(receive, limit)
        return await _read(receive, limit)

    # -- after -------------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            raw: list[tuple[bytes, bytes]] = list(message.get("headers", []))
            present = {name.lower() for name, _ in raw}
            extra = {**HEADERS, "x-request-id": self.id}
            if self.origin is not None:
                extra |= {"access-control-allow-origin": self.origin, "vary": "origin", "access-control-expose-headers": "x-request-id, warning"}  # fmt: skip
            raw += [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in present]
            message["headers"] = raw
        await self._send(message)

    async def _answer(self, what: Said) -> None:
        headers = {"content-type": "application/json", **what.headers}
        if what.status == 204:
            headers = {
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-allow-headers": "authorization, content-type, idempotency-key, x-regard-identity, x-request-id",
                "access-control-max-age": "600",
            }
        if what.code:
            self.service.metrics.refused.labels(what.code).inc()
        body = b"" if what.status == 204 else json.dumps(what.body).encode()
        raw = [(k.encode(), v.encode()) for k, v in headers.items()] + [(b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": what.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    def _record(self) -> None:
        route = getattr(self.scope.get("route"), "path", None) or "unknown"
        method = self.scope["method"] if self.scope["method"] in ("GET", "HEAD", "OPTIONS", *MUTATIONS) else "other"
        took, metrics = time.monotonic() - self.began, self.service.metrics
        metrics.requests.labels(route, method, str(self.status)).inc()
        metrics.seconds.labels(route).observe(took)
        caller = self.scope.get("regard.caller")
        LOG.info("%s %s %s %d %.0f ms %s", self.id, method, route, self.status, 1e3 * took, getattr(caller, "id", "-"))


def usual_path(path: str) -> str:
    """`//models` is what a client asks for whose base address ends in a slash, and `/models` one whose address has no /v1."""
    path = re.sub(r"/{2,}", "/", path)
    return f"/v1{path}" if path.split("/")[1] in OPENAI else path


def headers_of(scope: Scope) -> Mapping[str, str]:
    """By lower-case name; of a name that stands there twice and must not, nothing that could be mistaken for either."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = "\0twice" if key in found and key in ("host", "origin", "authorization", "content-length") else text
    return found


def hostname(host: str) -> str:
    """A Host header without its port."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body of a request has at most {limit:,} bytes here", code="body_too_large")


async def _read(receive: Receive, limit: int) -> Receive:
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    break
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_SECONDS:.0f} s", code="body_timeout") from None
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again


def _counted(receive: Receive, limit: int) -> Receive:
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413, str(too_large(limit)))
        return message

    return counted


__all__ = ["Guard"]
