"""Blobs as files: written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..folder import LARGEST
from .blobs import READ, SUFFIX, Blobs, Searchable, name_of, place_of
from .errors import MissingBlobError, StoreError


class FolderBlobs(Blobs):
    unreachable = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def path(self, blob: str) -> Path:
        return self.folder / place_of(blob)

    def label(self, blob: str) -> str:
        return str(self.path(blob))

    def put(self, data: bytes, name: str | None = None) -> str:
        blob = name_of(data, name)
        path = self.path(blob)
        try:
            if self._refresh(blob, data):
                # The name may be another writer's, who died before syncing the folder.
                files.sync(path.parent)
            else:
                self._write(path, data)
        except OSError as error:
            raise StoreError(
                f"{len(data):,} bytes could not be written to {self.where}: {error.strerror or error}; nothing was committed, and "
                "every head is where it was"
            ) from error
        return blob

    def _refresh(self, blob: str, data: bytes) -> bool:
        """Whether it is there and sound; then it is young again, so that `gc` leaves it until a commit names it."""
        path = self.path(blob)
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            if files.read_plain(path, len(data)) == data:
                os.utime(path)
                return True
        return False

    def _write(self, path: Path, data: bytes) -> None:
        if not path.parent.is_dir():
            files.new_folders(path.parent)
            files.sync(self.folder)
        files.write_bytes(path, data, private=True, drafts=self.folder)

    def has(self, blob: str) -> bool:
        return self.path(blob).exists()

    def read(self, blob: str) -> bytes:
        try:
            return files.read_plain(self.path(blob), LARGEST)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise MissingBlobError(blob, f"{error}; restore it or roll back") from error
            raise

    def drop(self, blob: str) -> int:
        path = self.path(blob)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def every(self) -> Iterator[str]:
        return (path.stem for path in self.folder.glob(f"*/*{SUFFIX}"))

    def old(self, grace: float) -> Iterator[str]:
        before = time.time() - grace
        for path in self.folder.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= before:
                    yield path.stem

    def strays(self, named: set[str]) -> list[str]:
        return [path.name for path in self.folder.glob("*/*") if path.stem not in named]

    def drafts(self) -> tuple[int, int]:
        number = total = 0
        for path in self.folder.glob(f"{files.DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
                number += 1
        return number, total

    def sweep(self, older_than: float) -> int:
        return files.sweep(self.folder, older_than)

    def searchable(self, named: set[str]) -> Iterator[Searchable]:
        return files_below(self.folder, named)

    def open_to_others(self) -> Iterator[Path]:
        return open_files(self.folder)

    def writable(self) -> bool:
        return not self.folder.exists() or os.access(self.folder, os.W_OK)

    def make(self, *, own: bool) -> None:
        files.new_folders(self.folder)
        if own:
            files.private_folder(self.folder)

    def set_aside(self, stamp: str) -> None:
        if self.folder.exists():
            os.replace(self.folder, self.folder.with_name(f"{self.folder.name}.{stamp}"))


def files_below(folder: Path, named: set[str]) -> Iterator[Searchable]:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink() and path.stem not in named and path.stat().st_size:
            yield searchable_file(path)


def searchable_file(path: Path) -> Searchable:
    def parts() -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            while data := file.read(READ):
                yield data

    return Searchable(path.name, parts)


def open_files(top: Path) -> Iterator[Path]:
    """A file, or what of a folder, others than its owner may read."""
    for path in (top, *(top.rglob("*") if top.is_dir() else ())):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077:
                yield path


__all__ = ["FolderBlobs", "files_below", "open_files", "searchable_file"]
