"""What people said is nobody else's to read, no password is ever said, and a store that may not be written is read."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Generator
from pathlib import Path

import pytest
from stored import BASE, heard, imprint, person

from regard.files import DRAFT, _host, sweep  # pyright: ignore
from regard.identity.state import Identity
from regard.identity.store import IdentityStore, StoreError
from regard.identity.store.location import locate, shown

SECRET = "hunter2secret"


@pytest.fixture(autouse=True)
def open_umask() -> Generator[None]:
    """Everything that is made without care can be read by all."""
    old = os.umask(0)
    yield
    os.umask(old)


def modes(folder: Path) -> dict[str, int]:
    """Whatever others may do with anything below a folder."""
    return {
        str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode)
        for p in folder.rglob("*")
        if stat.S_IMODE(p.stat().st_mode) & 0o077
    }


def with_mara(file: Path) -> IdentityStore:
    store = IdentityStore(file)
    store.new("mara", Identity.new(BASE))
    event = heard("mara", "My cat is called Mochi.")
    store.update("mara", lambda me: imprint(me, event), event=event)
    return store


def test_all_files_of_a_store_are_their_owners_alone_wherever_it_is(tmp_path: Path) -> None:
    with with_mara(tmp_path / "deep" / "er" / "x.db") as store:
        store.export("mara", tmp_path / "out" / "folder")
        store.export("mara", tmp_path / "single" / "mara.safetensors")
        store.backup(tmp_path / "backups" / "monday")
        person(1).save(tmp_path / "saved")
        assert (tmp_path / "deep" / "er" / "x.db-wal").exists()
        assert modes(tmp_path) == {}


def test_a_folder_that_was_there_is_left_as_it_is_and_the_files_in_it_are_private(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    (shared / "blobs").mkdir(mode=0o777)
    with IdentityStore(shared / "x.db", blobs=shared / "blobs") as store:
        store.new("mara", person(1))
        assert modes(tmp_path) == {"shared": 0o777, "shared/blobs": 0o777}


def test_a_database_that_an_older_version_left_open_is_closed_to_others(tmp_path: Path) -> None:
    with_mara(tmp_path / "x.db").close()
    (tmp_path / "x.db").chmod(0o644)
    with IdentityStore(tmp_path / "x.db", read_only=True) as store:
        problem = store.check().problems[0]
        assert (problem.where, problem.grave) == ("x.db", "untidy")
    with IdentityStore(tmp_path / "x.db"):
        assert modes(tmp_path) == {}


def test_a_database_with_other_tables_is_left_as_its_owner_keeps_it(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "x.db") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    (tmp_path / "x.db").chmod(0o640)
    with IdentityStore(tmp_path / "x.db"):
        assert stat.S_IMODE((tmp_path / "x.db").stat().st_mode) == 0o640


URLS = {
    "beside the user": "postgresql://user:{}@127.0.0.1:9/db",
    "in the query": "postgresql://user@127.0.0.1:9/db?password={}",
    "in both": "postgresql://user:{}@127.0.0.1:9/db?password={}x",
    "in an unknown option": "postgresql://user:{}@127.0.0.1:9/db?nonsense=1",
    "of a key": "postgresql://user@127.0.0.1:9/db?sslpassword={}",
    "one slash": "postgresql:/user:{}@127.0.0.1/db",
    "no slash": "postgresql:user:{}@127.0.0.1/db",
    "no scheme": "user:{}@127.0.0.1/db",
    "words": "host=127.0.0.1 password={} dbname=x",
    "a port that is none": "postgresql://127.0.0.1:{}/db",
    "no host": "postgresql+psycopg://user:{}@/db:/x",
    "another database": "mysql://user:{}@127.0.0.1/db",
    "another driver": "postgresql+nonsense://user:{}@127.0.0.1:9/db",
    "an odd scheme": "post gresql://user:{}@127.0.0.1/db",
    "an @ in it": "postgresql://user:p@{}@127.0.0.1:9/db",
    "an @ and a slash in it": "postgresql://user:p@{}/x@127.0.0.1:9/db",
    "no scheme and one letter": "u:{}@127.0.0.1/db",
    "brackets": "postgresql://user:{}@[::1/db",
}


@pytest.mark.parametrize("where", URLS)
def test_a_password_is_in_no_error_no_traceback_and_no_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    with pytest.raises(StoreError) as caught:
        IdentityStore(URLS[where].replace("{}", SECRET))
    said = "".join(traceback.format_exception(caught.value))
    context = repr(caught.value.__context__) + str(caught.value.__context__)
    assert SECRET not in said + repr(caught.value) + context
    assert [str(p) for p in tmp_path.rglob("*") if SECRET in str(p)] == []


@pytest.mark.parametrize(
    "where", ["postgresql://user:{}@127.0.0.1:9/db", "postgresql://127.0.0.1/db?password={}", "u:{}@host/db"]
)
def test_a_url_that_was_made_a_path_names_no_folder(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        IdentityStore(Path(where.replace("{}", SECRET)))
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_an_at_sign_is_a_file(tmp_path: Path) -> None:
    IdentityStore(tmp_path / "me@home.db").close()
    IdentityStore(f"sqlite:///{tmp_path}/a:b@c.db").close()
    assert {"me@home.db", "a:b@c.db"} <= {p.name for p in tmp_path.iterdir()}


def test_a_url_with_a_password_is_shown_without_it() -> None:
    pytest.importorskip("psycopg")
    at = locate(f"postgresql://user@host/db?password={SECRET}&sslmode=require", "blobs")
    assert at.url.password == SECRET
    assert SECRET not in repr(at) + repr(at.url) + shown(at.url)
    assert at.url.query == {"sslmode": "require"}


@pytest.mark.parametrize("name", ["a:b.db", "./post:gres.db"])
def test_a_file_whose_name_has_a_colon_is_given_with_its_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with IdentityStore(name) as store:
        store.new("mara", person(1))
    assert (tmp_path / name).is_file()


def test_a_store_that_is_read_only_reads_and_refuses_every_write(tmp_path: Path) -> None:
    with_mara(tmp_path / "x.db").close()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with IdentityStore(tmp_path / "x.db", read_only=True) as store:
        assert list(store.names()) == ["mara"]
        assert store.verify("mara") == 2
        assert store.load("mara").life.experiences == 1
        assert store.check().sound
        event = heard("mara", "more")
        for write in (
            lambda: store.new("b", person(1)),
            lambda: store.commit("mara", imprint(store.load("mara"), event)),
            lambda: store.update("mara", lambda me: imprint(me, event), event=event),
            lambda: store.fork("mara", "b"),
            lambda: store.rollback("mara", 1),
            lambda: store.delete("mara"),
            lambda: store.forget("mara", "mara", lambda me, events: me),
            lambda: store.gc(grace=0),
        ):
            with pytest.raises(StoreError, match="read only"):
                write()
        assert store.backup(tmp_path / "backup").is_dir(), "a backup is taken from what can only be read"
    names = sorted(p.name for p in tmp_path.rglob("*") if "backup" not in p.parts[len(tmp_path.parts)])
    assert [n for n in names if not n.endswith(("-wal", "-shm"))] == before
    with pytest.raises(StoreError, match="is not there"):
        IdentityStore(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()


def test_a_reader_that_is_read_only_sees_what_is_written_meanwhile(tmp_path: Path) -> None:
    with with_mara(tmp_path / "x.db") as store, IdentityStore(tmp_path / "x.db", read_only=True) as reader:
        store.new("theo", person(2))
        assert list(reader.names()) == ["mara", "theo"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process of another user")
@pytest.mark.parametrize("open_elsewhere", [False, True])
def test_files_that_may_not_be_written_are_opened_to_be_read(open_elsewhere: bool) -> None:
    # Not in pytest's own folder, which nobody else may enter.
    folder = Path(tempfile.mkdtemp())
    store = with_mara(folder / "x.db")
    store.verify("mara")
    if not open_elsewhere:
        store.close()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            if os.getuid() == 0:
                # Permissions do not hold for root.
                os.setgid(65534)
                os.setuid(65534)
            with IdentityStore(folder / "x.db") as reader:
                if reader.verify("mara") == 2 and reader.db.read_only:
                    try:
                        reader.delete("mara")
                    except StoreError:
                        code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    store.close()
    shutil.rmtree(folder)


def test_drafts_of_killed_processes_are_swept_on_opening_and_those_of_running_ones_never(tmp_path: Path) -> None:
    with_mara(tmp_path / "x.db").close()
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    folder = tmp_path / "x.blobs"
    names = {
        "dead": f"{dead}-{_host()}-a",
        "running": f"{os.getpid()}-{_host()}-a",
        "elsewhere": f"{dead}-0123456789ab-a",
        "old": "7-x",
    }
    for what, name in names.items():
        (folder / f"{DRAFT}{name}").write_bytes(b"x" * 1000)
        if what in ("running", "old"):
            os.utime(folder / f"{DRAFT}{name}", (0, 0))
    with IdentityStore(tmp_path / "x.db") as store:
        left = {what for what, name in names.items() if (folder / f"{DRAFT}{name}").exists()}
        assert left == {"running", "elsewhere"}
        assert store.verify("mara") == 2
    assert sweep(folder, older_than=0) == 1, "another host's is known by its age alone"
