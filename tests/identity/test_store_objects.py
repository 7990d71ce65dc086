"""Every promise of `test_store.py` and its neighbours again, with the blobs in an object store; and what only a bucket can do wrong.

In memory here; `.ci/objects` runs all of it against a real server (REGARD_TEST_OBJECTS=s3://bucket/prefix).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_store
from stored import BASE, heard, imprint, person, replay
from test_store import *  # noqa: F403
from test_store import Open, blobs, mara, needed, store  # noqa: F401
from test_store_episodes import *  # noqa: F403
from test_store_forget import (  # noqa: F401
    test_a_fork_is_found_by_ancestry_and_an_import_by_its_events,
    test_a_state_that_came_without_its_events_is_found_by_its_imprints,
    test_an_interrupted_night_and_the_draft_of_a_killed_one_go_with_their_commit,
    test_sources_that_would_be_called_the_same_are_told_apart_and_named_by_what_people_call_them,
    test_the_same_text_written_twice_is_a_copy_and_not_a_fork,
    test_two_people_who_chatted_on_one_day_are_not_told_to_erase_each_other,
)
from test_store_readers import *  # noqa: F403

from regard import CheckpointError
from regard.identity.state import Identity
from regard.identity.store import IdentityStore, MissingBlobError, StoreError, UnreachableError
from regard.identity.store.blobs import place_of
from regard.identity.store.codec import encode
from regard.identity.store.object_blobs import ObjectBlobs
from regard.identity.store.restore import check_place, restore, verified

PLACE = os.environ.get("REGARD_TEST_OBJECTS", "memory://tests")


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    return {"url": str(tmp_path / "identities.db"), "blobs": f"{PLACE}/{uuid.uuid4().hex}"}


@pytest.fixture
def open_store(place: dict[str, str]) -> Open:
    return lambda: IdentityStore(**place)


# These look at the files of a folder; what they say of a bucket is said below.
del test_gc_removes_what_no_commit_names_and_keeps_the_rest  # noqa: F821
del test_a_commit_writes_what_is_new_and_leaves_the_rest_as_it_was  # noqa: F821
del test_forks_rollbacks_and_imports_share_the_files_and_rows_of_their_episodes  # noqa: F821
del test_removing_one_episode_from_the_middle_writes_no_file_again  # noqa: F821
del test_forgetting_removes_the_episodes_of_a_source_and_keeps_the_others  # noqa: F821
del test_what_is_left_of_a_forgotten_episode_is_found_by_its_bytes  # noqa: F821
del test_episodes_do_not_count_to_what_an_identity_may_weigh  # noqa: F821
del test_an_episode_that_is_damaged_is_refused_and_named_with_whom_it_concerns  # noqa: F821
del test_what_was_lost_is_healed_by_who_writes_it_again  # noqa: F821
del test_a_disk_that_is_full_in_the_middle_of_a_life_loses_nothing  # noqa: F821
del test_a_blob_that_is_lost_is_damage_however_often_it_is_read  # noqa: F821
# These make no store, or one in a file: once is enough.
del test_any_run_of_verbs_leaves_what_a_plain_dictionary_would  # noqa: F821
del test_any_identity_comes_back_from_its_bytes_as_it_was  # noqa: F821
del test_any_event_comes_back_from_its_text_as_it_was  # noqa: F821
del test_events_have_limits  # noqa: F821


def damage(found: IdentityStore, blob: str, data: bytes | None) -> None:
    """Behind the store's back: other bytes under a name, or none."""
    where: Any = found.blobs
    if data is None:
        where._api.delete(where._store, place_of(blob))
    else:
        where._api.put(where._store, place_of(blob), data)


def test_the_blobs_are_in_a_bucket_and_no_file_beside_the_database_holds_one(mara: IdentityStore, tmp_path: Path) -> None:  # noqa: F811
    assert isinstance(mara.blobs, ObjectBlobs)
    assert blobs(mara) == needed(mara, "mara")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert mara.check().problems == []


