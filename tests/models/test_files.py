"""Damaged, hostile and odd files: an error that names what is wrong, never a crash and never an allocation."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import SMALL, interleaved, write_bin, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import DECODERS, both, llama, near, tokens

from regard import CheckpointError
from regard.errors import MissingPackageError
from regard.models import FAMILIES, BertConfig, GPT2Config, Llama, LlamaConfig
from regard.models.convert import load, save
from regard.models.convert.gguf import GGUF
from regard.models.convert.layout import TensorPlace
from regard.nn import Attention
from regard.position import Rope


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SMALL.build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(NORM), f"lacks {NORM}"),
        (lambda t: t.update({"model.layers.7.odd.weight": torch.zeros(2)}), "nothing here to fill with model.layers.7.odd"),
        (lambda t: t.update({NORM: torch.zeros(17)}), rf"{NORM} is \(17,\), and the configuration asks for \(16,\)"),
        (lambda t: t.update({NORM: torch.zeros(16, dtype=torch.int32)}), f"{NORM} holds torch.int32"),
    ],
)
def test_a_tensor_too_few_too_many_or_misshapen_is_named(change: Any, says: str, folder: Path) -> None:
    retensor(folder, change)
    with pytest.raises(CheckpointError, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": -16}, "hidden_size is -16"),
        ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; known here: gpt2, llama"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": 1 << 29}, "embed_tokens"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"regard": {"version": 99}}, "newer"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field(changes: dict[str, Any], says: str, folder: Path) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=says):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '{"a": ' * 5000])
def test_a_config_that_is_no_object_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, 5000])
def test_truncated_safetensors_are_refused(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(folder)


def test_safetensors_with_an_absurd_header_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(folder)


def test_pickle_is_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load(folder)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    theirs = llama()
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    x = tokens(1, 5)
    with torch.no_grad():
        near(load(tmp_path).eval()(x).logits * 100, theirs.eval()(input_ids=x).logits * 100)


@pytest.mark.parametrize("file", ["../model/model.safetensors", "/etc/passwd", "missing.safetensors", 7])
def test_an_index_cannot_point_outside_its_folder(file: object, folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    with pytest.raises(CheckpointError, match=r"no safetensors file of this folder|is not there"):
        load(folder)


def test_specs_and_their_trained_tensors_come_back(tmp_path: Path) -> None:
    lines = ("cosine(temperature=learned) | softmax", "dot | entmax(learned) | alibi")
    model = LlamaConfig(**{**vars(SMALL), "attention": lines}).build()
    with torch.no_grad():
        model.blocks[0].attention.trained["temperature"].fill_(0.3)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    x = tokens(1, 7) % 31
    with torch.no_grad():
        assert torch.equal(again.eval()(x).logits, model.eval()(x).logits)


def test_attention_may_be_changed_on_the_way_in_and_nothing_unknown(folder: Path) -> None:
    assert str(load(folder, attention="entmax(1.7)").blocks[1].attention.spec.selection) == "entmax(alpha=1.7)"  # type: ignore[index, union-attr]
    with pytest.raises(CheckpointError, match="did you mean attention"):
        load(folder, atention="entmax(1.5)")


def test_a_failed_save_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("regard.models.convert.hf.save_file", fail)
    with pytest.raises(OSError, match="full"):
        SMALL.build().save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocabulary=31, width=16, depth=1, heads=2, bias=False),
        LlamaConfig(vocabulary=31, width=16, depth=1, heads=2, key_heads=1, hidden=24, window=5, mlp_bias=True),
        LlamaConfig(vocabulary=31, width=16, depth=1, heads=2, key_heads=1, hidden=24, head_width=8),
        GPT2Config(vocabulary=31, width=16, depth=1, heads=2, activation="swiglu"),
        GPT2Config(vocabulary=31, width=16, depth=1, heads=2, norm="post"),
        LlamaConfig(vocabulary=31, width=16, depth=1, heads=2, key_heads=1, hidden=24, activation="relu", norm="post"),
    ],
    ids=[
        "gpt2 without biases",
        "llama with a window and biases",
        "llama that says its head width",
        "gpt2 with SwiGLU",
        "gpt2 with norms after sums",
        "llama with ReLU and norms after sums",
    ],
)
def test_what_hugging_face_has_no_word_for_comes_back_too(config: GPT2Config | LlamaConfig, tmp_path: Path) -> None:
    model = config.build()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config == config
    tokens = torch.arange(9)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt2", {"activation": "geglu"}, "geglu"),
        ("gpt2", {"norm": "post"}, "norm=post"),
        ("llama", {"activation": "relu"}, "activation=relu"),
        ("llama", {"norm": "post"}, "norm=post"),
        ("bert", {"activation": "gelu_tanh"}, "this is gelu_tanh"),
    ],
)
def test_a_form_that_hugging_face_has_no_word_for_is_refused_by_name(family: str, changes: dict[str, str], says: str) -> None:
    converter = FAMILIES[family].converter
    assert converter is not None
    with pytest.raises(CheckpointError, match=says):
        converter.write(FAMILIES[family].config(**changes))


def test_a_bert_that_hugging_face_cannot_express_is_saved_in_our_words(tmp_path: Path) -> None:
    config = BertConfig(vocabulary=31, width=16, depth=1, heads=2, hidden=8, activation="gelu_tanh")
    config.build().save_pretrained(tmp_path)
    assert load(tmp_path).config == config


@pytest.mark.parametrize("source", ["no/such/folder/here", "missing.gguf", "./missing"])
def test_a_source_that_is_not_there_is_said(source: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load(source)


def test_a_hub_name_that_cannot_be_fetched_says_that_a_folder_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match="a folder with config"):
        load("somebody/model")


def test_a_missing_package_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "regard.models.convert.hf", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'regard\[models\]'"):
        load(folder)


def test_a_file_of_another_family_is_refused_by_class(tmp_path: Path) -> None:
    both(DECODERS["gpt2"], tmp_path)
    with pytest.raises(TypeError, match="holds a GPT2, not a Llama"):
        Llama.from_pretrained(tmp_path)


# GGUF


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_gguf_file_comes_back_as_the_model_it_was_made_of(kind: str, tmp_path: Path) -> None:
    model, x = write_gguf(tmp_path / "m.gguf", kind), tokens(2, 7) % 31
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "m.gguf").eval()(x).logits, model.eval()(x).logits)


def test_llama_3_scaling_in_a_gguf_is_known_by_what_it_does(tmp_path: Path) -> None:
    plain, scaled = Rope(base=500000.0), Rope(base=500000.0, scaling="llama3", factor=32.0, original=8192)
    divisors = (plain.rates(8)[0] / scaled.rates(8)[0]).numpy()
    assert divisors.min() == 1
    assert divisors.max() == pytest.approx(32)
    base = {"rope.freq_base": 500000}
    write_gguf(tmp_path / "m.gguf", divisors=divisors, **base)
    assert load(tmp_path / "m.gguf").config.rope == scaled
    write_gguf(tmp_path / "n.gguf", divisors=divisors[::-1].copy(), **base)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3"):
        load(tmp_path / "n.gguf")


def test_other_architectures_and_experts_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", expert_count=8)
    with pytest.raises(CheckpointError, match="expert_count is 8"):
        load(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes().replace(b"llama", b"mamba")
    (tmp_path / "n.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'mamba'"):
        load(tmp_path / "n.gguf")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=60)
def test_any_cut_or_overwritten_gguf_loads_or_is_refused(gguf_bytes: bytes, tmp_path_factory: Any, data: Any) -> None:
    """Every damage ends in a model of the right shape or in our own error, at once."""
    path = tmp_path_factory.mktemp("bad") / "m.gguf"
    header = 2000
    if data.draw(st.booleans()):
        raw = gguf_bytes[: data.draw(st.integers(0, len(gguf_bytes) - 1))]
    else:
        at = data.draw(st.integers(0, header))
        raw = gguf_bytes[:at] + data.draw(st.binary(min_size=1, max_size=8)) + gguf_bytes[at + 8 :]
    path.write_bytes(raw)
    try:
        loaded = load(path)
    except CheckpointError:
        return
    assert isinstance(loaded, Llama)


@pytest.mark.parametrize("at", [8, 16])
def test_absurd_counts_in_a_gguf_header_are_refused_at_once(at: int, gguf_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes[:at] + struct.pack("<Q", 1 << 61) + gguf_bytes[at + 8 :])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a GGUF file that can be read"):
        GGUF(tmp_path / "m.gguf")


# llama2.c


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama2c_export_comes_back(versioned: bool, tied: bool, tmp_path: Path) -> None:
    model, x = write_bin(tmp_path / "m.bin", versioned, tied), tokens(2, 7) % 31
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "m.bin").eval()(x).logits, model.eval()(x).logits)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("keep", [0, 20, 300, -4])
def test_a_cut_llama2c_export_is_refused(versioned: bool, keep: int, tmp_path: Path) -> None:
    write_bin(tmp_path / "m.bin", versioned, True)
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        load(tmp_path / "m.bin")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (struct.pack("<7i", -5, 1, 1, 1, 1, 1, 1), "dim is -5"),
        (struct.pack("<7i", 1 << 30, 1 << 30, 1 << 12, 2, 2, 1 << 30, 8), "its header asks for"),
        (b"24ka" + struct.pack("<i", 2) + b"\0" * 248, "version 2"),
        (np.random.default_rng(0).bytes(256), "read as llama2.c"),
    ],
)
def test_a_hostile_llama2c_header_is_refused(header: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(header)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "m.bin")


def test_half_and_interleaved_order_undo_each_other() -> None:
    x = torch.arange(24.0).reshape(12, 2)
    assert torch.equal(TensorPlace("q", heads=3).take(interleaved(x, 3)), x)
    assert not torch.equal(interleaved(x, 3), x)


def test_qkv_bias_leaves_the_way_out_without() -> None:
    attention = Attention(8, 2, bias="qkv")
    assert attention.q.bias is not None
    assert attention.out is not None
    assert attention.out.bias is None
