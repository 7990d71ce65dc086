"""What a load leaves behind: whether every acknowledged turn is there once, whether answers are those of each person alone, and whether
any byte that was written down names what only one of them may know."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Server

from regard.identity import IdentityStore
from regard.identity.opened import opened
from regard.identity.store.replay import content
from regard.serve.asking import ask
from regard.serve.choosing import Who
from regard.serve.keys import Keys
from regard.serve.plain import PlainEngine
from regard.serve.routes.chat import Turn as ChatTurn
from regard.serve.schema import ChatRequest
from regard.serve.service import Service

if TYPE_CHECKING:
    from load import Person, Reading, Seen

COMPARED = 24
"""Answers that are written again in this process, one row at a time."""
GROWTH = 1.15
"""Of memory between the two halves of a run after its warming up: what is held of people is bounded, and so must this be."""


def judge(seen: Seen, people: list[Person], server: Server, figures: dict[str, Any]) -> list[str]:
    faults = list(dict.fromkeys(seen.faults))
    if figures["exit_code"] != 0:
        faults.append(f"after SIGTERM the server ended with {figures['exit_code']}")
    if not seen.told or figures["acknowledged"] == figures["acknowledged_before_kill"]:
        faults.append("no turn was acknowledged after the restart")
    if not seen.own_words:
        faults.append("nobody's own word ever came back: a word that was another's could not have been seen either")
    if figures["rss_second_half_mb"] > GROWTH * figures["rss_first_half_mb"]:
        faults.append(f"memory grew from {figures['rss_first_half_mb']:.0f} to {figures['rss_second_half_mb']:.0f} MB")
    store = IdentityStore(server.folder / "people.db")
    try:
        faults += journal_faults(seen, people, store, figures)
        faults += written_faults(seen, people, server)
        faults += asyncio.run(answer_faults(seen, server, store, figures))
        faults += [f"the store is damaged: {x}" for x in store.check().problems]
    finally:
        store.close()
    return faults


def journal_faults(seen: Seen, people: list[Person], store: IdentityStore, figures: dict[str, Any]) -> list[str]:
    """Every acknowledged turn is in its own person's journal, once; no other turn twice, and of those that were hung up on none."""
    faults, committed = list[str](), 0
    by_name: dict[str, list[Any]] = defaultdict(list)
    for turn in seen.told:
        by_name[turn.name].append(turn)
    for person in people:
        counts: Counter[str] = Counter()
        for event in store.journal(person.name):
            if event.kind == "imprint" and event.text is not None:
                said = content(event.text)
                counts[said if isinstance(said, str) else said[0]["content"]] += 1
        commits = {c.id for c in store.log(person.name)}
        committed += sum(counts.values())
        for turn in by_name[person.name]:
            if counts[turn.text] != 1:
                faults.append(f"{person.name}: an acknowledged turn is in the journal {counts[turn.text]} times: {turn.text}")
            if turn.commit not in commits:
                faults.append(f"{person.name}: the commit of an acknowledged turn is not in the log: {turn.commit}")
        faults += [f"{person.name}: {n} times in the journal: {text}" for text, n in counts.items() if n > 1]
        faults += [f"{person.name}: holds what another said: {text}" for text in counts if person.secret not in text]
    left = {t.text for t in seen.left}
    texts = {
        (said if isinstance(said, str) else said[0]["content"])
        for person in people
        for event in store.journal(person.name)
        if event.text is not None
        for said in [content(event.text)]
    }
    faults += [f"a turn that was hung up on was committed: {text}" for text in sorted(left & texts)]
    figures["committed"] = committed
    return faults


def written_faults(seen: Seen, people: list[Person], server: Server) -> list[str]:
    """The log and the metrics name nobody."""
    faults = list[str]()
    for what, written in (("log", server.log.read_bytes()), ("metrics", seen.metrics)):
        if not written:
            faults.append(f"the {what} is empty")
        for person in people:
            faults += [f"the {what} holds {word}" for word in (person.secret, person.name) if word.encode() in written]
    return faults


async def answer_faults(seen: Seen, server: Server, store: IdentityStore, figures: dict[str, Any]) -> list[str]:
    """Some answers again: the same person at the same commit, alone, by the plain engine."""
    model, tokenizer, base = opened(server.model)
    engine = PlainEngine(model, tokenizer)
    service = Service(model, tokenizer, base, engine, store, Keys(server.folder / "keys.json"))
    engine.start()
    chosen = random.Random(0).sample(seen.readings, min(COMPARED, len(seen.readings)))
    faults, differed = list[str](), 0
    try:
        for reading in chosen:
            answer, recalled = await written_again(service, reading, reading.name, reading.commit)
            if (answer, recalled) != (reading.answer, reading.recalled):
                faults.append(f"{reading.name} was answered {reading.answer!r}, and alone is answered {answer!r}")
            other = next(r for r in chosen if r.name != reading.name)
            differed += reading.recalled != (await written_again(service, reading, other.name, other.commit))[1]
    finally:
        engine.close()
    figures["answers_compared"] = len(chosen)
    if not chosen or not differed:
        faults.append("no answer could have told one person from another")
    return faults


async def written_again(service: Service, reading: Reading, name: str, commit: str) -> tuple[str, tuple[str, ...]]:
    messages = [{"role": "user", "content": reading.question}]
    asked = await ask(service, messages, Who(name, service.store.find(commit), False), time.monotonic())
    body = ChatRequest.model_validate({"messages": messages, "max_tokens": 12})
    whole = await ChatTurn(service, body, asked, None).whole()
    return whole["choices"][0]["message"]["content"], tuple(r["text"] for r in asked.recalled)


def report(figures: dict[str, Any], faults: list[str], folder: Path) -> None:
    """load.json, load.md, and the same on the terminal."""
    (folder / "load.json").write_text(json.dumps({**figures, "faults": faults}, indent=1) + "\n")
    f = figures
    lines = [
        f"{f['people']} people at once for {f['seconds']:.0f} s on a tiny model; killed and restarted at 40%, SIGTERM at the end.", "",
        "| what | number |", "|---|---|",
        f"| turns acknowledged (before the kill) | {f['acknowledged']} ({f['acknowledged_before_kill']}) |",
        f"| turns in the journals | {f.get('committed', 0)} |",
        f"| sent and not acknowledged; hung up on | {f['unacknowledged']}; {f['hung_up']} |",
        f"| answers equal to those of each person alone | {f.get('answers_compared', 0)} |",
        f"| bytes searched; own word came back | {f['bytes_received']:,}; {f['own_word_came_back']:,} |",
        f"| memory, first and second half after the restart | {f['rss_first_half_mb']:.0f} MB, {f['rss_second_half_mb']:.0f} MB |",
        f"| exit after SIGTERM; seconds | {f['exit_code']}; {f['drain_seconds']:.1f} |",
        f"| responses | {', '.join(f'{k}: {v}' for k, v in sorted(f['statuses'].items()))} |",
        f"| faults | {len(faults)} |", "",
        "| request | count | p50 | p95 |", "|---|---|---|---|",
        *(f"| {kind} | {x['count']} | {x['p50_ms']:.0f} ms | {x['p95_ms']:.0f} ms |" for kind, x in f["latency"].items()),
    ]  # fmt: skip
    (folder / "load.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), *(f"FAULT: {fault}" for fault in faults[:40]), sep="\n", flush=True)
