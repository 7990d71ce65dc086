"""Work on the model beside the batch waits where turns wait, and no more of it than may."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
from serving import client, make_service

from regard.serve.settings import Settings


def test_explanations_that_wait_are_bounded_as_turns_are(tmp_path: Path) -> None:
    service, held = make_service(tmp_path, Settings(queue=2)), threading.Event()

    async def ask() -> list[httpx.Response]:
        async with client(service) as c:
            blocked = asyncio.create_task(service.engine.call(held.wait))
            waiting = [asyncio.create_task(c.post("/v1/attention/heads", json={"text": "a boat"})) for _ in range(2)]
            while service.pending < 2:
                await asyncio.sleep(0.005)
            refused = await c.post("/v1/attention/heads", json={"text": "a boat"})
            held.set()
            await blocked
            return [refused, *[await w for w in waiting], await c.post("/v1/attention/heads", json={"text": "a boat"})]

    refused, *others = asyncio.run(ask())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in others] == [200, 200, 200]
    service.close()
    service.store.close()
