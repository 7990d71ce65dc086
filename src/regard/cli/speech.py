"""What all verbs share: errors that teach with exit code 2, Ctrl-C with 130, progress where someone watches."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn, ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")
BETWEEN = 2.0
"""Seconds between two plain lines of progress."""


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """A command whose errors are one line, as the library wrote it, and whose interruption is no error."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _warnings_as_notes():
                return function(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "regard":
                raise
            fail(f"{error.name or error} is not installed: pip install 'regard[cli,models]'")
        except (ValueError, OSError) as error:
            from ..errors import RegardError

            if not isinstance(error, RegardError | OSError):
                raise
            fail(str(error))

    return wrapped


@contextmanager
def _warnings_as_notes() -> Generator[None]:
    """Our own warnings are one line each; a traceback's line of our source helps nobody here."""
    from ..errors import RegardWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", RegardWarning)
        warnings.showwarning = lambda message, *_: typer.echo(f"note: {message}", err=True)
        yield


def fail(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)


def watched() -> bool:
    return sys.stderr.isatty()


@contextmanager
def progress() -> Generator[Callable[[str, float | None], None]]:
    """A bar on a terminal, a plain line every other second elsewhere. Both go to stderr: stdout is for results."""
    if watched():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, share: bar.update(
                task, description=what, total=None if share is None else 1.0, completed=share or 0
            )
        return
    last: dict[str, float] = {}

    def tell(what: str, share: float | None) -> None:
        now = time.monotonic()
        if what not in last or now - last[what] > BETWEEN:
            last[what] = now
            typer.echo(what if not share else f"{what}: {share:.0%}", err=True)

    yield tell


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns for eyes and for `cut`: no frames unless on a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        made = Table(*head)
        for row in rows:
            made.add_row(*row)
        Console().print(made)
        return
    widths = [max(len(r[n]) for r in [head, *rows]) for n in range(len(head))]
    for row in [head, *rows]:
        typer.echo("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip())
