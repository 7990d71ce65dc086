"""A full disk: what cannot be kept is refused with 507, reading goes on, and once there is room all goes on, with nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Server

SIZE = 24 << 20
NAME = "mara"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few megabytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk to fill")
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, spare: int = 0) -> Path:
    """Take what is left of a disk but so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as f:
        try:
            while True:
                f.write(b"\0" * 4096)
        except OSError:
            pass
        f.truncate(max(0, f.tell() - spare))
    return filler


def turn(client: httpx.Client, base: str, text: str, **more: Any) -> httpx.Response:
    headers = {"idempotency-key": text[:40].strip()} if more.get("remember", True) else {}
    body = {"model": f"{base}:{NAME}", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def imprints(client: httpx.Client) -> int:
    log = client.get(f"/v1/identities/{NAME}/log").raise_for_status().json()["data"]
    return [entry["kind"] for entry in log].count("imprint")


SPARE = (0, 4096, 32768)
"""Bytes that are left: what is refused first is a blob, a row, or the database's own files."""


def refusal(said: httpx.Response) -> dict[str, Any] | None:
    """The error of a response, whole or in the middle of a stream, with its status; None where it has none."""
    if not said.headers["content-type"].startswith("text/event-stream"):
        error = said.json().get("error")
        return None if error is None else {**error, "status": said.status_code}
    events = [json.loads(line[6:]) for line in said.text.splitlines() if line.startswith("data: {")]
    return next((e["error"] for e in events if "error" in e), None)


def test_full_disk_is_507_and_with_room_again_nothing_is_lost(server: Server, small: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    home = str(server.folder / "home")
    full = Server(tmp_path / "run", model=server.model, REGARD_STORE=str(small / "people.db"), REGARD_HOME=home)
    with full, httpx.Client(base_url=full.url, timeout=120) as client:
        base = client.get("/v1/models").json()["data"][0]["id"]
        client.post("/v1/identities", json={"id": NAME}).raise_for_status()
        kept = 0
        for spare in SPARE:
            filler, refused = fill(small, spare), list[str]()
            for i in range(20):
                text = f"With {spare} bytes left, turn {i}."
                error = refusal(turn(client, base, text, stream=bool(i % 2)))
                if error is None:
                    kept += 1
                    continue
                assert (error["status"], error["code"]) == (507, "disk_full"), error
                refused.append(text)
                if len(refused) == 4:
                    break
            assert len(refused) == 4
            # Whoever only reads does not notice.
            assert turn(client, base, "Do you read?", remember=False).status_code == 200
            assert client.get("/ready").status_code == 200
            assert imprints(client) == kept
            filler.unlink()
            for text in refused:
                assert refusal(turn(client, base, text)) is None
            kept += len(refused)
            assert imprints(client) == kept
    assert "Traceback" not in full.log.read_text()
