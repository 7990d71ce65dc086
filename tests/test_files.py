"""Files that are whole or absent, and private where they hold somebody."""

import os
import stat
import time
from pathlib import Path

import pytest

from regard import files
from regard.errors import CheckpointError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError), files.replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_private_files_and_folders_are_their_owners_alone(tmp_path):
    files.write_bytes(tmp_path / "a", b"x", private=True)
    with files.new_folder(tmp_path / "folder", private=True) as draft:
        (draft / "b").write_text("y")
    assert mode(tmp_path / "a") == 0o600
    assert mode(tmp_path / "folder") == 0o700
    assert mode(tmp_path / "folder" / "b") == 0o600


def test_other_files_are_as_readable_as_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    files.write_text(tmp_path / "ours", "x")
    assert mode(tmp_path / "ours") == mode(tmp_path / "plain")


def test_a_folder_that_others_could_enter_is_closed(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    assert mode(files.private_folder(open_folder)) == 0o700


def test_only_old_drafts_are_swept(tmp_path):
    for name in (".draft-old", ".draft-new", "kept"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".draft-folder").mkdir()
    (tmp_path / ".draft-folder" / "x").write_text("x")
    long_ago = time.time() - 2 * files.STALE
    for name in (".draft-old", ".draft-folder", "kept"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    assert files.sweep(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [".draft-new", "kept"]


def test_pipes_devices_links_and_large_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "link").symlink_to(tmp_path / "large")
    for name, why in (
        ("pipe", "no plain file"),
        ("large", "at most 10"),
        ("link", "links are not followed"),
        ("none", "not there"),
    ):
        with pytest.raises(CheckpointError, match=why):
            files.read_plain(tmp_path / name, 10)
    with pytest.raises(CheckpointError, match="no plain file"):
        files.read_plain("/dev/zero", 10)
    assert files.read_plain(tmp_path / "link", 11, follow=True) == b"x" * 11
