"""The application: routers, errors and the guard around them.

app = create_app(Service(model, tokenizer, base, engine, store, keys))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from .. import __version__
from ..errors import RegardError, needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastapi.routing import APIRoute
    from starlette.exceptions import HTTPException as StarletteHTTPException

from .errors import DOCUMENTED, ApiError, said
from .guard import Guard
from .routes import (
    attention,
    chat,
    completions,
    embeddings,
    health,
    identities,
    jobs,
    mechanisms,
    models,
    responses,
    static,
    studies,
    tokenize,
)
from .service import Service

ROUTERS = (
    health.router, chat.router, completions.router, models.router, responses.router, embeddings.router, tokenize.router,
    identities.router, jobs.router, attention.router, mechanisms.router, studies.router, static.router,
)  # fmt: skip
"""In the order in which paths are matched."""
SPOKEN = 3
"""Faults of one body that are named."""


def api_routes() -> list[APIRoute]:
    """Every route that there is; a test looks at each."""
    found = [route for router in ROUTERS for route in router.routes]
    if strays := [r for r in found if not isinstance(r, APIRoute)]:
        raise TypeError(f"{strays[0]!r} is no route that says what it needs")
    return [r for r in found if isinstance(r, APIRoute)]


def create_app(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.engine.start()
        warming = asyncio.create_task(service.warm()) if service.settings.warm else None
        yield
        if warming is not None:
            warming.cancel()

    app = FastAPI(
        title="regard", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        # Served by a route of ours, which says who may read it.
        openapi_url=None, responses=DOCUMENTED,
    )  # fmt: skip
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(RegardError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _http)
    app.add_middleware(Guard, service=service)
    return app


async def _ours(request: Request, error: Exception) -> JSONResponse:
    what = said(error)
    if what.code:
        request.app.state.service.metrics.refused.labels(what.code).inc()
    return JSONResponse(what.body, what.status, dict(what.headers))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """A body or a query that does not fit: 400 with what is wrong where, and nothing of what it said."""
    assert isinstance(error, RequestValidationError)
    faults = [(".".join(str(x) for x in e["loc"] if x != "body"), str(e["msg"])) for e in error.errors()]
    words = "; ".join(f"{at or 'the body'}: {why}" for at, why in faults[:SPOKEN]) + (" …" if len(faults) > SPOKEN else "")
    param = faults[0][0].partition(".")[0] or None if faults else None
    return await _ours(request, ApiError(400, words, code="invalid_value", param=param))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException | HTTPException)
    codes = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
    words = {
        400: "the body is no JSON that can be read",
        404: "there is nothing here at this address",
        405: "this address does not take that method",
    }
    message = words.get(error.status_code, str(error.detail))
    headers = {k.lower(): v for k, v in (error.headers or {}).items()}
    return await _ours(request, ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers))


__all__ = ["ROUTERS", "api_routes", "create_app"]
