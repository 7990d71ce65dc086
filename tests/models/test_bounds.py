"""A small file cannot ask for much: everything below runs in one process that may take half a gigabyte beyond what it starts with."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import write_checkpoints
from safetensors.torch import load_file, save_file

from regard.models import downloads as hub

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and pipes as Linux has them")

READER = """
import json, resource, sys
from pathlib import Path
import torch
from regard import CheckpointError
from regard.models.convert import load
from regard.models.tokenizer import load_tokenizer
import regard.models.convert.hf, regard.models.convert.gguf, regard.models.sandbox, gguf, tokenizers
torch.set_num_threads(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
for line in sys.stdin:
    source, reads = json.loads(line)
    try:
        (load if reads == "model" else load_tokenizer)(source)
        said = "read"
    except CheckpointError as error:
        said = f"refused: {error}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


class Reader:
    """Reads checkpoints within its limit, one after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, source: Path, reads: str = "model") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([str(source), reads]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"the reader of {source} is dead"
        return json.loads(line)


@pytest.fixture(scope="module")
def reader() -> Any:
    made = Reader()
    yield made
    with made.process as process:
        process.kill()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_checkpoints(root)
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in (originals / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        return tmp_path / name

    return copied


def edit(folder: Path, own: bool, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    (values["regard"]["config"] if own else values).update(changes)
    path.write_text(json.dumps(values))


HUGE: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"num_hidden_layers": 2**30}, {"num_hidden_layers": 4000}, {"vocab_size": 2**27}, {"vocab_size": 2**30},
        {"hidden_size": 2**30}, {"hidden_size": 2**20}, {"intermediate_size": 2**30}, {"num_attention_heads": 2**30},
        {"num_key_value_heads": 2**30}, {"head_dim": 2**30}, {"head_dim": 2**30, "num_attention_heads": 2**30},
        {"regard": {"version": 1, "family": "llama", "attention": "dot | softmax | relative(buckets=268435456)"}},
        {"regard": {"version": 1, "family": "llama", "attention": ["dot | softmax"] * 5000}},
    ],
    "gpt2": [{"n_positions": 2**30}, {"n_layer": 2**30}, {"n_inner": 2**30}, {"vocab_size": 2**27, "n_embd": 2**20}],
    "bert": [{"max_position_embeddings": 2**30}, {"type_vocab_size": 2**30}, {"num_hidden_layers": 2**30}],
    "t5": [
        {"num_layers": 2**30}, {"num_decoder_layers": 2**30}, {"num_decoder_layers": 4000}, {"d_kv": 2**30}, {"d_ff": 2**30},
        {"relative_attention_num_buckets": 2**30},
    ],
}  # fmt: skip
OWN_HUGE: dict[str, list[dict[str, Any]]] = {
    "routing": [{"experts": 2**30}, {"experts": 2**16}, {"depth": 2**30}, {"clusters": 2**27}, {"hidden": 2**30}, {"vocabulary": 2**27}],
    "energy": [{"memories": 2**30}, {"context": 2**30}, {"depth": 2**30}, {"steps": 2**30}],
    "ngpt": [{"depth": 2**30}, {"vocabulary": 2**27}, {"width": 2**30}],
    "recurrent": [{"depth": 2**30}, {"width": 2**27}, {"vocabulary": 2**27}],
}  # fmt: skip
CASES = [(n, False, c) for n, cs in HUGE.items() for c in cs] + [(n, True, c) for n, cs in OWN_HUGE.items() for c in cs]


@pytest.mark.parametrize(("name", "own", "changes"), CASES, ids=str)
def test_a_config_that_asks_for_much_is_refused(
    name: str, own: bool, changes: dict[str, Any], copy: Callable[[str], Path], reader: Reader
) -> None:
    folder = copy(name)
    edit(folder, own, **changes)
    assert reader(folder).startswith("refused: ")


def test_the_context_of_a_model_without_a_table_of_places_costs_nothing(copy: Callable[[str], Path], reader: Reader) -> None:
    folder = copy("llama")
    edit(folder, False, max_position_embeddings=2**30)
    assert reader(folder) == "read"


def test_layers_announced_by_many_tiny_tensors_are_still_bounded(copy: Callable[[str], Path], reader: Reader) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"x{i}": torch.zeros(1) for i in range(9000)}, folder / "model.safetensors")
    edit(folder, False, num_hidden_layers=4096, regard={"version": 1, "family": "llama"})
    assert "asks for 4096 layers; its tensors number 2" in reader(folder)


# GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(
    tensors: list[tuple[str, tuple[int, ...], int]], pairs: bytes = b"", count: int = 0, body: int = (1 << 16) + 64
) -> bytes:
    """A file by hand: tensors of float32 at any offset, and metadata as it comes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count) + pairs
    for name, shape, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
    return head + bytes(body)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gguf([(f"t{i}", (1 << 14,), 0) for i in range(2000)]), "starts inside the tensor before it"),
        (gguf([("a", (64,), 0), ("b", (64,), 252)]), "b starts inside"),
        (gguf([("a", (1 << 40,), 0)]), "ends past the end"),
        (gguf([("a", (1 << 32, 1 << 32), 0)]), "ends past the end"),
        (gguf([("a", (4,), 1 << 63)]), "ends past the end"),
        (gguf([], text("k") + struct.pack("<IIQ", 9, 8, 1 << 40), 1), "announce"),
        (gguf([], text("k") + struct.pack("<IIQ", 9, 0, 1 << 22), 1), "announces"),
        (gguf([], (text("k") + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22)) * 3, 3), "its arrays announce"),
        (gguf([], text("k") + struct.pack("<IQ", 8, 1 << 60), 1), "announces"),
        (gguf([], text("k") + struct.pack("<II", 9, 9), 1), "not a GGUF file"),
        (gguf([], text("general.alignment") + struct.pack("<II", 4, 1 << 30), 1), "general.alignment"),
        (gguf([], text("general.alignment") + struct.pack("<II", 4, 0), 1), "general.alignment"),
    ],
)
def test_a_gguf_that_counts_bytes_twice_or_beyond_its_end_is_refused(
    data: bytes, says: str, tmp_path: Path, reader: Reader
) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    for reads in ("model", "tokenizer"):
        said = reader(tmp_path / "m.gguf", reads)
        assert said.startswith("refused: ")
        assert says in said


