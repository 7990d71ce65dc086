"""An identity as a value and as a folder: what is whole comes back bit for bit, and what is not is refused in one way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lives import apart, heard, llama, nobody, someone
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from regard.errors import CheckpointError, RegardError, StateError
from regard.identity.body import base_of
from regard.identity.folder import CONFIG, TENSORS, unpack
from regard.identity.packed import Packed
from regard.identity.state import Base, Identity, Imprints, Life, SelfState, TraceState
from regard.identity.write.rule import Rule, imprint

BASE = Base("f" * 64, depth=2, key_heads=2, head_width=8, family="llama")
MARA = replace(someone(BASE), life=Life(3, 120, 1, 2.5, 1.5, (0.5, 0.75)), parent="c0ffee")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identities") / "mara"
    MARA.save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("form", ["key_bias", "self_token", None])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("episodes", [0, 3])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, form: Any, rank: int, slots: int, episodes: int):
    me = someone(BASE, form=form, rank=rank, slots=slots, episodes=episodes)
    me.save(tmp_path / "me")
    again = Identity.load(tmp_path / "me")
    assert again.digest() == me.digest()
    assert again.tensors().keys() == me.tensors().keys()
    for name, x in me.tensors().items():
        assert torch.equal(x, again.tensors()[name])
        assert x.dtype == again.tensors()[name].dtype
    assert again.config() == me.config()
    assert again.silent == (form is None and not rank and not slots)
    assert again.empty == (again.silent and not episodes)


def test_a_folder_is_two_files_that_others_can_read(saved: Path):
    assert sorted(p.name for p in saved.iterdir()) == sorted([TENSORS, CONFIG])
    config = json.loads((saved / CONFIG).read_text(encoding="utf-8"))
    assert config["base"]["fingerprint"] == BASE.fingerprint
    assert load_file(saved / TENSORS)["imprints.k.codes"].shape == (2, 2, 5, 8)
    assert Identity.from_pretrained(saved).life == MARA.life
    assert Identity.load(saved).parent == "c0ffee"


def test_saving_again_replaces_the_folder_whole(tmp_path: Path):
    MARA.save(tmp_path / "me")
    nobody_yet = Identity.new(BASE)
    nobody_yet.save(tmp_path / "me")
    assert Identity.load(tmp_path / "me").digest() == nobody_yet.digest()


@pytest.mark.parametrize("kind", ["a folder", "a file", "beside an identity"])
def test_saving_does_not_remove_what_is_no_identitys(tmp_path: Path, kind: str):
    me, place = someone(BASE, 1), tmp_path / "notes"
    if kind == "beside an identity":
        me.save(place)
    mine = place if kind == "a file" else place / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("of years")
    with pytest.raises(StateError, match=f"{mine.name} would be lost"):
        me.save(place)
    assert mine.read_text() == "of years"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes"]


def test_saving_over_an_export_takes_its_journal_along(tmp_path: Path):
    me, folder = someone(BASE, 1), tmp_path / "me"
    folder.mkdir()
    me.save(folder)
    (folder / "journal.json").write_text("{}")
    me.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["identity.safetensors", "identity_config.json"]


@pytest.mark.parametrize("part", ["identity.safetensors", "identity_config.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_no_plain_file_is_not_read(copy: Path, part: str, kind: str):
    (copy / part).unlink()
    if kind == "a pipe":
        os.mkfifo(copy / part)
    else:
        (copy / part).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no plain file"):
        Identity.load(copy)


def test_a_link_to_a_file_is_read(copy: Path, tmp_path: Path):
    (copy / "identity.safetensors").rename(tmp_path / "elsewhere")
    (copy / "identity.safetensors").symlink_to(tmp_path / "elsewhere")
    assert Identity.load(copy).sources


def test_a_digest_is_of_the_content_and_of_nothing_else():
    assert MARA.digest() == replace(MARA, parent=None).digest()
    others = [
        replace(MARA, sources=("another",)),
        replace(MARA, life=replace(MARA.life, tokens=121)),
        replace(MARA, base=replace(BASE, name="x")),
        MARA.only("self", "trace"),
        replace(MARA, imprints=replace(MARA.imprints, worth=MARA.imprints.worth + 1)),
    ]
    assert len({x.digest() for x in [MARA, *others]}) == 6


def test_a_digest_does_not_depend_on_how_tensors_lie_in_memory():
    k = MARA.imprints.k
    strided = Packed(k.codes.transpose(0, 1).contiguous().transpose(0, 1), k.scale)
    assert replace(MARA, imprints=replace(MARA.imprints, k=strided)).digest() == MARA.digest()


def test_parts_can_be_looked_at_alone():
    alone = MARA.only("trace")
    assert alone.self is None
    assert alone.trace is MARA.trace
    assert len(alone.imprints) == 0
    assert MARA.only().empty
    assert MARA.only("self", "trace", "imprints").digest() == MARA.digest()
    assert MARA.nbytes == sum(x.numel() * x.element_size() for x in MARA.tensors().values())


def test_imprints_are_picked_and_joined_in_order():
    kept = MARA.imprints
    both = kept.pick(torch.tensor([0, 3])).joined(kept.pick(torch.tensor([1])))
    assert both.token.tolist() == [0, 3, 1]
    assert apart(both.k.dense(), kept.k.dense()[:, :, [0, 3, 1]]) == 0
    assert torch.equal(both.weight, kept.weight[..., [0, 3, 1]])
    assert len(Imprints.none(BASE).joined(kept)) == 5


def test_an_identity_of_a_model_says_who_its_model_is():
    model = llama()
    base = base_of(model)
    assert (base.depth, base.key_heads, base.head_width, base.family) == (3, 2, 8, "llama")
    assert base_of(llama()) == base
    assert base_of(llama(1)) != base
    base.refuse(base_of(llama()))
    with pytest.raises(StateError, match="weights differ"):
        base.refuse(base_of(llama(1)))
    with pytest.raises(StateError, match="layers, key heads"):
        base.refuse(replace(base, depth=4))


def test_a_source_with_any_letters_survives(tmp_path: Path):
    model = llama()
    me = imprint(nobody(model), heard(model, source='Tagebuch – 日記 \U0001f431\n"quoted"'), Rule(keep="shock"))
    me.save(tmp_path / "me")
    assert Identity.load(tmp_path / "me").sources == me.sources
    with pytest.raises(StateError, match="names"):
        imprint(nobody(model), heard(model, source="half \ud800"), Rule(keep="shock"))


# ---- folders that are not whole ---------------------------------------------------------------------------------------------


def test_folders_that_are_none(tmp_path: Path, saved: Path):
    for nothing in (tmp_path / "missing", tmp_path, saved / CONFIG, saved / TENSORS):
        with pytest.raises(CheckpointError):
            Identity.load(nothing)
    for name in (CONFIG, TENSORS):
        folder = Path(shutil.copytree(saved, tmp_path / name))
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            Identity.load(folder)
        (folder / name).mkdir()
        with pytest.raises(CheckpointError):
            Identity.load(folder)


def test_a_file_too_large_for_an_identity_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("regard.identity.folder.LARGEST", 1000)
    with pytest.raises(CheckpointError, match="at most"):
        Identity.load(copy)
    with pytest.raises(CheckpointError, match="at most"):
        unpack(save(MARA.tensors()))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "3", '"text"', "{}", "[" * 100_000, '{"schema": 1}', '{"schema": ' + "9" * 5000 + "}",
        '{"schema": 1, "base": {}}', '{"schema": 1e999}', "\x00",
    ],
)  # fmt: skip
def test_settings_that_are_none(copy: Path, text: str):
    (copy / CONFIG).write_text(text)
    with pytest.raises(RegardError):
        Identity.load(copy)


def test_settings_that_are_not_text(copy: Path):
    (copy / CONFIG).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(RegardError):
        Identity.load(copy)


ANYTHING = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "text", [], [1], ["x"], {}, {"x": 1}, "half \ud800"]
SAME = {
    ("base", "name"): ["", "text"], ("base", "licence"): ["", "text"], ("base", "family"): ["", "text"],
    ("base", "fingerprint"): ["", "text"], ("parent",): [None, "", "text"], ("life", "shock_mean"): [True, -1, 0, 1.5, 10**30],
    ("life", "shock_spread"): [True, -1, 0, 1.5, 10**30], ("life", "experiences"): [0], ("life", "tokens"): [0],
    ("life", "sleeps"): [0], ("life", "self_norms"): ["", [], [1], {}], ("life",): ["", {}, []], ("schema",): [1, 2],
    ("sources",): [["x"]],
}  # fmt: skip
"""Values that mean something, or do no harm."""
PLACES = [
    *((n,) for n in ("schema", "base", "form", "sources", "life", "parent")),
    *(("base", n) for n in ("fingerprint", "depth", "key_heads", "head_width", "family", "name", "licence", "more")),
    *(("life", n) for n in ("experiences", "tokens", "sleeps", "shock_mean", "shock_spread", "self_norms", "more")),
]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_setting_of_any_other_kind_is_refused(copy: Path, place: tuple[str, ...]):
    for value in ANYTHING:
        config = json.loads(json.dumps(MARA.config()))
        inner = config
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
        (copy / CONFIG).write_text(json.dumps(config))
        if any(value == x and type(value) is type(x) for x in SAME.get(place, [])):
            again = Identity.load(copy)
            again.save(copy.parent / "again")
            assert Identity.load(copy.parent / "again").digest() == again.digest()
        else:
            with pytest.raises(RegardError):
                Identity.load(copy)


@pytest.mark.parametrize("name", ["schema", "base", "form", "sources", "life"])
def test_a_setting_that_is_missing_is_refused(copy: Path, name: str):
    config = MARA.config()
    del config[name]
    (copy / CONFIG).write_text(json.dumps(config))
    with pytest.raises(RegardError):
        Identity.load(copy)


def test_another_schema_is_named(copy: Path):
    (copy / CONFIG).write_text(json.dumps({**MARA.config(), "schema": 3}))
    with pytest.raises(CheckpointError, match="schema 3"):
        Identity.load(copy)


DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "wider": lambda x: torch.cat([x, x], -1),
    "shorter": lambda x: x[..., :-1],
    "flat": lambda x: x.reshape(-1),
    "deeper": lambda x: x[None],
    "a number": lambda x: x.reshape(-1)[0],
    "empty": lambda x: x[..., :0],
    "double": lambda x: x.double(),
    "whole numbers": lambda x: x.long(),
    "true or false": lambda x: x > 0,
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("name", MARA.tensors())
def test_a_tensor_of_another_shape_or_kind_is_refused(copy: Path, name: str):
    for damage in DAMAGE.values():
        tensors = MARA.tensors()
        found = damage(tensors[name]).contiguous()
        if found.shape == tensors[name].shape and found.dtype == tensors[name].dtype:
            continue
        save_file({**tensors, name: found}, copy / TENSORS)
        with pytest.raises(RegardError):
            Identity.load(copy)


@pytest.mark.parametrize("name", MARA.tensors())
def test_a_tensor_that_is_missing_is_refused(copy: Path, name: str):
    tensors = MARA.tensors()
    del tensors[name]
    save_file(tensors, copy / TENSORS)
    # Without its only tensor a self is simply not there; everything else has several.
    if name == "self.s":
        assert Identity.load(copy).self is None
        return
    with pytest.raises(RegardError):
        Identity.load(copy)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(copy: Path, wrong: float):
    for name, x in MARA.tensors().items():
        if x.is_floating_point():
            x.view(-1)[0] = wrong
            save_file({**MARA.tensors(), name: x}, copy / TENSORS)
            with pytest.raises(StateError, match="finite"):
                Identity.load(copy)


@pytest.mark.parametrize("source", [-1, 1, 2**31 - 1])
def test_a_source_that_nobody_named_is_refused(copy: Path, source: int):
    x = MARA.imprints.source.clone()
    x[0] = source
    save_file({**MARA.tensors(), "imprints.source": x}, copy / TENSORS)
    with pytest.raises(StateError, match="sources"):
        Identity.load(copy)


def test_signs_that_are_none_and_tensors_too_many_are_refused(copy: Path):
    save_file({**MARA.tensors(), "trace.signs": torch.tensor([1, -1, 2, 1], dtype=torch.int8)}, copy / TENSORS)
    with pytest.raises(StateError, match="signs"):
        Identity.load(copy)
    save_file({**MARA.tensors(), "soul": torch.zeros(1)}, copy / TENSORS)
    with pytest.raises(CheckpointError, match="soul"):
        Identity.load(copy)
    save_file({}, copy / TENSORS)
    with pytest.raises(RegardError):
        Identity.build({**MARA.config(), "base": None}, {})


@settings(max_examples=80)
@given(st.data())
def test_bytes_that_were_cut_or_flipped_are_refused_or_read_whole(data: st.DataObject):
    whole = save(MARA.tensors())
    if data.draw(st.booleans()):
        hurt = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        # Most of a file is numbers, of which any are good; the header is where it is decided.
        at = data.draw(st.one_of(st.integers(0, 1500), st.integers(0, len(whole) - 1)))
        hurt = bytearray(whole)
        hurt[at] ^= 1 << data.draw(st.integers(0, 7))
        hurt = bytes(hurt)
    try:
        found = Identity.build(MARA.config(), unpack(hurt))
    except RegardError:
        return
    assert len(hurt) == len(whole)
    assert found.tensors().keys() == MARA.tensors().keys()


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(data: bytes):
    try:
        found = unpack(data)
    except RegardError:
        return
    assert found == {}


def test_states_that_are_wrong_are_refused_where_they_are_made():
    with pytest.raises(StateError, match="whole numbers"):
        replace(MARA, life=replace(MARA.life, tokens=1 << 31))
    with pytest.raises(StateError, match="form"):
        replace(MARA, self=SelfState(torch.zeros(2, 16), "soul"))  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"self\.s"):
        replace(MARA, self=SelfState(torch.zeros(2, 16), "self_token"))
    wide = Packed.of(torch.zeros(2, 2, 9, 8))
    with pytest.raises(StateError, match="at most 8"):
        replace(MARA, trace=TraceState(wide, torch.ones(9, dtype=torch.int8)))
    for wrong in (0, -3, 1 << 20, True, "two", None):
        with pytest.raises(StateError, match="no model"):
            Identity.new(replace(BASE, depth=wrong))  # type: ignore[arg-type]
