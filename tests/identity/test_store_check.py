"""Whether a store is whole is asked, answered, and put right: check, backup, restore, and every damage refused or harmless."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from damage import Truth, contents, outcome, sound
from stored import heard, imprint, person

from regard import CheckpointError
from regard.identity.store import IdentityStore, StoreError
from regard.identity.store.restore import check_place, restore, verified

FUZZ = int(os.environ.get("REGARD_FUZZ", "150"))
"""Damages to try; set it to try more."""


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return sound(tmp_path / "s")


@pytest.fixture
def file(tmp_path: Path, truth: Truth) -> Path:
    return tmp_path / "s" / "x.db"


@pytest.fixture
def backup(tmp_path: Path, file: Path) -> Path:
    with IdentityStore(file) as store:
        return store.backup(tmp_path / "backups" / "monday")


def execute(file: Path, *statements: str) -> None:
    c = sqlite3.connect(file)
    for statement in statements:
        assert c.execute(statement).rowcount != 0, statement
    c.commit()
    c.close()


def test_any_damage_to_the_database_is_refused_or_harmless_and_no_name_vanishes(tmp_path: Path) -> None:
    truth = sound(tmp_path / "origin")
    found = Counter(outcome(tmp_path / "origin", tmp_path / "work", truth, seed) for seed in range(FUZZ))
    assert set(found) <= {"refused", "right"}
    assert min(found["refused"], found["right"]) > FUZZ // 10, found


def test_a_whole_store_is_sound_and_has_no_problems(file: Path, truth: Truth) -> None:
    found = check_place(file)
    assert found.sound
    assert found.problems == []
    assert (found.names, found.commits) == (5, len({c.id for c in commits(file)}))
    assert "sound" in str(found)
    with pytest.raises(StoreError, match="there is no store"):
        check_place(file.with_name("none.db"))


def commits(file: Path) -> list[object]:
    with IdentityStore(file) as store:
        return [c for name in store.names() for c in store.log(name)]  # pyright: ignore


WRONG: dict[str, tuple[str, str]] = {
    "a name that was removed": ("DELETE FROM identity_names WHERE name = 'mara'", "1? ?a name is lost"),
    "a name that was changed": ("UPDATE identity_names SET name = 'nara' WHERE name = 'mara'", "not as it was written"),
    "a head that was moved": (
        "UPDATE identity_names SET head = (SELECT parent FROM identity_commits WHERE id = head) WHERE name = 'mara'", "not as it was written",
    ),
    "a name in both records": (
        "DELETE FROM identity_names WHERE name = 'alone'; DELETE FROM identity_seals WHERE key NOT IN (SELECT '')", "",
    ),
    "a record that was changed": ("UPDATE identity_commits SET body = replace(body, 'imprint', 'forget')", "its hash differs"),
    "a column that was changed": ("UPDATE identity_commits SET blob = 'ab' WHERE number = 2", "its blob is not what its record says"),
    "an event that was removed": ("DELETE FROM identity_events WHERE source = 'mara-0'", "their hash differs"),
    "a source that was changed": ("UPDATE identity_events SET source = 'x' WHERE source = 'mara-0'", "not what its record says"),
    "a commit that was removed": ("DELETE FROM identity_commits WHERE number = 1", "not there"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_check_names_what_is_wrong_and_what_to_do(file: Path, what: str) -> None:
    statements, word = WRONG[what]
    execute(file, *statements.split("; "))
    found = check_place(file)
    assert not found.sound
    assert any(word.strip("1? ") in p.what for p in found.problems), found
    assert all("restore" in p.todo for p in found.problems if p.grave == "lost")
    assert "damaged" in str(found)


def test_a_name_lost_from_both_records_is_missed_by_its_commits(file: Path) -> None:
    from regard.identity.store.schema import key_of

    execute(
        file, "DELETE FROM identity_names WHERE name = 'alone'", f"DELETE FROM identity_seals WHERE key = '{key_of('alone')}'"
    )
    [problem] = check_place(file).problems
    assert "no name leads to 1 commits" in problem.what


@pytest.mark.parametrize("name", ["mara", "alone"])
def test_a_name_that_damage_took_is_not_answered_as_if_it_had_never_been(file: Path, name: str) -> None:
    execute(file, f"DELETE FROM identity_names WHERE name = '{name}'")
    with IdentityStore(file) as store:
        for read in (store.names, lambda: store.head(name), lambda: store.load("somebody")):
            with pytest.raises(CheckpointError, match="damaged"):
                read()
        assert store.load("tom").life.experiences == 2, "the others are read as ever"
        with pytest.raises(CheckpointError, match="damaged"):
            store.gc(grace=0)


def test_a_blob_that_is_lost_or_changed_is_named(file: Path) -> None:
    with IdentityStore(file) as store:
        first, second = (store.blobs.path(store.head(name).blob) for name in ("mara", "alone"))
        first.unlink()
        second.write_bytes(second.read_bytes()[:-1] + b"x")
        found = store.check()
    assert not found.sound
    assert sorted(p.where for p in found.problems) == sorted(f"blob {p.stem[:12]}" for p in (first, second))
    assert all("roll back" in p.todo for p in found.problems)


def test_what_is_untidy_is_told_and_is_not_damage(file: Path) -> None:
    with IdentityStore(file) as store:
        store.blobs.put(b"nobody's")
        (store.blobs.folder / ".draft-1-x").write_bytes(b"half")
        os.chmod(store.blobs.folder / ".draft-1-x", 0o644)
        found = store.check()
        assert found.sound
        assert [p.grave for p in found.problems] == ["untidy"] * 3
        os.utime(store.blobs.folder / ".draft-1-x", (0, 0))
        store.gc(grace=0)
        assert store.check().problems == []


def test_a_file_that_is_no_database_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"this is a letter, not a database " * 100)
    [problem] = check_place(tmp_path / "x.db").problems
    assert "not a database" in problem.what


def test_a_backup_is_a_store_of_its_own_and_comes_back_as_it_was(backup: Path, tmp_path: Path, truth: Truth) -> None:
    assert verified(backup).sound
    with IdentityStore(backup / "identities.db", read_only=True) as copy:
        assert contents(copy) == truth
    assert sorted(p.name for p in backup.iterdir()) == ["backup.json", "identities.blobs", "identities.db"]
    assert [p for p in (backup, *backup.rglob("*")) if p.stat().st_mode & 0o077] == []
    found = restore(backup, tmp_path / "new" / "y.db")
    assert (found.sound, found.names) == (True, 5)
    with IdentityStore(tmp_path / "new" / "y.db") as store:
        assert contents(store) == truth
        event = heard("mara", "and on")
        store.update("mara", lambda me: imprint(me, event), event=event)


def test_a_backup_never_replaces_anything(file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with IdentityStore(file) as store, pytest.raises(StoreError, match="there already"):
        store.backup(tmp_path / "there")


def test_a_damaged_store_is_not_backed_up_as_if_it_were_whole(file: Path, tmp_path: Path) -> None:
    with IdentityStore(file) as store:
        path = store.blobs.path(store.head("mara").blob)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError):
            store.backup(tmp_path / "bad")
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "nothing half written is left"


def test_a_store_that_holds_somebody_is_replaced_only_when_asked(
    backup: Path, file: Path, truth: Truth, tmp_path: Path
) -> None:
    with IdentityStore(file) as store:
        store.delete("tom")
        store.new("later", person(9))
        later = store.head("later").blob
        with pytest.raises(StoreError, match=r"holds alone, fork, later, mara, theo; .*--replace"):
            restore(backup, file)
        assert "later" in store.names()
        restore(backup, file, replace=True)
        assert contents(store) == truth, "a store that is open meanwhile sees it at once"
        assert not store.blobs.path(later).exists()
        assert store.check().problems == []


def test_a_damaged_store_is_replaced_and_kept_aside(backup: Path, file: Path, truth: Truth) -> None:
    for damage in (
        lambda: file.write_bytes(b"no database at all " * 99),
        lambda: file.write_bytes(file.read_bytes()[:8192]),
        lambda: execute(file, "DELETE FROM identity_names WHERE name = 'mara'"),
        lambda: execute(file, "ALTER TABLE identity_names RENAME TO lost"),
    ):
        damage()
        with pytest.raises((CheckpointError, StoreError)):
            restore(backup, file)
        restore(backup, file, replace=True)
        with IdentityStore(file) as store:
            assert contents(store) == truth
    assert any(p.name.startswith("x.db.damaged-") for p in file.parent.iterdir())


@pytest.mark.parametrize("what", ["database", "blob", "blob gone", "note", "newer", "no note"])
def test_a_backup_that_is_not_whole_changes_nothing(backup: Path, file: Path, truth: Truth, what: str) -> None:
    note, blob = backup / "backup.json", sorted(backup.glob("identities.blobs/*/*"))[0]
    if what == "database":
        data = bytearray((backup / "identities.db").read_bytes())
        data[-100] ^= 1
        (backup / "identities.db").write_bytes(data)
    elif what == "blob":
        blob.write_bytes(blob.read_bytes()[:-1])
    elif what == "blob gone":
        blob.unlink()
    elif what == "note":
        note.write_text("{}")
    elif what == "newer":
        note.write_text(json.dumps({**json.loads(note.read_text()), "schema": 2}))
    else:
        note.unlink()
    with pytest.raises(CheckpointError):
        restore(backup, file, replace=True)
    with IdentityStore(file) as store:
        assert contents(store) == truth


def test_a_restore_that_fails_half_way_changes_nothing(
    backup: Path, file: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.identity.store import restore as module

    real: Callable[..., dict[str, int]] = module.copy_rows

    def half(*given: object) -> dict[str, int]:
        real(*given)
        raise KeyboardInterrupt

    with IdentityStore(file) as store:
        store.delete("tom")
        before = contents(store)
        monkeypatch.setattr(module, "copy_rows", half)
        with pytest.raises(KeyboardInterrupt):
            restore(backup, file, replace=True)
        assert contents(store) == before
        assert store.check().sound


@pytest.fixture(autouse=True)
def no_drafts(tmp_path: Path) -> Generator[None]:
    yield
    assert [p for p in tmp_path.rglob(".draft-*") if p.name != ".draft-1-x"] == []
