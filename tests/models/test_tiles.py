"""Weights in blocks: what files mean by them, and products in C held to their plain twin, for every kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf import quantize as their_quantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import CheckpointError, CombinationError, ShapeError
from regard.models.decode import native
from regard.models.decode.tiles import KINDS, MOST, Q4_1, Q8_0, Blocks, Kind, quantised, read, rounded, tiled

from .test_native import instrumented, noise

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=[k.name for k in KINDS.values()])
F16 = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block keeps its half-precision numbers."""


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    if instrumented() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    monkeypatch.setattr(native, "library", instrumented)


def file_rows(kind: Kind, out: int, blocks: int, seed: int = 0) -> Tensor:
    """Any codes at all under scales of a usual size."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (out, blocks, kind.block_bytes), dtype=np.uint8)
    for at in F16[kind.name]:
        scale = (rng.standard_normal((out, blocks, 1)) * 0.05).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8)
    return torch.from_numpy(raw.reshape(out, -1))


@kinds
def test_blocks_mean_what_gguf_says_they_mean_to_the_last_bit(kind: Kind):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind.gguf)]
    assert (kind.block, kind.block_bytes) == (block, size)
    for seed in range(3):
        rows = file_rows(kind, 5, 3, seed)
        theirs = dequantize(rows.numpy(), GGMLQuantizationType(kind.gguf))
        ours = read(kind, rows).weights()
        assert ours.shape == (5, 3 * kind.block)
        assert bool((ours != 0).any())
        assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if not k.shares], ids=lambda k: k.name)
def test_what_gguf_itself_packs_is_read_back_as_it_reads_it(kind: Kind):
    w = noise(7, 96, std=0.1).numpy()
    packed = their_quantize(w, GGMLQuantizationType(kind.gguf))
    ours = read(kind, torch.from_numpy(packed)).weights()
    assert np.array_equal(ours.numpy(), dequantize(packed, GGMLQuantizationType(kind.gguf)))
    assert float((ours - torch.from_numpy(w)).abs().max()) < 0.1


@pytest.fixture(params=["wide", "narrow"])
def lanes(request: pytest.FixtureRequest):
    before = native.library().use_wide(request.param == "wide")
    yield request.param
    native.library().use_wide(before)


def close(found: Tensor | None, x: Tensor, w: Tensor) -> None:
    assert found is not None
    wanted = rounded(x).double() @ w.double().mT
    off = (found.double() - wanted).abs() - (rounded(x).abs().double() @ w.abs().double().mT * 2e-6 + 1e-30)
    # The parts of a block cancel: its codes against what is added to each.
    room = x.abs().double().sum(-1, keepdim=True) * w.abs().max() * 2e-6
    assert bool((off <= room).all()), f"off by {float(off.max()):.3g}"


@kinds
@pytest.mark.parametrize("out", [1, 15, 16, 17, 50])
@torch.no_grad()
def test_product_with_tiles_is_that_of_its_plain_twin(kind: Kind, out: int, lanes: str):
    blocks = read(kind, file_rows(kind, out, 1 if kind.shares else 3))
    w, matrices = blocks.weights(), native.Matrices([tiled(blocks)], [None])
    for rows in (1, 2, 3, 4, 7, 8, 9, 13, 65):
        x = noise(rows, w.shape[1], seed=rows)
        close(native.product(x, matrices), x, w)


@kinds
@torch.no_grad()
def test_both_widths_of_lanes_and_any_company_give_the_same_bits(kind: Kind):
    blocks = read(kind, file_rows(kind, 40, 2 if kind.shares else 5))
    matrices, x = native.Matrices([tiled(blocks)], [noise(40)]), noise(70, blocks.shape[1], seed=3) * 10
    before = native.library().use_wide(True)
    wide = native.product(x, matrices)
    native.library().use_wide(False)
    narrow = native.product(x, matrices)
    native.library().use_wide(before)
    assert wide is not None
    assert narrow is not None
    assert torch.equal(wide, narrow)
    for some in (1, 2, 3, 5, 8, 64):
        parts = [native.product(part, matrices) for part in x.split(some)]
        assert torch.equal(torch.cat([p for p in parts if p is not None]), wide)


@given(st.integers(1, 9), st.integers(1, 130), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 99))
@torch.no_grad()
def test_parts_of_different_kinds_and_odd_widths_stand_side_by_side(rows: int, inside: int, outs: list[int], seed: int):
    pick = random.Random(seed)
    x, parts, plain = noise(rows, inside, seed=seed), list[native.Weight](), list[Tensor]()
    for i, out in enumerate(outs):
        w = noise(out, inside, seed=i, std=0.1)
        if pick.random() < 0.3:
            parts.append(w)
            plain.append(x.double() @ w.double().mT)
            continue
        blocks = quantised(w, pick.choice([Q4_1, Q8_0]))
        parts.append(tiled(blocks, inside))
        plain.append(rounded(x).double() @ blocks.weights()[:, :inside].double().mT)
    biases = [noise(o, seed=o) if i % 2 else None for i, o in enumerate(outs)]
    wanted = torch.cat([p if b is None else p + b for p, b in zip(plain, biases, strict=True)], -1)
    onto = noise(rows, sum(outs), seed=seed + 1)
    found = native.product(x, native.Matrices(parts, biases), onto.clone())
    assert found is not None
    torch.testing.assert_close(found.double(), wanted + onto, rtol=1e-4, atol=1e-4)


@kinds
@torch.no_grad()
def test_sums_of_codes_are_exact_at_their_extremes(kind: Kind, lanes: str):
    """The largest codes times the largest activations, all of one sign: what overflows soonest."""
    n = kind.block * 2
    codes = torch.full((16, n), 2**kind.bits - 1, dtype=torch.uint8)
    codes[1::2] = 0
    per, ones = (16 if kind.name == "Q6_K" else 32), torch.ones(16, n // 256 if kind.shares else 1).half()
    whole = torch.int8 if kind.name == "Q6_K" else torch.uint8
    scale = torch.full((16, n // per), 1).to(whole) if kind.shares else torch.ones(16, n // per).half()
    least = None if not kind.least else torch.ones_like(scale)
    blocks = Blocks(kind, codes, scale, least, ones if kind.shares else None, ones if kind.shares and kind.least else None)
    for sign in (1, -1):
        x = torch.full((9, n), float(sign * MOST))
        wanted = x.double() @ blocks.weights().double().mT
        found = native.product(x, native.Matrices([tiled(blocks)], [None]))
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-33, 1e-31, 1.0, 1e30, 3e38])
@torch.no_grad()
def test_activations_of_any_size_are_rounded_to_fourteen_bits(size: float, lanes: str):
    x = noise(3, 64) * size
    x = x.clamp(-3e38, 3e38)
    assert bool(((rounded(x) - x).abs() <= x.abs().amax() / MOST * 0.51).all())
    blocks = quantised(torch.eye(16, 64), Q8_0)
    found = native.product(x, native.Matrices([tiled(blocks)], [None]))
    torch.testing.assert_close(found, rounded(x) @ blocks.weights().mT, rtol=1e-5, atol=size * 1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@torch.no_grad()
def test_what_is_not_finite_makes_its_own_row_nan_and_no_other(bad: float, lanes: str):
    x = noise(4, 70)
    x[2, 40] = bad
    found = native.product(x, native.Matrices([tiled(quantised(noise(20, 70), Q4_1), 70)], [None]))
    assert found is not None
    assert torch.isnan(found[2]).all()
    assert torch.isfinite(found[[0, 1, 3]]).all()


def test_a_block_of_zeros_stays_zero():
    x = torch.zeros(2, 64)
    found = native.product(x, native.Matrices([tiled(quantised(noise(16, 64), Q4_1))], [None]))
    assert torch.equal(found, torch.zeros(2, 16))  # pyright: ignore


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 99))
def test_our_own_blocks_are_within_half_a_step_of_the_weights(out: int, inside: int, seed: int):
    w = noise(out, inside, seed=seed)
    eight = quantised(w, Q8_0).weights()[:, :inside]
    assert bool(((eight - w).abs() <= w.abs().amax(dim=1, keepdim=True) / 127 * 0.6).all())
    four = quantised(w, Q4_1).weights()[:, :inside]
    wide = w.amax(dim=1, keepdim=True).clamp_min(0) - w.amin(dim=1, keepdim=True).clamp_max(0)
    assert float((four - w).square().mean().sqrt()) <= float(wide.max()) / 15 * 0.6


def test_what_a_file_kept_in_q4_1_is_recovered_where_all_codes_are_used():
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 4)
    kept = Blocks(Q4_1, codes, torch.full((4, 2), 0.01).half(), torch.full((4, 2), -0.07).half()).weights()
    assert float((quantised(kept, Q4_1).weights() - kept).abs().max()) < 1e-4


def test_refusals_name_what_was_given():
    with pytest.raises(CheckpointError, match="Q4_1 keeps 32 weights in 20 bytes"):
        read(Q4_1, torch.zeros(2, 21, dtype=torch.uint8))
    with pytest.raises(CombinationError, match="60,000"):
        quantised(torch.full((1, 32), 1e6), Q4_1)
    with pytest.raises(CombinationError, match="not finite"):
        quantised(torch.full((1, 32), torch.nan), Q8_0)
    tiles = tiled(quantised(noise(3, 40), Q4_1), 40)
    with pytest.raises(ShapeError, match="beside weights of width 41"):
        native.Matrices([noise(2, 41), tiles], [None, None])
    with pytest.raises(ShapeError, match="blocks that are 64 wide"):
        tiled(quantised(noise(3, 40), Q4_1), 20)
