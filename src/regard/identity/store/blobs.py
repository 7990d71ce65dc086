"""Files named by the hash of what they hold, whole or absent: written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ...errors import CheckpointError
from ...files import DRAFT, new_folders, read_plain, sync, write_bytes
from ..folder import LARGEST
from .errors import MissingBlobError, StoreError


class Blobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, blob: str) -> Path:
        return self.folder / blob[:2] / f"{blob}.safetensors"

    def put(self, data: bytes, name: str | None = None) -> str:
        """Keep `data`, under a name that stands for its content, by default its hash; when this returns it survives a power cut."""
        blob = name or hashlib.sha256(data).hexdigest()
        path = self.path(blob)
        try:
            if self._refresh(blob, data):
                # The name may be another writer's, who died before syncing the folder.
                sync(path.parent)
            else:
                self._write(path, data)
        except OSError as error:
            raise StoreError(
                f"{len(data):,} bytes could not be written to {self.folder}: {error.strerror or error}; nothing was committed, "
                "and every head is where it was"
            ) from error
        return blob

    def _refresh(self, blob: str, data: bytes) -> bool:
        """Whether it is there and sound; then it is young again, so that `gc` leaves it until a commit names it."""
        path = self.path(blob)
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            if read_plain(path, len(data)) == data:
                os.utime(path)
                return True
        return False

    def _write(self, path: Path, data: bytes) -> None:
        if not path.parent.is_dir():
            new_folders(path.parent)
            sync(self.folder)
        write_bytes(path, data, private=True, drafts=self.folder)

    def read(self, blob: str) -> bytes:
        """Whatever stands under that name."""
        try:
            return read_plain(self.path(blob), LARGEST)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise MissingBlobError(blob, f"{error}; restore it or roll back") from error
            raise

    def get(self, blob: str) -> bytes:
        data = self.read(blob)
        if hashlib.sha256(data).hexdigest() != blob:
            raise CheckpointError(f"{self.path(blob)} is damaged: what it holds has another hash; restore it or roll back")
        return data

    def drop(self, blob: str) -> int:
        """Remove it; the bytes that this freed."""
        path = self.path(blob)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def draft_bytes(self) -> int:
        """Of files that are being written, or were when their process was killed."""
        total = 0
        for path in self.folder.glob(f"{DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def old(self, pattern: str, grace: float) -> Iterator[Path]:
        """Files that nobody has touched for `grace` seconds."""
        before = time.time() - grace
        for path in self.folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= before:
                    yield path


__all__ = ["Blobs"]
