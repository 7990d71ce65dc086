"""Episodes in a store: each is written once, shared by all that hold it, and gone when nobody does; `test_store_postgres.py` runs this again."""

# ruff: noqa: F811

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from lives import episode
from stored import BASE, heard, imprint, person, replay, said
from test_store import Open, blobs, mara, needed, open_store, store, write  # noqa: F401

from regard import CheckpointError, StateError
from regard.identity.episodes import Episode
from regard.identity.packed import Packed
from regard.identity.state import Identity, Recollection
from regard.identity.store import IdentityStore, StaleError, StoreError, compare
from regard.identity.store.cache import EpisodeCache
from regard.identity.store.codec import encode_episode
from regard.identity.store.records import rows_of


def with_episodes(count: int, *, first: int = 0, source: str = "mara") -> Identity:
    return replace(
        Identity.new(BASE), sources=(source,), episodes=tuple(episode(first + i, source=source) for i in range(count))
    )


def files(store: IdentityStore) -> dict[str, int]:
    """Every blob, and when it was written."""
    return {p.stem: p.stat().st_mtime_ns for p in store.blobs.folder.glob("*/*.safetensors")}


def row_count(store: IdentityStore) -> int:
    with store.db.read() as c:
        return len(store.db.episode_rows(c))


def add(store: IdentityStore, name: str, *new: Episode) -> None:
    def longer(me: Identity) -> Identity:
        sources = tuple(dict.fromkeys((*me.sources, *(e.source for e in new))))
        return replace(me, sources=sources, episodes=(*me.episodes, *new))

    store.update(name, longer)


def test_a_commit_writes_what_is_new_and_leaves_the_rest_as_it_was(store: IdentityStore) -> None:
    store.new("mara", with_episodes(40))
    before, rows = files(store), row_count(store)
    assert (len(before), rows) == (41, 40)
    one = episode(99, source="mara")
    add(store, "mara", one)
    after = files(store)
    assert set(after) - set(before) == {one.digest}, "and the state is the same"
    lived = {e.digest for e in store.load("mara").episodes[:-1]}
    assert {k: after[k] for k in lived} == {k: before[k] for k in lived}
    assert row_count(store) == 41
    head = store.head("mara")
    assert head.episodes == 41
    assert head.bytes == store.log("mara")[1].bytes, "a state is as large as it was, however long the life"
    assert [e.digest for e in store.load("mara").episodes][-1] == one.digest


def test_forks_rollbacks_and_imports_share_the_files_and_rows_of_their_episodes(
    store: IdentityStore,
    tmp_path: Path,
) -> None:
    store.new("mara", with_episodes(10))
    add(store, "mara", episode(50, source="mara"))
    before, rows = files(store), row_count(store)
    store.fork("mara", "twin")
    store.rollback("mara", 1)
    store.import_(store.export("twin", tmp_path / "out"), "carried")
    assert set(files(store)) == set(before)
    assert row_count(store) == rows == 11
    add(store, "twin", episode(51, source="mara"))
    add(store, "carried", episode(52, source="mara"))
    assert row_count(store) == 13
    assert [len(store.load(n).episodes) for n in ("mara", "twin", "carried")] == [10, 12, 12]
    assert [store.verify(n) for n in ("mara", "twin", "carried")] == [3, 3, 2]
    assert store.check().problems == []


def test_what_was_rolled_back_stays_and_what_was_deleted_goes(store: IdentityStore) -> None:
    store.new("mara", with_episodes(3))
    store.fork("mara", "twin")
    later = episode(50, source="mara")
    add(store, "mara", later)
    store.rollback("mara", 1)
    store.gc(grace=0)
    assert later.digest in blobs(store), "a rollback can be rolled back"
    store.rollback("mara", 1)
    assert store.load("mara").episodes[-1].digest == later.digest
    store.delete("mara")
    assert blobs(store) == needed(store, "twin")
    assert later.digest not in blobs(store)
    assert row_count(store) == 3
    store.delete("twin")
    assert blobs(store) == set()
    assert row_count(store) == 0


