"""Forgetting: who else holds it is found by what was said, and what is claimed is read from the files' bytes."""

from __future__ import annotations

import itertools
import os
import random
import time
import uuid
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from stored import BASE, heard, imprint, replay

from regard.identity.state import Identity
from regard.identity.store import Event, Forgotten, IdentityStore, StoreError, folder_blobs, label_of, unique_source
from regard.identity.store import proof as proof_module
from regard.identity.store.folder_blobs import searchable_file
from regard.identity.store.proof import found_in, fragments_of_text

DAY = "chat-2026-07-24"


@pytest.fixture
def store(tmp_path: Path) -> Generator[IdentityStore]:
    with IdentityStore(tmp_path / "identities.db") as found:
        yield found


def begin(store: IdentityStore, name: str, *events: Event) -> None:
    store.new(name, Identity.new(BASE))
    for event in events:
        write(store, name, event)


def write(store: IdentityStore, name: str, event: Event) -> None:
    store.update(name, lambda me: imprint(me, event), event=event)


def holding(store: IdentityStore, *words: bytes) -> list[str]:
    """Files of the store in which a word stands."""
    folder = store.blobs.folder.parent
    return [p.name for p in folder.rglob("*") if p.is_file() and any(w in p.read_bytes() for w in words)]


def test_two_people_who_chatted_on_one_day_are_not_told_to_erase_each_other(store: IdentityStore) -> None:
    begin(store, "mara", heard(DAY, "I am Mara, and my cat is called Mochi."))
    begin(store, "theo", heard(DAY, "I am Theo, and I have a boat."))
    found = store.forget("mara", DAY, replay)
    assert (found.forks, found.copies) == ((), ())
    assert "theo" not in str(found)
    assert [e.text for e in store.journal("theo") if e.text] == ["I am Theo, and I have a boat."]


def test_a_fork_is_found_by_ancestry_and_an_import_by_its_events(store: IdentityStore, tmp_path: Path) -> None:
    begin(store, "mara", heard(DAY, "I am Mara."), heard("theo", "I am Theo."))
    store.fork("mara", "fork")
    store.fork("mara", "before", at=store.log("mara")[2].id)
    store.import_(store.export("mara", tmp_path / "out"), "imported")
    begin(store, "namesake", heard(DAY, "I am somebody else."))
    assert store.forget("mara", DAY, replay).forks == ("fork", "imported")


def test_a_state_that_came_without_its_events_is_found_by_its_imprints(store: IdentityStore, tmp_path: Path) -> None:
    begin(store, "mara", heard(DAY, "I am Mara."))
    store.load("mara").save(tmp_path / "saved")
    store.import_(tmp_path / "saved", "carried")
    stranger = imprint(Identity.new(BASE), heard(DAY, "Quite another."))
    replace(stranger, parent=None).save(tmp_path / "stranger")
    store.import_(tmp_path / "stranger", "stranger")
    assert store.forget("mara", DAY, replay).forks == ("carried",)


def test_the_same_text_written_twice_is_a_copy_and_not_a_fork(store: IdentityStore) -> None:
    begin(store, "mara", heard("diary", "The boat leaves at nine."))
    begin(store, "tom", heard("diary", "The boat leaves at nine."))
    found = store.forget("mara", "diary", replay)
    assert (found.forks, found.copies) == ((), ("tom",))
    assert "also written, by themselves, into tom" in str(found)
    assert "forget it there too" not in str(found)


def test_sources_that_would_be_called_the_same_are_told_apart_and_named_by_what_people_call_them(store: IdentityStore) -> None:
    first, second = unique_source("diary", "one"), unique_source("diary", "two")
    assert first != second
    assert first == unique_source("diary", "one")
    assert unique_source(DAY) != unique_source(DAY), "without content, every one is another"
    assert {label_of(first), label_of(second), label_of("diary"), label_of("a@home")} == {"diary", "a@home"}
    assert len(unique_source("x" * 500, "one")) == 256
    begin(store, "mara", heard(first, "One diary."), heard(second, "Another diary."), heard("theo", "I am Theo."))
    with pytest.raises(StoreError, match=f"2 sources of 'mara': .*{min(first, second)}"):
        store.forget("mara", "diary", replay)
    assert store.forget("mara", first, replay).events_removed == 1
    found = store.forget("mara", "diary", replay)
    assert (found.source, found.events_removed, found.events_kept) == (second, 1, 1)


def residue(folder: Path, seed: int, patch: pytest.MonkeyPatch) -> Forgotten:
    """A history of events that are long and short, of which one source is forgotten; the same pages for one seed."""
    rng, clock = random.Random(seed), itertools.count(1_700_000_000)
    patch.setattr(time, "time", lambda: float(next(clock)))
    patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
    with IdentityStore(folder / "x.db") as store:
        store.new("a", Identity.new(BASE))
        for i in range(rng.randint(4, 12)):
            source = rng.choice(["secret", "other", "third"])
            write(store, "a", heard(source, " ".join([f"{source}word{i:02d}"] * rng.choice([3, 20, 60, 120, 200, 400]))))
        write(store, "a", heard("secret", "secretword99 " * rng.randint(1, 300)))
        found = store.forget("a", "secret", replay)
        assert holding(store, b"secretword") == []
        return found


