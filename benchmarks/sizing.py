"""What one person costs, in bytes and in milliseconds, and on paper what a million would: `python -m benchmarks.sizing`.

A life of chat turns is imprinted by SmolLM2-135M, and each turn is committed to every store that there is: SQLite and PostgreSQL
(REGARD_TEST_POSTGRES), with blobs in a folder and in a bucket (REGARD_TEST_OBJECTS, such as s3://bucket/prefix). The stores take turns, so
that whatever else the machine does falls on all of them. Writes results/sizing.json and .md, and the tables of docs/sizing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from regard.identity.body import base_of
from regard.identity.read.recall import recall
from regard.identity.state import Identity
from regard.identity.store import IdentityStore
from regard.identity.store.replay import apply_event, imprint_event
from regard.identity.write.rule import Rule
from regard.models import downloads

from .harness import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "sizing.md"
OPEN, CLOSE = "<!-- sizing -->", "<!-- /sizing -->"
TURNS = 12
PEOPLE, PER_DAY, DAYS, SPEAKING = 1_000_000, 10, 365, 0.01
"""On paper: how many, how many turns a day each, for how many days, and which share of them in the busiest minute."""
NAMES = ("Mochi", "Ada", "Porto", "Lumen", "Basil", "Kyoto", "Iris", "Tove", "Marlow", "Nantes", "Pip", "Quill")
SAID = (
    ("My {a} is called {n}, and it came to us in {y}.", "What a lovely name, {n}! I will remember that it came to you in {y}."),
    ("I moved to {n} in {y}, because my {a} found work there.", "So {n} has been your home since {y}. How do you like it?"),
    ("Every {a} I know is afraid of {n}, the old dog next door.", "Poor {n}! Perhaps he only wants somebody to play with."),
)
THINGS = ("cat", "sister", "neighbour", "boat", "teacher", "uncle")


def turns(count: int) -> list[list[dict[str, str]]]:
    chance = random.Random(0)
    made: list[list[dict[str, str]]] = []
    for _ in range(count):
        fields = {"a": chance.choice(THINGS), "n": chance.choice(NAMES), "y": chance.randint(1950, 2025)}
        asked, answered = chance.choice(SAID)
        made.append(
            [{"role": "user", "content": asked.format(**fields)}, {"role": "assistant", "content": answered.format(**fields)}]
        )
    return made


def places(folder: Path) -> dict[str, dict[str, str]]:
    """Every store that can be had here."""
    postgres, bucket = os.environ.get("REGARD_TEST_POSTGRES", ""), os.environ.get("REGARD_TEST_OBJECTS", "")
    found = {"SQLite, folder": {"url": str(folder / "a.db")}}
    if bucket:
        found["SQLite, bucket"] = {"url": str(folder / "b.db"), "blobs": f"{bucket}/{uuid.uuid4().hex}"}
    if postgres:
        found["PostgreSQL, folder"] = {"url": _database(postgres), "blobs": str(folder / "c.blobs")}
    if postgres and bucket:
        found["PostgreSQL, bucket"] = {"url": _database(postgres), "blobs": f"{bucket}/{uuid.uuid4().hex}"}
    return found


def _database(server: str) -> str:
    from sqlalchemy import create_engine, make_url, text

    name = f"regard_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as c:
        c.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)


class Times:
    def __init__(self) -> None:
        self.by: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        began, used = time.perf_counter(), time.process_time()
        yield
        self.by.setdefault(what, []).append(1e3 * (time.perf_counter() - began))
        # Of this process alone: what others do on the machine hardly counts.
        self.cpu.setdefault(what, []).append(1e3 * (time.process_time() - used))

    def rows(self) -> dict[str, dict[str, float]]:
        return {
            what: {"median": round(median(x), 2), "low": round(quantiles(x, n=4)[0], 2), "high": round(quantiles(x, n=4)[2], 2),
                   "cpu": round(median(self.cpu[what]), 2), "n": len(x)}
            for what, x in self.by.items()
        }  # fmt: skip


def measure(count: int, say: Callable[[str], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer = downloads.open_model("smollm2")
    times, me = Times(), Identity.new(base_of(model))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stores = {n: stack.enter_context(IdentityStore(**at)) for n, at in places(Path(folder)).items()}
        heads = {n: store.new("person", me) for n, store in stores.items()}
        half: dict[str, int] = {}
        # The first of everything makes what is made once.
        first = apply_event(model, tokenizer, me, imprint_event(turns(1)[0], source="warm"))
        recall(model, first, tokenizer.encode("What is my cat called?"), tokenizer)
        for i, turn in enumerate(turns(count)):
            event = imprint_event(turn, source=f"chat-{i // 8}")
            with times.of("imprint a turn"):
                me = apply_event(model, tokenizer, me, event)
            prompt = tokenizer.encode(
                tokenizer.chat([{"role": "user", "content": f"Where does {NAMES[i % len(NAMES)]} live?"}])
            )
            with times.of("recall for a prompt"):
                recall(model, me, prompt, tokenizer)
            for name, store in stores.items():
                with times.of(f"commit: {name}"):
                    heads[name] = store.commit("person", me, event=event, expected=heads[name].id)
                with times.of(f"read the head and its state: {name}"):
                    store.state_of(store.head("person"))
            if i + 1 == count // 2:
                half = {n: _database_bytes(store) for n, store in stores.items()}
            say(f"turn {i + 1} of {count}")
        for name in stores:
            stores[name].cached_episodes.clear()
            with times.of(f"read everything, cold: {name}"):
                stores[name].load("person")
            stores[name].cached_episodes.clear()
            with times.of(f"read everything, cold: {name}"):
                stores[name].load("person")
        # What a table takes before it holds anything counts for nobody: the second half of the life alone.
        growth = {n: (_database_bytes(store) - half[n]) / (count - count // 2) for n, store in stores.items()}
        counts = _counts(stores, me, growth)
    return {
        "environment": {**environment(), "threads": 1, "load": round(os.getloadavg()[0], 1)},
        "turns": count,
        "ms": times.rows(),
        **counts,
    }


def _database_bytes(store: IdentityStore) -> int:
    from sqlalchemy import text

    if store.db.file is not None:
        store.db.scrub()
        return store.db.file.stat().st_size
    every = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname LIKE 'identity%' AND relkind = 'r'"
    with store.db.read() as c:
        return int(c.scalar(text(every)) or 0)


def _counts(stores: dict[str, IdentityStore], me: Identity, growth: dict[str, float]) -> dict[str, Any]:
    from regard.identity.store.codec import encode, encode_episode

    lite = stores["SQLite, folder"]
    log = lite.log("person")
    episodes = [len(encode_episode(e)) for e in me.episodes]
    sizes: dict[str, Any] = {
        "tokens": me.life.tokens,
        "state": len(encode(me)),
        "imprints": len(me.imprints),
        "budget": Rule().budget,
        "bytes_per_imprint": round((log[0].bytes - log[-1].bytes) / max(1, len(me.imprints))),
        "state_without_imprints": log[-1].bytes,
        "episodes": len(me.episodes),
        "episode_tokens": sum(len(e.tokens) for e in me.episodes),
        "episode_file": round(sum(episodes) / max(1, len(episodes))),
        "episode_in_memory": round(sum(e.nbytes for e in me.episodes) / max(1, len(episodes))),
        "states_written": sum(x.bytes for x in log),
        "commits": len(log),
    }
    sizes["sqlite_per_commit"] = round(growth["SQLite, folder"])
    if "PostgreSQL, folder" in growth:
        sizes["postgres_per_commit"] = round(growth["PostgreSQL, folder"])
    return {"bytes": sizes}


def on_paper(found: dict[str, Any]) -> dict[str, float]:
    """Nothing here was measured: it is what was, times how many there would be."""
    b, commits = found["bytes"], PER_DAY * DAYS
    per_turn = b["episode_tokens"] / found["turns"]
    full = b["state_without_imprints"] + b["bytes_per_imprint"] * b["budget"]
    database = b.get("postgres_per_commit", b["sqlite_per_commit"])
    speaking = found["ms"]["imprint a turn"]["cpu"] + found["ms"]["recall for a prompt"]["cpu"]
    busy = PEOPLE * SPEAKING
    return {
        "state_full": full,
        "head_of_everybody": PEOPLE * full,
        "states_with_history": PEOPLE * commits * full,
        "episodes": PEOPLE * commits * b["episodes"] / found["turns"] * b["episode_file"],
        "tokens_per_turn": per_turn,
        "database": PEOPLE * commits * database,
        "commit_rows": PEOPLE * commits,
        "episode_rows": PEOPLE * commits * b["episodes"] / found["turns"],
        "turns_per_second": PEOPLE * PER_DAY / 86400,
        "busy": busy,
        "memory_busy": busy * (full + b["episode_in_memory"] * b["episodes"]),
        "cores_for_imprints_and_recall": busy / 60 * speaking / 1e3,
    }


def markdown(found: dict[str, Any]) -> str:
    where, b, paper = found["environment"], found["bytes"], on_paper(found)
    lines = [
        f"Measured over {found['turns']} turns of {paper['tokens_per_turn']:.0f} tokens, {where['cpu']}, one thread, load average "
        f"{where['load']} (where that is above 1, other work ran on the machine: the core's time is what to go by, and the clock's an upper bound), torch {where['torch']}.",
        "", "| milliseconds | median | quartiles | of it, this process on a core | n |", "|---|---|---|---|---|",
        *(f"| {what} | {t['median']:,.1f} | {t['low']:,.1f} – {t['high']:,.1f} | {t['cpu']:,.1f} | {t['n']} |" for what, t in found["ms"].items()),
        "", "| bytes | measured |", "|---|---|",
        f"| a state: head of one person, {b['imprints']} imprints | {b['state']:,} |",
        f"| of it, each imprint | {b['bytes_per_imprint']:,} |",
        f"| an episode's file, {b['episode_tokens'] / max(1, b['episodes']):.0f} tokens | {b['episode_file']:,} |",
        f"| episodes for each token of life | {b['episode_file'] * b['episodes'] / max(1, b['episode_tokens']):,.0f} |",
        f"| a commit's rows in SQLite, indices included, vacuumed | {b['sqlite_per_commit']:,} |",
        *([f"| a commit's rows in PostgreSQL, indices included | {b['postgres_per_commit']:,} |"] if "postgres_per_commit" in b else []),
        "",
        f"**On paper, not measured:** {PEOPLE:,} people, {PER_DAY} turns a day each, {DAYS} days, {SPEAKING:.0%} of them in the busiest minute.",
        "", "| extrapolated | how | figure |", "|---|---|---|",
        f"| state of everybody, heads alone | people × a full state of {paper['state_full']:,.0f} B | {_size(paper['head_of_everybody'])} |",
        f"| states with every commit kept | × {PER_DAY * DAYS:,} commits | {_size(paper['states_with_history'])} |",
        f"| episodes | a file each, {b['episodes'] / found['turns']:.1f} a turn | {_size(paper['episodes'])} |",
        f"| database | rows and indices of a commit | {_size(paper['database'])} |",
        f"| rows of commits; of episodes | one a turn; one an episode | {paper['commit_rows']:.2e}; {paper['episode_rows']:.2e} |",
        f"| turns a second, on the average | people × turns / day | {paper['turns_per_second']:,.0f} |",
        f"| memory for those who speak | states and the episodes of a life as measured, {paper['busy']:,.0f} people | {_size(paper['memory_busy'])} |",
        f"| cores for imprints and recall alone | a turn of each in a minute, by the core's time | {paper['cores_for_imprints_and_recall']:,.0f} |",
    ]  # fmt: skip
    return "\n".join(lines)


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} PB"


def publish(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(OPEN)
    _, _, after = rest.partition(CLOSE)
    PAGE.write_text(f"{before}{OPEN}\n{text}\n{CLOSE}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description="What one person costs.")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--quick", action="store_true", help="a few turns; prints, and writes nothing")
    asked = parser.parse_args()
    found = measure(6 if asked.quick else asked.turns, lambda said: print(said, flush=True))
    text = markdown(found)
    print(text)
    if not asked.quick:
        record = {"name": "sizing", **found, "on_paper": on_paper(found)}
        (RESULTS / "sizing.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (RESULTS / "sizing.md").write_text(f"# What one person costs\n\n{text}\n", encoding="utf-8")
        publish(text)


if __name__ == "__main__":
    main()