def test_an_episode_that_stands_twice_in_a_life_or_in_two_orders_comes_back_so(store: IdentityStore) -> None:
    a, b = (episode(i, source="mara") for i in range(2))
    for n, order in enumerate([(a, a, b), (b, a, a), (a, b, a)]):
        store.new(f"p{n}", replace(with_episodes(0), episodes=order))
        assert [e.digest for e in store.load(f"p{n}").episodes] == [e.digest for e in order]
    assert len({store.head(f"p{n}").digest for n in range(3)}) == 3
    assert {a.digest, b.digest} <= blobs(store)
    store.delete("p0")
    assert [store.verify(f"p{n}") for n in (1, 2)] == [1, 1]


def test_removing_one_episode_from_the_middle_writes_no_file_again(store: IdentityStore) -> None:
    store.new("mara", with_episodes(9))
    before = set(files(store))
    store.update("mara", lambda me: replace(me, episodes=me.episodes[:4] + me.episodes[5:]))
    assert set(files(store)) == before, "the state is the same, and the episodes are there"
    assert row_count(store) == 9 + 4
    assert len(store.load("mara").episodes) == 8
    assert store.verify("mara") == 2


def test_forgetting_removes_the_episodes_of_a_source_and_keeps_the_others(mara: IdentityStore) -> None:
    theirs = [e for e in mara.load("mara").episodes if e.source == "mara"]
    assert len(theirs) == 2
    proof = mara.forget("mara", "mara", replay)
    left = mara.load("mara").episodes
    assert [e.source for e in left] == ["theo"]
    assert blobs(mara) == needed(mara, "mara")
    assert not blobs(mara) & {e.digest for e in theirs}
    assert not any(mara.cached_episodes.get(e.digest) for e in theirs), "nor in memory"
    assert row_count(mara) == 1
    assert proof.scrubbed
    tokens, keys = theirs[1].tokens.numpy().tobytes(), theirs[1].keys.codes.numpy().tobytes()
    held = [p.name for p in mara.blobs.folder.parent.rglob("*") if p.is_file() and p.stem not in needed(mara, "mara")]
    folder = mara.blobs.folder.parent
    assert not [p for p in folder.rglob("*") if p.is_file() and (tokens in p.read_bytes() or keys in p.read_bytes())], held


@pytest.mark.parametrize("part", ["whole", "tokens", "keys", "meaning", "k", "v"])
def test_what_is_left_of_a_forgotten_episode_is_found_by_its_bytes(store: IdentityStore, part: str) -> None:
    store.new("mara", Identity.new(BASE))
    write(store, "mara", heard("theo", "I am Theo."))
    event = heard("secret", "my password is Wintergreen")

    def meant(me: Identity) -> Identity:
        *before, last = imprint(me, event).episodes
        size = len(last), BASE.depth, BASE.key_heads, BASE.head_width
        k, v = (Packed.of(torch.randn(size, generator=torch.Generator().manual_seed(n))) for n in range(2))
        last = replace(last, meaning=episode(1, width=64).keys.pick(index, 0), encoder="an encoder", k=k, v=v)
        return replace(imprint(me, event), episodes=(*before, last))

    import torch

    index = torch.zeros(1, dtype=torch.int64)
    store.update("mara", meant, event=event)
    last = store.load("mara").episodes[-1]
    assert last.meaning is not None
    assert last.k is not None
    assert last.v is not None
    pieces = {
        "k": last.k.codes,
        "v": last.v.codes,
        "tokens": last.tokens,
        "keys": last.keys.codes[3:],
        "meaning": last.meaning.codes,
    }
    data = encode_episode(last) if part == "whole" else pieces[part].numpy().tobytes()
    (store.blobs.folder / "copy.bin").write_bytes(b"..." + data + b"...")
    proof = store.forget("mara", "secret", replay)
    assert proof.searched.left == ("copy.bin",)
    assert not proof.scrubbed


