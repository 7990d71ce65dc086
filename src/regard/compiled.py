"""The file that a C source is compiled to: built where a compiler is found, kept for the next start, and checked before loading.

`products.c` becomes `products-KEY-HASH.so` in `home()/native`, a folder of its owner's alone: KEY names what it was built from,
HASH is the SHA-256 of its own bytes. A file that is cut short, changed, linked or somebody else's is never loaded, and is built
again: the loader maps a file without looking, and a page that is missing kills the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from . import files
from .errors import CheckpointError

Signatures = dict[str, tuple[list[type], type | None]]
"""What each function of a library takes and gives."""
FLAGS = ("-O3", "-mavx2", "-mfma", "-mf16c", "-fno-math-errno", "-fPIC")
PATIENCE = 300.0
"""Seconds that a compiler may take for each of its two calls: five alone, and many times as long beside much other work."""
LARGEST = 1 << 24
HERE = Path(__file__).parent
"""Where headers are that several sources include."""


def loaded(source: Path, signatures: Signatures) -> tuple[ctypes.CDLL | None, str | None]:
    """The library of a C source, or None and why it cannot be had."""
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "REGARD_NATIVE=0 turns it off"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None, f"it is written for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        return None, f"it needs AVX2, and torch sees {capability}"
    try:
        return bound(str(compiled(source)), signatures), None
    except (OSError, AttributeError) as error:
        return None, str(error)


def bound(path: str, signatures: Signatures) -> ctypes.CDLL:
    """The library in a file, with the types of its functions."""
    library = ctypes.CDLL(path)
    for name, (arguments, result) in signatures.items():
        f = getattr(library, name)
        f.argtypes, f.restype = arguments, result
    return library


def compiled(source: Path) -> Path:
    """The checked file, built if there is none; OSError says why it cannot be had."""
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not openmp:
        raise OSError("this torch was built with another OpenMP than GNU's")
    headers = (*sorted(source.parent.glob("*.h")), *sorted(HERE.glob("*.h")))
    text = b"\0".join(x.read_bytes() for x in (source, *headers))
    key = hashlib.sha256(b"\0".join([text, *map(str.encode, FLAGS), str(openmp[0]).encode()])).hexdigest()[:16]
    folder = _folder()
    for file in sorted(folder.glob(f"{source.stem}-{key}-*.so")):
        if is_sound(file):
            return file
    return _built(source, folder, key, openmp[0])


def is_sound(file: Path) -> bool:
    """True for a plain file of ours, or root's, that nobody else may write and whose bytes have the hash in its name."""
    try:
        _check_owner(file)
        data = files.read_plain(file, LARGEST)
    except (OSError, CheckpointError):
        return False
    return file.stem.endswith(f"-{hashlib.sha256(data).hexdigest()}")


def _folder() -> Path:
    folder = files.home() / "native"
    if folder.is_symlink():
        raise OSError(f"{folder} is a link; code is loaded from a folder of its own only")
    files.private_folder(folder)
    _check_owner(folder)
    return folder


def _check_owner(path: Path) -> None:
    status = path.lstat()
    if status.st_uid not in (os.getuid(), 0):
        raise OSError(f"{path} belongs to user {status.st_uid}; code is loaded from files of one's own, or root's, only")
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022:
        raise OSError(f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):o}); code is not loaded from there")


def _built(source: Path, folder: Path, key: str, openmp: Path) -> Path:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if not compiler or shutil.which(compiler[0]) is None:
        raise OSError(f"there is no compiler: {' '.join(compiler) or 'CC'} is no command here")
    files.sweep(folder)
    with tempfile.TemporaryDirectory(prefix=files.DRAFT, dir=folder) as scratch:
        part = Path(scratch) / source.stem
        # -fopenmp is for compiling only: at linking it would bring the compiler's own OpenMP in, whose threads would
        # wait for the cores that torch's hold.
        _run([*compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", f"{part}.o"], Path(scratch))
        _run([*compiler, "-shared", f"{part}.o", str(openmp), "-lm", "-o", f"{part}.so"], Path(scratch))
        data = Path(f"{part}.so").read_bytes()
    # The hash is in the name, so one rename puts both in place: two processes that build at once cannot mix theirs.
    target = folder / f"{source.stem}-{key}-{hashlib.sha256(data).hexdigest()}.so"
    if target.is_dir() and not target.is_symlink():
        raise OSError(f"{target} is a folder; remove it")
    files.write_bytes(target, data, private=True)
    if not is_sound(target):
        raise OSError(f"{target} is not what was written to it")
    for file in folder.glob(f"{source.stem}-{key}-*.so"):
        # What was not fit to load is not kept; whoever has it loaded goes on with what they have.
        if file != target and not is_sound(file) and (file.is_symlink() or file.is_file()):
            file.unlink(missing_ok=True)
    return target


def _run(command: list[str], scratch: Path) -> None:
    """A compiler's call in a session of its own: when it hangs, all that it started ends with it."""
    said = scratch / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=scratch, start_new_session=True
        )
        try:
            code = process.wait(PATIENCE)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise OSError(f"{command[0]} took longer than {PATIENCE:g} s and was ended") from error
    if code:
        words = said.read_bytes()[-400:].decode(errors="replace").strip()
        raise OSError(f"{command[0]} failed with {code}: {words or 'it said nothing'}")


__all__ = ["Signatures", "bound", "compiled", "is_sound", "loaded"]
