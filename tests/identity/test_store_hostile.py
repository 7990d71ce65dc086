"""Damaged and hostile files, full disks, and other people's databases: every one is one of our errors, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from stored import BASE, heard, imprint, person, replay

from regard import CheckpointError, StateError
from regard.identity.folder import CONFIG, TENSORS
from regard.identity.state import Identity
from regard.identity.store import Event, IdentityStore, StoreError
from regard.identity.store.codec import decode, encode

SOUND = encode(person(1))


def with_mara(folder: Path) -> IdentityStore:
    found = IdentityStore(folder / "identities.db")
    found.new("mara", Identity.new(BASE))
    event = heard("mara", "My cat is called Mochi.")
    found.update("mara", lambda me: imprint(me, event), event=event)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Generator[IdentityStore]:
    with with_mara(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Generator[IdentityStore]:
    """One store for all that is refused before it is written."""
    with with_mara(tmp_path_factory.mktemp("untouched")) as found:
        yield found
        assert list(found.names()) == ["mara"]
        assert found.verify("mara") == 2


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    size = struct.unpack("<Q", SOUND[:8])[0]
    header = json.loads(SOUND[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + SOUND[8 + size :]


def with_config(change: Callable[[dict[str, Any]], object]) -> bytes:
    def inner(header: dict[str, Any]) -> None:
        config = json.loads(header["__metadata__"]["identity"])
        change(config)
        header["__metadata__"]["identity"] = json.dumps(config)

    return with_header(inner)


def with_tensors(**changed: torch.Tensor) -> bytes:
    config = json.dumps(person(1).config())
    names = {name.replace("_", "."): t for name, t in changed.items()}
    return save({**person(1).tensors(), **names}, metadata={"identity": config})


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "too short": SOUND[:7],
    "no header": SOUND[:40],
    "cut": SOUND[:-5],
    "longer": SOUND + b"x",
    "a huge header": struct.pack("<Q", 1 << 40) + SOUND[8:],
    "a header of the largest number": b"\xff" * 8 + SOUND[8:],
    "a header that is not JSON": struct.pack("<Q", 4) + b"nope",
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "a header nested too deeply": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "no settings": with_header(lambda h: h.pop("__metadata__")),
    "settings that are no mapping": with_header(lambda h: h["__metadata__"].update(identity="[1]")),
    "another tensor": with_header(lambda h: h.update(evil=h.pop("self.s"))),
    "overlapping tensors": with_header(lambda h: h["self.s"].update(data_offsets=[0, 32])),
    "offsets outside": with_header(lambda h: h["self.s"].update(data_offsets=[10**6, 10**6 + 32])),
    "a negative shape": with_header(lambda h: h["self.s"].update(shape=[-2, -4])),
    "a shape that is no number": with_header(lambda h: h["self.s"].update(shape=["2", 4])),
    "another type in the header": with_header(lambda h: h["self.s"].update(dtype="I32")),
    "an unknown type": with_header(lambda h: h["self.s"].update(dtype="F128")),
    "a float64 self": with_tensors(self_s=torch.zeros(2, 4, dtype=torch.float64)),
    "a self of another width": with_tensors(self_s=torch.zeros(2, 5)),
    "a self that is not finite": with_tensors(self_s=torch.full((2, 4), float("nan"))),
    "infinite scales": with_tensors(imprints_v_scale=torch.full((2, 1, 3, 1), float("inf"), dtype=torch.float16)),
    "imprints of another depth": with_tensors(imprints_k_codes=torch.zeros(3, 1, 3, 4, dtype=torch.int8)),
    "imprints of nobody": with_tensors(imprints_source=torch.full((3,), 9, dtype=torch.int32)),
    "imprints of a negative source": with_tensors(imprints_source=torch.full((3,), -1, dtype=torch.int32)),
    "signs that are none": with_tensors(trace_signs=torch.full((2,), 3, dtype=torch.int8)),
    "signs whose absolute value overflows": with_tensors(trace_signs=torch.full((2,), -128, dtype=torch.int8)),
    "another schema": with_config(lambda c: c.update(schema=99)),
    "no schema": with_config(lambda c: c.pop("schema")),
    "no base": with_config(lambda c: c.pop("base")),
    "a base that is a list": with_config(lambda c: c.update(base=[1, 2])),
    "a base with more": with_config(lambda c: c["base"].update(code="import os")),
    "a depth that is true": with_config(lambda c: c["base"].update(depth=True)),
    "another depth": with_config(lambda c: c["base"].update(depth=3)),
    "a huge depth": with_config(lambda c: c["base"].update(depth=10**30)),
    "a name that is a number": with_config(lambda c: c["base"].update(name=5)),
    "experiences that are words": with_config(lambda c: c["life"].update(experiences="many")),
    "negative tokens": with_config(lambda c: c["life"].update(tokens=-1)),
    "a mean that is not finite": with_config(lambda c: c["life"].update(shock_mean=float("nan"))),
    "a mean beyond floats": with_config(lambda c: c["life"].update(shock_mean=10**400)),
    "norms that are words": with_config(lambda c: c["life"].update(self_norms=["x"])),
    "sources in one word": with_config(lambda c: c.update(sources="mara")),
    "sources twice": with_config(lambda c: c.update(sources=["mara", "mara"])),
    "sources that are no names": with_config(lambda c: c.update(sources=[["mara"]])),
    "a source with a line break": with_config(lambda c: c.update(sources=["a\nb"])),
    "a form that is none": with_config(lambda c: c.update(form="evil")),
    "a form that is a list": with_config(lambda c: c.update(form=[])),
    "a parent that is a number": with_config(lambda c: c.update(parent=7)),
    "more settings": with_config(lambda c: c.update(exec="rm")),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_is_written(untouched: IdentityStore, tmp_path: Path, what: str) -> None:
    path = tmp_path / "evil.safetensors"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(CheckpointError):
        untouched.import_(path, "evil")
    assert list(untouched.names()) == ["mara"]
    assert untouched.verify("mara") == 2


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_another_sound_identity_or_our_error(at: int, flip: int) -> None:
    data = bytearray(SOUND)
    data[at] ^= flip
    try:
        found = decode(bytes(data), "it")[0]
    except CheckpointError:
        return
    assert found.base.depth == BASE.depth


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_in_a_kept_blob_is_always_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    from regard.identity.store.folder_blobs import FolderBlobs

    blobs = FolderBlobs(tmp_path_factory.mktemp("flip"))
    blob = blobs.put(SOUND)
    data = bytearray(SOUND)
    data[at % len(data)] ^= flip
    blobs.path(blob).write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        blobs.get(blob)
    blobs.put(SOUND)
    assert blobs.get(blob) == SOUND, "writing it again heals it"


@pytest.mark.parametrize("damage", ["cut", "gone", "a link", "a folder", "too large"])
def test_a_damaged_blob_is_refused_and_older_commits_still_load(
    store: IdentityStore, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = store.log("mara")
    path = store.blobs.path(new.blob)
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:100])
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a folder":
        path.mkdir()
    elif damage == "too large":
        with path.open("wb") as file:
            file.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointError):
        store.load("mara")
    with pytest.raises(CheckpointError):
        store.verify("mara")
    assert store.load(old.id).empty
    assert store.rollback("mara", 1).blob == old.blob
    assert store.load("mara").empty


@pytest.mark.parametrize(
    "journal",
    [
        "no", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "digest": "x", "events": []}', '{"schema": 1, "events": NaN}',
        "[" * 100_000, "\udcff",
    ],
)  # fmt: skip
def test_a_hostile_journal_is_refused(untouched: IdentityStore, tmp_path: Path, journal: str) -> None:
    path = untouched.export("mara", tmp_path / "out")
    (path / "journal.json").write_bytes(journal.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError):
        untouched.import_(path, "evil")
    assert list(untouched.names()) == ["mara"]


@pytest.mark.parametrize(
    "change",
    [{"kind": "hack"}, {"text": 5}, {"rule": "x"}, {"time": "1"}, {"source": "\n"}, {"more": 1}, {"text": "x" * (1 << 21)}],
)
def test_a_hostile_event_in_a_journal_is_refused(untouched: IdentityStore, tmp_path: Path, change: dict[str, Any]) -> None:
    path = untouched.export("mara", tmp_path / "out")
    journal = json.loads((path / "journal.json").read_text())
    journal["events"][-1].update(change)
    (path / "journal.json").write_text(json.dumps(journal))
    with pytest.raises(CheckpointError):
        untouched.import_(path, "evil")


@pytest.mark.parametrize("part", [TENSORS, CONFIG, "journal.json"])
@pytest.mark.parametrize("what", ["a link", "a pipe", "a folder"])
def test_only_plain_files_are_read_from_a_folder(untouched: IdentityStore, tmp_path: Path, part: str, what: str) -> None:
    path = untouched.export("mara", tmp_path / "out")
    (path / part).rename(tmp_path / "real")
    if what == "a link":
        (path / part).symlink_to(tmp_path / "real")
    elif what == "a pipe":
        os.mkfifo(path / part)
    else:
        (path / part).mkdir()
    with pytest.raises(CheckpointError):
        untouched.import_(path, "evil")
    if part != "journal.json":
        (path / part).rmdir() if what == "a folder" else (path / part).unlink()
        with pytest.raises(CheckpointError, match="is not there"):
            untouched.import_(path, "evil")


def test_a_folder_with_the_settings_of_another_is_refused(untouched: IdentityStore, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    person(2).save(path)
    (path / TENSORS).write_bytes(save(person(2, form="self_token").tensors()))
    with pytest.raises(CheckpointError, match=r"self\.s"):
        untouched.import_(path, "evil")
    (path / CONFIG).write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        untouched.import_(path, "evil")


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
def test_a_full_disk_loses_nothing(store: IdentityStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before, files = store.log("mara"), set(store.blobs.folder.rglob("*"))
    event = heard("mara", "too much")

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        real(path, data[: len(data) // 2])
        return full()

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(Path, "write_bytes", half)
        elif call == "open":
            opened = os.open
            patch.setattr(os, "open", lambda p, flags, *a: full() if flags & os.O_EXCL else opened(p, flags, *a))
        else:
            patch.setattr(os, call, full)
        with pytest.raises(StoreError, match=r"No space left.*every head is where it was"):
            store.update("mara", lambda me: imprint(me, event), event=event)
        with pytest.raises(StoreError):
            store.new("second", person(3))
    assert store.log("mara") == before
    assert list(store.names()) == ["mara"]
    if call != "replace":
        assert {f for f in store.blobs.folder.rglob("*") if f.is_file()} == {f for f in files if f.is_file()}
    store.update("mara", lambda me: imprint(me, event), event=event)
    assert store.verify("mara") == 3


def test_a_disk_that_is_full_for_the_database_loses_nothing(store: IdentityStore) -> None:
    before = store.log("mara")
    with store.db.engine.connect() as c:
        pages = c.exec_driver_sql("PRAGMA page_count").scalar()
        c.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    event = heard("mara", "x" * 500_000)
    with pytest.raises(StoreError, match="full"):
        store.update("mara", lambda me: imprint(me, event), event=event)
    assert store.log("mara") == before
    with store.db.engine.connect() as c:
        c.exec_driver_sql("PRAGMA max_page_count = 1000000")
    store.update("mara", lambda me: imprint(me, event), event=event)
    assert store.verify("mara") == 3


def test_nothing_of_a_forgotten_text_is_left_in_any_file(store: IdentityStore, tmp_path: Path) -> None:
    for word in ("Wintergreen", "Zanzibar " * 3000):
        event = Event("imprint", "secret-source", f"my password is {word}", {"note": "Honolulu"})
        store.update("mara", lambda me, e=event: imprint(me, e), event=event, message="said Honolulu")
    store.fork("mara", "gone")
    store.delete("gone")

    def found(word: bytes) -> list[str]:
        return [p.name for p in tmp_path.rglob("*") if p.is_file() and word in p.read_bytes()]

    words = (b"Wintergreen", b"Zanzibar", b"Honolulu", b"secret-source")
    assert all(found(word) for word in words)
    proof = store.forget("mara", "secret-source", replay)
    assert (proof.events_removed, proof.events_kept, proof.scrubbed) == (2, 1, True)
    assert [w for w in words if found(w)] == []


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "oracle://x"])
def test_a_place_that_cannot_keep_identities_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        IdentityStore(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"this is a letter, not a database " * 100)
    with pytest.raises(CheckpointError, match="not a store"):
        IdentityStore(path)
    assert path.read_bytes().startswith(b"this is a letter")


def test_a_store_lives_beside_other_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE commits (mine TEXT)")
    other.close()
    with IdentityStore(f"sqlite:///{path}") as store:
        store.new("a", person())
        assert store.verify("a") == 1


def test_the_default_place_is_the_home_of_regard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    with IdentityStore() as store:
        store.new("a", person())
    folder = tmp_path / "home" / "identities"
    assert (folder / "identities.db").is_file()
    assert folder.stat().st_mode & 0o077 == 0, "what people said is nobody else's to read"
    assert len(list((folder / "identities.blobs").glob("*/*.safetensors"))) == 1 + len(person().episodes)


def test_sqlite_is_set_up_to_keep_what_it_acknowledged(store: IdentityStore) -> None:
    with store.db.read() as c:
        found = {
            p: c.exec_driver_sql(f"PRAGMA {p}").scalar()
            for p in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 60_000}


@pytest.mark.parametrize(
    ("package", "url", "extra"), [("sqlalchemy", "x.db", "identity"), ("psycopg", "postgresql://h/d", "postgres")]
)
def test_a_missing_package_says_what_to_install(tmp_path: Path, package: str, url: str, extra: str) -> None:
    code = f"""
import sys, importlib.util
sys.modules[{package!r}] = None
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == {package!r} else spec(name, *a)
from regard.identity.store import Event, IdentityStore
Event("new")
try:
    IdentityStore({url!r})
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
    assert f"pip install 'regard[{extra}]'" in run.stdout


def test_an_identity_of_the_wrong_kind_of_numbers_is_refused_before_it_is_written(store: IdentityStore) -> None:
    with pytest.raises(StateError):
        store.update("mara", lambda me: replace(me, life=replace(me.life, self_norms=(1,))))  # pyright: ignore
    assert store.verify("mara") == 2
