"""Loading, saving and loading again keeps what a checkpoint says beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from corpus import sentencepiece, write_tokenizer
from exports import write_bin, write_gguf
from tiny import llama, loud, qwen2, scaled

from regard import CheckpointError
from regard.models import LlamaConfig
from regard.models import downloads as hub
from regard.models.convert import load, save
from regard.models.tokenizer import load_tokenizer
from regard.position import Rope


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(bos_token_id=1, eos_token_id=[2, 7], pad_token_id=0).save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", sentencepiece())
    return tmp_path / "theirs"


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("eos", [2, [2, 7], None])
def test_ids_come_back_in_the_form_they_had(eos: int | list[int] | None, folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", eos_token_id=eos)
    (folder / "generation_config.json").unlink()
    save(load(folder), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    for name in ("a", "b"):
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (1, eos, 0)
        assert not (tmp_path / name / "generation_config.json").exists()


def test_generation_config_comes_back_whole_and_transformers_reads_it(folder: Path, tmp_path: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 2, 9], temperature=0.6, do_sample=True, top_p=0.9)
    model = load(folder, attention="dot | entmax(1.5)")
    save(model.with_attention("dot | softmax"), tmp_path / "ours")
    before, after = (json.loads((x / "generation_config.json").read_text()) for x in (folder, tmp_path / "ours"))
    assert before == after
    theirs = hf.GenerationConfig.from_pretrained(tmp_path / "ours")
    assert (theirs.eos_token_id, theirs.temperature, theirs.bos_token_id) == ([7, 2, 9], 0.6, 1)
    assert model.generation_info.eos_ids == (7, 2, 9)


def test_stop_ids_come_from_generation_config_and_else_from_config(folder: Path, tmp_path: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[9, 2])
    assert load_tokenizer(folder).eos_ids == (2, 9)
    edit(folder / "generation_config.json", eos_token_id=None)
    assert load_tokenizer(folder).eos_ids == (2, 7)
    converted = hub.convert(folder, tmp_path / "ours")
    assert load_tokenizer(converted).special == load_tokenizer(folder).special


@pytest.mark.parametrize("bad", ["2", [2, "x"], 1.5, True, {"a": 1}, -2, 2**40, [1] * 5000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_that_are_no_numbers_are_refused_by_field(bad: object, file: str, folder: Path) -> None:
    edit(folder / file, eos_token_id=bad)
    with pytest.raises(CheckpointError, match=f"{file}: eos_token_id is"):
        load(folder)


def test_gpt2_without_ids_gets_one_that_its_vocabulary_has(tmp_path: Path) -> None:
    from regard.models import GPT2Config

    GPT2Config(vocabulary=31, width=16, depth=1, heads=2).build().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 30


@pytest.mark.parametrize("words", ["gpt2", "llama"])
def test_a_converted_gguf_ends_where_the_file_ended(words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", words=words)
    folder = hub.convert(tmp_path / "m.gguf", tmp_path / "ours")
    first, again = load_tokenizer(tmp_path / "m.gguf"), load_tokenizer(folder)
    assert again.special == first.special
    assert again.eos_ids == (2, 8) == load(folder).generation_info.eos_ids
    assert again.template == first.template
    assert again.encode("abc") == first.encode("abc")


def test_a_converted_llama2c_export_ends_at_bos(tmp_path: Path) -> None:
    write_bin(tmp_path / "m.bin", versioned=False, tied=True)
    save(load(tmp_path / "m.bin"), tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["eos_token_id"] == [2, 1]


@pytest.mark.parametrize("where", ["top", "rope_parameters", "rope_scaling"])
def test_a_partial_rotation_that_transformers_ignores_is_refused(where: str, folder: Path) -> None:
    loud(llama(**scaled("default"))).save_pretrained(folder)
    half = {"partial_rotary_factor": 0.5}
    values = {"top": half, "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **half}},
              "rope_scaling": {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0, **half}}}  # fmt: skip
    edit(folder / "config.json", **values[where])
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5; this family turns whole heads"):
        load(folder)


def test_a_partial_rotation_is_not_written_where_nobody_reads_it(tmp_path: Path) -> None:
    config = LlamaConfig(vocabulary=31, width=16, depth=1, heads=2, key_heads=1, hidden=8)
    half = LlamaConfig(**{**vars(config), "rope": Rope(fraction=0.5)}).build()
    half.save_pretrained(tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["model_type"] == "regard-llama"
    assert load(tmp_path / "half").config == half.config
    kept = LlamaConfig(**{**vars(config), "attention": f"dot | softmax | {Rope(fraction=0.5)}"}).build()
    kept.save_pretrained(tmp_path)
    assert load(tmp_path).config == kept.config


def test_layers_of_an_unknown_type_are_refused(folder: Path) -> None:
    qwen2(use_sliding_window=True, max_window_layers=0, sliding_window=5).save_pretrained(folder)
    edit(folder / "config.json", layer_types=["chunked_attention"] * 3)
    with pytest.raises(CheckpointError, match="layer_types"):
        load(folder)
