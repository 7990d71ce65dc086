"""Hostile files of episodes, in a store and in what is imported: every one is one of our errors, and nothing is written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lives import episode
from safetensors.torch import load, save, save_file
from stored import BASE, person

from regard import CheckpointError, RegardError, StateError
from regard.identity.episodes import Episode
from regard.identity.folder import CONFIG, EPISODES
from regard.identity.packed import Packed
from regard.identity.state import Identity
from regard.identity.store import IdentityStore
from regard.identity.store.codec import decode_episode, encode, encode_episode

ONE = episode(1, source="mara")
SOUND = encode_episode(ONE)


def rewritten(facts: dict[str, Any] | None = None, entry: str = "episode", **changed: torch.Tensor) -> bytes:
    names = {name.replace("_", "."): t for name, t in changed.items()}
    return save({**ONE.tensors(), **names}, metadata={entry: json.dumps({**ONE.facts(), **(facts or {})})})


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    size = struct.unpack("<Q", SOUND[:8])[0]
    header = json.loads(SOUND[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + SOUND[8 + size :]


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "cut": SOUND[:-5],
    "longer": SOUND + b"x",
    "a huge header": struct.pack("<Q", 1 << 40) + SOUND[8:],
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "a header nested too deeply": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "an identity": encode(person(1)),
    "another episode": encode_episode(episode(3, source="mara")),
    "the same words by somebody else": encode_episode(replace(ONE, source="theo")),
    "no facts": with_header(lambda h: h.pop("__metadata__")),
    "facts of another kind": rewritten(entry="identity"),
    "facts that are a list": with_header(lambda h: h["__metadata__"].update(episode="[1]")),
    "more beside the facts": with_header(lambda h: h["__metadata__"].update(note="x")),
    "another tensor": with_header(lambda h: h.update(evil=h.pop("tokens"))),
    "overlapping tensors": with_header(lambda h: h["tokens"].update(data_offsets=[0, 24])),
    "a negative shape": with_header(lambda h: h["tokens"].update(shape=[-6])),
    "another type": with_header(lambda h: h["tokens"].update(dtype="F32")),
    "tokens of no dimension": rewritten(tokens=torch.tensor(3, dtype=torch.int32)),
    "no tokens": rewritten(tokens=torch.zeros(0, dtype=torch.int32)),
    "negative tokens": rewritten(tokens=torch.full((6,), -1, dtype=torch.int32)),
    "keys of other tokens": rewritten(keys_codes=torch.zeros(5, 8, dtype=torch.int8)),
    "keys of no dimension": rewritten(keys_codes=torch.tensor(1, dtype=torch.int8)),
    "codes that overflow": rewritten(keys_codes=torch.full((6, 8), -128, dtype=torch.int8)),
    "infinite scales": rewritten(keys_scale=torch.full((6, 1), float("inf"), dtype=torch.float16)),
    "a usual that is not finite": rewritten(usual=torch.full((4,), float("nan"))),
    "a usual of another size": rewritten(usual=torch.zeros(5)),
    "another role": rewritten({"role": "system"}),
    "a role that is a list": rewritten({"role": ["user"]}),
    "no source": rewritten({"source": ""}),
    "an encoder with a line break": rewritten({"encoder": "a\nb"}),
    "another count": rewritten({"count": 5}),
    "a count that is true": rewritten({"count": True}),
    "a negative position": rewritten({"position": -1}),
    "a position beyond 32 bits": rewritten({"position": 1 << 40}),
    "a time beyond floats": rewritten({"time": 10**400}),
    "a time that is not finite": rewritten({"time": float("nan")}),
    "more facts": rewritten({"exec": "rm"}),
}


@pytest.fixture
def store(tmp_path: Path) -> Generator[IdentityStore]:
    with IdentityStore(tmp_path / "identities.db") as found:
        yield found


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_in_the_place_of_an_episode_is_refused(what: str) -> None:
    with pytest.raises(CheckpointError, match=r"^it |in it|of it"):
        decode_episode(HOSTILE[what], ONE.digest, "it")


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_a_flipped_byte_of_an_episode_is_noticed_or_changes_nothing(at: int, flip: int) -> None:
    data = bytearray(SOUND)
    data[at] ^= flip
    try:
        assert decode_episode(bytes(data), ONE.digest, "it").digest == ONE.digest
    except CheckpointError:
        return


def test_swapped_files_of_two_episodes_are_noticed(store: IdentityStore) -> None:
    store.new("mara", person(1))
    a, b = (store.blobs.path(e.digest) for e in person(1).episodes)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    store.cached_episodes.clear()
    with pytest.raises(CheckpointError, match="it holds another episode"):
        store.load("mara")
    assert len([p for p in store.check().problems if p.where.startswith("episode ")]) == 2


def saved(folder: Path) -> Path:
    person(1).save(folder)
    return folder


def changed(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    change(config["episodes"])
    (folder / CONFIG).write_text(json.dumps(config))


def retensored(folder: Path, **tensors: torch.Tensor) -> None:
    names = {name.replace("_", "."): t for name, t in tensors.items()}
    save_file({**load((folder / EPISODES).read_bytes()), **names}, folder / EPISODES)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "no tensors": lambda p: (p / EPISODES).unlink(),
    "no facts": lambda p: changed(p, lambda facts: facts.clear()),
    "one fact too few": lambda p: changed(p, lambda facts: facts.pop()),
    "one fact too many": lambda p: changed(p, lambda facts: facts.append(facts[0])),
    "facts that are no list": lambda p: changed(p, lambda facts: facts.__setitem__(0, "x")),
    "a count too large": lambda p: changed(p, lambda facts: facts[0].update(count=10**9)),
    "a count that is negative": lambda p: changed(p, lambda facts: facts[0].update(count=-1)),
    "a source that is none of its sources": lambda p: changed(p, lambda facts: facts[0].update(source="eve")),
    "an encoder without a meaning": lambda p: changed(p, lambda facts: facts[0].update(encoder="an encoder")),
    "cut": lambda p: (p / EPISODES).write_bytes((p / EPISODES).read_bytes()[:-3]),
    "a pipe": lambda p: ((p / EPISODES).unlink(), os.mkfifo(p / EPISODES)),
    "a link": lambda p: ((p / EPISODES).rename(p.parent / "real"), (p / EPISODES).symlink_to(p.parent / "real")),
    "another tensor": lambda p: retensored(p, evil=torch.zeros(1)),
    "tokens of no dimension": lambda p: retensored(p, tokens=torch.tensor(1, dtype=torch.int32)),
    "usual of no dimension": lambda p: retensored(p, usual=torch.tensor(1.0)),
    "keys of three dimensions": lambda p: retensored(p, keys_codes=torch.zeros(12, 8, 2, dtype=torch.int8)),
    "tokens of another type": lambda p: retensored(p, tokens=torch.zeros(12)),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_with_hostile_episodes_is_refused_and_nothing_is_written(
    store: IdentityStore, tmp_path: Path, what: str
) -> None:
    FOLDERS[what](saved(tmp_path / "saved"))
    with pytest.raises((CheckpointError, StateError)):
        store.import_(tmp_path / "saved", "evil")
    if what not in ("a pipe", "a link"):
        with pytest.raises(RegardError):
            Identity.load(tmp_path / "saved")
    assert not store.names()
    assert not list(store.blobs.folder.glob("*/*"))


def test_a_single_file_with_hostile_episodes_is_refused(store: IdentityStore, tmp_path: Path) -> None:
    store.new("mara", person(1))
    data = store.export("mara", tmp_path / "out.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    settings = json.loads(header["__metadata__"]["identity"])
    for facts in (
        [],
        settings["episodes"][:1],
        [*settings["episodes"], {}],
        "x",
        [{**settings["episodes"][0], "source": "eve"}] * 2,
    ):
        header["__metadata__"]["identity"] = json.dumps({**settings, "episodes": facts})
        text = json.dumps(header).encode()
        (tmp_path / "evil.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        with pytest.raises((CheckpointError, StateError)):
            store.import_(tmp_path / "evil.safetensors", "evil")
    assert list(store.names()) == ["mara"]


def test_episodes_of_another_width_are_refused_where_they_enter(store: IdentityStore, tmp_path: Path) -> None:
    store.new("mara", person(1))
    wide = episode(9, source="mara", width=12)
    with pytest.raises(StateError, match="4, 12 numbers wide"):
        store.update("mara", lambda me: replace(me, episodes=(*me.episodes, wide)))
    assert store.verify("mara") == 1
    replace(person(2), episodes=(wide,)).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="found by 12 numbers a token, and those of tiny by 4: another model made them"):
        store.import_(tmp_path / "saved", "evil")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": torch.zeros(6)}, {"keys": Packed(torch.zeros(6, 8), torch.zeros(6, 1))}, {"asks": 1}, {"position": 1.5},
        {"source": "eve"}, {"role": "system"}, {"usual": torch.zeros(3)},
    ],
)  # fmt: skip
def test_an_episode_of_the_wrong_kind_never_reaches_a_file(store: IdentityStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        store.new("evil", replace(person(1), episodes=(replace(ONE, **wrong),)))
    assert not list(store.blobs.folder.glob("*/*"))


def test_tensors_that_share_memory_or_lie_across_are_written_as_they_read(store: IdentityStore) -> None:
    """As those of a folder are, which are rows of one file."""
    keys = torch.arange(48, dtype=torch.int8).reshape(8, 6).T
    e = Episode(
        torch.arange(20, dtype=torch.int32)[2:14:2],
        Packed(keys, torch.ones(6, 1).half()),
        "user",
        "mara",
        0,
        torch.zeros(9)[:4],
    )
    assert not keys.is_contiguous()
    store.new("mara", replace(Identity.new(BASE), sources=("mara",), episodes=(e,)))
    store.cached_episodes.clear()
    back = store.load("mara").episodes[0]
    assert back.digest == e.digest
    assert torch.equal(back.keys.codes, keys)
