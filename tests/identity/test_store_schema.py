"""Stores and files of the first release are opened by every later one, and an upgrade happens whole or not at all."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, Table
from stored import heard, imprint, person, replay

from regard import CheckpointError
from regard.identity import folder as identity_module
from regard.identity.folder import CONFIG
from regard.identity.state import Identity
from regard.identity.store import IdentityStore, StoreError, schema
from regard.identity.store.backup import file_hash
from regard.identity.store.codec import decode, encode
from regard.identity.store.restore import restore

Expected = dict[str, list[dict[str, Any]]]


@pytest.fixture(params=[1, 2])
def number(request: pytest.FixtureRequest) -> int:
    """The schema of a store that an older release wrote."""
    return request.param


@pytest.fixture
def old(tmp_path: Path, number: int) -> Path:
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / f"store-schema-{number}", tmp_path / "old")
    # A checkout gives files the modes of the user; a store has its own.
    for path in (tmp_path / "old").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "old"


@pytest.fixture
def expected(old: Path) -> Expected:
    return json.loads((old / "expected.json").read_text())


def versions(file: Path) -> list[int]:
    with sqlite3.connect(file) as c:
        return [v for (v,) in c.execute("SELECT version FROM identity_schema ORDER BY version")]


def contents(store: IdentityStore) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{"id": c.id, "digest": c.digest, "events": [e.body() for e in store.events(c.id)]} for c in store.log(name)]
        for name in store.names()
    }


def test_a_store_of_an_older_schema_is_upgraded_and_loses_nothing(old: Path, number: int, expected: Expected) -> None:
    assert versions(old / "identities.db") == [number]
    with IdentityStore(old / "identities.db") as store:
        assert contents(store) == expected
        for name, log in expected.items():
            assert store.verify(name) == len(log)
            assert store.load(name).digest() == log[0]["digest"]
        assert store.check().problems == []
        event = heard("mara", "and on")
        store.update("mara", lambda me: imprint(me, event), event=event)
        assert len(store.load("mara").episodes) == 1, "what was committed before had none"
        assert store.forget("mara", "theo", replay).events_kept == 2
        assert len(store.load("mara").episodes) == 2
    assert versions(old / "identities.db") == list(range(number, schema.newest() + 1))
    with IdentityStore(old / "identities.db") as again:
        assert list(again.names()) == list(expected)


def test_an_upgrade_that_is_interrupted_has_not_begun(
    old: Path, number: int, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(c: Connection) -> None:
        raise ZeroDivisionError

    table = Table("identity_more", schema.metadata, Column("x", Integer, primary_key=True))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "STEPS", [*schema.STEPS, schema.Step((table,), fails)])
            with pytest.raises(ZeroDivisionError):
                IdentityStore(old / "identities.db")
        assert versions(old / "identities.db") == [number]
        with sqlite3.connect(old / "identities.db") as c:
            names = {n for (n,) in c.execute("SELECT name FROM sqlite_master")}
        assert not {"identity_more", "identity_episodes"} & names
        assert ("identity_seals" in names) == (number > 1)
        with IdentityStore(old / "identities.db") as store:
            assert contents(store) == expected
    finally:
        schema.metadata.remove(table)


def test_a_further_step_is_taken_once_by_stores_of_every_schema(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IdentityStore(tmp_path / "second.db") as store:
        store.new("a", person(1))
    taken: list[int] = []
    table = Table("identity_more", schema.metadata, Column("x", Integer, primary_key=True))
    try:
        monkeypatch.setattr(schema, "STEPS", [*schema.STEPS, schema.Step((table,), lambda c: taken.append(1))])
        for file in (old / "identities.db", tmp_path / "second.db") * 2:
            IdentityStore(file).close()
        assert len(taken) == 2
        IdentityStore(tmp_path / "third.db").close()
        assert versions(tmp_path / "third.db") == [schema.newest()]
        assert len(taken) == 2, "a new store begins with the newest schema"
    finally:
        schema.metadata.remove(table)


def test_a_newer_schema_is_refused_and_left_alone(old: Path) -> None:
    with sqlite3.connect(old / "identities.db") as c:
        c.execute("INSERT INTO identity_schema VALUES (9)")
    before = (old / "identities.db").read_bytes()
    with pytest.raises(StoreError, match="has schema 9; this version of regard reads up to 3: update regard"):
        IdentityStore(old / "identities.db")
    assert (old / "identities.db").read_bytes() == before


def test_an_older_schema_is_not_upgraded_by_who_only_reads(old: Path, number: int) -> None:
    with pytest.raises(StoreError, match=f"has schema {number}, of 3, and was opened to be read only"):
        IdentityStore(old / "identities.db", read_only=True)
    assert versions(old / "identities.db") == [number]


def test_a_backup_of_an_older_schema_is_restored_and_stays_as_it_was(old: Path, number: int, expected: Expected) -> None:
    """As the older release made it: its own tables and blobs, and a note."""
    counts = {
        "names": len(expected),
        "commits": len({c["id"] for log in expected.values() for c in log}),
        "events": len({(c["id"], e) for log in expected.values() for c in log for e in c["events"]}),
    }
    note = {"schema": 1, "time": 0.0, "from": "sqlite", **counts, "database": file_hash(old / "identities.db")}
    (old / "backup.json").write_text(json.dumps(note))
    assert restore(old, old.parent / "new" / "x.db").sound
    with IdentityStore(old.parent / "new" / "x.db") as store:
        assert contents(store) == expected
    assert versions(old / "identities.db") == [number]
    assert file_hash(old / "identities.db") == note["database"]


@pytest.mark.parametrize(
    "table",
    ["identity_names", "identity_schema", "identity_commits", "identity_seals", "identity_doomed", "identity_episodes"],
)
def test_a_table_that_went_missing_is_damage_and_is_not_made_again_empty(old: Path, table: str) -> None:
    IdentityStore(old / "identities.db").close()
    with sqlite3.connect(old / "identities.db") as c:
        c.execute(f"ALTER TABLE {table} RENAME TO lost")
    with pytest.raises(CheckpointError, match=f"damaged.*{table}"):
        IdentityStore(old / "identities.db")


def test_blobs_beside_a_database_without_a_store_are_not_taken_for_a_new_one(old: Path) -> None:
    (old / "identities.db").unlink()
    with pytest.raises(CheckpointError, match="Restore a backup, or move that folder away"):
        IdentityStore(old / "identities.db")


def test_exports_of_an_older_schema_are_read(old: Path, expected: Expected, tmp_path: Path) -> None:
    digest = expected["mara"][0]["digest"]
    assert Identity.load(old / "exported").digest() == digest
    with IdentityStore(tmp_path / "x.db") as store:
        assert store.import_(old / "exported", "a").digest == digest
        assert store.import_(old / "exported.safetensors", "b").digest == digest
        assert [e.text for e in store.journal("a") if e.text] == ["I am Mara. 日本語", "I am Theo."]


def test_a_file_of_an_older_schema_is_upgraded_and_keeps_its_digest(
    old: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later release will: the settings get a new name, and commits that were written before still hold."""
    last = identity_module.SCHEMA

    def rename(config: dict[str, Any], tensors: Any) -> Any:
        return {**config, "schema": last + 1, "base": {**config["base"], "name": config["base"]["name"].upper()}}, tensors

    written = encode(person(1))
    monkeypatch.setattr(identity_module, "SCHEMA", last + 1)
    with pytest.raises(CheckpointError, match=f"schema {last}; this version reads 1 to {last + 1}"):
        Identity.load(old / "exported")
    monkeypatch.setitem(identity_module.UPGRADES, last, rename)
    assert Identity.load(old / "exported").base.name == "TINY"
    assert decode(written, "it")[0].base.name == "TINY"
    monkeypatch.setitem(identity_module.UPGRADES, last, lambda config, tensors: ({**config, "schema": last + 1}, tensors))
    assert Identity.load(old / "exported").digest() == expected["mara"][0]["digest"]
    with IdentityStore(old / "identities.db") as store:
        assert [store.verify(name) for name in store.names()] == [len(log) for log in expected.values()]
    monkeypatch.setitem(identity_module.UPGRADES, last, lambda config, tensors: (config, tensors))
    with pytest.raises(CheckpointError, match=f"the upgrade from schema {last} led to {last}"):
        Identity.load(old / "exported")


def test_a_file_of_a_newer_schema_says_to_update(old: Path) -> None:
    config = json.loads((old / "exported" / CONFIG).read_text())
    (old / "exported" / CONFIG).write_text(json.dumps({**config, "schema": 7}))
    with pytest.raises(CheckpointError, match="has schema 7; this version of regard reads up to 2: update regard"):
        Identity.load(old / "exported")