# safetensors


def safetensors(entries: dict[str, Any], body: int = 64) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(body)


def entry(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        safetensors({f"t{i}": entry([16], 0, 64) for i in range(500)}),
        safetensors({"a": entry([16], 0, 64), "b": entry([8], 32, 64)}),
        safetensors({"a": entry([1 << 40], 0, 1 << 42)}),
        safetensors({"a": entry([1 << 62, 4], 0, 64)}),
        safetensors({"a": entry([0, 1 << 62], 0, 0), "b": entry([16], 0, 64)}),
        struct.pack("<Q", 1 << 62) + b"{}",
    ],
)
def test_safetensors_that_share_or_invent_bytes_are_refused(data: bytes, copy: Callable[[str], Path], reader: Reader) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").write_bytes(data)
    assert reader(folder).startswith("refused: ")


# What is no plain file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


PLACES = [
    ("llama", "config.json"), ("llama", "model.safetensors"), ("llama", "regard.safetensors"), ("llama", "generation_config.json"),
    ("llama", "tokenizer.json"), ("llama", "tokenizer_config.json"), ("llama", "special_tokens_map.json"),
    ("llama", "chat_template.jinja"), ("sharded", "model.safetensors.index.json"), ("sharded", "a.safetensors"),
    ("gguf", "llama.gguf"), ("bin 0", "m.bin"), ("bin 0", "tokenizer.bin"),
]  # fmt: skip


@pytest.mark.parametrize("put", [pipe, endless, loop, Path.mkdir], ids=["pipe", "endless", "loop", "folder"])
@pytest.mark.parametrize(("name", "file"), PLACES)
def test_a_pipe_a_device_a_loop_or_a_folder_is_not_read(
    put: Callable[[Path], None], name: str, file: str, copy: Callable[[str], Path], reader: Reader
) -> None:
    folder = copy(name)
    (folder / file).unlink()
    put(folder / file)
    source = folder / file if name == "gguf" else folder / "m.bin" if name == "bin 0" else folder
    said = [reader(source, reads) for reads in ("model", "tokenizer")]
    if put is loop:
        # A link to nowhere is a file that is not there, which some files need not be.
        assert all(x == "read" or x.startswith("refused: ") for x in said)
    else:
        assert any(x.startswith("refused: ") for x in said)
        assert all(x == "read" or x.startswith("refused: ") for x in said)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
def test_a_file_far_too_large_for_its_kind_is_refused_unread(file: str, copy: Callable[[str], Path], reader: Reader) -> None:
    folder = copy("llama")
    with (folder / file).open("r+b") as f:
        f.truncate(1 << 40)
    said = [reader(folder, reads) for reads in ("model", "tokenizer")]
    assert any("are read" in x for x in said), said


def test_a_damaged_record_of_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard import CheckpointError

    monkeypatch.setenv("REGARD_HOME", str(tmp_path))
    (tmp_path / "models" / "x").mkdir(parents=True)
    for damaged in (b"\xff", b"{}", b'{"name": 3}', b"["):
        (tmp_path / "models" / "x" / "regard.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"regard\.json"):
            hub.local_names()


def test_drafts_of_killed_downloads_are_swept(tmp_path: Path) -> None:
    from regard.models import LlamaConfig
    from regard.models.convert import save

    (tmp_path / ".draft-1-x").mkdir()
    os.utime(tmp_path / ".draft-1-x", (1, 1))
    save(LlamaConfig(vocabulary=32, width=16, depth=1, heads=2, key_heads=1, hidden=24).build(), tmp_path / "a")
    hub.convert(tmp_path / "a", tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
