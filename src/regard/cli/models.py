"""`regard models`: fetch, list, look at and convert checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from .console import progress, table, verb
from .generate import TokenizerOption

app = typer.Typer(help="Models on this machine: get, list, show, convert.", no_args_is_help=True)


@app.command()
@verb
def get(name: Annotated[str, typer.Argument(help="smollm2, minilm, or a hub name: owner/model, or hub:model")]) -> None:
    """Put a model into the cache; a second time does nothing.

    \b
    regard models get smollm2
    regard models get HuggingFaceTB/SmolLM2-360M-Instruct
    REGARD_HOME=/data/regard regard models get minilm
    """
    with progress() as tell:
        tell(f"looking for {name}", None)
        from ..models import downloads as hub

        there = hub.present(name)
        folder = hub.get(name, tell)
    typer.echo(f"{name} {'was here already' if there else 'is here now'}: {folder}")


@app.command("list")
@verb
def list_models() -> None:
    """What is here, and what can be had by a short name.

    \b
    regard models list
    """
    from ..models import downloads as hub

    here = hub.local_names()
    rows = [
        (n, f"{hub.size(hub.place(n)) / 1e6:,.0f} MB", hub.PACKAGES[n].about if n in hub.PACKAGES else "from the hub")
        for n in here
    ]
    rows += [(n, "not here", f"{p.about}: regard models get {n}") for n, p in hub.PACKAGES.items() if n not in here]
    table(("name", "size", "what"), rows)


@app.command()
@verb
def show(source: Annotated[str, typer.Argument(help="a name from the list, a folder, a .gguf or a .bin")]) -> None:
    """What a checkpoint is: family, sizes, attention of each layer.

    \b
    regard models show smollm2
    regard models show ./model.gguf
    """
    with progress() as tell:
        tell(f"loading {source}", None)
        from ..models import downloads as hub
        from ..models.convert import load

        model = load(hub.resolve(source), progress=lambda share: tell(f"loading {source}", share))
    seen: set[int] = set()
    count = 0
    for p in model.parameters():
        count += 0 if p.data_ptr() in seen else p.numel()
        seen.add(p.data_ptr())
    rows = [("family", model.family), ("parameters", f"{count / 1e6:,.1f} M")]
    rows += [(f.name, str(getattr(model.config, f.name))) for f in dataclasses.fields(model.config)]
    table(("field", "value"), rows)


@app.command()
@verb
def convert(
    source: Annotated[str, typer.Argument(help="a name from the list, a folder, a .gguf or a .bin")],
    folder: Annotated[Path, typer.Argument(help="a new folder, in Hugging Face's layout")],
    tokenizer: TokenizerOption = None,
) -> None:
    """Write a checkpoint as config.json, safetensors and tokenizer.json.

    \b
    regard models convert model.gguf ./model
    regard models convert stories.bin ./model --tokenizer tokenizer.model
    """
    with progress() as tell:
        tell(f"converting {source}", None)
        from ..models import downloads as hub

        hub.convert(hub.resolve(source), folder, tell, tokenizer=tokenizer)
    typer.echo(f"wrote {folder}")
