"""Files that are whole or absent: written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """A folder to fill; it takes its name when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield draft
        put(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put(draft: Path, path: Path) -> None:
    """Sync every file, then give the folder its name; a folder of that name steps aside first."""
    for file in draft.iterdir():
        if file.is_file():
            # Drafts are made private; what they become is as readable as any new file.
            os.chmod(file, 0o666 & ~umask())
            sync(file)
    sync(draft)
    os.chmod(draft, 0o777 & ~umask())
    old: Path | None = None
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent)) / "x"
        os.replace(path, old)
    os.replace(draft, path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old.parent, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def point(link: Path, target: str) -> None:
    """Make `link` name `target`, in one step: a reader sees the old or the new, never neither."""
    draft = link.with_name(f".{link.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    os.replace(draft, link)
