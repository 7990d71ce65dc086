"""Load: many people at once on one server, which is killed and restarted in the middle, and asked to go while they still talk.

    .venv/bin/python tests/clients/load.py [--people 100] [--seconds 60] [--out build/load]

Each person has a key, an identity and a secret word. They tell (every turn under an Idempotency-Key, tried again until it is
acknowledged), ask, hang up in the middle, and look around. Of every byte that comes back, of the log and of the metrics, none may hold
another's word; what that and the store say afterwards is judged in `load_check.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from harness import Server

from regard.serve.keys import Keys

SECRET = re.compile(rb"zq[a-z]{10}")
PATIENCE = 120.0
"""Seconds for which a server that is up may leave a turn unacknowledged; how long it takes to start again does not count."""
WARM = 0.3
"""Share of a run after which memory is expected to be flat."""


@dataclass(frozen=True)
class Turn:
    """What somebody told, and what it was acknowledged with."""

    name: str
    text: str
    commit: str | None


@dataclass(frozen=True)
class Reading:
    """A question that changed nothing, and its answer: the same must come out of a process of its own."""

    name: str
    commit: str
    question: str
    answer: str
    recalled: tuple[str, ...]


@dataclass
class Seen:
    """Everything that clients saw."""

    told: list[Turn] = field(default_factory=list)
    open: list[Turn] = field(default_factory=list)
    """Sent, and never acknowledged: to be found once or not at all."""
    left: list[Turn] = field(default_factory=list)
    """Streams that were hung up on."""
    readings: list[Reading] = field(default_factory=list)
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    own_words: int = 0
    """Times that somebody's own secret came back to them."""
    received: int = 0
    metrics: bytes = b""


