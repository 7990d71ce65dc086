"""Every promise of `test_store.py` and of `test_store_crash.py` again, on a real PostgreSQL server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
import test_store
from test_store import *  # noqa: F403
from test_store import Open, heard, imprint, mara, person, replay, store  # noqa: F401
from test_store_crash import Drive, drive  # noqa: F401
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

from regard.identity.state import Identity
from regard.identity.store import IdentityStore, StoreError
from regard.identity.store.restore import restore, verified
from regard.identity.store.schema import newest

SERVER = os.environ.get("REGARD_TEST_POSTGRES", "")
if not SERVER:
    pytest.skip(
        "REGARD_TEST_POSTGRES names no PostgreSQL server, such as postgresql+psycopg://user@localhost/postgres; .ci/run starts one",
        allow_module_level=True,
    )
# These make their own store in a file, or none at all: once is enough.
del test_any_run_of_verbs_leaves_what_a_plain_dictionary_would  # noqa: F821
del test_any_identity_comes_back_from_its_bytes_as_it_was  # noqa: F821
del test_any_event_comes_back_from_its_text_as_it_was  # noqa: F821
del test_events_have_limits  # noqa: F821
# Here the name's row is locked while `update` runs, so that a plain commit waits: the last test below.
del test_update_writes_on_what_a_plain_commit_left_between  # noqa: F821


@pytest.fixture
def place(tmp_path: Path) -> Generator[dict[str, str]]:
    """A database of its own for each test."""
    from sqlalchemy import create_engine, make_url, text

    name = f"regard_{uuid.uuid4().hex}"
    server = create_engine(SERVER, isolation_level="AUTOCOMMIT")
    with server.connect() as c:
        c.execute(text(f"CREATE DATABASE {name}"))
    url = make_url(SERVER).set(database=name).render_as_string(hide_password=False)
    yield {"url": url, "blobs": str(tmp_path / "store" / "blobs")}
    with server.connect() as c:
        c.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()


@pytest.fixture
def open_store(place: dict[str, str]) -> Open:
    return lambda: IdentityStore(**place)


def test_the_store_is_in_postgresql(open_store: Open) -> None:
    with open_store() as found:
        assert not found.db.lite
        with found.db.read() as c:
            assert "PostgreSQL" in str(c.exec_driver_sql("SELECT version()").scalar())


def test_eight_writers_of_fifty_commits_each_all_land_in_one_chain(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="writers", place=place, count=8, commits=50)
    assert found["errors"] == []
    assert found["lost"] == []
    counts = [found[k] for k in ("acknowledged", "commits", "experiences", "texts", "episodes")]
    assert counts == [400, 401, 400, 400, 400]


def test_many_processes_may_open_a_new_store_at_once(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    assert drive(do="opening", place=place, count=8) == {"errors": [], "names": 8}


def test_fifty_kills_lose_no_acknowledged_commit_and_repeat_none(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="crash", place=place, kills=50, seed=3)
    assert (found["errors"], found["lost"], found["twice"], found["episodes"]) == ([], [], 0, 0)
    assert found["acknowledged"] > 25
    assert found["acknowledged"] + 1 <= found["commits"] <= found["acknowledged"] + 51


def test_a_kill_while_forgetting_leaves_the_old_history_or_the_new_one(drive: Drive, place: dict[str, str]) -> None:  # noqa: F811
    found = drive(do="forgetting", place=place, kills=10, seed=4)
    assert found["errors"] == []
    assert (found["missing"], found["stray"], found["left"]) == (0, 0, [])


def test_a_server_that_is_not_there_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="did not answer"):
        IdentityStore("postgresql://nobody:secret-word@127.0.0.1:9/none", blobs=tmp_path)
    with pytest.raises(StoreError) as error:
        IdentityStore("postgres://nobody:secret-word@127.0.0.1:9/none", blobs=tmp_path)
    assert "secret-word" not in str(error.value)


def test_a_connection_that_broke_is_replaced(mara: IdentityStore) -> None:  # noqa: F811
    from sqlalchemy import text

    with mara.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
        own = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        c.execute(text(own))
    event = heard("mara", "again")
    mara.update("mara", lambda me: imprint(me, event), event=event)
    assert mara.verify("mara") == 5


def test_a_plain_commit_waits_for_an_update_and_is_then_stale(mara: IdentityStore, open_store: Open) -> None:  # noqa: F811
    import threading

    started, stale = threading.Event(), list[bool]()

    def intrude() -> None:
        with open_store() as other:
            me = other.load("mara")
            started.set()
            try:
                other.commit("mara", imprint(me, heard("theo", "between")))
            except test_store.StaleError:
                stale.append(True)

    def slowly(me: Identity) -> Identity:
        intruder.start()
        started.wait(20)
        return imprint(me, heard("mara", "slow"))

    intruder = threading.Thread(target=intrude)
    mara.update("mara", slowly, event=heard("mara", "slow"))
    intruder.join()
    assert stale == [True]
    assert mara.verify("mara") == 5


def test_a_forgetting_rewrites_the_tables_and_says_what_the_server_may_keep(mara: IdentityStore) -> None:  # noqa: F811
    found = mara.forget("mara", "mara", replay)
    assert found.scrubbed
    assert "write-ahead log" in str(found)
    assert "archives" in str(found)
    with mara.db.read() as c:
        assert mara.db.doomed(c) == []


def test_rows_that_an_old_snapshot_may_look_at_are_not_called_gone_and_nobody_waits_for_it(
    mara: IdentityStore,  # noqa: F811
    open_store: Open,
) -> None:
    from sqlalchemy import text

    with open_store() as old, old.db.read() as c:
        c.execute(text("SELECT 1 FROM identity_schema"))
        assert not mara.forget("mara", "mara", replay).scrubbed
        assert mara.verify("mara") == 2
    with open_store() as again:
        assert again.check().problems == [], "the next opening finishes it"


def test_a_backup_of_a_server_goes_into_a_file_and_back(mara: IdentityStore, tmp_path: Path, place: dict[str, str]) -> None:  # noqa: F811
    mara.rollback("mara", 1)
    mara.fork("mara", "twin")
    log = mara.log("mara")
    path = mara.backup(tmp_path / "backup")
    assert verified(path).names == 2
    restore(path, tmp_path / "x.db")
    with IdentityStore(tmp_path / "x.db") as store:  # noqa: F811
        assert store.log("mara") == log
    heard_later = heard("mara", "later")
    mara.update("mara", lambda me: imprint(me, heard_later), event=heard_later)
    with pytest.raises(StoreError, match="--replace"):
        restore(path, **place)
    restore(path, **place, replace=True)
    assert mara.log("mara") == log
    assert mara.check().problems == []


def test_a_server_that_is_read_only_is_read(mara: IdentityStore, place: dict[str, str]) -> None:  # noqa: F811
    from sqlalchemy import delete

    from regard.identity.store.schema import names

    with IdentityStore(**place, read_only=True) as reader:
        assert reader.verify("mara") == 4
        with pytest.raises(StoreError, match="read only"):
            reader.delete("mara")
        with pytest.raises(StoreError, match="read-only transaction"), reader.db.errors(), reader.db.engine.begin() as c:
            c.execute(delete(names))


@pytest.mark.parametrize("number", [1, 2])
def test_a_server_of_an_older_schema_is_upgraded(store: IdentityStore, open_store: Open, number: int) -> None:  # noqa: F811
    from sqlalchemy import text

    for seed in range(2):
        store.new(f"p{seed}", person(seed, episodes=0))
    log = store.log("p1")
    with store.db.write() as c:
        c.execute(text("DROP TABLE identity_episodes"))
        if number == 1:
            c.execute(text("DROP TABLE identity_seals"))
        c.execute(text(f"UPDATE identity_schema SET version = {number}"))
    with open_store() as again:
        assert again.log("p1") == log
        assert again.check().problems == []
        with again.db.read() as c:
            assert c.scalar(text("SELECT max(version) FROM identity_schema")) == newest()
        event = heard("mara", "and on")
        again.update("p1", lambda me: imprint(me, event), event=event)
        assert len(again.load("p1").episodes) == 1
