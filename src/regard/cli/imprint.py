"""`regard imprint`: a text or a conversation into an identity, in one pass and without a gradient."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .console import fail, progress, verb
from .generate import DEFAULT
from .who import ModelOption, StoreOption, clean, note, open_model, open_store, parse_affect, several, size, text_of, words

if TYPE_CHECKING:
    from ..identity import Event

SHOWN = 12
"""Words of what was kept that are printed."""


@verb
def imprint(
    file: Annotated[str, typer.Argument(help="a text, a .json list of messages, a .jsonl of messages; - reads stdin")],
    identity: Annotated[str, typer.Option("--identity", "-i", help="who remembers it; made if there is none of that name")],
    affect: Annotated[str, typer.Option(help="how deeply, from -1 to 1, or estimated: by how it went for the model")] = "1",
    source: Annotated[
        str | None,
        typer.Option(
            help="a name for it, to forget it by [default: the file's, and digits of what it holds]", show_default=False
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="what is worth keeping: learned, coverage, shock, attention, snapkv, recency, …")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="slots that the identity has at most", min=0)] = None,
    again: Annotated[
        bool, typer.Option("--again", help="also when the identity has lived through this very text before")
    ] = False,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Let an identity live through a text.

    The model reads it once; what is worth keeping is kept as keys and values, a few hundred kilobytes for a life. Long texts are
    read in pieces. A message is {"role": "user", "content": "…"}, as in every chat API. What was written can be taken back, by
    its source, with `regard identity forget`. A text that the identity has lived through already is recognised, and left alone.

    \b
    regard imprint diary.txt --identity mara
    regard imprint chat.jsonl -i mara --source monday --affect estimated
    echo "My cat is called Mochi." | regard imprint - -i mara --source cat --keep shock
    """
    changes: dict[str, Any] = {k: v for k, v in (("keep", keep), ("budget", budget)) if v is not None}
    text = text_of(file)
    from ..identity import Identity, Rule
    from ..identity.body import body_of
    from ..identity.store.records import checked_name, unique_source
    from ..identity.store.replay import apply_event, imprint_event

    checked_name(identity)
    gain = parse_affect(affect)
    rule = Rule(**changes)
    # Two files of one name are two sources; one file is the same source wherever it lies.
    said = messages(text, file)
    name = source or unique_source("stdin" if file == "-" else Path(file).stem, json.dumps(said))
    event = imprint_event(said, source=name, rule=rule, affect=gain)
    with open_store(store) as kept:
        known = identity in kept.names()
        if known and not again and (before := _lived(kept.journal(identity), event)) is not None:
            day = time.strftime("%Y-%m-%d", time.gmtime(before.time))
            typer.echo(
                f"{identity} has lived through this text already, as {clean(str(before.source))} on {day}: nothing was written"
            )
            note("--again imprints it once more")
            return
        with progress() as tell:
            body, tokenizer, base = open_model(model, tell)
            # Another model's identity is refused before anything is read, which may take long.
            start = kept.load(identity, base) if known else Identity.new(base)
            event = imprint_event(said, source=name, rule=rule, affect=gain, piece=body_of(body).piece)
            after = apply_event(body, tokenizer, start, event, tell=tell)
            expected = start.parent if known else kept.new(identity, start).id
            commit = kept.commit(identity, after, event=event, expected=expected)
        if not known:
            note(f"{identity} is new: an identity of {base.name or base.family}")
        met = after.life.tokens - start.life.tokens
        fresh = [i for i, p in enumerate(after.imprints.position.tolist()) if p >= start.life.tokens]
        best = ", ".join(w for w, _, _ in words(after, tokenizer, fresh)[:SHOWN])
        typer.echo(f"kept {len(fresh)} of {several(met, 'token')} from {name}{f': {best}' if best else ''}")
        typer.echo(
            f"{identity} {commit.id[:12]}  {several(len(after.imprints), 'imprint')}, "
            f"{several(after.life.experiences, 'experience')}, {size(after.nbytes)}"
        )


def _lived(events: Sequence[Event], event: Event) -> Event | None:
    """The event in which the same words were imprinted before, whatever their source was called."""
    return next((e for e in events if e.kind == "imprint" and e.text == event.text), None)


def messages(text: str, file: str) -> Any:
    """The messages of a JSON or JSONL file, or the text itself."""
    kind = Path(file).suffix.lower()
    if kind == ".json":
        found = _json(text, file)
        if not isinstance(found, list) or not found:
            fail(f'{file} holds no list of messages: [{{"role": "user", "content": "…"}}, …]')
        rows = [(m, f"{file}, message {i}") for i, m in enumerate(cast(list[Any], found), 1)]
    elif kind == ".jsonl":
        lines = [(line, f"{file}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = [(_json(line, where), where) for line, where in lines]
    else:
        # From stdin there is no name to tell by: lines that are all messages are messages.
        return _all_messages(text) or text
    for found, where in rows:
        if not _is_message(found):
            fail(f'{where} is no message: it needs {{"role": "user", "content": "…"}}, and is {found!r:.60}')
    return [{"role": m["role"], "content": m["content"]} for m, _ in rows]


def _all_messages(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not all(line.lstrip().startswith("{") for line in lines):
        return []
    try:
        found = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return []
    return [{"role": m["role"], "content": m["content"]} for m in found] if all(map(_is_message, found)) else []


def _is_message(found: Any) -> bool:
    match found:
        case {"role": str(), "content": str()}:
            return True
        case _:
            return False


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(f"{where} is not JSON: {error}")
