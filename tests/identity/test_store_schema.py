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
from regard.identity.store.codec import decode, encode

FIXTURE = Path(__file__).parents[1] / "fixtures" / "store-schema-1"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURE / "expected.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "old")
    # A checkout gives files the modes of the user; a store has its own.
    for path in (tmp_path / "old").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "old"


def versions(file: Path) -> list[int]:
    with sqlite3.connect(file) as c:
        return [v for (v,) in c.execute("SELECT version FROM identity_schema ORDER BY version")]


def contents(store: IdentityStore) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{"id": c.id, "digest": c.digest, "events": [e.body() for e in store.events(c.id)]} for c in store.log(name)]
        for name in store.names()
    }


def test_a_store_of_schema_1_is_upgraded_and_loses_nothing(old: Path) -> None:
    assert versions(old / "identities.db") == [1]
    with IdentityStore(old / "identities.db") as store:
        assert contents(store) == EXPECTED
        for name, log in EXPECTED.items():
            assert store.verify(name) == len(log)
            assert store.load(name).digest() == log[0]["digest"]
        assert store.check().problems == []
        event = heard("mara", "and on")
        store.update("mara", lambda me: imprint(me, event), event=event)
        assert store.forget("mara", "theo", replay).events_kept == 2
    assert versions(old / "identities.db") == list(range(1, schema.newest() + 1))
    with IdentityStore(old / "identities.db") as again:
        assert list(again.names()) == list(EXPECTED)


def test_an_upgrade_that_is_interrupted_has_not_begun(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(c: Connection) -> None:
        raise ZeroDivisionError

    table = Table("identity_more", schema.metadata, Column("x", Integer, primary_key=True))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "STEPS", [*schema.STEPS, schema.Step((table,), fails)])
            with pytest.raises(ZeroDivisionError):
                IdentityStore(old / "identities.db")
        assert versions(old / "identities.db") == [1]
        with sqlite3.connect(old / "identities.db") as c:
            names = {n for (n,) in c.execute("SELECT name FROM sqlite_master")}
        assert not {"identity_more", "identity_seals"} & names
        with IdentityStore(old / "identities.db") as store:
            assert contents(store) == EXPECTED
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
    with pytest.raises(StoreError, match="has schema 9; this version of regard reads up to 2: update regard"):
        IdentityStore(old / "identities.db")
    assert (old / "identities.db").read_bytes() == before


def test_an_older_schema_is_not_upgraded_by_who_only_reads(old: Path) -> None:
    with pytest.raises(StoreError, match="has schema 1, of 2, and was opened to be read only"):
        IdentityStore(old / "identities.db", read_only=True)
    assert versions(old / "identities.db") == [1]


@pytest.mark.parametrize(
    "table", ["identity_names", "identity_schema", "identity_commits", "identity_seals", "identity_doomed"]
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


def test_exports_of_schema_1_are_read(old: Path, tmp_path: Path) -> None:
    digest = EXPECTED["mara"][0]["digest"]
    assert Identity.load(old / "exported").digest() == digest
    with IdentityStore(tmp_path / "x.db") as store:
        assert store.import_(old / "exported", "a").digest == digest
        assert store.import_(old / "exported.safetensors", "b").digest == digest
        assert [e.text for e in store.journal("a") if e.text] == ["I am Mara. 日本語", "I am Theo."]


def test_a_file_of_an_older_schema_is_upgraded_and_keeps_its_digest(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later release will: the settings get a new name, and commits that were written before still hold."""

    def rename(config: dict[str, Any], tensors: Any) -> Any:
        return {**config, "schema": 2, "base": {**config["base"], "name": config["base"]["name"].upper()}}, tensors

    written = encode(person(1))
    monkeypatch.setattr(identity_module, "SCHEMA", 2)
    with pytest.raises(CheckpointError, match="schema 1; this version reads 1 to 2"):
        Identity.load(old / "exported")
    monkeypatch.setitem(identity_module.UPGRADES, 1, rename)
    assert Identity.load(old / "exported").base.name == "TINY"
    assert decode(written, "it")[0].base.name == "TINY"
    monkeypatch.setitem(identity_module.UPGRADES, 1, lambda config, tensors: ({**config, "schema": 2}, tensors))
    assert Identity.load(old / "exported").digest() == EXPECTED["mara"][0]["digest"]
    with IdentityStore(old / "identities.db") as store:
        assert [store.verify(name) for name in store.names()] == [len(log) for log in EXPECTED.values()]
    monkeypatch.setitem(identity_module.UPGRADES, 1, lambda config, tensors: (config, tensors))
    with pytest.raises(CheckpointError, match="the upgrade from schema 1 led to 1"):
        Identity.load(old / "exported")


def test_a_file_of_a_newer_schema_says_to_update(old: Path) -> None:
    config = json.loads((old / "exported" / CONFIG).read_text())
    (old / "exported" / CONFIG).write_text(json.dumps({**config, "schema": 7}))
    with pytest.raises(CheckpointError, match="has schema 7; this version of regard reads up to 1: update regard"):
        Identity.load(old / "exported")
