from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import Server


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one server, with its model: given by whoever starts several runs, so that one model serves them all."""
    given = os.environ.get("REGARD_CLIENTS_FOLDER")
    return Path(given) if given else tmp_path_factory.mktemp("server")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """A server of a tiny model, without keys, on loopback."""
    with Server(folder) as running:
        yield running


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    """What has no client of its own: identities, metrics."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def base(http: httpx.Client) -> str:
    """What the model is called."""
    return str(http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture
def person(http: httpx.Client, request: pytest.FixtureRequest) -> str:
    """Somebody new, for one test."""
    name = f"p{abs(hash((request.node.nodeid, os.getpid()))) % 10**12}"
    made = http.post("/v1/identities", json={"id": name})
    assert made.status_code == 201, made.text
    return name
