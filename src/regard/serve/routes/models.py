"""GET /v1/models: the base, and every identity on it that the caller may see."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..access import READ, SERVICE
from ..choosing import split_model
from ..errors import no_identity
from ..keys import Caller
from ..models_listed import base, listed, person
from ..service import Service

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
def models(service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """All of them; an identity's `parent` is the model that it is on."""
    return {"object": "list", "data": listed(service, caller)}


@router.get("/v1/models/{id:path}")
def model(id: str, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """One of them."""
    _, name = split_model(id, (service.name,))
    if name is None:
        return base(service)
    head = service.head(caller, name)
    if head.fingerprint != service.base.fingerprint:
        raise no_identity(name)
    return person(service, name, head)
