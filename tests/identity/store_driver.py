"""Many processes on one store: forked from one that has imported everything, because importing takes longer than the test.

To the database a forked process that opens the store itself is like any other. Run as a script: a JSON request a line.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from stored import BASE, heard, imprint, replay
from stored import said as spoken

from regard.identity.state import Identity
from regard.identity.store import Event, IdentityStore

Say = Callable[[str], None]


def small(me: Identity, event: Event) -> Identity:
    me = imprint(me, event)
    return replace(me, imprints=me.imprints.pick(torch.arange(len(me.imprints))[-4:]))


def spawn(work: Callable[[Say], None]) -> tuple[int, int]:
    """A process, and the pipe through which it speaks: what it said before it was killed is still read."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    code = 1
    try:
        os.close(out)
        work(lambda line: os.write(into, f"{line}\n".encode()) and None)
        code = 0
    except BaseException as error:
        os.write(into, f"! {type(error).__name__}: {error}\n".encode())
    os._exit(code)


def hear(pipes: list[int]) -> list[str]:
    """All that was said, until every pipe is closed."""
    said = dict.fromkeys(pipes, b"")
    while pipes:
        for pipe in select.select(pipes, [], [])[0]:
            data = os.read(pipe, 1 << 16)
            said[pipe] += data
            if not data:
                os.close(pipe)
                pipes = [p for p in pipes if p != pipe]
    # A kill can cut the last line; an id that was not said whole was not acknowledged.
    return [line.decode().strip() for text in said.values() for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def kill_at_random(
    work: Callable[[int], Callable[[Say], None]], kills: int, seed: int, within: float, at_once: int
) -> list[str]:
    rng, said = random.Random(seed), list[str]()
    for start in range(0, kills, at_once):
        born = [spawn(work(start + i)) for i in range(at_once)]
        for pid, pipe in born:
            # Mostly after its first word, and sometimes while it still opens the store.
            if rng.random() < 0.8:
                select.select([pipe], [], [], 10)
            time.sleep(rng.uniform(0.0, within))
            os.kill(pid, signal.SIGKILL)
        said += hear([pipe for _, pipe in born])
        for pid, _ in born:
            os.waitpid(pid, 0)
    return said


def begin(place: dict[str, Any]) -> None:
    """A first life and a first write, so that all that is imported late is there before processes are forked."""
    if not in_bucket(place):
        _begin(place)
        return
    pid, pipe = spawn(lambda _: _begin(place))
    hear([pipe])
    os.waitpid(pid, 0)


def in_bucket(place: dict[str, Any]) -> bool:
    """The threads of a bucket's client do not survive a fork: whoever is to fork opens no such store."""
    return "://" in str(place.get("blobs", ""))


def _begin(place: dict[str, Any]) -> None:
    with IdentityStore(**place) as store:
        store.new("mara", Identity.new(BASE))
        store.fork("mara", "warm")
        store.update("warm", lambda me: small(me, heard("w", "warm")), event=heard("w", "warm"))
        store.forget("warm", "w", replay)
        store.delete("warm")


def crash(place: dict[str, Any], kills: int, seed: int) -> dict[str, Any]:
    def work(who: int) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            store = IdentityStore(**place)
            for n in range(10_000):
                if n % 7 == 6:
                    say(store.rollback("mara", 1).id)
                    store.gc(grace=0)
                event = heard("w", f"{who}-{n}")
                say(store.update("mara", lambda me, e=event: small(me, e), event=event).id)

        return run

    begin(place)
    said = kill_at_random(work, kills, seed, within=0.08, at_once=2)
    with IdentityStore(**place) as store:
        log = store.log("mara")
        texts = [e.text for x in log for e in store.events(x.id) if e.text]
        return {
            "errors": [line for line in said if line.startswith("!")],
            "acknowledged": len(said),
            "lost": sorted(set(said) - {x.id for x in log}),
            "commits": store.verify("mara"),
            "twice": len(texts) - len(set(texts)),
            "episodes": len(store.load("mara").episodes) - len([e for e in store.journal("mara") if e.text]),
            "drafts": store.blobs.drafts()[0],
        }


def writers(place: dict[str, Any], count: int, commits: int) -> dict[str, Any]:
    def work(who: int) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            with IdentityStore(**place) as store:
                for n in range(commits):
                    event = heard(f"w{who}", f"{who}-{n}")
                    say(store.update("mara", lambda me, e=event: small(me, e), event=event).id)

        return run

    def collect(say: Say) -> None:
        with IdentityStore(**place) as store:
            while store.head("mara").number < count * commits:
                store.gc(grace=0)
                time.sleep(0.1)

    begin(place)
    began = time.time()
    born = [spawn(work(i)) for i in range(count)] + [spawn(collect)]
    said = hear([pipe for _, pipe in born])
    for pid, _ in born:
        os.waitpid(pid, 0)
    with IdentityStore(**place) as store:
        log = store.log("mara")
        return {
            "errors": [line for line in said if line.startswith("!")],
            "acknowledged": len(set(said)),
            "lost": sorted(set(said) - {x.id for x in log}),
            "commits": store.verify("mara"),
            "experiences": store.load("mara").life.experiences,
            "episodes": len({e.digest for e in store.load("mara").episodes}),
            "texts": len({e.text for e in store.journal("mara") if e.text}),
            "seconds": round(time.time() - began, 2),
        }


def opening(place: dict[str, Any], count: int) -> dict[str, Any]:
    def work(who: int) -> Callable[[Say], None]:
        return lambda say: say(IdentityStore(**place).new(f"p{who}", Identity.new(BASE)).id)

    born = [spawn(work(i)) for i in range(count)]
    said = hear([pipe for _, pipe in born])
    for pid, _ in born:
        os.waitpid(pid, 0)
    with IdentityStore(**place) as store:
        return {"errors": [line for line in said if line.startswith("!")], "names": len(store.names())}


def forgetting(place: dict[str, Any], kills: int, seed: int) -> dict[str, Any]:
    """Killed at any moment of forgetting, a store has the old history or the new one, and nothing of the old beside the new."""

    def run(say: Say) -> None:
        store = IdentityStore(**place)
        while True:
            for source in ("theo", "secret"):
                event = heard(source, f"{source} word")
                store.update("mara", lambda me, e=event: small(me, e), event=event)
            say(f"forget {store.forget('mara', 'secret', replay).events_removed}")

    begin(place)
    said = kill_at_random(lambda _: run, kills, seed, within=0.2, at_once=1)
    # The first opening finishes what a kill interrupted.
    with IdentityStore(**place) as store:
        store.verify("mara")
        if any(e.source == "secret" for x in store.log("mara") for e in store.events(x.id)):
            store.forget("mara", "secret", replay)
        log = store.log("mara")
        named = {x.blob for x in log} | {e.digest for x in log for e in store.load(x.id).episodes}
        verified, kept = store.verify("mara"), set(store.blobs.every())
        # A blob that was written for a commit that never came is nobody's, and goes with the rest.
        store.gc(grace=0)
        swept = set(store.blobs.every())
    # As text in the tables, and as the tokens of an episode.
    words = (b"secret word", spoken(heard("secret", "secret word"), 0).tokens.numpy().tobytes())
    return {
        "errors": [line for line in said if line.startswith("!")],
        "forgotten": sum(line.startswith("forget") for line in said),
        "commits": verified,
        "missing": len(named - kept),
        "stray": len(swept - named),
        "left": [name for name, data in _bytes_of(store, place) if any(w in data for w in words)],
    }


def _bytes_of(store: IdentityStore, place: dict[str, Any]) -> list[tuple[str, bytes]]:
    if in_bucket(place):
        mine = [] if store.db.file is None else [p for p in store.db.file.parent.rglob("*") if p.is_file()]
        return [(p.name, p.read_bytes()) for p in mine] + [(blob, store.blobs.read(blob)) for blob in store.blobs.every()]
    folder = Path(store.blobs.where).parent
    return [(p.name, p.read_bytes()) for p in folder.rglob("*") if p.is_file()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        do = globals()[request.pop("do")]
        try:
            if in_bucket(request["place"]):
                pid, pipe = spawn(lambda say, do=do, request=request: say(json.dumps(do(**request))))
                (answer,) = (json.loads(said) if said[:1] == "{" else {"errors": [said]} for said in hear([pipe]))
                os.waitpid(pid, 0)
            else:
                answer = do(**request)
        except Exception as error:
            answer = {"errors": [f"{type(error).__name__}: {error}"]}
        print(json.dumps(answer), flush=True)
