"""A real server on this machine: its one line, clients that hang up, the signal that ends it, and what is kept after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TEMPLATE, events, tiny_model

from regard.identity import IdentityStore
from regard.models.convert import save

CONTEXT = 1 << 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    made, _ = tiny_model(folder, context=CONTEXT)
    save(made, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@contextmanager
def serving(model: Path, home: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    env = {**os.environ, "REGARD_HOME": str(home), "REGARD_STORE": str(home / "people.db"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard.cli.main", "serve", "--model", str(model), "--port", "0", *more]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://127.0.0.1:" in line, line + (process.stderr.read() if process.stderr else "")
        yield process, line.split(" is served at ")[1].split("/v1")[0]
    finally:
        process.kill()
        process.communicate()


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny:mara", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}


def begin_mara(home: Path, model: Path) -> None:
    from regard.identity.opened import opened
    from regard.identity.state import Identity

    home.mkdir(parents=True, exist_ok=True)
    with IdentityStore(home / "people.db") as store:
        store.new("mara", Identity.new(opened(model)[2]))


def imprinted(home: Path) -> list[str]:
    with IdentityStore(home / "people.db") as store:
        return [json.loads(e.text)[0]["content"] for e in store.journal("mara") if e.kind == "imprint" and e.text]


def test_sigterm_finishes_and_commits_what_runs_takes_nothing_new_and_exits_with_0(model: Path, tmp_path: Path):
    begin_mara(tmp_path, model)
    with serving(model, tmp_path) as (process, url), httpx.Client(base_url=url, timeout=120) as c:
        assert c.get("/ready").status_code == 200
        first = c.post("/v1/chat/completions", json=turn("One.")).json()["regard"]["commit"]
        with c.stream("POST", "/v1/chat/completions", json=turn("Two.", stream=True, max_tokens=1500)) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, timeout=60) as other:
                # Refused while the first goes on, or not reached once it has ended: never taken.
                seen: list[int] = []
                for ask in (lambda: other.get("/ready"), lambda: other.post("/v1/chat/completions", json=turn("Three."))):
                    try:
                        seen.append(ask().status_code)
                    except httpx.TransportError:
                        break
            rest = "\n".join(lines)
        assert set(seen) <= {503}
        last = [e for e in events(rest) if e.get("regard")][-1]
        assert last["choices"][0]["finish_reason"] == "length"
        assert rest.rstrip().endswith("data: [DONE]")
        assert process.wait(60) == 0
        assert process.stderr is not None
        logged = process.stderr.read()
        assert "draining: 1 requests" in logged
        assert "mara" not in logged
    assert imprinted(tmp_path) == ["One.", "Two."]
    with IdentityStore(tmp_path / "people.db") as store:
        assert [c.id for c in store.log("mara")][:2] == [last["regard"]["commit"], first]


def test_a_client_that_hangs_up_stops_its_answer_and_a_killed_server_has_kept_every_acknowledged_turn(
    model: Path, tmp_path: Path
):
    begin_mara(tmp_path, model)
    with serving(model, tmp_path) as (process, url), httpx.Client(base_url=url, timeout=120) as c:
        with c.stream("POST", "/v1/chat/completions", json=turn("Left.", stream=True, max_tokens=CONTEXT // 2)) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        hung_up = httpx.Client(base_url=url, timeout=0.5)
        with pytest.raises(httpx.ReadTimeout):
            hung_up.post("/v1/chat/completions", json=turn("Left too.", max_tokens=CONTEXT // 2))
        hung_up.close()
        done = threading.Event()
        while not done.wait(0.05):
            metrics = c.get("/metrics").text
            if "regard_running 0.0" in metrics and "regard_queued 0.0" in metrics:
                done.set()
        written = next(float(x.split()[1]) for x in metrics.splitlines() if x.startswith("regard_completion_tokens_total "))
        assert written < CONTEXT // 2, "both answers together stopped far before one of them would have ended"
        acknowledged = [
            text for text in ("One.", "Two.", "Three.") if c.post("/v1/chat/completions", json=turn(text)).status_code == 200
        ]
        process.kill()
        process.wait(60)
    assert imprinted(tmp_path) == acknowledged == ["One.", "Two.", "Three."]
