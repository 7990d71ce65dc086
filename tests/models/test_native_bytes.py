"""Keys and values in bytes, in C: the bytes of torch, the bits of their numbers written out, and a row alone whoever is beside it.

`.ci/sanitize` runs this file as it runs `test_native.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.attention.allow import Causal
from regard.errors import ShapeError
from regard.models import Sampling, generate
from regard.models.decode import native
from regard.models.decode.generate import logits_of
from regard.models.decode.int8_cache import GROUP, Bytes, int8_caches
from regard.models.decode.prepare import prepare
from regard.nn import Cache
from regard.state import State

from .test_native import Scene, instrumented, noise
from .test_step import MODELS, every_model


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    if instrumented() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    monkeypatch.setattr(native, "library", instrumented)


def meet(flat: Tensor, k: native.Room, v: native.Room, heads: tuple[int, int, int], at: int = 0) -> Tensor:
    array = (native.Text * 1)(native.text(k, v, heads[1:]))
    return native.meet(flat, None, array, [len(flat)], [at], heads, 0.3)


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 100))


@given(sizes, st.integers(1, 20), st.sampled_from([1e-36, 1e-20, 1.0, 1e30]), st.integers(0, 1 << 20))
def test_c_keeps_the_bytes_that_torch_would_keep(size: tuple[int, int, int], tokens: int, scale: float, seed: int):
    G, each, D = size
    flat = noise(tokens, (each + 2) * G * D, seed=seed) * scale
    k, v = Bytes.empty(G, tokens, D), Bytes.empty(G, tokens, D)
    meet(flat, k, v, (G * each, G, D))
    _, keys, values = flat.view(tokens, -1, D).transpose(0, 1).split([each * G, G, G])
    for room, x in ((k, keys), (v, values)):
        wanted = Bytes.of(x)
        assert torch.equal(room.q, wanted.q)
        assert torch.equal(room.scale, wanted.scale)


@given(st.integers(1, 100), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.integers(0, 99))
def test_what_is_not_finite_is_nan_in_its_group_alone(D: int, bad: float, at: int):
    flat = noise(1, 3 * D)
    flat[0, D + at % D] = bad
    k, v = Bytes.empty(1, 1, D), Bytes.empty(1, 1, D)
    y = meet(flat, k, v, (1, 1, D))
    wanted = Bytes.of(flat.view(3, 1, D)[1:2]).numbers(torch.float32)
    torch.testing.assert_close(k.numbers(torch.float32), wanted, rtol=0, atol=0, equal_nan=True)
    assert bool(k.numbers(torch.float32).isnan().any())
    assert bool(y.isnan().all())


def on_the_grid(*shape: int, seed: int) -> Tensor:
    """Numbers that bytes hold as they are."""
    g = torch.Generator().manual_seed(seed)
    *before, W = shape
    groups = -(-W // GROUP)
    q = torch.randint(-127, 128, shape, generator=g)
    q[..., ::GROUP] = 127
    scale = torch.rand(*before, groups, generator=g).add(0.01).to(torch.bfloat16)
    return Bytes(q.to(torch.int8), scale).numbers(torch.float32)


@given(sizes, st.integers(0, 40), st.integers(1, 20), st.integers(0, 1 << 20))
def test_bytes_give_the_bits_of_their_numbers_written_out(size: tuple[int, int, int], before: int, new: int, seed: int):
    G, each, D = size
    H, total = G * each, before + new
    heads = noise(total, H, D, seed=seed), on_the_grid(total, G, D, seed=seed + 1), on_the_grid(total, G, D, seed=seed + 2)
    flat = torch.cat(heads, 1).flatten(1)
    found: list[Tensor] = []
    for empty in (Bytes.empty, torch.empty):
        k, v = empty(G, total, D), empty(G, total, D)
        if before:
            meet(flat[:before], k, v, (H, G, D))
        found.append(meet(flat[before:], k, v, (H, G, D), before))
    assert torch.equal(*found)


# --- identities, GQA, turns: the scenes of test_native.py


@dataclass(frozen=True)
class AsKept(Cache):
    """Grows by what C has kept, after a look that it is what it was given, within the step of its bytes."""

    room: Any = None

    def grown(self, k: Tensor, v: Tensor) -> AsKept:
        start = 0 if self.k is None else self.k.shape[2]
        stop = start + k.shape[2]
        rooms = [x.places(0, stop).numbers(torch.float32).unsqueeze(0) for x in self.room]
        for room, x in zip(rooms, (k, v), strict=True):
            here = room[:, :, start:].split(GROUP, -1)
            for mine, given_ in zip(here, x.split(GROUP, -1), strict=True):
                largest = given_.abs().amax(-1, keepdim=True)
                assert bool(((mine - given_).abs() <= largest / 120 + 1e-6).all())
        return replace(self, k=rooms[0], v=rooms[1])


class Bytewise(Scene):
    def rooms(self) -> list[Any]:
        _, G, D = self.heads
        made: list[Any] = []
        for k, v, row, _ in super().rooms():
            lead = 0 if row is None else row.lead
            room = [Bytes.empty(*x.shape) for x in (k, v)]
            for mine, x in zip(room, (k, v), strict=True):
                mine.q.fill_(-128)
                mine.write(0, Bytes.of(x[:, :lead]))
            more = dict[str, Any]()
            if row is not None:
                more.update(left=row.left, signs=row.signs, bias=row.bias, lead=lead, head=row.head)
            made.append((*room, row, native.text(room[0], room[1], (G, D), **more)))
        return made

    def under(self, i: int, k: Bytes, v: Bytes) -> Tensor:
        """Heads of what is new in a text, by torch, from what C has kept of it."""
        (H, G, D), read, a = self.heads, self.reads[i], self.attention
        cache: Cache = AsKept(room=(k, v))
        out = torch.empty(0)
        for flat in (self.before[i], self.new[i]):
            if not len(flat):
                continue
            q, k_, v_ = flat.view(1, -1, H + 2 * G, D).transpose(1, 2).split([H, G, G], dim=1)
            if read is not None:
                out, cache = read.meet(a, q, k_, v_, cache, Causal())
            else:
                q, k_ = (a.spec.position.apply(y, len(cache), State()) for y in (q, k_))
                out, cache = a.meet(q, k_, v_, cache, allow=Causal())
        return out[0].transpose(0, 1).reshape(len(self.new[i]), -1)


@pytest.mark.parametrize("position", [" | rope", ""])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_texts_in_bytes_meet_their_own_keys_as_they_do_in_torch(seed: int, position: str):
    scene = Bytewise(seed, position)
    texts = scene.rooms()
    old = [i for i, before in enumerate(scene.before) if len(before)]
    if old:
        scene.meet([texts[i] for i in old], [scene.before[i] for i in old], [0] * len(old))
    found = scene.meet(texts, scene.new, [len(b) for b in scene.before])
    for i, y in enumerate(found):
        k, v, _, _ = texts[i]
        torch.testing.assert_close(y, scene.under(i, k, v), rtol=2e-4, atol=5e-5)
        assert not bool((k.q == -128).any())
        assert not bool((v.q == -128).any())
    # One text after the other, one token after the other: the same bits, and the same in the rooms.
    for i, (before, new) in enumerate(zip(scene.before, scene.new, strict=True)):
        alone = scene.rooms()[i]
        rows = [scene.meet([alone], [row[None]], [n])[0] for n, row in enumerate(torch.cat([before, new]))]
        assert torch.equal(torch.cat(rows[len(before) :]), found[i])
        for mine, theirs in zip(alone[:2], texts[i][:2], strict=True):
            assert torch.equal(mine.q, theirs.q)
            assert torch.equal(mine.scale, theirs.scale)


# --- whole models


@every_model
@pytest.mark.parametrize("weights", ["float32", "q4"])
@torch.inference_mode()
def test_a_text_in_any_pieces_and_any_company_gets_the_same_bits(name: str, weights: Any):
    decoder = prepare(MODELS[name](), weights)
    tokens = torch.randint(0, 50, (3, 30), generator=torch.Generator().manual_seed(3))
    whole, _ = decoder(tokens[:1], int8_caches(decoder.depth), every=True)
    for cuts in ([1] * 30, [20, 1, 1, 8], [3, 27]):
        caches, each = int8_caches(decoder.depth, 4), list[Tensor]()
        for piece in tokens.split(cuts, dim=1):
            # More than 64 rows go layer by layer, fewer in one call.
            logits, caches = decoder(piece, caches, every=True)
            each.append(logits[:1])
        assert torch.equal(torch.cat(each, 1), whole)


@every_model
def test_text_is_near_that_of_the_twin_in_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    text = list(range(1, 40))
    ours = logits_of(MODELS[name](), text, cache="int8")
    with monkeypatch.context() as m:
        m.setattr(native, "library", lambda: None)
        twin = logits_of(MODELS[name](), text, cache="int8")
    exact = logits_of(MODELS[name](), text)
    # A last bit may round to the next byte, which is a small part of what bytes cost.
    assert float((ours - twin).abs().mean()) < 0.5 * float((ours - exact).abs().mean())
    assert float((ours - exact).abs().mean()) > 0


def test_a_fork_keeps_a_room_of_its_own():
    model = MODELS["llama"]()
    decoder = prepare(model)
    _, caches = decoder(torch.tensor([[1, 2, 3]]), int8_caches(decoder.depth, 4))
    wanted, _ = decoder(torch.tensor([[4, 5]]), caches, every=True)
    decoder(torch.tensor([[9]]), caches)
    first, after = decoder(torch.tensor([[4]]), caches)
    second, _ = decoder(torch.tensor([[5]]), after)
    assert torch.equal(torch.cat([first, second]), wanted[0])


def test_texts_of_bytes_refuse_what_does_not_fit():
    G, D = 2, 40
    k, v = Bytes.empty(G, 5, D), Bytes.empty(G, 5, D)
    assert native.text(k, v, (G, D)).k_scales == k.scale.data_ptr()
    assert native.text(noise(G, 5, D), noise(G, 5, D), (G, D)).k_scales is None
    for bad in (
        lambda: native.text(k, noise(G, 5, D), (G, D)),
        lambda: native.text(noise(G, 5, D), v, (G, D)),
        lambda: native.text(Bytes(k.q, k.scale[..., :1]), v, (G, D)),
        lambda: native.text(Bytes(k.q, k.scale.float()), v, (G, D)),
        lambda: native.text(Bytes(k.q.short(), k.scale), v, (G, D)),
        lambda: native.text(k, Bytes.empty(G, 4, D), (G, D)),
        lambda: native.text(k.places(0, 3), v.places(0, 3), (G, D)),
        lambda: native.text(Bytes(k.q[0], k.scale[0]), v, (G, D)),
        lambda: native.text(Bytes.empty(G, 5, D - 1), Bytes.empty(G, 5, D - 1), (G, D)),
    ):
        with pytest.raises(ShapeError):
            bad()


def test_batches_in_bytes_write_what_each_row_writes_alone():
    model, prompts = MODELS["llama"](), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    together = generate(model, prompts, Sampling(max_tokens=12, logprobs=0), cache="int8")
    for i, p in enumerate(prompts):
        alone = generate(model, p, Sampling(max_tokens=12, logprobs=0), cache="int8")
        assert together.logprobs is not None
        assert alone.logprobs is not None
        assert (together.tokens[i], together.logprobs[i]) == (alone.tokens[0], alone.logprobs[0])
