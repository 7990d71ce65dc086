"""The compiled file is checked before it is loaded, built again when it is not sound, and done without where it cannot be had."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from regard import compiled
from regard.models.decode import native

if native.library() is None:
    pytest.skip(f"nothing is compiled here: {native.reason()}", allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with one sound file in it, and a compiler that gives the same again at once."""
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    good = compiled_once(tmp_path.parent)
    inside = tmp_path / "home" / "native"
    inside.mkdir(mode=0o700, parents=True)
    shutil.copy(good, inside / good.name)
    quick = tmp_path / "quick"
    quick.write_text(f'#!/bin/sh\nfor last; do :; done\ncase "$last" in *.so) cp "{good}" "$last";; *) : > "$last";; esac\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    forget()
    yield inside
    forget()


def forget() -> None:
    native.library.cache_clear()
    native._loaded.cache_clear()  # pyright: ignore


def compiled_once(base: Path) -> Path:
    """Compiling takes a second: once for all tests, as a home of its own would have it."""
    folder = base / "compiled" / "native"
    if not folder.exists():
        before = os.environ["REGARD_HOME"]
        os.environ["REGARD_HOME"] = str(folder.parent)
        try:
            compiled.compiled(native.SOURCE)
        finally:
            os.environ["REGARD_HOME"] = before
    (file,) = folder.glob("*.so")
    return file


def only(folder: Path) -> Path:
    (file,) = folder.glob("products-*.so")
    return file


def multiplies() -> bool:
    forget()
    assert native.reason() is None
    found = native.product(torch.ones(1, 8), native.Matrices([torch.ones(2, 8)], [None]))
    return found is not None and found.tolist() == [[8.0, 8.0]]


def without(word: str) -> None:
    """Torch multiplies, and the reason is said."""
    forget()
    assert native.library() is None
    assert word in str(native.reason())
    assert native.product(torch.ones(1, 8), native.Matrices([torch.ones(2, 8)], [None])) is None


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")


def test_sound_file_is_loaded_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch):
    no_compiler(monkeypatch)
    assert multiplies()


def test_file_and_folder_are_their_owners_alone(tmp_path: Path, folder: Path):
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    compiled.compiled(native.SOURCE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only(folder).stat().st_mode) == 0o600
    assert [x.name for x in folder.iterdir()] == [only(folder).name]


@pytest.mark.parametrize(
    "damage", ["cut", "emptied", "flipped", "renamed", "made a pipe", "replaced by a link", "open to others"]
)
def test_file_that_is_not_sound_is_built_again(damage: str, folder: Path, tmp_path: Path):
    file = only(folder)
    data, name = file.read_bytes(), file.name
    match damage:
        case "cut":
            file.write_bytes(data[: len(data) // 2])
        case "emptied":
            file.write_bytes(b"")
        case "flipped":
            file.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
        case "renamed":
            file.rename(folder / f"{file.stem.rsplit('-', 1)[0]}-{'0' * 64}.so")
        case "made a pipe":
            file.unlink()
            os.mkfifo(file)
        case "replaced by a link":
            file.rename(tmp_path / "elsewhere.so")
            file.symlink_to(tmp_path / "elsewhere.so")
        case _:
            file.chmod(0o666)
    assert not any(map(compiled.is_sound, folder.glob("*.so")))
    assert multiplies()
    assert only(folder).name == name
    assert only(folder).read_bytes() == data
    assert not only(folder).is_symlink()


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damage_without_a_compiler_is_no_crash(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    no_compiler(monkeypatch)
    file = only(folder)
    if damage == "missing":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:5000] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 255]))
    without("no-such-compiler")


def test_file_of_another_user_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    no_compiler(monkeypatch)
    # As if this process were somebody else's: neither the file nor the folder is theirs, nor root's.
    owner = only(folder).stat().st_uid
    if owner == 0:
        for path in (only(folder), folder):
            try:
                os.chown(path, 12345, -1)
            except PermissionError:
                pytest.skip("a file cannot be given away here")
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    without("belongs to user")


def test_linked_folder_is_not_loaded_from(folder: Path, tmp_path: Path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    without("is a link")


def test_home_that_cannot_be_written_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch):
    # A plain file where the folder should be stops root too.
    monkeypatch.setenv("REGARD_HOME", str(only(folder)))
    without("Not a directory")


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("exit 3", "failed with 3"),
        ("echo broken >&2; exit 1", "broken"),
        ("exit 0", "No such file"),
        ("sleep 300 & wait", "took longer"),
    ],
)
def test_compiler_that_fails_or_hangs_is_done_without(
    script: str, word: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    only(folder).unlink()
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    monkeypatch.setattr(compiled, "PATIENCE", 0.3 if "sleep" in script else 20.0)
    without(word)
    assert list(folder.iterdir()) == []


def test_compiler_may_be_several_words(folder: Path, monkeypatch: pytest.MonkeyPatch):
    only(folder).unlink()
    monkeypatch.setenv("CC", f"env {os.environ['CC']}")
    assert multiplies()


def test_library_that_lacks_a_function_is_done_without(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_SIGNATURES", {**native._SIGNATURES, "no_such_function": ([], None)})  # pyright: ignore
    without("no_such_function")


def test_turned_off_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REGARD_NATIVE", "0")
    without("REGARD_NATIVE=0")


def test_processes_that_build_at_once_all_multiply(folder: Path):
    only(folder).unlink()
    code = (
        "import torch; from regard.models.decode import native; m = native.Matrices([torch.ones(2, 8)], [None]);"
        "print(native.reason(), native.product(torch.ones(1, 8), m).tolist())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ}) for _ in range(2)
    ]
    assert [p.communicate(timeout=120)[0].strip() for p in running] == ["None [[8.0, 8.0]]"] * 2
    assert compiled.is_sound(only(folder))
