"""What a store of identities promises, on any database: `test_store_postgres.py` runs all of this again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import BASE, OTHER, heard, imprint, people, person, replay

from regard import CheckpointError, RegardError, StateError
from regard.identity.state import Identity
from regard.identity.store import Commit, Event, IdentityStore, StaleError, StoreError, compare
from regard.identity.store import store as store_module
from regard.identity.store.codec import decode, decode_episode, decode_whole, encode, encode_episode, encode_whole

Open = Callable[[], IdentityStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    return lambda: IdentityStore(tmp_path / "identities.db")


@pytest.fixture
def store(open_store: Open) -> Generator[IdentityStore]:
    with open_store() as found:
        yield found


@pytest.fixture
def mara(store: IdentityStore) -> IdentityStore:
    """A store in which Mara, Theo and Mara again spoke to an identity."""
    store.new("mara", Identity.new(BASE))
    for source, text in (("mara", "I am Mara."), ("theo", "I am Theo."), ("mara", "My cat is called Mochi.")):
        write(store, "mara", heard(source, text))
    return store


def write(store: IdentityStore, name: str, event: Event, **more: str) -> Commit:
    return store.update(name, lambda me: imprint(me, event), event=event, **more)


def blobs(store: IdentityStore) -> set[str]:
    return set(store.blobs.every())


def needed(store: IdentityStore, *names: str) -> set[str]:
    """What the commits of these names are made of: their states, and their episodes."""
    log = [c for name in names for c in store.log(name)]
    return {c.blob for c in log} | {e.digest for c in log for e in store.load(c.id).episodes}


def test_what_is_committed_is_loaded_with_the_same_digest_after_reopening(store: IdentityStore, open_store: Open) -> None:
    for seed in range(3):
        commit = store.new(f"p{seed}", person(seed))
        assert commit.digest == person(seed).digest()
    with open_store() as again:
        for seed in range(3):
            assert again.load(f"p{seed}").digest() == person(seed).digest()
            assert again.load(f"p{seed}", BASE).parent == again.head(f"p{seed}").id
        assert list(again.names()) == ["p0", "p1", "p2"]


@given(people())
def test_any_identity_comes_back_from_its_bytes_as_it_was(identity: Identity) -> None:
    data = encode_whole(identity)
    assert decode_whole(data, "it")[0].digest() == identity.digest()
    assert encode_whole(decode_whole(data, "it")[0]) == data
    state = encode(identity)
    assert decode(state, "it")[0].digest() == replace(identity, episodes=()).digest()
    for one in identity.episodes:
        assert decode_episode(encode_episode(one), one.digest, "it").digest == one.digest


@given(
    st.text(max_size=50), st.dictionaries(st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False))
)
def test_any_event_comes_back_from_its_text_as_it_was(text: str, rule: dict[str, float]) -> None:
    import json

    event = Event("imprint", "someone", text, rule, 3)
    assert Event.read(json.loads(event.body())) == event


def test_texts_with_nul_and_odd_characters_are_kept(store: IdentityStore) -> None:
    store.new("x", Identity.new(BASE))
    text, message = "nul \x00, a half pair \ud800, 日本語, 🐈", "message \x00 ✓"
    commit = write(store, "x", heard("名前", text), message=message)
    assert store.events(commit.id)[0].text == text
    assert store.log("x")[0].message == message
    assert store.head("x").source == "名前"


def test_the_log_is_a_chain_from_the_head_to_the_root(mara: IdentityStore) -> None:
    log = mara.log("mara")
    assert [x.number for x in log] == [3, 2, 1, 0]
    assert [x.parent for x in log] == [x.id for x in log[1:]] + [None]
    assert [x.source for x in log] == ["mara", "theo", "mara", None]
    assert mara.log("mara", limit=2) == log[:2]
    assert mara.verify("mara") == 4
    assert "imprint by mara" in str(log[0])


def test_a_commit_is_found_by_the_beginning_of_its_id(mara: IdentityStore) -> None:
    second = mara.log("mara")[1]
    assert mara.find(second.id[:10]) == second
    assert mara.load(second.id[:10]).digest() == second.digest
    with pytest.raises(StoreError, match="there are mara"):
        mara.load("0000000000")
    with pytest.raises(StoreError, match="cannot name an identity"):
        mara.load("../../etc/passwd")


def test_a_writer_who_started_from_an_older_head_is_refused_and_changes_nothing(mara: IdentityStore) -> None:
    early = mara.load("mara")
    moved = write(mara, "mara", heard("theo", "I was quicker."))
    with pytest.raises(StaleError, match=f"to {moved.id[:12]}"):
        mara.commit("mara", imprint(early, heard("mara", "slow")))
    with pytest.raises(StaleError):
        mara.commit("mara", early, expected=early.parent)
    assert mara.head("mara") == moved
    later = mara.commit("mara", early, expected=moved.id, message="on purpose")
    assert later.parent == moved.id


def test_an_identity_that_was_not_loaded_needs_an_expected_parent(mara: IdentityStore) -> None:
    with pytest.raises(StaleError, match="expected="):
        mara.commit("mara", person())


def test_a_retry_with_the_same_token_does_not_commit_twice(mara: IdentityStore) -> None:
    token, me = uuid.uuid4().hex, mara.load("mara")
    me = imprint(me, heard("mara", "once"))
    first = mara.commit("mara", me, token=token)
    assert mara.commit("mara", me, token=token) == first
    calls: list[int] = []
    assert mara.update("mara", lambda x: (calls.append(1), x)[1], token=token) == first
    assert not calls
    assert mara.head("mara") == first
    with pytest.raises(StoreError, match="another identity"):
        mara.commit("mara", person(5), token=token, expected=first.id)
    with pytest.raises(StoreError, match="8 to 64"):
        mara.commit("mara", me, token="x")


def test_writers_of_one_name_take_turns_and_none_is_lost(open_store: Open, store: IdentityStore) -> None:
    store.new("mara", Identity.new(BASE))

    def speak(who: int) -> None:
        with open_store() as mine:
            for n in range(5):
                # Some of them share one store, as the threads of a server do.
                write(store if who % 2 else mine, "mara", heard(f"w{who}", f"{who} says {n}"))

    threads = [threading.Thread(target=speak, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert store.verify("mara") == 21
    assert store.load("mara").life.experiences == 20
    texts = [e.text for e in store.journal("mara") if e.text]
    assert sorted(texts) == sorted(f"{i} says {n}" for i in range(4) for n in range(5))


def test_update_writes_on_what_a_plain_commit_left_between(mara: IdentityStore, open_store: Open) -> None:
    seen: list[int] = []

    def slowly(me: Identity) -> Identity:
        seen.append(me.life.experiences)
        if len(seen) == 1:
            with open_store() as other:
                other.commit("mara", imprint(other.load("mara"), heard("theo", "between")), event=heard("theo", "between"))
        return imprint(me, heard("mara", "slow"))

    mara.update("mara", slowly, event=heard("mara", "slow"))
    assert seen == [3, 4]
    assert [x.source for x in mara.log("mara")][:2] == ["mara", "theo"]


def test_an_error_in_the_writers_function_leaves_the_head(mara: IdentityStore) -> None:
    before = mara.head("mara")
    with pytest.raises(ZeroDivisionError):
        mara.update("mara", lambda me: 1 / 0)  # pyright: ignore
    assert mara.head("mara") == before
    write(mara, "mara", heard("mara", "and it still writes"))


def test_a_fork_does_not_feel_its_parents_later_writes(mara: IdentityStore) -> None:
    at = mara.fork("mara", "twin")
    before = mara.load("twin").digest()
    write(mara, "mara", heard("mara", "only mara"))
    assert mara.head("twin") == at
    assert mara.load("twin").digest() == before
    write(mara, "twin", heard("theo", "only the twin"))
    assert mara.load("mara").digest() != mara.load("twin").digest()
    assert mara.log("twin")[1:] == mara.log("mara")[1:]


def test_a_fork_can_begin_at_an_older_commit_of_that_name_only(mara: IdentityStore) -> None:
    old = mara.log("mara")[2]
    mara.new("stranger", person(9))
    assert mara.fork("mara", "young", at=old.id) == old
    assert mara.head("young") == old
    with pytest.raises(StoreError, match="not in the history"):
        mara.fork("mara", "wrong", at=mara.head("stranger").id)
    with pytest.raises(StoreError, match="already"):
        mara.fork("mara", "young")


@pytest.mark.parametrize("steps", [True, False])
def test_a_rollback_is_a_new_commit_that_is_byte_equal_to_the_old_one(mara: IdentityStore, steps: bool) -> None:
    log = mara.log("mara")
    back = mara.rollback("mara", 2 if steps else log[2].id)
    assert (back.blob, back.digest, back.kind, back.parent) == (log[2].blob, log[2].digest, "rollback", log[0].id)
    assert mara.load("mara").digest() == mara.load(log[2].id).digest()
    assert mara.log("mara")[1:] == log
    assert mara.rollback("mara", 1).digest == log[0].digest, "a rollback can be rolled back"
    assert mara.verify("mara") == 6


def test_the_journal_leaves_out_what_was_rolled_back(mara: IdentityStore) -> None:
    mara.rollback("mara", 2)
    write(mara, "mara", heard("mara", "after"))
    texts = [e.text for e in mara.journal("mara") if e.kind == "imprint"]
    assert texts == ["I am Mara.", "after"]
    assert replay(Identity.new(BASE), [e for e in mara.journal("mara") if e.text]).digest() == mara.head("mara").digest
    mara.rollback("mara", 2)
    assert [e.text for e in mara.journal("mara") if e.text] == ["I am Mara.", "I am Theo.", "My cat is called Mochi."]


@pytest.mark.parametrize("to", [0, 4, -1, True])
def test_a_rollback_beyond_the_beginning_is_refused(mara: IdentityStore, to: int) -> None:
    with pytest.raises(StoreError, match="3 commits to go back"):
        mara.rollback("mara", to)


def test_a_diff_says_what_changed(mara: IdentityStore) -> None:
    old = mara.log("mara")[2]
    diff = mara.diff(old.id, "mara")
    assert (diff.added, diff.removed, diff.kept, diff.rewritten) == (2, 0, 1, 0)
    assert diff.sources_added == ("theo",)
    assert (diff.experiences, diff.tokens) == (2, 22)
    assert diff.self.cosine is not None
    assert diff.self.cosine < 1
    assert not diff.same
    assert "+2 −0" in str(diff)
    assert "+theo" in str(diff)
    assert mara.diff("mara", "mara").same


def test_a_diff_sees_traces_and_rewritten_imprints() -> None:
    a = person(1)
    b = replace(a, imprints=replace(a.imprints, v=person(2).imprints.v), trace=person(2).trace)
    diff = compare(a, b)
    assert (diff.kept, diff.rewritten) == (3, 3)
    assert diff.trace.cosine is not None
    assert -1 <= diff.trace.cosine < 0.99
    assert diff.trace.before > 0
    with pytest.raises(StateError, match="two models"):
        compare(a, replace(b, base=OTHER))


def test_another_base_is_refused_when_loading_and_when_writing(mara: IdentityStore) -> None:
    with pytest.raises(StateError, match="its weights differ"):
        mara.load("mara", OTHER)
    with pytest.raises(StateError, match="a name of its own"):
        mara.update("mara", lambda me: replace(me, base=OTHER))
    with pytest.raises(StateError, match="a name of its own"):
        mara.commit("mara", replace(mara.load("mara"), base=OTHER))


def test_gc_removes_what_no_commit_names_and_keeps_the_rest(mara: IdentityStore) -> None:
    before = blobs(mara)
    stray = mara.blobs.put(encode(person(77)))
    draft = mara.blobs.folder / ".draft-1-x"
    draft.write_bytes(b"half")
    assert mara.gc().blobs == 0, "what is young may be named in a moment"
    import os

    os.utime(draft, (0, 0))
    report = mara.gc(grace=0)
    assert (report.blobs, report.drafts) == (1, 1)
    assert report.bytes > 4
    assert "1 blobs" in str(report)
    assert blobs(mara) == before == needed(mara, "mara")
    assert stray not in before
    assert not draft.exists()
    assert mara.verify("mara") == 4


def test_a_blob_that_gc_took_from_under_a_writer_is_written_again(mara: IdentityStore) -> None:
    def write_late(me: Identity) -> Identity:
        mara.blobs.put(encode(replace(imprint(me, heard("mara", "late")), parent=None)))
        return imprint(me, heard("mara", "late"))

    encoded = mara.encoded

    def then_collected(identity: Identity) -> bytes:
        data = encoded(identity)
        mara.gc(grace=0)
        return data

    mara.encoded = then_collected  # pyright: ignore
    mara.commit("mara", write_late(mara.load("mara")))
    assert mara.verify("mara") == 5


def test_deleting_a_name_removes_what_no_other_name_needs(mara: IdentityStore) -> None:
    old = mara.log("mara")[2]
    mara.fork("mara", "young", at=old.id)
    assert mara.delete("mara") == 2
    assert list(mara.names()) == ["young"]
    assert mara.verify("young") == 2
    assert blobs(mara) == needed(mara, "young")
    assert len(blobs(mara)) == 3
    assert mara.delete("young") == 2
    assert not blobs(mara)
    with pytest.raises(StoreError, match="there are none yet"):
        mara.head("young")


def test_what_a_crash_kept_from_being_removed_is_removed_on_opening(mara: IdentityStore, open_store: Open) -> None:
    mara.sweep = lambda *_: (0, 0, True)  # pyright: ignore
    mara.delete("mara")
    assert len(blobs(mara)) == 4 + 3
    with open_store() as again:
        assert not blobs(again)


@pytest.mark.parametrize("where", ["out", "out.safetensors"])
def test_an_export_is_imported_as_it_was_with_its_journal(mara: IdentityStore, tmp_path: Path, where: str) -> None:
    mara.rollback("mara", 1)
    path = mara.export("mara", tmp_path / "there" / where)
    back = mara.import_(path, "copy", BASE)
    assert back.digest == mara.head("mara").digest
    assert back.kind == "import"
    assert [e.text for e in mara.journal("copy") if e.text] == ["I am Mara.", "I am Theo."]
    assert mara.verify("copy") == 1
    with pytest.raises(StoreError, match="there already"):
        mara.export("mara", path)
    with pytest.raises(StateError, match="its weights differ"):
        mara.import_(path, "third", OTHER)
    forgotten = mara.forget("copy", "mara", replay)
    assert forgotten.events_kept == 1, "what was imported with its journal can be taken back too"


def test_an_export_is_what_identity_load_reads_and_a_saved_folder_can_be_imported(mara: IdentityStore, tmp_path: Path) -> None:
    mara.export("mara", tmp_path / "out")
    assert Identity.load(tmp_path / "out").digest() == mara.head("mara").digest
    person(4).save(tmp_path / "saved")
    assert mara.import_(tmp_path / "saved", "four").digest == person(4).digest()
    with pytest.raises(StoreError, match="no event tells of"):
        mara.forget("four", "mara", replay)


def test_forgetting_leaves_what_the_others_would_have_written_alone(mara: IdentityStore) -> None:
    before, old = mara.head("mara"), {x.blob for x in mara.log("mara") if x.number}
    theo = next(e for e in mara.journal("mara") if e.source == "theo")
    proof = mara.forget("mara", "mara", replay)
    alone = imprint(Identity.new(BASE), theo)
    assert proof.after == proof.again == mara.head("mara").digest == alone.digest()
    assert proof.before == before.digest
    assert (proof.events_removed, proof.events_kept, proof.commits_removed, proof.forks) == (2, 1, 4, ())
    assert [x.kind for x in mara.log("mara")] == ["forget", "new"]
    assert mara.load("mara").sources == ("theo",)
    assert not blobs(mara) & (old - {mara.head("mara").blob})
    assert [e.text for e in mara.journal("mara") if e.text] == ["I am Theo."]
    assert mara.verify("mara") == 2
    assert "2 events removed, 1 replayed" in str(proof)
    with pytest.raises(StoreError, match="wrote nothing"):
        mara.forget("mara", "mara", replay)
    write(mara, "mara", heard("theo", "and on"))
    assert mara.forget("mara", "theo", replay).events_removed == 2
    assert mara.load("mara").empty


def test_forgetting_reaches_what_was_rolled_back(mara: IdentityStore) -> None:
    mara.rollback("mara", 1)
    proof = mara.forget("mara", "mara", replay)
    assert proof.events_removed == 2
    assert proof.events_kept == 1


def test_forgetting_leaves_forks_alone_and_names_them(mara: IdentityStore) -> None:
    mara.fork("mara", "twin")
    mara.fork("mara", "early", at=mara.log("mara")[3].id)
    twin = mara.log("twin")
    proof = mara.forget("mara", "mara", replay)
    assert proof.forks == ("twin",)
    assert "still in twin" in str(proof)
    assert mara.log("twin") == twin
    assert mara.verify("twin") == 4
    assert mara.verify("early") == 1
    mara.forget("twin", "mara", replay)
    assert mara.verify("early") == 1
    assert mara.forget("twin", "theo", replay).forks == ("mara",)


def test_a_replay_that_is_not_the_same_twice_changes_nothing(mara: IdentityStore) -> None:
    log, count = mara.log("mara"), iter(range(10))

    def restless(me: Identity, events: object) -> Identity:
        return person(next(count), sources=("theo",))

    with pytest.raises(StateError, match="two replays"):
        mara.forget("mara", "mara", restless)
    with pytest.raises(StateError, match="still names 'mara'"):
        mara.forget("mara", "mara", lambda me, events: person(1, sources=("theo", "mara")))
    with pytest.raises(StateError, match="another base"):
        mara.forget("mara", "mara", lambda me, events: Identity.new(OTHER))
    assert mara.log("mara") == log
    assert mara.verify("mara") == 4


def test_a_write_without_an_event_stands_in_the_way_of_forgetting(mara: IdentityStore) -> None:
    mara.update("mara", lambda me: imprint(me, heard("mara", "silent")))
    with pytest.raises(StoreError, match="without an event"):
        mara.forget("mara", "mara", replay)
    mara.rollback("mara", 1)
    assert mara.forget("mara", "mara", replay).events_kept == 1


def test_a_text_that_another_source_repeats_is_reported(mara: IdentityStore) -> None:
    write(mara, "mara", heard("theo", "Mara said: My cat is called Mochi."))
    assert mara.forget("mara", "mara", replay).echoes == 1


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "-x", "a" * 65, "a\n", "a\0b", "ä", "a b", 3, None])
def test_names_that_could_be_paths_or_worse_are_refused(store: IdentityStore, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name an identity"):
        store.new(name, person())
    assert not store.names()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "hack"}, {"source": ""}, {"source": "a\nb"}, {"source": "x" * 257}, {"source": "\ud800"}, {"text": "x" * (1 << 20) + "y"},
        {"text": b"bytes"}, {"rule": {"x": float("nan")}}, {"rule": {"x": object()}}, {"rule": {"x": "y" * (1 << 16)}}, {"rule": []},
        {"seed": 1.5}, {"seed": 1 << 70}, {"time": float("inf")}, {"time": "now"},
    ],
)  # fmt: skip
def test_events_have_limits(wrong: dict[str, object]) -> None:
    with pytest.raises(StoreError):
        Event(**{"kind": "imprint", **wrong})  # pyright: ignore


def test_the_store_has_limits(mara: IdentityStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="4096"):
        mara.rollback("mara", 1, message="x" * 5000)
    with pytest.raises(StoreError, match="at least one"):
        mara.log("mara", limit=0)
    with pytest.raises(StoreError, match="already"):
        mara.new("mara", person())
    monkeypatch.setattr(store_module, "MOST_NAMES", 1)
    with pytest.raises(StoreError, match="limit"):
        mara.new("one-more", person())
    monkeypatch.setattr("regard.identity.store.codec.LARGEST", 100)
    with pytest.raises(StoreError, match="drop imprints"):
        mara.update("mara", lambda me: me)


def test_an_identity_that_would_not_come_back_the_same_is_refused(mara: IdentityStore) -> None:
    with pytest.raises(StateError, match=r"whole numbers|would not be read back"):
        mara.update("mara", lambda me: replace(me, life=replace(me.life, experiences="many")))  # pyright: ignore
    assert mara.verify("mara") == 4


def test_a_newer_schema_is_refused(store: IdentityStore, open_store: Open) -> None:
    from sqlalchemy import text

    with store.db.write() as c:
        c.execute(text("UPDATE identity_schema SET version = 9"))
    with pytest.raises(StoreError, match="has schema 9"):
        open_store()


@pytest.mark.parametrize(
    ("column", "table", "word"),
    [("body", "identity_commits", "its hash differs"), ("body", "identity_events", "their hash differs")],
)
def test_a_record_that_was_tampered_with_is_noticed(mara: IdentityStore, column: str, table: str, word: str) -> None:
    from sqlalchemy import text

    with mara.db.write() as c:
        c.execute(text(f"UPDATE {table} SET {column} = replace({column}, 'mara', 'eve1')"))
    with pytest.raises(CheckpointError, match=word):
        mara.verify("mara")


@settings(max_examples=8)
@given(st.data())
def test_any_run_of_verbs_leaves_what_a_plain_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Names to lists of digests: the plain twin of a store."""
    twin: dict[str, list[str]] = {}
    names = st.sampled_from(["a", "b", "c"])
    with IdentityStore(tmp_path_factory.mktemp("any") / "x.db") as store:
        for step in range(data.draw(st.integers(5, 14))):
            verb, x, y = data.draw(
                st.tuples(st.sampled_from(["new", "write", "fork", "rollback", "delete", "gc"]), names, names)
            )
            try:
                if verb == "new":
                    store.new(x, Identity.new(BASE))
                    twin[x] = [Identity.new(BASE).digest()]
                elif verb == "write":
                    digest = write(store, x, heard(y, f"step {step}")).digest
                    twin[x].append(digest)
                elif verb == "fork":
                    store.fork(x, y)
                    twin[y] = list(twin[x])
                elif verb == "rollback":
                    steps = data.draw(st.integers(1, 3))
                    store.rollback(x, steps)
                    twin[x].append(twin[x][-1 - steps])
                elif verb == "delete":
                    store.delete(x)
                    del twin[x]
                else:
                    store.gc(grace=0)
            except RegardError:
                refused = {"new": x in twin, "fork": x not in twin or y in twin, "rollback": True}
                assert refused.get(verb, x not in twin)
            assert {n: [c.digest for c in reversed(store.log(n))] for n in store.names()} == twin
        assert blobs(store) == needed(store, *twin)
        for n in twin:
            store.verify(n)
