"""Files that are whole or absent, private where they hold somebody, and plain where they are read.

    with replacing(path) as draft: save_file(tensors, draft)       # synced, then renamed: a reader sees the old or the new
    with new_folder(path, private=True) as draft: ...
    data = read_plain(path, limit)                                 # no link, no pipe, no device, no more than `limit` bytes

Every draft is named `.draft-…` and stands beside what it becomes, so whoever opens a folder can sweep what a killed process left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from .errors import CheckpointError, MissingPackageError, RegardError

DRAFT = ".draft-"
STALE = 24 * 3600.0
"""Seconds after which a draft belongs to nobody."""


def home() -> Path:
    """Where models, identities and compiled products are kept: REGARD_HOME, or `regard` in the platform's cache."""
    given = os.environ.get("REGARD_HOME")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "regard"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/regard"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


@contextlib.contextmanager
def replacing(path: str | Path, *, private: bool = False, drafts: Path | None = None) -> Generator[Path]:
    """A file to write; it takes its name, synced, when the block ends well, and vanishes when it does not.

    `drafts` is the folder to write it in, on the same disk; by default the one it will stand in.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=_prefix(), dir=drafts or path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        os.chmod(draft, 0o600 if private else 0o666 & ~_umask())
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        # A full disk must not be left fuller.
        draft.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes, *, private: bool = False, drafts: Path | None = None) -> None:
    with replacing(path, private=private, drafts=drafts) as draft:
        draft.write_bytes(data)


def write_text(path: str | Path, text: str, *, private: bool = False) -> None:
    write_bytes(path, text.encode("utf-8"), private=private)


@contextlib.contextmanager
def new_folder(path: Path, *, private: bool = False) -> Generator[Path]:
    """A folder to fill; it takes its name when the block ends well, and vanishes when it does not."""
    if private:
        new_folders(path.parent.absolute())
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=_prefix(), dir=path.parent))
    try:
        yield draft
        put(draft, path, private=private)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put(draft: Path, path: Path, *, private: bool = False) -> None:
    """Sync every file, then give the folder its name; a folder of that name steps aside first."""
    for file in draft.iterdir():
        if file.is_file():
            # Drafts are made private; what they become is as readable as any new file, unless it holds somebody.
            os.chmod(file, 0o600 if private else 0o666 & ~_umask())
            sync(file)
    sync(draft)
    os.chmod(draft, 0o700 if private else 0o777 & ~_umask())
    old: Path | None = None
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{_prefix()}old-", dir=path.parent)) / "x"
        os.replace(path, old)
    os.replace(draft, path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old.parent, ignore_errors=True)


def private_folder(path: Path) -> Path:
    """A folder that its owner alone may enter, made if it is not there; one that others may enter is closed to them."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(path.stat().st_mode) & 0o077 and path.stat().st_uid == os.getuid():
        path.chmod(0o700)
    return path


def sweep(folder: Path, older_than: float = STALE) -> int:
    """Remove the drafts of processes that have ended, and of unknown ones those that nobody has touched for `older_than` seconds;
    how many they were. A draft whose process still runs here is left alone, however old it is."""
    swept, before = 0, time.time() - older_than
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(FileNotFoundError):
            runs = _writer_runs(draft.name)
            if runs or (runs is None and draft.lstat().st_mtime > before):
                continue
            if draft.is_dir() and not draft.is_symlink():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink()
            swept += 1
    return swept


def new_folders(path: Path) -> Path:
    """`path` and every folder above it that is not there yet, each for its owner alone; one that is there stays as it is."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def read_plain(path: str | Path, limit: int, *, follow: bool = False) -> bytes:
    """A file's bytes; nothing that could block or go on for ever is read as a file, and no link unless `follow`."""
    path = Path(path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}{'' if follow else '; links are not followed'}"
        ) from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        # Before it becomes a Python file: a folder cannot, and its handle would stay open.
        os.close(handle)
        raise CheckpointError(f"{path} is no plain file")
    with os.fdopen(handle, "rb") as file:
        if status.st_size > limit:
            raise CheckpointError(f"{path} has {status.st_size:,} bytes; at most {limit:,} are read")
        # Room is made for what is asked for, not for what is there; and nothing beyond the limit is read if it grows meanwhile.
        return file.read(min(limit, max(status.st_size, 1 << 16)))


def require_plain(path: str | Path) -> Path:
    """`path`, when it is a plain file (or a link to one): for readers that open it by name themselves."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is no plain file")
    return path


@contextlib.contextmanager
def reading(
    what: object, kind: type[RegardError] = CheckpointError, *, passes: type[RegardError] = RegardError
) -> Generator[None]:
    """Read `what` in this block: whatever its damage makes a reader raise becomes a `kind` that names it.

    Errors that `passes` names say already what is wrong, and one of a missing package what to install.
    """
    try:
        yield
    except (passes, MissingPackageError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # A panic in Rust derives from BaseException, so that `except Exception` would let it through.
        said = " ".join(str(error).split())[:300]
        raise kind(f"{what} cannot be read: {type(error).__name__}{': ' if said else ''}{said}") from error


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def point(link: Path, target: str) -> None:
    """Make `link` name `target`, in one step: a reader sees the old or the new, never neither."""
    draft = link.with_name(f"{DRAFT}{link.name}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    os.replace(draft, link)


def _prefix() -> str:
    """A draft says who writes it: a process by its number, which means something only on its own host."""
    return f"{DRAFT}{os.getpid()}-{_host()}-"


@functools.cache
def _host() -> str:
    """A name for the space in which process numbers count: containers of one machine may have the same ones."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _writer_runs(name: str) -> bool | None:
    """Whether the process that writes a draft still runs; None where that cannot be known."""
    match name.removeprefix(DRAFT).split("-"):
        case [pid, host, *_] if pid.isdecimal() and host == _host() and sys.platform != "win32":
            pass
        case _:
            return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # Somebody else's process runs under this number.
        return True
    return True


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


__all__ = [
    "DRAFT", "home", "new_folder", "new_folders", "point", "private_folder", "put", "read_plain", "reading", "replacing", "require_plain", "sweep", "sync",
    "write_bytes", "write_text",
]  # fmt: skip
