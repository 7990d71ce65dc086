"""Blocks of few bits are written out as `gguf` writes them, bit for bit, and a weight knows the blocks that it came from."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.models.packed import KINDS, PackedWeight, keep_packed, packed_of


def blocks(number: int, rows: int, width: int, seed: int = 0, hostile: bool = False) -> torch.Tensor:
    """Random bytes; where they are not hostile, scales that are finite."""
    kind = KINDS[number]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, width // kind.block * kind.size), dtype=np.uint8)
    if not hostile and kind.block > 1:
        # The top exponent bit of a float16, wherever it may stand: 0x40 cleared in every byte leaves none infinite.
        raw &= 0xBF
    return torch.from_numpy(raw)


def bits(x: object) -> np.ndarray:
    values = np.ascontiguousarray(np.asarray(x, dtype=np.float32))
    # NaN has many bit patterns, and one meaning.
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@pytest.mark.parametrize("number", KINDS, ids=lambda n: KINDS[n].name)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 1 << 30), hostile=st.booleans())
def test_every_kind_is_written_out_as_gguf_does(number: int, rows: int, groups: int, seed: int, hostile: bool) -> None:
    kind = KINDS[number]
    raw = blocks(number, rows, groups * kind.block, seed, hostile)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw.numpy(), GGMLQuantizationType(number)).copy()
    got = PackedWeight(kind, (rows, groups * kind.block), raw).unpacked()
    assert np.array_equal(bits(got), bits(wanted))


def test_sizes_are_those_of_gguf() -> None:
    for number, kind in KINDS.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.block, kind.size)


def test_pieces_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedWeight(KINDS[3], (37, 96), blocks(3, 37, 96))
    whole = packed.unpacked()
    monkeypatch.setattr("regard.models.unpack.PIECE", 200)
    assert torch.equal(packed.unpacked(), whole)
    assert whole.std() > 0


def test_rows_of_heads_are_put_back_in_order() -> None:
    raw = blocks(8, 12, 32)
    plain, paired = PackedWeight(KINDS[8], (12, 32), raw), PackedWeight(KINDS[8], (12, 32), raw, heads=2)
    assert plain.rows is None
    assert paired.rows is not None
    assert paired.rows.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(paired.unpacked(), plain.unpacked()[paired.rows])
    assert torch.equal(paired.ordered(), raw[paired.rows])


def test_weight_says_when_it_is_no_longer_what_was_packed() -> None:
    packed = PackedWeight(KINDS[2], (4, 64), blocks(2, 4, 64))
    weight = nn.Parameter(packed.unpacked())
    assert packed_of(weight) is None
    keep_packed(weight, packed)
    assert packed_of(weight) is packed
    assert packed.holds(weight)
    weight.data[3, 63] += 1
    assert not packed.holds(weight)
    assert not packed.holds(weight.detach()[:2])
    assert not packed.holds(packed.unpacked().double())


def test_copies_and_files_of_a_weight_carry_no_blocks() -> None:
    packed = PackedWeight(KINDS[2], (4, 64), blocks(2, 4, 64))
    weight = nn.Parameter(packed.unpacked())
    keep_packed(weight, packed)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.detach()):
        assert packed_of(other) is None
        assert torch.equal(other, weight)
