"""Killed writers and many processes on one bucket, against a real server: `.ci/objects` starts one."""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from pathlib import Path

import pytest
import test_store
from stored import BASE, heard, replay
from test_store_crash import Drive, drive  # noqa: F401

from regard.identity.state import Identity
from regard.identity.store import IdentityStore

PLACE = os.environ.get("REGARD_TEST_OBJECTS", "")
SERVER = os.environ.get("REGARD_TEST_POSTGRES", "")
if not PLACE.startswith("s3:"):
    pytest.skip(
        "REGARD_TEST_OBJECTS names no bucket, such as s3://bucket/prefix; .ci/objects starts one", allow_module_level=True
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    blobs = f"{PLACE}/{uuid.uuid4().hex}"
    if request.param == "sqlite":
        return {"url": str(tmp_path / "identities.db"), "blobs": blobs}
    if not SERVER:
        pytest.skip("REGARD_TEST_POSTGRES names no PostgreSQL server")
    from sqlalchemy import create_engine, make_url, text

    name = f"regard_{uuid.uuid4().hex}"
    server = create_engine(SERVER, isolation_level="AUTOCOMMIT")
    with server.connect() as c:
        c.execute(text(f"CREATE DATABASE {name}"))
    server.dispose()
    return {"url": make_url(SERVER).set(database=name).render_as_string(hide_password=False), "blobs": blobs}


def test_forty_kills_lose_no_acknowledged_commit_and_repeat_none(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="crash", place=place, kills=40, seed=5)
    assert (found["errors"], found["lost"], found["twice"], found["episodes"]) == ([], [], 0, 0)
    assert found["acknowledged"] > 20
    assert found["acknowledged"] + 1 <= found["commits"] <= found["acknowledged"] + 41


def test_four_writers_on_one_name_all_land_in_one_chain_beside_a_collector(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="writers", place=place, count=4, commits=20)
    assert (found["errors"], found["lost"]) == ([], [])
    assert [found[k] for k in ("acknowledged", "commits", "experiences", "texts", "episodes")] == [80, 81, 80, 80, 80]


def test_a_kill_while_forgetting_leaves_the_old_history_or_the_new_one(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="forgetting", place=place, kills=10, seed=6)
    assert found["errors"] == []
    assert (found["missing"], found["stray"], found["left"]) == (0, 0, [])


def test_a_bucket_with_versions_keeps_what_was_forgotten_and_the_proof_says_so(tmp_path: Path) -> None:
    bucket = f"versions-{uuid.uuid4().hex}"
    for query, body in (
        ("", b""),
        ("?versioning", b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"),
    ):
        address = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}{query}"
        urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "application/xml"}, method="PUT"))
    with IdentityStore(tmp_path / "x.db", blobs=f"s3://{bucket}/people") as store:
        store.new("mara", Identity.new(BASE))
        for source in ("secret", "theo"):
            test_store.write(store, "mara", heard(source, f"{source} word, and more of them"))
        found = store.forget("mara", "secret", replay)
        assert not found.scrubbed
        assert found.searched.left, json.dumps(found.searched.files)
        assert all(", version " in name for name in found.searched.left)
