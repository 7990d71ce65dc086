"""`regard imprint`: a text or a conversation into an identity, in one pass and without a gradient."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..identity.wording import several, size
from .arguments import EpisodesOption, ModelOption, StoreOption, note, open_model, open_store, parse_affect, parse_rule
from .console import progress, verb
from .generate import DEFAULT


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
        str | None, typer.Option(help="what is worth keeping: words, coverage, shock, attention, snapkv, kvzip, …")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="slots that the identity has at most", min=0)] = None,
    episodes: EpisodesOption = None,
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
    from ..identity.body import body_of
    from ..identity.documents import parse_document, read_document
    from ..identity.store.imprinting import imprint_into, recognised
    from ..identity.store.records import MOST_TEXT, checked_name, checked_source, unique_source
    from ..identity.store.replay import event_text, imprint_event

    said = parse_document(sys.stdin.buffer.read(MOST_TEXT + 1), "-") if file == "-" else read_document(Path(file))
    checked_name(identity)
    gain, rule = parse_affect(affect), parse_rule(keep, budget, episodes)
    # Two files of one name are two sources; one file is the same source wherever it lies.
    label = "stdin" if file == "-" else Path(file).stem
    source = checked_source(source) if source else unique_source(label, json.dumps(said))
    with open_store(store) as opened:
        done = None if again else recognised(opened, identity, event_text(said))
        if done is None:
            with progress() as tell:
                body, tokenizer, base = open_model(model, tell)
                event = imprint_event(said, source=source, rule=rule, affect=gain, piece=body_of(body).piece)
                done = imprint_into(opened, identity, body, tokenizer, event, again=again, base=base, tell=tell)
            if done.begun:
                note(f"{identity} is new: an identity of {base.name or base.family}")
        typer.echo(str(done))
        if done.commit is None:
            note("--again imprints it once more")
            return
        made = opened.find(done.commit)
    facts = f"{several(made.imprints, 'imprint')}, {several(made.experiences, 'experience')}, {size(made.bytes)}"
    typer.echo(f"{identity} {made.id[:12]}  {facts}")
