"""Readers beside somebody who forgets: never a word of damage, never a long wait; `test_store_postgres.py` runs this again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from stored import BASE, heard, imprint, replay

from regard import CheckpointError
from regard.identity.state import Identity
from regard.identity.store import IdentityStore, MissingBlobError

Open = Callable[[], IdentityStore]
ROUNDS = 6


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    return lambda: IdentityStore(tmp_path / "identities.db")


def write(store: IdentityStore, name: str, source: str, text: str) -> None:
    event = heard(source, text)
    store.update(name, lambda me: imprint(me, event), event=event)


def test_readers_during_forgets_see_the_old_or_the_new_and_no_damage(open_store: Open) -> None:
    with open_store() as store:
        store.new("mara", Identity.new(BASE))
        write(store, "mara", "theo", "I am Theo.")
        done, wrong, reads = threading.Event(), list[BaseException](), [0, 0]

        def read(which: int) -> None:
            try:
                mine = open_store()
                while not done.is_set():
                    # One that stays open, and one that opens it each time.
                    if which:
                        mine.close()
                        mine = open_store()
                    assert mine.load("mara").life.experiences in (1, 2)
                    assert [e.source for e in mine.journal("mara") if e.text] in (["theo"], ["theo", "secret"])
                    mine.verify("mara")
                    assert mine.diff("mara", "mara").same
                    reads[which] += 1
                mine.close()
            except BaseException as error:
                wrong.append(error)

        readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in readers:
            thread.start()
        for i in range(ROUNDS):
            write(store, "mara", "secret", f"my password is number {i}")
            assert store.forget("mara", "secret", replay).events_removed == 1
        done.set()
        for thread in readers:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []
        assert min(reads) > 0


def test_a_blob_that_goes_between_being_named_and_being_read_gives_the_new_truth(open_store: Open) -> None:
    with open_store() as store, open_store() as reader:
        store.new("mara", Identity.new(BASE))
        write(store, "mara", "secret", "my password is Wintergreen")
        get = reader.blobs.get

        def too_late(blob: str) -> bytes:
            reader.blobs.get = get
            store.forget("mara", "secret", replay)
            return get(blob)

        for read in (
            lambda: reader.load("mara").empty,
            lambda: reader.verify("mara") == 2,
            lambda: reader.diff("mara", "mara").same,
        ):
            reader.blobs.get = too_late  # pyright: ignore
            assert read()
            write(store, "mara", "secret", "and again")


def test_a_blob_that_is_lost_is_damage_however_often_it_is_read(open_store: Open) -> None:
    with open_store() as store:
        store.new("mara", Identity.new(BASE))
        write(store, "mara", "theo", "I am Theo.")
        store.blobs.path(store.head("mara").blob).unlink()
        with pytest.raises(MissingBlobError, match="restore it or roll back"):
            store.load("mara")
        with pytest.raises(CheckpointError):
            store.verify("mara")


def test_a_store_opens_and_reads_while_another_writes_for_long(open_store: Open) -> None:
    with open_store() as store:
        store.new("mara", Identity.new(BASE))
        with store.db.write() as c:
            store.db.drop_name(c, "nobody")
            found = list[str]()

            def look() -> None:
                with open_store() as reader:
                    found.extend(reader.names())

            thread = threading.Thread(target=look)
            thread.start()
            # A minute is what a writer would wait for the lock that is held here.
            thread.join(30)
            assert found == ["mara"]
        thread.join()
