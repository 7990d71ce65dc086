"""/v1/jobs: long work on identities, asked after, watched and cancelled. Another's is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from ..access import READ, SERVICE, WRITE
from ..errors import ApiError
from ..jobs import Job
from ..keys import Caller
from ..service import Service
from ..wire import DONE, EventStream, event

router = APIRouter(prefix="/v1/jobs", tags=["identities"])
OFTEN = 0.1
"""Seconds between two looks at a job that is watched."""


@router.get("")
async def jobs(
    identity: Annotated[str | None, Query(max_length=64)] = None, limit: Annotated[int, Query(ge=1, le=200)] = 100,
    service: Service = SERVICE, caller: Caller = READ,
) -> dict[str, Any]:  # fmt: skip
    """The youngest first; those that ended are listed for an hour."""
    mine = [j for j in service.jobs.every() if caller.may(j.identity) and identity in (None, j.identity)]
    return {"object": "list", "data": [j.body() for j in mine[:limit]], "has_more": len(mine) > limit}


@router.get("/{id}")
async def job(id: str, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """How far it is, and what came of it."""
    return _found(service, caller, id).body()


@router.post("/{id}/cancel")
async def cancel(id: str, service: Service = SERVICE, caller: Caller = WRITE) -> dict[str, Any]:
    """End it at its next step. A sleep keeps the best so far where that helps; a forgetting changes nothing, or is too far to stop."""
    found = _found(service, caller, id)
    service.jobs.cancel(found)
    return found.body()


@router.get("/{id}/events", response_class=StreamingResponse)
async def events(id: str, service: Service = SERVICE, caller: Caller = READ) -> EventStream:
    """The job, each time something of it changes, until it has ended."""
    found = _found(service, caller, id)

    async def follow() -> AsyncGenerator[str]:
        last: dict[str, Any] | None = None
        while True:
            over, now = found.over, found.body()
            if now != last:
                yield event(now)
                last = now
            if over:
                yield DONE
                return
            await asyncio.sleep(OFTEN)

    return EventStream(follow(), {})


def _found(service: Service, caller: Caller, id: str) -> Job:
    job = service.jobs.get(id)
    if job is None or not caller.may(job.identity):
        raise ApiError(404, f"there is no job {id!r:.80} here; those that ended are kept for an hour", code="job_not_found")
    return job


__all__ = ["router"]
