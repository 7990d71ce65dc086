"""What is learned about reading: it moves the words around what came to mind, as far as it is sure, and nothing that was told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lives import letters, nobody, says, speaking
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import RegardError
from regard.identity import Rule, imprint, observe
from regard.identity.body import body_of
from regard.identity.read import reader
from regard.identity.read.finding import Finder, finder_of
from regard.identity.read.reader import Reader, reader_for, shipped
from regard.identity.read.slots import nothing_told, slots_of
from regard.models.base import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def finder(model: Model) -> Finder:
    return finder_of(body_of(model), letters())


def made(finder: Finder, size: float = 3.0) -> Reader:
    base, (before, _, after) = finder.body.base, finder.frame.around(finder.usual_head)
    generator = torch.Generator().manual_seed(1)

    def some(n: int) -> Tensor:
        return size * torch.randn(base.depth, base.key_heads, n, base.head_width, generator=generator)

    return Reader((some(len(before)), some(len(before))), (some(len(after)), some(len(after))), base.fingerprint)


def test_only_the_words_around_are_moved_and_as_far_as_it_is_sure(
    model: Model, finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = imprint(nobody(model), observe(model, "My cat is Mochi.", letters(), source="a test"), Rule(keep=None))
    prompt = letters().encode(letters().chat(says("My cat?")))
    mine = made(finder)
    monkeypatch.setattr(reader, "shipped", lambda: mine)
    plain, half, whole = (slots_of(finder.body, finder, me, me.episodes, prompt, sure=x) for x in (0.0, 0.5, 1.0))
    b, a = mine.before[0].shape[2], mine.after[0].shape[2]
    n = len(plain)
    assert b > 0
    assert a > 0
    assert n == b + len(me.episodes[0]) + a
    for x, moves in (("k", (mine.before[0], mine.after[0])), ("v", (mine.before[1], mine.after[1]))):
        at = [getattr(s, x).dense() for s in (plain, half, whole)]
        assert torch.equal(at[0][:, :, b : n - a], at[2][:, :, b : n - a]), "what was told stays as it was read"
        for share, y in ((0.5, at[1]), (1.0, at[2])):
            torch.testing.assert_close(y[:, :, :b] - at[0][:, :, :b], share * moves[0], atol=0.2, rtol=0.05)
            torch.testing.assert_close(y[:, :, n - a :] - at[0][:, :, n - a :], share * moves[1], atol=0.2, rtol=0.05)
    monkeypatch.setattr(reader, "shipped", lambda: Reader(mine.before, mine.after, "another"))
    other = slots_of(finder.body, finder, me, me.episodes, prompt, sure=1.0)
    assert torch.equal(other.k.codes, plain.k.codes), "on another base the words around stand as they are read"


def test_what_words_lean_away_from_is_read_in_the_same_way(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, mine = letters().encode(letters().chat(says("My cat?"))), made(finder)
    monkeypatch.setattr(reader, "shipped", lambda: mine)
    plain, moved = (nothing_told(finder, prompt, sure) for sure in (0.0, 1.0))
    b = mine.before[0].shape[2]
    assert not torch.equal(plain.v.codes[:, :, :b], moved.v.codes[:, :, :b])
    assert torch.equal(plain.v.codes[:, :, b], moved.v.codes[:, :, b])


def test_a_reader_is_of_its_base_and_of_its_words(model: Model, finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader_for(body_of(model), 13, 5) is None, "this model is no SmolLM2"
    mine = made(finder)
    monkeypatch.setattr(reader, "shipped", lambda: mine)
    b, a = mine.before[0].shape[2], mine.after[0].shape[2]
    assert reader_for(body_of(model), b, a) is mine
    assert reader_for(body_of(model), 0, 2) is None, "a text without turns has other words around"


def test_the_reader_that_came_with_the_package_is_whole() -> None:
    mine = shipped()
    assert tuple(mine.before[0].shape) == (30, 3, 13, 64)
    assert tuple(mine.after[1].shape) == (30, 3, 5, 64)
    assert all(bool(x.any()) for x in (*mine.before, *mine.after))
    assert len(mine.fingerprint) == 64


@pytest.mark.parametrize(
    "damaged",
    [
        {"before.k": torch.full((2, 1, 3, 4), torch.nan)},
        {"after.v": torch.zeros(2, 1, 3, 5)},
        {"after.k": torch.zeros(4), "after.v": torch.zeros(4)},
    ],
)
def test_a_damaged_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: dict[str, Tensor]) -> None:
    file = tmp_path / "reader.safetensors"
    whole = {f"{side}.{x}": torch.zeros(2, 1, 3, 4) for side in ("before", "after") for x in "kv"}
    about = {"about": json.dumps({"fingerprint": "x"})}
    save_file({**whole, **damaged}, file, metadata=about)
    monkeypatch.setattr(reader, "FILE", file)
    reader.shipped.cache_clear()
    try:
        with pytest.raises(RegardError):
            shipped()
        save_file({name: x for name, x in whole.items() if name != "after.k"}, file, metadata=about)
        with pytest.raises(RegardError):
            shipped()
        file.write_bytes(file.read_bytes()[:40])
        with pytest.raises(RegardError):
            shipped()
    finally:
        monkeypatch.undo()
        reader.shipped.cache_clear()
    assert shipped().before[0].shape[0] == 30
