"""A database file damaged in one of many ways, and what a store makes of it: the truth, or one of our errors."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stored import BASE, heard, imprint, person, replay

from regard import RegardError
from regard.identity.state import Identity
from regard.identity.store import IdentityStore
from regard.identity.store.restore import check_place

PAGE = 4096
Truth = dict[str, list[tuple[str, list[str]]]]


def sound(folder: Path) -> Truth:
    """A store with several names and histories, closed; what it holds."""
    with IdentityStore(folder / "x.db") as store:
        for name in ("mara", "theo", "tom"):
            store.new(name, Identity.new(BASE))
            for i in range(4):
                event = heard(f"{name}-{i % 2}", f"{name} says {i}. " * (1 + 90 * (i == 2)))
                store.update(name, lambda me, e=event: imprint(me, e), event=event)
        store.fork("mara", "fork")
        store.rollback("theo", 2)
        store.new("alone", person(3))
        store.forget("tom", "tom-1", replay)
        return contents(store)


def contents(store: IdentityStore) -> Truth:
    return {name: history(store, name) for name in store.names()}


def history(store: IdentityStore, name: str) -> list[tuple[str, list[str]]]:
    with store.db.read() as c:
        log = store.db.chain(c, store.head_of(c, name))
        return [(x.digest, [e.body() for e in events]) for x, events in zip(log, store.db.events(c, log), strict=True)]


def damaged(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    pages = len(found) // PAGE
    at = rng.randrange(len(found))
    # Most of a small database is its first pages and the beginnings of others: headers, and lists of cells.
    if rng.random() < 0.5:
        at = PAGE * rng.randrange(pages) + rng.randrange(120)
    match rng.randrange(8):
        case 0 | 1 | 2:
            found[at] ^= 1 << rng.randrange(8)
        case 3:
            found[at] = rng.randrange(256)
        case 4:
            found[at : at + 64] = rng.randbytes(len(found[at : at + 64]))
        case 5:
            size = rng.choice([4, 100, PAGE])
            found[at : at + size] = bytes(len(found[at : at + size]))
        case 6:
            del found[rng.choice([at, PAGE * rng.randrange(pages)]) :]
        case _:
            a, b = (PAGE * rng.randrange(pages) for _ in range(2))
            found[b : b + PAGE] = found[a : a + PAGE]
    return bytes(found)


def outcome(origin: Path, work: Path, truth: Truth, seed: int) -> str:
    """ "refused" by one of our errors, or "right"; anything else is an AssertionError or an error that is not ours."""
    rng = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(origin, work)
    (work / "x.db").write_bytes(damaged((origin / "x.db").read_bytes(), rng))
    kept = {p.name for p in work.glob("x.blobs/*/*")}
    found: list[str] = []

    def tried(read: Callable[[], Any], right: object) -> None:
        try:
            result = read()
        except RegardError:
            found.append("refused")
            return
        assert result == right, f"seed {seed}: {result!r:.200} instead of {right!r:.200}"
        found.append("right")

    try:
        checked = check_place(work / "x.db") if rng.random() < 0.3 else None
        store = IdentityStore(work / "x.db")
    except RegardError:
        return "refused"
    with store:
        tried(lambda: list(store.names()), list(truth))
        for name, log in truth.items():
            tried(lambda n=name: store.load(n).digest(), log[0][0])
            tried(lambda n=name: history(store, n), log)
            with contextlib.suppress(RegardError):
                store.journal(name)
        if checked is not None and checked.sound:
            assert set(found) == {"right"}, f"seed {seed}: called sound, and refused"
        event = heard("new", "words")
        for write in (
            ()
            if rng.random() < 0.7
            else (
                lambda: store.update("mara", lambda me: imprint(me, event), event=event),
                lambda: store.fork("theo", "more"),
                lambda: store.rollback("mara", 1),
                lambda: store.forget("theo", "theo-0", replay),
                lambda: store.delete("alone"),
                lambda: store.gc(grace=0),
            )
        ):
            with contextlib.suppress(RegardError):
                write()
        with contextlib.suppress(RegardError):
            names = set(store.names())
            assert names >= set(truth) - {"alone"}, f"seed {seed}: {set(truth) - names} are lost"
        if set(found) == {"refused"}:
            # What cannot be read may still be restored: nothing takes its files for rubbish.
            assert {p.name for p in work.glob("x.blobs/*/*")} >= kept, f"seed {seed}: blobs were removed"
    return "refused" if "refused" in found else "right"
