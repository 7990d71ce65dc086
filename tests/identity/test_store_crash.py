"""Processes that are killed, and processes that write at once: what was acknowledged is there, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("store_driver.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these processes are forked, which this system does not do")


Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drive() -> Generator[Drive]:
    """One process that has imported everything, and forks the others."""
    process = subprocess.Popen(
        [sys.executable, str(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(**request: object) -> dict[str, Any]:
        print(json.dumps(request), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())  # pyright: ignore

    with process:
        yield ask


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    return {"url": str(tmp_path / "identities.db")}


def test_two_hundred_kills_lose_no_acknowledged_commit_and_repeat_none(drive: Drive, place: dict[str, str]) -> None:
    found = drive(do="crash", place=place, kills=200, seed=1)
    assert found["errors"] == []
    assert found["lost"] == []
    assert (found["twice"], found["episodes"]) == (0, 0)
    assert found["acknowledged"] > 120, "the kills came too early to say anything"
    # One commit of each process may have been made and not yet said.
    assert found["acknowledged"] + 1 <= found["commits"] <= found["acknowledged"] + 201


def test_eight_writers_of_fifty_commits_each_all_land_in_one_chain_beside_a_collector(
    drive: Drive, place: dict[str, str]
) -> None:
    found = drive(do="writers", place=place, count=8, commits=50)
    assert found["errors"] == []
    assert found["lost"] == []
    counts = [found[k] for k in ("acknowledged", "commits", "experiences", "texts", "episodes")]
    assert counts == [400, 401, 400, 400, 400]


def test_many_processes_may_open_a_new_store_at_once(drive: Drive, place: dict[str, str]) -> None:
    assert drive(do="opening", place=place, count=8) == {"errors": [], "names": 8}


def test_a_kill_while_forgetting_leaves_the_old_history_or_the_new_one(
    drive: Drive, tmp_path: Path, place: dict[str, str]
) -> None:
    found = drive(do="forgetting", place={**place, "blobs": str(tmp_path / "blobs")}, kills=40, seed=2)
    assert found["errors"] == []
    assert found["forgotten"] > 10
    assert (found["missing"], found["stray"], found["left"]) == (0, 0, [])