class Person:
    """One of them, on a connection of their own."""

    def __init__(self, number: int, server: Server, token: str, seen: Seen, base: str) -> None:
        self.name, self.random = f"person-{number:03}", random.Random(number)
        self.secret = "zq" + "".join(self.random.choices("abcdefghijklmnopqrstuvwxyz", k=10))
        self.seen, self.base, self.turns = seen, base, 0
        self.lost = 0.0
        """When a connection was last refused or lost."""
        self.client = httpx.AsyncClient(
            base_url=server.url, headers={"authorization": f"Bearer {token}"}, timeout=httpx.Timeout(60.0)
        )

    async def live(self, stop: asyncio.Event) -> None:
        actions = [self.tell] * 4 + [self.tell_in_a_stream] * 2 + [self.ask] * 3 + [self.look, self.complete, self.hang_up]
        try:
            await self.tell(stop)
            while not stop.is_set():
                await self.random.choice(actions)(stop)
        finally:
            await self.client.aclose()

    # -- what they do ------------------------------------------------------------------------------------------------------

    async def tell(self, stop: asyncio.Event, *, stream: bool = False) -> None:
        self.turns += 1
        text = f"Turn {self.turns}: my secret word is {self.secret}, and I like the number {self.random.randrange(10**6)}."
        key = f"{self.name}-{self.turns}"
        body = {**self.chat(text), "stream": stream}
        began = time.monotonic()
        while True:
            commit = await self.attempt("stream" if stream else "tell", body, {"idempotency-key": key})
            if commit is not None:
                self.seen.told.append(Turn(self.name, text, commit))
                return
            if stop.is_set():
                self.seen.open.append(Turn(self.name, text, None))
                return
            if time.monotonic() > max(began, self.lost) + PATIENCE:
                self.seen.faults.append(f"{self.name}: a turn was not acknowledged within {PATIENCE:.0f} s")
                self.seen.open.append(Turn(self.name, text, None))
                return

    async def tell_in_a_stream(self, stop: asyncio.Event) -> None:
        await self.tell(stop, stream=True)

    async def ask(self, stop: asyncio.Event) -> None:
        question = f"What is my secret word, and which number do I like? ({self.random.randrange(5)})"
        answer = await self.send("ask", "POST", "/v1/chat/completions", {**self.chat(question), "remember": False})
        if answer is not None:
            about = answer["regard"]
            self.seen.readings.append(Reading(
                self.name, about["read_commit"], question, answer["choices"][0]["message"]["content"],
                tuple(r["text"] for r in about["recalled"]),
            ))  # fmt: skip

    async def look(self, stop: asyncio.Event) -> None:
        path = self.random.choice(
            [
                "/v1/models",
                f"/v1/identities/{self.name}",
                f"/v1/identities/{self.name}/log",
                f"/v1/identities/{self.name}/facts",
            ]
        )
        await self.send("look", "GET", path)

    async def complete(self, stop: asyncio.Event) -> None:
        body = {
            "model": f"{self.base}:{self.name}",
            "prompt": "My secret word is",
            "max_tokens": 8,
            "logprobs": 1,
            "echo": True,
        }
        await self.send("complete", "POST", "/v1/completions", body)

    async def hang_up(self, stop: asyncio.Event) -> None:
        self.turns += 1
        text = f"Turn {self.turns}: nobody hears the end of this, says {self.secret}."
        body = {**self.chat(text), "stream": True, "max_tokens": 1200}
        self.seen.left.append(Turn(self.name, text, None))
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    self.check(line.encode())
                    if line:
                        break
        except httpx.TransportError:
            await asyncio.sleep(0.2)

    # -- how ---------------------------------------------------------------------------------------------------------------

    def chat(self, text: str) -> dict[str, Any]:
        return {"model": f"{self.base}:{self.name}", "messages": [{"role": "user", "content": text}], "max_tokens": 12}

    async def attempt(self, kind: str, body: dict[str, Any], headers: dict[str, str]) -> str | None:
        """The commit of an acknowledged turn; None where nothing was acknowledged, after a wait as long as was asked for."""
        if not body["stream"]:
            whole = await self.send(kind, "POST", "/v1/chat/completions", body, headers)
            return None if whole is None else whole["regard"]["commit"]
        began, said, commit = time.monotonic(), "", None
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    await self.refused(response, await response.aread())
                    return None
                self.seen.statuses["200"] += 1
                async for line in response.aiter_lines():
                    self.check(line.encode())
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        self.seen.statuses[f"event {chunk['error']['code']}"] += 1
                        await asyncio.sleep(0.2)
                        return commit
                    for choice in chunk["choices"]:
                        said += choice["delta"].get("content") or ""
                        if choice["finish_reason"]:
                            commit = chunk["regard"]["commit"]
        except httpx.TransportError as error:
            self.seen.statuses[type(error).__name__] += 1
            self.lost = time.monotonic()
            await asyncio.sleep(0.2)
            return commit
        self.check(said.encode())
        if commit is not None:
            self.seen.took[kind].append(time.monotonic() - began)
        return commit

    async def send(
        self, kind: str, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        began = time.monotonic()
        try:
            response = await self.client.request(method, path, json=body, headers=headers)
        except httpx.TransportError as error:
            self.seen.statuses[type(error).__name__] += 1
            self.lost = time.monotonic()
            await asyncio.sleep(0.2)
            return None
        if response.status_code != 200:
            await self.refused(response, response.content)
            return None
        self.check(response.content)
        self.check(str(response.headers).encode())
        self.seen.statuses["200"] += 1
        self.seen.took[kind].append(time.monotonic() - began)
        return response.json()

    async def refused(self, response: httpx.Response, content: bytes) -> None:
        self.check(content)
        status = response.status_code
        try:
            code = json.loads(content)["error"]["code"]
        except (ValueError, KeyError):
            self.seen.faults.append(f"{self.name}: {status} with a body that is no error of ours: {content[:300]!r}")
            code = "?"
        self.seen.statuses[f"{status} {code}"] += 1
        wait = response.headers.get("retry-after")
        if status in (429, 503) and not (wait and wait.isdecimal()):
            self.seen.faults.append(f"{status} without Retry-After: {content[:200]!r}")
        if status not in (429, 503):
            self.seen.faults.append(f"{self.name}: {status} {content[:300]!r}")
        await asyncio.sleep(min(float(wait or 1), 5.0) * self.random.uniform(0.5, 1.0))

    def check(self, content: bytes) -> None:
        """Nobody's word but one's own."""
        self.seen.received += len(content)
        for word in SECRET.findall(content):
            if word.decode() == self.secret:
                self.seen.own_words += 1
            else:
                self.seen.faults.append(f"{self.name} was sent the word of another: {word.decode()}")


async def watch(server: Server, rss: list[tuple[float, int]]) -> None:
    """Memory, twice a second."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        try:
            rss.append((time.monotonic() - began, server.resident()))
        except (OSError, StopIteration):
            continue


async def drive(server: Server, people: list[Person], seconds: float, admin: str) -> dict[str, Any]:
    stop, rss = asyncio.Event(), list[tuple[float, int]]()
    seen = people[0].seen
    lives = [asyncio.create_task(p.live(stop)) for p in people]
    await asyncio.sleep(0.4 * seconds)
    print(f"   kill -9 after {len(seen.told)} acknowledged turns", flush=True)
    server.kill()
    before = len(seen.told)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.start)
    watching = asyncio.create_task(watch(server, rss))
    await asyncio.sleep(0.6 * seconds)
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {admin}"}, timeout=60) as client:
        seen.metrics = (await client.get("/metrics")).content
    watching.cancel()
    print(f"   SIGTERM after {len(seen.told)} acknowledged turns, while {len(people)} people talk", flush=True)
    began = time.monotonic()
    code = await asyncio.to_thread(server.stop)
    drained = time.monotonic() - began
    stop.set()
    await asyncio.gather(*lives)
    return {"before_kill": before, "exit": code, "drained": drained, "rss": rss}


def measured(seen: Seen, driven: dict[str, Any], people: int, seconds: float) -> dict[str, Any]:
    def of(values: list[float]) -> dict[str, float]:
        cut = statistics.quantiles(values, n=20) if len(values) > 1 else values * 19
        return {"count": len(values), "p50_ms": 1e3 * cut[9], "p95_ms": 1e3 * cut[18]}

    rss = [(at, size) for at, size in driven["rss"] if at > WARM * 0.6 * seconds]
    half = len(rss) // 2
    first, last = (statistics.median(s for _, s in part) for part in (rss[:half], rss[half:]))
    return {
        "people": people, "seconds": seconds, "acknowledged": len(seen.told), "acknowledged_before_kill": driven["before_kill"],
        "unacknowledged": len(seen.open), "hung_up": len(seen.left), "statuses": dict(seen.statuses), "bytes_received": seen.received,
        "own_word_came_back": seen.own_words, "exit_code": driven["exit"], "drain_seconds": driven["drained"],
        "rss_first_half_mb": first / 1e6, "rss_second_half_mb": last / 1e6, "latency": {kind: of(took) for kind, took in sorted(seen.took.items())},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("build/load"))
    options = parser.parse_args()
    from load_check import judge, report

    # Whoever ends this ends the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    keys = Keys(folder / "keys.json")
    admin, _ = keys.new("admin", ["admin"])
    server, seen = Server(folder, "--keys", str(keys.path)).start(), Seen()
    try:
        with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {admin}"}, timeout=60) as client:
            base = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            people = list[Person]()
            for i in range(options.people):
                token, _ = keys.new(f"key {i}", ["write"], [f"person-{i:03}"])
                people.append(Person(i, server, token, seen, base))
                client.post("/v1/identities", json={"id": people[i].name}).raise_for_status()
        print(f"== {options.people} people for {options.seconds:.0f} s", flush=True)
        driven = asyncio.run(drive(server, people, options.seconds, admin))
    finally:
        server.kill()
    figures = measured(seen, driven, options.people, options.seconds)
    faults = judge(seen, people, server, figures)
    report(figures, faults, folder)
    return len(faults) > 0


if __name__ == "__main__":
    sys.exit(main())
