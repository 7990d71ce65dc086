"""Whether the server lives, whether it takes work, and what it has counted."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..access import ADMIN, READ, SERVICE
from ..keys import Caller
from ..service import Service

router = APIRouter(tags=["server"])


@router.get("/health")
def health() -> dict[str, Any]:
    """200 while the process runs."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "it goes down, and takes no new work"}})
def ready(service: Service = SERVICE) -> JSONResponse:
    """200 while new work is taken."""
    if service.draining:
        return JSONResponse({"status": "draining"}, 503, {"retry-after": "5"})
    return JSONResponse({"status": "ready"})


@router.get("/metrics", response_class=Response)
def metrics(service: Service = SERVICE, caller: Caller = ADMIN) -> Response:
    """Counters and histograms in Prometheus's text form."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/openapi.json", include_in_schema=False)
def schema(request: Request, caller: Caller = READ) -> dict[str, Any]:
    """Every route, as OpenAPI describes them."""
    return request.app.openapi()
