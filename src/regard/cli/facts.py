"""`regard identity facts`: what an identity was told, line by line, and striking one line out for good."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..identity.wording import clean, several
from .arguments import JsonOption, ModelOption, StoreOption, load, note, open_model, open_store, tokenizer_of
from .console import Yes, confirm, progress, verb
from .generate import DEFAULT

if TYPE_CHECKING:
    from ..identity.facts import Fact
    from ..identity.store import Forgotten


@verb
def facts(
    name: Annotated[str, typer.Argument(help="the identity's name", show_default=False)],
    word: Annotated[
        str | None, typer.Argument(help="only lines that hold it, or whose answers do [default: all]", show_default=False)
    ] = None,
    strike: Annotated[
        int | None, typer.Option(help="take the line of this number back, for good", min=1, show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="questions too")] = False,
    yes: Yes = False,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """What an identity was told, line by line, the youngest last; words in brackets are imprints.

    A line without brackets has no imprint; it may come to mind whole, as an episode, and sleep goes over it. --strike takes one line back, with the
    answer to it: the identity is made again from nothing out of all the rest, twice, and both must agree bit for bit; what was
    removed is searched for in every file of the store. This cannot be undone, and later lines then count one less.

    \b
    regard identity facts mara
    regard identity facts mara Mochi
    regard identity facts mara --strike 3
    """
    from ..identity.facts import fact_of, still_named
    from ..identity.facts import facts as list_facts
    from ..identity.facts import strike as strike_out
    from ..identity.store.replay import replay

    with open_store(store) as opened:
        who = load(opened, name)
        if strike is None:
            listed = list_facts(opened.journal(name), who, tokenizer_of(who, model, "imprints are not marked"))
            if as_json:
                typer.echo(json.dumps([_described(f) for f in chosen(listed, word)], ensure_ascii=False))
            else:
                show(listed, word, every=None if every else "--all")
            return
        fact = fact_of(list_facts(opened.journal(name), who), strike)
        confirm(yes, f"strike out {clean(fact.text)!r}, with the answer to it? This cannot be undone")
        with progress() as tell:
            body, tokenizer, base = open_model(model, tell)
            who.base.refuse(base)
            proof = strike_out(opened, name, fact, replay(body, tokenizer, tell))
        typer.echo(clean(str(proof)))
        tell_of_others(still_named(fact, list_facts(opened.journal(name), opened.load(name))))


def chosen(listed: Sequence[Fact], word: str | None) -> list[Fact]:
    return [f for f in listed if word is None or f.mentions(word)]


def show(listed: Sequence[Fact], word: str | None = None, last: int | None = None, every: str | None = None) -> None:
    """Facts under the names of their sources; questions are none, and `every` is how to see them too, None where they are seen."""
    if not listed:
        note("nothing was told yet")
        return
    some = [f for f in chosen(listed, word) if word is not None or every is None or not f.asks]
    asked = len(listed) - len(some) if word is None else 0
    some, hidden = (some[-last:], len(some[:-last])) if last else (some, 0)
    if hidden:
        note(f"{several(hidden, 'older line')} not shown: {every}")
    source = None
    for fact in some:
        if fact.event.source != source:
            source = fact.event.source
            note(f"{clean(str(source))}, {time.strftime('%Y-%m-%d', time.localtime(fact.event.time))}")
        typer.echo(clean(str(fact)))
        if word is not None and fact.mentions_only_in_answer(word):
            note(f"      answered: {clean(fact.line.answer)}")
    if not some:
        note(f"nobody said {clean(word)!r}" if word is not None else "nothing but questions")
    if asked:
        note(f"{several(asked, 'question')} not shown: {every}")


def tell_of_others(named: dict[str, list[int]]) -> None:
    """Say which names of a struck line stand elsewhere: the person decides about those."""
    for word, numbers in named.items():
        note(f"{clean(word)} is also in line {', '.join(map(str, numbers))}, or in the answer to it")


def struck(proof: Forgotten) -> str:
    """A proof in one line; all of it where something is not as it should be."""
    if not proof.scrubbed or proof.forks or proof.copies or proof.echoes:
        return clean(str(proof))
    files = several(len(proof.searched.files), "file")
    return f"struck out; {several(proof.events_kept, 'event')} lived again, twice, to the same state, and nothing of it is left in {files}"


def _described(fact: Fact) -> dict[str, Any]:
    return {
        "number": fact.number,
        "text": fact.text,
        "imprinted": [fact.text[a:b] for a, b in fact.imprinted],
        "answer": fact.line.answer,
        "source": fact.event.source,
        "time": fact.event.time,
    }


__all__ = ["chosen", "facts", "show", "struck", "tell_of_others"]