def test_who_comes_too_late_does_not_bring_back_what_was_forgotten(mara: IdentityStore, open_store: Open) -> None:
    with open_store() as other:
        late = imprint(other.load("mara"), heard("mara", "My cat is called Mochi, and my dog Rex."))
        mara.forget("mara", "mara", replay)
        left = blobs(mara)
        with pytest.raises(StaleError):
            other.commit("mara", late)
    assert blobs(mara) == left == needed(mara, "mara")


def test_a_name_that_holds_only_the_episodes_of_a_source_is_told(mara: IdentityStore, tmp_path: Path) -> None:
    mara.load("mara").only("episodes").save(tmp_path / "saved")
    mara.import_(tmp_path / "saved", "carried")
    stranger = replace(with_episodes(0), episodes=(said(heard("mara", "Quite another."), 0),))
    mara.new("stranger", stranger)
    assert mara.forget("mara", "mara", replay).forks == ("carried",)


def test_an_identity_that_is_read_for_one_prompt_is_not_committed(mara: IdentityStore) -> None:
    def recalled(me: Identity) -> Recollection:
        return Recollection(me.base, me.self, me.trace, me.imprints, me.sources, me.life, me.parent, me.episodes, chosen=(0,))

    before = mara.head("mara")
    with pytest.raises(StateError, match="made for one prompt, and is not committed"):
        mara.update("mara", recalled)
    with pytest.raises(StateError, match="made for one prompt"):
        mara.new("second", recalled(mara.load("mara")))
    assert mara.head("mara") == before


def test_a_diff_says_which_episodes_came_and_went(mara: IdentityStore) -> None:
    old = mara.log("mara")[2]
    diff = mara.diff(old.id, "mara")
    assert [e.source for e in diff.episodes_added] == ["theo", "mara"]
    assert (diff.episodes_removed, diff.episodes_kept) == ((), 1)
    assert diff.episodes_added[0].tokens == len("I am Theo.")
    assert "+2 −0, 1 kept: +1 by theo, +1 by mara" in str(diff)
    back = mara.diff("mara", old.id)
    assert [e.digest for e in back.episodes_removed] == [e.digest for e in diff.episodes_added]
    me = with_episodes(2)
    assert not compare(me, replace(me, episodes=me.episodes[:1])).same
    assert compare(me, replace(me, episodes=me.episodes * 2)).episodes_added == compare(with_episodes(0), me).episodes_added
    assert compare(me, me).same


@pytest.mark.parametrize("where", ["out", "out.safetensors"])
def test_an_export_carries_the_episodes(mara: IdentityStore, tmp_path: Path, where: str) -> None:
    path = mara.export("mara", tmp_path / where)
    mara.import_(path, "copy")
    assert [e.digest for e in mara.load("copy").episodes] == [e.digest for e in mara.load("mara").episodes]
    if path.is_dir():
        assert Identity.load(path).digest() == mara.head("mara").digest