def test_gc_removes_what_no_commit_names(mara: IdentityStore) -> None:  # noqa: F811
    before = blobs(mara)
    stray = mara.blobs.put(encode(person(77)))
    assert mara.gc().blobs == 0, "what is young may be named in a moment"
    assert [p.grave for p in mara.check().problems] == ["untidy"]
    report = mara.gc(grace=0)
    assert (report.blobs, report.drafts, report.bytes) == (1, 0, len(encode(person(77))))
    assert blobs(mara) == before
    assert stray not in before


@pytest.mark.parametrize("what", ["cut", "flipped", "another's", "gone"])
def test_a_damaged_blob_is_refused_named_and_healed_by_who_writes_it_again(mara: IdentityStore, what: str) -> None:  # noqa: F811
    head, before = mara.head("mara"), mara.log("mara")[1]
    data = mara.blobs.get(head.blob)
    other = {
        "cut": data[:-3],
        "flipped": bytes([data[0] ^ 1]) + data[1:],
        "another's": mara.blobs.get(before.blob),
        "gone": None,
    }
    damage(mara, head.blob, other[what])
    for _ in range(2):
        with pytest.raises(MissingBlobError if what == "gone" else CheckpointError, match="restore it or roll back"):
            mara.load("mara")
    assert head.blob[:12] in str(mara.check())
    assert mara.load(before.id).digest() == before.digest
    mara.blobs.put(data)
    assert mara.load("mara").digest() == head.digest
    assert mara.check().problems == []


@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_damaged_episode_is_refused_and_named(mara: IdentityStore, open_store: Open, what: str) -> None:  # noqa: F811
    episode = mara.load("mara").episodes[-1].digest
    damage(mara, episode, None if what == "gone" else mara.blobs.read(episode)[:-9])
    with open_store() as again:
        with pytest.raises(CheckpointError):
            again.load("mara")
        assert episode[:12] in str(again.check())


