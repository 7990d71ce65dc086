"""Measured lines on disk: one JSON line per seed, with where it comes from; a line that was cut off is measured again.

results = Results(folder)
results.lines(study, "full")       # those that this study's present code measured, one per seed
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .study import SIZES, Record, Size, Study

Line = dict[str, Any]
"""A record with its study, seed, size, version, command, machine and seconds."""
_JUDGING = ("judge", "draw", "planted")
_NAMED = ("STUDY", "PENDING")
LONGEST = 64 * 1024 * 1024
"""Bytes of a file of lines at most."""


@dataclass(frozen=True)
class Results:
    """A folder of measured studies."""

    folder: Path

    def path(self, name: str, size: Size) -> Path:
        return self.folder / (f"{name}.jsonl" if size == "full" else f"{name}.{size}.jsonl")

    def lines(self, study: Study, size: Size, *, stale: bool = False) -> list[Line]:
        """One line per seed, in order; those that other code measured only if `stale`."""
        path, by_seed = self.path(study.name, size), dict[int, Line]()
        if not path.is_file() or path.stat().st_size > LONGEST:
            return []
        # Only "\n" ends a line: JSON may hold what else Python takes for one, and a cut may go through a letter.
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if _is_line(line, study.name, size) and (stale or line["code"] == code_of(study.name)):
                by_seed[line["seed"]] = line
        return [by_seed[seed] for seed in sorted(by_seed)]

    def append(self, line: Line) -> None:
        """Add a line, in one write, after whatever a killed process left."""
        path = self.path(line["study"], line["size"])
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
        data = ("\n" if cut else "") + json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, data.encode("utf-8"))
            os.fsync(handle)
        finally:
            os.close(handle)

    def best(self, study: Study) -> tuple[Size, list[Line]] | None:
        """The largest size that was measured with enough seeds, and its lines; older code counts where nothing newer is there."""
        for stale in (False, True):
            for size in reversed(SIZES):
                lines = self.lines(study, size, stale=stale)
                if len(lines) >= len(study.seeds_of(size)):
                    return size, lines
        return None


def _is_line(line: Any, name: str, size: Size) -> bool:
    """A line that this program wrote: files can be edited by anybody."""
    return (
        isinstance(line, dict)
        and line.get("study") == name
        and line.get("size") == size
        and type(line.get("seed")) is int
        and isinstance(line.get("record"), dict)
        and isinstance(line.get("code"), str)
    )


def records_of(lines: Sequence[Line]) -> list[Record]:
    return [line["record"] for line in lines]


@functools.cache
def code_of(name: str) -> str:
    """A digest of the code that measures: the study's module without its docstrings and without what judges and draws."""
    module = importlib.import_module(f"regard.study.{name}")
    tree = ast.parse(inspect.getsource(module))
    body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.FunctionDef) and node.name in _JUDGING)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in _NAMED for t in node.targets))
    ]
    return hashlib.sha256("".join(ast.dump(node) for node in body).encode()).hexdigest()[:16]


@functools.cache
def machine() -> dict[str, str | int]:
    """What the numbers were measured on; never its name."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def command() -> str:
    """The command as it was typed, without the folder that the program stands in."""
    # The console script, or `python -m regard.cli.main`.
    typed = bool(sys.argv) and ("regard" in Path(sys.argv[0]).name or Path(sys.argv[0]).parts[-3:-1] == ("regard", "cli"))
    return " ".join(["regard", *sys.argv[1:]]) if typed else "regard.study"
