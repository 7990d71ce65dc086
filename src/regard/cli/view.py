"""`regard view`: the attention of a model on a text, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import ModelOption, StoreOption, load, open_model, open_store
from .console import fail, progress, verb
from .generate import DEFAULT


@verb
def view(
    text: Annotated[str, typer.Argument(help="the text to look at; - reads it from stdin")],
    identity: Annotated[str | None, typer.Option("--identity", "-i", help="somebody whose attention it is")] = None,
    spec: Annotated[
        list[str] | None, typer.Option("--spec", "-s", help="another mechanism beside the model's own; up to three times")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="some layers, such as 0,12,29 or 4-9 [default: all]", show_default=False)
    ] = None,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="put a mechanism into every layer, not only into the one that is shown")
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="the file to write")] = Path("view.html"),
    limit: Annotated[int, typer.Option(help="megabytes that the file has at most")] = 24,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Write one HTML file that shows attention; it needs no server and no network.

    \b
    regard view "The animal didn't cross the street because it was too tired"
    regard view "What is my cat called?" --identity mara --layers 8-16
    regard view "The sea is" --spec "entmax(1.5)" --spec "topk(4)" --out sea.html
    cat chapter.txt | regard view - --layers 3,18
    """
    from .generate import _read  # pyright: ignore[reportPrivateUsage]

    said = _read(text)
    chosen = None if layers is None else parse_layers(layers)
    if limit < 1:
        fail(f"--limit {limit}: a file has at least one megabyte")
    with progress() as tell:
        tell(f"loading {model}", None)
        loaded, tokenizer, base = open_model(model, tell)
        from ..serve.view import view as make

        who = None
        if identity is not None:
            opened = open_store(store)
            try:
                who = load(opened, identity, base)
            finally:
                opened.close()
        made = make(
            loaded, said, tokenizer, identity=who, name=identity or "", spec=spec or (), layers=chosen, everywhere=everywhere,
            limit=limit << 20, called=base.name, tell=tell,
        )  # fmt: skip
    made.save(out)
    typer.echo(f"{out}: {len(made.html) / 1e6:.1f} MB; open it in a browser")


def parse_layers(text: str) -> list[int]:
    """0,12,29 or 4-9, or both."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 12:
            fail(f"--layers {text:.60}: write numbers and ranges, such as 0,12,29 or 4-9")
        chosen += range(int(first), int(last or first) + 1) if int(last or first) - int(first) < 1000 else [int(last)]
    return chosen