def test_a_life_too_long_for_the_header_of_one_file_is_exported_as_a_folder(
    mara: IdentityStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regard.identity.store.exchange.MOST_HEADER", 1000)
    with pytest.raises(StoreError, match="too long for one file; export a folder"):
        mara.export("mara", tmp_path / "out.safetensors")
    mara.import_(mara.export("mara", tmp_path / "out"), "copy")
    assert mara.head("copy").episodes == 3


def test_episodes_do_not_count_to_what_an_identity_may_weigh(
    store: IdentityStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = with_episodes(30)
    for module in ("codec", "folder_blobs", "exchange"):
        monkeypatch.setattr(f"regard.identity.store.{module}.LARGEST", 2000)
    assert sum(e.nbytes for e in me.episodes) > 2000
    store.new("long", me)
    assert store.load("long").digest() == me.digest()


def test_episodes_are_read_from_their_files_once(
    mara: IdentityStore, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store() as again:
        first = again.load("mara")
        reads: list[str] = []
        read = again.blobs.read
        monkeypatch.setattr(again.blobs, "read", lambda blob: (reads.append(blob), read(blob))[1])
        second = again.load("mara")
        assert reads == [again.head("mara").blob]
        assert [a is b for a, b in zip(first.episodes, second.episodes, strict=True)] == [True] * 3
        write(mara, "mara", heard("theo", "and on"))
        reads.clear()
        assert len(again.load("mara").episodes) == 4
        assert len(reads) == 2, "the state, and what is new"


def test_what_is_in_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    some = [episode(2 * i) for i in range(4)]
    cache = EpisodeCache(3 * some[0].nbytes)
    for e in some[:3]:
        cache.add(e)
    assert cache.get(some[0].digest) is some[0]
    cache.add(some[3])
    assert [cache.get(e.digest) is e for e in some] == [True, False, True, True]
    cache.add(some[3])
    cache.drop(some[1].digest)
    assert cache.bytes == 3 * some[0].nbytes
    cache.drop(some[0].digest)
    assert (len(cache), cache.bytes) == (2, 2 * some[0].nbytes)
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


@pytest.mark.parametrize("damage", ["cut", "gone", "another's", "a state's", "a link", "a folder", "flipped"])
def test_an_episode_that_is_damaged_is_refused_and_named_with_whom_it_concerns(
    mara: IdentityStore,
    open_store: Open,
    tmp_path: Path,
    damage: str,
) -> None:
    mara.fork("mara", "twin")
    mara.fork("mara", "young", at=mara.log("mara")[2].id)
    mara.new("alone", person(3))
    first, hurt, _ = mara.load("mara").episodes
    path = mara.blobs.path(hurt.digest)
    data = path.read_bytes()
    path.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a folder":
        path.mkdir()
    elif damage != "gone":
        state = mara.blobs.get(mara.head("mara").blob)
        flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        others = {"cut": data[:-5], "another's": mara.blobs.read(first.digest), "a state's": state, "flipped": flipped}
        path.write_bytes(others[damage])
    second = mara.log("mara")[1]
    with open_store() as again:
        for name in ("mara", "twin"):
            with pytest.raises(CheckpointError, match=hurt.digest):
                again.load(name)
        assert len(again.load("young").episodes) == 1
        assert len(again.load("alone").episodes) == 2
        report = again.check()
        [problem] = [p for p in report.problems if p.grave == "lost"]
        assert problem.where == f"episode {hurt.digest[:12]}"
        assert f"(in mara, twin: commit {second.id[:12]}, {mara.head('mara').id[:12]})" in problem.what
        assert f"roll back to before commit {second.id[:12]}" in problem.todo
        assert not report.sound
        with pytest.raises(CheckpointError):
            again.backup(tmp_path / "backup")
        assert len(again.load(again.rollback("mara", 2).id).episodes) == 1
    with pytest.raises(CheckpointError):
        mara.verify("twin")


def test_what_was_lost_is_healed_by_who_writes_it_again(store: IdentityStore) -> None:
    store.new("mara", with_episodes(3))
    path = store.blobs.path(store.load("mara").episodes[1].digest)
    path.write_bytes(b"damaged")
    store.new("again", replace(with_episodes(3), episodes=with_episodes(3).episodes[1:]))
    assert store.verify("mara") == 1


def test_a_writer_who_is_killed_between_the_files_and_the_rows_leaves_nothing_that_counts(
    mara: IdentityStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, log = blobs(mara), mara.log("mara")
    event = heard("theo", "never said")
    for at in ("insert_rows", "insert", "move"):

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(mara.db, at, die)
            with pytest.raises(KeyboardInterrupt):
                write(mara, "mara", event)
        assert mara.log("mara") == log
        assert row_count(mara) == 3
    assert len(blobs(mara) - before) == 2, "a state and an episode that nothing names"
    assert mara.check().sound
    assert mara.gc().blobs == 0, "what is young may be named in a moment"
    assert mara.gc(grace=0).blobs == 2
    assert blobs(mara) == before
    write(mara, "mara", event)
    assert mara.verify("mara") == 5


def test_an_episode_that_gc_took_from_under_a_writer_is_written_again(mara: IdentityStore) -> None:
    encoded = mara.encoded

    def then_collected(identity: Identity) -> bytes:
        data = encoded(identity)
        assert mara.gc(grace=0).blobs == 2
        return data

    mara.encoded = then_collected  # pyright: ignore
    mara.commit("mara", imprint(mara.load("mara"), heard("mara", "late")))
    assert mara.verify("mara") == 5


def test_a_list_that_was_removed_while_it_was_being_extended_is_written_again(mara: IdentityStore, open_store: Open) -> None:
    """The rows that a writer saw are gone when it commits: it writes them all."""
    me = replace(mara.load("mara"), parent=None)
    encoded = mara.encoded

    def then_deleted(identity: Identity) -> bytes:
        data = encoded(identity)
        with open_store() as other:
            other.delete("mara")
            assert row_count(other) == 0
        return data

    mara.encoded = then_deleted  # pyright: ignore
    mara.new("second", imprint(me, heard("mara", "late")))
    assert mara.head("second").episodes == row_count(mara) == 4
    assert mara.verify("second") == 1
    assert blobs(mara) == needed(mara, "second")


def test_writers_who_add_the_same_episodes_to_many_names_at_once_share_them(store: IdentityStore, open_store: Open) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def live(who: int) -> None:
        try:
            with open_store() as mine:
                start.wait()
                mine.new(f"p{who}", with_episodes(2))
                for n in range(6):
                    add(mine, f"p{who}", episode(100 + n, source="mara"))
                if who == 3:
                    mine.delete("p3")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert row_count(store) == 8
    assert [store.verify(f"p{i}") for i in range(3)] == [7] * 3
    assert {store.head(f"p{i}").last_episode for i in range(3)} == {
        rows_of(tuple(e.digest for e in store.load("p0").episodes))[-1].id
    }
    assert blobs(store) == needed(store, "p0", "p1", "p2")
    assert store.check().problems == []


WRONG = {
    "a row that was removed": "DELETE FROM identity_episodes WHERE number = 2",
    "a row that was changed": "UPDATE identity_episodes SET blob = 'ab' WHERE number = 1",
    "a row in another place": "UPDATE identity_episodes SET number = 7 WHERE number = 1",
    "a row of nobody's": "INSERT INTO identity_episodes SELECT 'ff', NULL, 0, blob FROM identity_episodes WHERE number = 1",
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_not_as_they_were_written_are_refused(mara: IdentityStore, what: str) -> None:
    from sqlalchemy import text

    kept = blobs(mara)
    with mara.db.write() as c:
        assert c.execute(text(WRONG[what])).rowcount == 1
    for read in (lambda: mara.verify("mara"), lambda: mara.gc(grace=0)):
        with pytest.raises(CheckpointError):
            read()
    report = mara.check()
    assert not report.sound
    assert any("episode" in f"{p.where} {p.what}" for p in report.problems)
    assert blobs(mara) == kept, "what cannot be read may still be restored"


def test_a_store_that_is_read_only_reads_episodes(mara: IdentityStore, place: dict[str, str] | None) -> None:
    where = place or {"url": str(mara.db.file)}
    with IdentityStore(**where, read_only=True) as reader:
        assert [e.digest for e in reader.load("mara").episodes] == [e.digest for e in mara.load("mara").episodes]
        assert reader.verify("mara") == 4
        with pytest.raises(StoreError, match="read only"):
            reader.commit("mara", imprint(reader.load("mara"), heard("mara", "more")))


def test_a_disk_that_is_full_in_the_middle_of_a_life_loses_nothing(
    store: IdentityStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.new("mara", with_episodes(2))
    before, count, real = store.log("mara"), iter(range(100)), os.replace

    def full(a: Path, b: Path) -> None:
        if next(count) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StoreError, match="No space left"):
            add(store, "mara", *(episode(50 + i, source="mara") for i in range(6)))
    assert store.log("mara") == before
    assert row_count(store) == 2
    add(store, "mara", *(episode(50 + i, source="mara") for i in range(6)))
    assert store.verify("mara") == 2


@pytest.fixture
def place() -> dict[str, str] | None:
    """Where the store is, for who opens it otherwise; None for a file."""
    return None
