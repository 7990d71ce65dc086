"""Two servers on one store: a write is right on whichever it happens, and happens once."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import begin, client, make_service

from regard.identity.store import IdentityStore
from regard.serve.service import Service

SERVER = os.environ.get("REGARD_TEST_POSTGRES", "")


@pytest.fixture(params=["sqlite", "postgresql"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Service, Service]]:
    place: dict[str, Any] = {"url": tmp_path / "shared.db", "blobs": f"memory://{uuid.uuid4().hex}"}
    if request.param == "postgresql":
        if not SERVER:
            pytest.skip("REGARD_TEST_POSTGRES names no PostgreSQL server; .ci/run starts one")
        from sqlalchemy import create_engine, make_url, text

        engine = create_engine(SERVER, isolation_level="AUTOCOMMIT")
        name = f"regard_{uuid.uuid4().hex}"
        with engine.connect() as c:
            c.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        place["url"] = make_url(SERVER).set(database=name).render_as_string(hide_password=False)
    made: list[Service] = []
    for i in range(2):
        service = make_service(tmp_path / str(i))
        service.store.close()
        service.store = IdentityStore(**place)
        made.append(service)
    yield made[0], made[1]
    for service in made:
        service.close()
        service.store.close()


def test_what_two_servers_write_to_one_person_is_all_there_and_once(two: tuple[Service, Service]):
    begin(two[0], "mara")

    async def work() -> None:
        async with client(two[0]) as a, client(two[1]) as b:

            async def tell(c: httpx.AsyncClient, n: int) -> None:
                said = {"model": "tiny:mara", "messages": [{"role": "user", "content": f"Number {n} of what happened."}]}
                answer = await c.post("/v1/chat/completions", json=said, headers={"idempotency-key": f"turn-{n}"})
                assert answer.status_code == 200, answer.text

            # Each turn by one of them, and every third by both, as a client does that was not answered in time.
            await asyncio.gather(*(tell((a, b)[n % 2], n) for n in range(9)), *(tell((b, a)[n % 2], n) for n in range(0, 9, 3)))

    asyncio.run(work())
    store = two[1].store
    texts = [e.text or "" for e in store.journal("mara") if e.kind == "imprint"]
    assert sorted(n for n in range(9) for t in texts if f"Number {n} of" in t) == list(range(9))
    assert len(texts) == 9
    assert store.verify("mara") == 10
    assert store.check().problems == []


def test_what_one_server_forgets_the_other_does_not_answer_with(two: tuple[Service, Service]):
    begin(two[0], "mara")

    async def work() -> None:
        async with client(two[0]) as a, client(two[1]) as b:
            for source, text in (("diary", "My cat is called Mochi."), ("theo", "Theo likes boats.")):
                assert (await a.post("/v1/identities/mara/imprint", json={"text": text, "source": source})).status_code == 200
            assert "Mochi" in (await b.get("/v1/identities/mara/facts")).text
            job = (await a.post("/v1/identities/mara/forget", json={"source": "diary"})).json()
            while job["status"] in ("queued", "running"):
                await asyncio.sleep(0.02)
                job = (await a.get(f"/v1/jobs/{job['id']}")).json()
            assert job["status"] == "done", job
            for path in ("", "/facts", "/log"):
                answer = await b.get(f"/v1/identities/mara{path}")
                assert answer.status_code == 200
                assert "Mochi" not in answer.text
                assert "diary" not in answer.text

    asyncio.run(work())
