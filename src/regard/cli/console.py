"""What all verbs share: errors that teach with exit code 2, Ctrl-C with 130, progress where someone watches."""

from __future__ import annotations

import contextlib
import functools
import re
import select
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")
BETWEEN = 2.0
"""Seconds between two plain lines of progress."""
TOGETHER = 0.03
"""Seconds within which lines on a terminal belong to one paste: nobody types the next one so soon."""
QUOTES = '"""'
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
COMMAND = re.compile(r"/\w+(\s[^/]*)?")


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
        except ImportError:
            # The console script says which extra of regard brings it.
            raise
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


def confirm(yes: bool, question: str) -> None:
    """Go on only if whoever watches agrees, or said so beforehand."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nobody is here to be asked; say --yes")
    if not agreed(question):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)


def agreed(question: str) -> bool:
    """Whether somebody at the terminal says yes; Ctrl-C and Ctrl-D say no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo(err=True)
        return False


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
            typer.echo(f"{what}: {share:.0%}" if share and what in last else what, err=True)
            last[what] = now

    yield tell


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns that people and `cut` can read: no frames unless on a terminal."""
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


def read_messages(prompt: str = "› ") -> Iterator[str]:
    """Messages from stdin until it ends: one a line, or what stands between three quotes and three quotes.

    On a terminal, with a prompt and editing, lines that were pasted together are one message too; a command (`/who`) is always
    one by itself.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline

            # Python turns this off; with it a terminal says itself where a paste ends, and the paste is sent with Enter.
            readline.parse_and_bind("set enable-bracketed-paste on")
    quoted = ""
    while True:
        try:
            texts = _typed("" if quoted else prompt) if terminal else [sys.stdin.readline()]
        except UnicodeDecodeError:
            fail("stdin is not text in UTF-8")
        except KeyboardInterrupt:
            if not terminal:
                raise
            quoted = ""
            typer.echo("\nCtrl-D or /quit ends the chat", err=True)
            continue
        except EOFError:
            typer.echo()
            texts = [""]
        for text in texts:
            message = quoted + text
            if text and message.lstrip().startswith(QUOTES) and not message.strip()[3:].endswith(QUOTES):
                quoted = message
                continue
            quoted = ""
            message = message.strip()
            if message.startswith(QUOTES):
                message = message.removeprefix(QUOTES).removesuffix(QUOTES).strip()
            if message:
                yield message
            if not text:
                return


def _typed(prompt: str) -> list[str]:
    """A line of the terminal and those that came with it; a command among them by itself."""
    lines = [input(prompt)]
    while not COMMAND.fullmatch(lines[-1]) and _more_waits():
        with contextlib.suppress(EOFError):
            lines.append(input())
    last = [lines.pop()] if COMMAND.fullmatch(lines[-1]) else []
    return [text + "\n" for text in (*(["\n".join(lines)] if lines else []), *last)]


def _more_waits() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(select.select([sys.stdin], [], [], TOGETHER)[0])
    return False
