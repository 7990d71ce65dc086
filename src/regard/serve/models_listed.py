"""The model and the identities on it, as clients list models."""

from __future__ import annotations

from typing import Any

from ..identity.store.records import Commit
from .choosing import MARK, Who
from .keys import Caller
from .service import Service


def model_id(service: Service, who: Who | None) -> str:
    return service.name if who is None else f"{service.name}{MARK}{who.name}"


def listed(service: Service, caller: Caller) -> list[dict[str, Any]]:
    """The base first, then every identity on it that this caller may see."""
    people = service.people(caller).items()
    return [
        base(service),
        *(person(service, name, head) for name, head in people if head.fingerprint == service.base.fingerprint),
    ]


def base(service: Service) -> dict[str, Any]:
    return _model(service, service.name, int(service.started), None)


def person(service: Service, name: str, head: Commit) -> dict[str, Any]:
    return _model(service, f"{service.name}{MARK}{name}", int(head.time), service.name)


def _model(service: Service, id: str, created: int, parent: str | None) -> dict[str, Any]:
    return {
        "id": id, "object": "model", "created": created, "owned_by": "regard", "root": service.name, "parent": parent,
        "max_model_len": service.model.context,
    }  # fmt: skip


__all__ = ["base", "listed", "model_id", "person"]
