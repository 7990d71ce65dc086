"""Verdicts and figures of the studies that were measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ..access import READ, SERVICE
from ..errors import ApiError
from ..keys import Caller
from ..service import Service
from ..studies import StudyFolder

router = APIRouter(prefix="/v1/studies", tags=["studies"])


def folder_of(service: Service) -> StudyFolder:
    return StudyFolder(Path(service.settings.studies))


@router.get("")
async def studies(service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Every study with its verdict; an empty list where none was measured."""
    return {"object": "list", "data": await service.aside(folder_of(service).summaries)}


@router.get("/{name}/figure", response_class=Response, responses={200: {"content": {"image/png": {}}}})
async def figure(name: str, service: Service = SERVICE, caller: Caller = READ) -> Response:
    """The figure of a study, a PNG."""
    data = await service.aside(lambda: folder_of(service).figure(name))
    if data is None:
        raise ApiError(404, f"there is no figure of a study {name!r:.80} here", code="not_found")
    return Response(data, media_type="image/png")