def test_what_is_too_large_to_be_a_blob_is_not_read(mara: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("regard.identity.store.object_blobs.LARGEST", 10)
    with pytest.raises(CheckpointError, match="at most 10 are read"):
        mara.load("mara")


def test_who_creates_a_blob_never_changes_one_that_is_there(mara: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    data, modes = encode(person(5)), list[str]()
    blob = mara.blobs.put(data)
    api: Any = mara.blobs._api  # pyright: ignore
    put = api.put
    monkeypatch.setattr(api, "put", lambda *a, **k: (modes.append(k["mode"]), put(*a, **k))[1])
    assert mara.blobs.put(data) == blob
    assert modes == ["create"]
    damage_modes = len(modes)
    put(mara.blobs._store, place_of(blob), b"x")  # pyright: ignore
    assert mara.blobs.put(data) == blob
    assert modes[damage_modes:] == ["create", "overwrite"], "only damage is written over"


def test_a_bucket_that_fails_loses_nothing_and_is_said(mara: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    log = mara.log("mara")
    api: Any = mara.blobs._api  # pyright: ignore

    def broken(*_: object, **__: object) -> None:
        raise api.exceptions.GenericError("no route to host\nDebug source: a long tail")

    for verb in ("put", "head"):
        with monkeypatch.context() as patch:
            patch.setattr(api, verb, broken)
            with pytest.raises(UnreachableError, match="no route to host;") as error:
                test_store.write(mara, "mara", heard("mara", f"lost {verb}"))
        assert "Debug source" not in str(error.value)
        assert mara.log("mara") == log
    with monkeypatch.context() as patch:
        patch.setattr(api, "get", broken)
        with pytest.raises(UnreachableError):
            mara.load("mara")
    test_store.write(mara, "mara", heard("mara", "and on"))
    assert mara.verify("mara") == 5


def test_forgetting_reads_the_whole_prefix_and_says_what_a_bucket_may_keep(mara: IdentityStore) -> None:  # noqa: F811
    where: Any = mara.blobs
    where._api.put(where._store, "notes/old.txt", b"... My cat is called Mochi. ...")
    found = mara.forget("mara", "mara", replay)
    assert found.searched.left == ("old.txt",)
    assert not found.scrubbed
    assert "versions of removed objects" in str(found)
    assert blobs(mara) == needed(mara, "mara")
    where._api.delete(where._store, "notes/old.txt")


def test_a_version_that_the_bucket_kept_is_read_and_told(mara: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """As a bucket with versions answers: what was removed is not there, and is there by its version."""
    api: Any = mara.blobs._api  # pyright: ignore
    get, head, delete, kept = api.get, api.head, api.delete, dict[str, bytes]()

    def remove(at: object, path: str) -> None:
        kept[path] = bytes(get(at, path).bytes())
        delete(at, path)

    class Found:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def stream(self, min_chunk_size: int) -> list[bytes]:
            return [self.data]

    monkeypatch.setattr(api, "head", lambda at, path: {**head(at, path), "version": "v1"})
    monkeypatch.setattr(api, "delete", remove)
    monkeypatch.setattr(api, "get", lambda at, path, options=None: Found(kept[path]) if options else get(at, path))
    found = mara.forget("mara", "theo", replay)
    assert not found.scrubbed
    assert found.searched.left
    assert all("version v1" in name for name in found.searched.left)


def test_a_backup_of_a_bucket_is_a_folder_and_goes_back_into_a_bucket(
    mara: IdentityStore,  # noqa: F811
    tmp_path: Path,
    place: dict[str, str],
) -> None:
    log = mara.log("mara")
    path = mara.backup(tmp_path / "backup")
    assert verified(path).names == 1
    test_store.write(mara, "mara", heard("mara", "later"))
    with pytest.raises(StoreError, match="--replace"):
        restore(path, **place)
    restore(path, **place, replace=True)
    assert mara.log("mara") == log
    assert blobs(mara) == needed(mara, "mara")
    other = {"url": str(tmp_path / "x.db"), "blobs": f"{place['blobs']}-2"}
    restore(path, **other)
    assert check_place(**other).problems == []


def test_a_database_that_was_lost_is_not_taken_for_a_new_one_and_its_blobs_are_kept_aside(
    mara: IdentityStore,  # noqa: F811
    tmp_path: Path,
    place: dict[str, str],
) -> None:
    path, names = mara.backup(tmp_path / "backup"), blobs(mara)
    mara.close()
    Path(place["url"]).write_bytes(b"no database" * 100)
    for side in ("-wal", "-shm"):
        Path(f"{place['url']}{side}").unlink(missing_ok=True)
    assert not check_place(**place).sound
    restore(path, **place, replace=True)
    with IdentityStore(**place) as again:
        assert again.verify("mara") == 4
        assert blobs(again) == names
    Path(place["url"]).unlink()
    with pytest.raises(CheckpointError, match="holds identities of one"):
        IdentityStore(**place)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket", "a whole bucket"), ("s3:///prefix", "no place for blobs"), ("ftp://host/x", "no place for blobs"),
        ("s3://bucket/../x", "no place for blobs"), ("s3://bucket/a//b", "no place for blobs"), ("s3://key:hidden@bucket/x", "environment"),
        ("s3://bucket/x?secret=hidden", "environment"), ("file:///tmp/x", "give a folder"), ("s3://[hidden@/x", "environment"),
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_refused_without_repeating_a_secret(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as error:
        IdentityStore(tmp_path / "x.db", blobs=url)
    assert "hidden" not in str(error.value)
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_bucket_that_is_not_there_is_said_on_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.identity.store.object_blobs.RETRIES", {"max_retries": 0})
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "hidden"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(UnreachableError, match="s3://bucket/people did not answer") as error:
        IdentityStore(tmp_path / "x.db", blobs="s3://bucket/people")
    assert "hidden" not in str(error.value)


def test_two_stores_that_write_one_name_at_once_lose_nothing(store: IdentityStore, open_store: Open) -> None:  # noqa: F811
    import threading

    store.new("mara", Identity.new(BASE))
    errors: list[Exception] = []

    def run(who: int) -> Callable[[], None]:
        def work() -> None:
            try:
                with open_store() as mine:
                    for n in range(6):
                        event = heard(f"w{who}", f"{who}-{n}")
                        mine.update("mara", lambda me, e=event: imprint(me, e), event=event)
            except Exception as error:
                errors.append(error)

        return work

    threads = [threading.Thread(target=run(i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.verify("mara") == 19
    assert len({e.text for e in store.journal("mara") if e.text}) == 18
    assert store.gc(grace=0).blobs == 0
