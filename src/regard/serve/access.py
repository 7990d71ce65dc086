"""Who may call a route: each declares it once, `caller: Caller = Depends(needs("read"))`.

open      the page's own files, which say nothing of anybody      read     everything that changes nothing
write     what changes an identity of the caller's                admin    the server itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from ..errors import needs_extra

with needs_extra("serve"):
    from fastapi import Depends, Request

from .errors import ApiError
from .keys import Caller
from .service import Service

Need = Literal["open", "read", "write", "admin"]
ANYBODY = Caller("anybody", frozenset())


class Needs:
    """What a route needs, as a dependency that gives its caller; a test reads `scope` of every route."""

    def __init__(self, scope: Need) -> None:
        self.scope: Need = scope

    def __call__(self, request: Request) -> Caller:
        caller = cast(Caller | None, request.scope.get("regard.caller"))
        if self.scope == "open":
            return caller or ANYBODY
        if caller is None:
            raise unauthorised()
        if not caller.holds(self.scope):
            raise ApiError(403, f"this key may not do that: it needs the scope {self.scope}", code="insufficient_scope")
        return caller


def needs(scope: Need) -> Callable[[Request], Caller]:
    return Needs(scope)


def unauthorised() -> ApiError:
    return ApiError(
        401, "a key is needed here: Authorization: Bearer rg-…; make one with: regard serve key new", code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )  # fmt: skip


def service_of(request: Request) -> Service:
    """The service of an application, as a dependency: `service: Service = Depends(service_of)`."""
    return cast(Service, request.app.state.service)


SERVICE = Depends(service_of)
READ, WRITE, ADMIN, OPEN = (Depends(needs(s)) for s in ("read", "write", "admin", "open"))
"""The same, made once: `caller: Caller = READ`."""

__all__ = ["ADMIN", "OPEN", "READ", "SERVICE", "WRITE", "Needs", "needs", "service_of", "unauthorised"]
