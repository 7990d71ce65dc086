"""Every route says who may call it, and the guard holds for all of them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from serving import client, secret_key

from regard.serve.access import Needs
from regard.serve.app import api_routes, create_app
from regard.serve.service import Service

OPEN = {"/health", "/ready"}


def get(service: Service, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with client(service) as c:
            return await c.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(ask())


def test_every_route_declares_what_it_needs(service: Service):
    assert len(api_routes()) > 10
    for route in api_routes():
        if route.path not in OPEN:
            needs = [d.call for d in route.dependant.dependencies if isinstance(d.call, Needs)]
            assert len(needs) == 1, f"{route.path} has no needs(…)"
    # What an application has beside these would be reached unseen.
    assert {type(r).__name__ for r in create_app(service).routes} <= {"APIRoute", "_IncludedRouter"}


def test_without_keys_this_machine_may_do_everything(service: Service):
    assert get(service, "/metrics").status_code == 200


def test_a_first_key_closes_the_server_to_everybody_else(service: Service):
    secret_key(service, "me", ["admin"])
    refused = get(service, "/metrics")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert get(service, "/health").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example"])
def test_a_host_that_is_not_ours_is_refused(service: Service, host: str):
    assert get(service, "/health", host=host).status_code == 421


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9", "http://127.0.0.1:8000.evil.example"])
def test_a_page_of_another_origin_is_refused(service: Service, origin: str):
    assert get(service, "/health", origin=origin).status_code == 403


def test_our_own_page_is_not_refused_and_every_answer_has_its_headers(service: Service):
    answer = get(service, "/health", origin="http://127.0.0.1:8000")
    assert answer.status_code == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-request-id"].startswith("req-")
    assert "access-control-allow-origin" not in answer.headers
