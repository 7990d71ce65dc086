"""The page: files that were built from studio/, and that say nothing of anybody."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from ..access import OPEN, SERVICE
from ..errors import ApiError
from ..keys import Caller
from ..service import Service

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parents[1] / "static"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip


@dataclass(frozen=True)
class PageFile:
    data: bytes
    kind: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Every file of the page, by its path below /studio/: what is not in this table does not exist."""
    files: dict[str, PageFile] = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file() and path.suffix in KINDS and "view" not in path.parts:
            data = path.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
            files[path.relative_to(FOLDER).as_posix()] = PageFile(data, KINDS[path.suffix], tag)
    return files


@router.get("/")
async def front(caller: Caller = OPEN) -> Response:
    """Whoever opens the server in a browser is led to the page."""
    return RedirectResponse("/studio/", 307)


@router.get("/studio")
async def unslashed(caller: Caller = OPEN) -> Response:
    return RedirectResponse("/studio/", 307)


@router.get("/studio/{path:path}")
async def page(path: str, request: Request, service: Service = SERVICE, caller: Caller = OPEN) -> Response:
    """A file of the page."""
    file = page_files().get(path or "index.html")
    if file is None:
        raise ApiError(404, "the page has no such file", code="unknown_url")
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.kind, headers=headers)
