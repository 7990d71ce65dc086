"""What a run says: a bar on a terminal, plain lines elsewhere, and `metrics.jsonl` always. Only the first rank speaks."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import CheckpointError
from ..files import require_plain


class Metrics:
    """An append-only file of JSON lines; each is on its way to the disk before the next step begins."""

    def __init__(self, path: Path, live: bool) -> None:
        self.file, self.path = None, path
        if live:
            if path.exists():
                require_plain(path)
            # A line is handed over whole or not at all; what a full disk cut must not be tried again at the end.
            self.file = open(path, "ab+", buffering=0)  # noqa: SIM115
            # A killed process may have left half a line; a new one must not be glued to it.
            if self.file.seek(0, os.SEEK_END):
                self.file.seek(-1, os.SEEK_END)
                if self.file.read(1) != b"\n":
                    self._write(b"\n")

    def _write(self, line: bytes) -> None:
        assert self.file is not None
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path}: {error.strerror}; what was saved before is whole") from error

    def add(self, **record: Any) -> None:
        if self.file is not None:
            # JSON has no NaN; null is what every reader understands.
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            self._write((json.dumps(plain) + "\n").encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.file is not None:
            self.file.close()


class Reporter:
    """Silent; what `quiet` and every rank but the first use."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def say(self, line: str) -> None: ...

    def building(self, label: str, done: int, total: int) -> None: ...

    def step(self, done: int, total: int, loss: float, speed: float) -> None: ...


class Lines(Reporter):
    """For files and pipes: a line for each step that is told, none more often than once a second."""

    def __init__(self) -> None:
        self.spoke = 0.0

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def building(self, label: str, done: int, total: int) -> None:
        if done >= total or time.monotonic() - self.spoke >= 1:
            self.spoke = time.monotonic()
            self.say(f"{label} {done / max(total, 1):.0%}")

    def step(self, done: int, total: int, loss: float, speed: float) -> None:
        if done == total or time.monotonic() - self.spoke >= 1:
            self.spoke = time.monotonic()
            self.say(f"step {done}/{total}  loss {loss:.4f}  {speed:,.0f} tokens/s")


class Bar(Reporter):
    """For terminals: drawn at most four times a second, since a bar must not cost training time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TextColumn("ETA"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def _show(self, label: str, done: int, total: int, note: str) -> None:
        if label not in self.tasks:
            self.tasks[label] = self.bar.add_task(label, total=total, note="")
            # A resumed run starts where it was; its speed is what it does from here on.
            self.bar.reset(self.tasks[label], total=total, completed=done)
        self.bar.update(self.tasks[label], completed=done, total=total, note=note)

    def say(self, line: str) -> None:
        self.bar.console.print(line, highlight=False)

    def building(self, label: str, done: int, total: int) -> None:
        self._show(label, done, total, "")

    def step(self, done: int, total: int, loss: float, speed: float) -> None:
        self._show("training", done, total, f"loss {loss:.4f}  {speed:,.0f} tokens/s")


def reporter(speaks: bool) -> Reporter:
    if not speaks:
        return Reporter()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
