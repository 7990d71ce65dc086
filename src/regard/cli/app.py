"""The verbs of `regard`. Each one lives in a file of its own and imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .bench import bench
from .chat import chat
from .explain import explain
from .generate import generate
from .identity import app as identity
from .imprint import imprint
from .models import app as models
from .serve import app as serve
from .serve import studio
from .sleep import sleep
from .study import app as study
from .train import train
from .view import view

HELP = """Attention that can measure, choose and remember.

\b
regard models get smollm2
regard generate "The sea is"
regard generate "The sea is" --attention "cosine | entmax(1.5)"
regard explain "cosine | entmax(1.5) | alibi" --q 1,8,1024,64
regard imprint diary.txt --identity mara
regard chat --identity mara
regard serve
regard studio
regard train
regard study list
regard view "The sea is"
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    # Boxes and colours are for terminals; a pipe gets plain lines.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and stop", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


top.__doc__ = HELP
app.command()(generate)
app.add_typer(models, name="models")
app.command()(chat)
app.command()(imprint)
app.command()(sleep)
app.add_typer(identity, name="identity")
app.add_typer(serve, name="serve")
app.command()(studio)
app.add_typer(study, name="study")
app.command()(explain)
app.command()(bench)
app.command()(train)
app.command()(view)