@pytest.mark.parametrize("seed", [185])
def test_nothing_is_left_in_pages_that_were_balanced(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        found = residue(tmp_path, seed, patch)
    assert found.scrubbed
    assert found.searched.left == ()
    assert "x.db" in found.searched.files


def test_what_is_still_there_is_said_and_not_called_clean(store: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(store, "mara", heard("secret", "my password is Wintergreen"), heard("theo", "I am Theo."))
    stray = store.blobs.folder / "notes.txt"
    stray.write_bytes(b"... my password is Wintergreen ...")
    night = store.sleep_checkpoints / "scratch"
    store.sleep_checkpoints.mkdir()
    night.write_bytes(b"nothing of it")
    found = store.forget("mara", "secret", replay)
    assert found.searched.left == ("notes.txt",)
    assert not found.scrubbed
    assert {"identities.db", "notes.txt", "scratch"} <= set(found.searched.files)
    assert "still in the bytes of notes.txt" in str(found)
    assert "backups" in str(found), "what cannot be reached is said"


def test_keys_and_tokens_of_a_forgotten_state_are_searched_for_too(store: IdentityStore) -> None:
    begin(store, "mara", *(heard("secret", f"word {i}") for i in range(8)), heard("theo", "I am Theo."))
    old = store.head("mara").blob
    copy = store.blobs.folder / "copy.bin"
    copy.write_bytes(store.blobs.get(old))
    assert store.forget("mara", "secret", replay).searched.left == ("copy.bin",)


def test_a_reader_in_the_way_is_said_and_the_next_opening_finishes(store: IdentityStore, tmp_path: Path) -> None:
    begin(store, "mara", heard("secret", "my password is Wintergreen"), heard("theo", "I am Theo."))
    with IdentityStore(tmp_path / "identities.db") as reader, reader.db.read() as c:
        reader.db.names(c)
        found = store.forget("mara", "secret", replay)
        assert not found.scrubbed
        assert "could not be written anew" in str(found)
    with IdentityStore(tmp_path / "identities.db") as again:
        assert holding(again, b"Wintergreen") == []
        assert again.check().problems == []


def test_a_mark_of_one_removal_is_not_taken_by_the_clearing_of_another(store: IdentityStore, tmp_path: Path) -> None:
    begin(store, "a", heard("secret", "my password is Wintergreen"))
    begin(store, "b", heard("secret", "my password is Honolulu and more"))
    scrub = store.db.scrub

    def then_forgotten() -> bool:
        done = scrub()
        store.db.scrub = scrub
        # While the first clears away, and after it has written the database anew.
        with IdentityStore(tmp_path / "identities.db") as other:
            other.sweep = lambda *_: (0, 0, False)  # pyright: ignore
            other.forget("b", "secret", replay)
        return done

    store.db.scrub = then_forgotten  # pyright: ignore
    store.forget("a", "secret", replay)
    with store.db.read() as c:
        assert [x for x in store.db.doomed(c) if x.startswith("-")], "the second removal is still to be cleared away"
    store.sweep()
    assert holding(store, b"Wintergreen", b"Honolulu") == []


def test_an_interrupted_night_and_the_draft_of_a_killed_one_go_with_their_commit(store: IdentityStore) -> None:
    from regard.files import DRAFT, _host  # pyright: ignore

    begin(store, "mara", heard("secret", "my password is Wintergreen"))
    begin(store, "theo", heard("theo", "I am Theo."))
    store.sleep_checkpoints.mkdir()
    nights = [store.sleep_checkpoints / f"{store.head(name).id}.safetensors" for name in ("mara", "theo")]
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    drafts = [
        store.sleep_checkpoints / f"{DRAFT}{dead}-{_host()}-x",
        store.sleep_checkpoints / f"{DRAFT}{os.getpid()}-{_host()}-x",
    ]
    for path in (*nights, *drafts):
        path.write_bytes(b"what was learned from it")
    store.forget("mara", "secret", replay)
    assert [p.exists() for p in nights] == [False, True], "the night over a commit that is no more, and no other"
    assert [p.exists() for p in drafts] == [False, True], "the draft of a process that has ended, and no other"


def test_fragments_are_found_wherever_a_page_ends_and_not_by_chance() -> None:
    rng = random.Random(0)
    text = "".join(chr(rng.randint(97, 122)) for _ in range(400))
    needles = fragments_of_text([text, 'with "quotes", 日本語 and \x00'])
    data = bytes(rng.randint(0, 255) for _ in range(5000))
    assert found_in([data], needles) == set()
    for cut in range(31, 200, 7):
        assert found_in([data[:99] + text.encode()[:cut] + data[99:]], needles), cut
        assert found_in([data[:5] + text.encode()[-cut:] + data[5:]], needles), cut
    assert found_in([b'{"text":"with \\"quotes\\", \\u65e5\\u672c\\u8a9e and \\u0000"}'], needles)
    assert found_in(['with "quotes", 日本語 and \x00'.encode()], needles)
    assert found_in([b"short"], needles) == found_in([], needles) == set()


def test_a_text_across_two_parts_of_a_large_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_blobs, "READ", 64)
    needles = fragments_of_text(["sixteen letters!"])
    for before in range(40, 70):
        (tmp_path / "x").write_bytes(b"." * before + b"sixteen letters!" + b"." * 50)
        parts = proof_module._overlapping(searchable_file(tmp_path / "x").parts())  # pyright: ignore
        assert found_in(parts, needles) == needles, before
