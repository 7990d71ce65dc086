"""What the tour says in the terminal: colours and a bar where someone watches, plain lines where a file or a log does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from demo.extras import have, need

_BETWEEN = 2.0
"""Seconds between two plain lines of progress."""


class Screen:
    def __init__(self) -> None:
        self.rich = sys.stdout.isatty() and have("rich")

    def say(self, text: str) -> None:
        if self.rich:
            need("rich").print(text)
        else:
            print(text, flush=True)

    @contextmanager
    def steps(self, title: str, total: int) -> Generator[Callable[[], None]]:
        """A job of `total` steps; call what it gives after each."""
        start = time.perf_counter()
        if self.rich:
            with need("rich.progress").Progress(transient=True, refresh_per_second=4) as progress:
                task = progress.add_task(title, total=total)
                yield lambda: progress.advance(task)
        else:
            done, last = 0, start

            def tick() -> None:
                nonlocal done, last
                done += 1
                if time.perf_counter() - last > _BETWEEN and done < total:
                    last = time.perf_counter()
                    print(f"{title}: {done} of {total}", flush=True)

            yield tick
        self.say(f"{title}: {time.perf_counter() - start:.1f} s")

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column reads from the left, the others are numbers."""
        if self.rich:
            table = need("rich.table").Table(title=title, title_justify="left")
            for n, name in enumerate(head):
                table.add_column(name, justify="right" if n else "left")
            for row in rows:
                table.add_row(*row)
            need("rich").print(table)
            return
        widths = [max(len(r[n]) for r in [head, *rows]) for n in range(len(head))]
        print(f"\n{title}")
        for row in [head, *rows]:
            cells = [x.rjust(w) if n else x.ljust(w) for n, (x, w) in enumerate(zip(row, widths, strict=True))]
            print("  ".join(cells).rstrip())
        print(flush=True)
