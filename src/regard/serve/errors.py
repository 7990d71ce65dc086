"""Every error as OpenAI's clients read it, `{"error": {"message", "type", "param", "code"}}`, with its status from one table."""

from __future__ import annotations

import errno
import sqlite3
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingPackageError, NumericsError, RegardError, ShapeError
from ..identity.store.errors import StaleError, StoreError, UnknownNameError, UnreachableError
from .contract import DrainingError, QueueFullError

FULL = (errno.ENOSPC, errno.EDQUOT)
DRAIN_RETRY = 5


class ApiError(RegardError):
    """Something that a request asked for, or said, and does not get."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


class GoneError(Exception):
    """The client has hung up: there is nobody to answer."""


def refuse(param: str, why: str, code: str = "unsupported_parameter") -> ApiError:
    """A parameter that means something, and is not to be had here."""
    return ApiError(400, f"{param}: {why}", code=code, param=param)


def no_identity(name: str) -> ApiError:
    """The same words whether nobody has this name or somebody else owns it."""
    return ApiError(
        404,
        f"there is no identity {name!r:.80} here; begin one with POST /v1/identities, or `regard identity new`",
        code="identity_not_found",
        param="identity",
    )


@dataclass(frozen=True)
class Row:
    status: int
    code: str | None
    message: str | None = None
    """Instead of the error's own words, where those are not for whoever asks."""


TABLE: tuple[tuple[type[BaseException], Row], ...] = (
    (QueueFullError, Row(429, "queue_full")),
    (DrainingError, Row(503, "draining")),
    (UnknownNameError, Row(404, "not_found", "there is no such identity or commit here")),
    (StaleError, Row(409, "conflict")),
    (StoreError, Row(400, "store_refused")),
    (MissingPackageError, Row(501, "not_installed")),
    (NumericsError, Row(500, "numerics")),
    (ShapeError, Row(400, "invalid_value")),
    (CheckpointError, Row(500, "damaged", "what is stored here is damaged, or is not to be read; its owner finds out with: regard identity check")),
    (RegardError, Row(400, "invalid_value")),
)  # fmt: skip
"""The first row whose class fits."""
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}  # fmt: skip


@dataclass(frozen=True)
class Said:
    """An error as it is sent."""

    status: int
    message: str
    code: str | None
    param: str | None
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_NAMED = {"type": ["string", "null"]}
_SHAPE = {
    "type": "object", "required": ["error"], "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NAMED, "code": _NAMED},
        },
    },
}  # fmt: skip
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    statuses: {"description": what, "content": {"application/json": {"schema": _SHAPE}}}
    for statuses, what in (("4XX", "what the request asked for, or said, and does not get"), ("5XX", "what went wrong here"))
}
"""For the OpenAPI document: what any route may send instead of an answer."""


def said(error: BaseException) -> Said:
    """What is sent of an error: of ours its own words, of any other none, for they may quote somebody."""
    if isinstance(error, ApiError):
        return Said(error.status, str(error), error.code, error.param, error.headers)
    if is_full(error):
        words = (
            "the disk of this server is full: nothing was committed, and every identity is as it was; make room and try again"
        )
        return Said(507, words, "disk_full", None, {})
    if isinstance(error, StoreError) and _unreachable(error):
        return Said(503, "the store of identities did not answer; try again", "store_unavailable", None, {"retry-after": "1"})
    for kind, row in TABLE:
        if isinstance(error, kind):
            return Said(row.status, row.message or str(error), row.code, None, _headers(error))
    return Said(
        500, "something went wrong here; the log of this server says what, under this request's id", "internal", None, {}
    )


def where(error: BaseException) -> str:
    """What kind of error it is and where it was raised, without what it says: that may quote a prompt."""
    places = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at " + " < ".join(f"{Path(p.filename).name}:{p.lineno} {p.name}" for p in places[::-1])


def _headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, QueueFullError):
        return {"retry-after": str(max(1, round(error.retry_after)))}
    return {"retry-after": str(DRAIN_RETRY)} if isinstance(error, DrainingError) else {}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind it, in a file or in SQLite."""
    return any(
        (isinstance(e, OSError) and e.errno in FULL)
        or (isinstance(e, sqlite3.OperationalError) and getattr(e, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL)
        for e in causes(error)
    )


def _unreachable(error: StoreError) -> bool:
    from sqlalchemy.exc import SQLAlchemyError

    return any(isinstance(e, SQLAlchemyError | UnreachableError) for e in causes(error))


__all__ = ["DOCUMENTED", "ApiError", "GoneError", "Said", "is_full", "no_identity", "refuse", "said", "where"]
