"""The knobs of every mechanism, and small scenes under them, computed by the operator itself."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..access import READ, SERVICE
from ..keys import Caller
from ..mechanisms import MOST_KEYS, MOST_QUERIES, MOST_WIDTH, parts, scene
from ..service import Service

router = APIRouter(prefix="/v1/mechanisms", tags=["mechanisms"])
Point = Annotated[list[float], Field(max_length=MOST_WIDTH)]


class SceneRequest(BaseModel):
    queries: Annotated[list[Point], Field(max_length=MOST_QUERIES)]
    keys: Annotated[list[Point], Field(max_length=MOST_KEYS)]
    values: Annotated[list[Point], Field(max_length=MOST_KEYS)] | None = None
    spec: Annotated[str, Field(max_length=500)]
    trace: Annotated[list[Point], Field(max_length=MOST_WIDTH)] | None = None
    """The metric that `trace` reads, a square of the points' width."""
    causal: bool = False
    rows: bool = True
    """Without it, only what can be said in one number a query."""


@router.get("")
async def knobs(service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Every geometry, selection and position with its parameters."""
    return {"object": "list", **parts()}


@router.post("")
async def play(asked: SceneRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Weights, energies, acceptance and GD's jump of each query."""
    return await service.aside(
        lambda: scene(
            asked.queries, asked.keys, asked.spec, values=asked.values, trace=asked.trace, causal=asked.causal, rows=asked.rows
        )
    )
