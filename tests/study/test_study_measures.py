"""What the studies of positions, fossils, angles, sparse_length and selective_attention measure, held to what is known exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard
from regard import Causal
from regard.models.recurrent import Convolved, RecurrentConfig
from regard.study import angles, fossils, positions, selective_attention
from regard.study.tasks.training import Batch, built, generator


def test_masks_are_those_that_the_selection_carries():
    model = built(0, lambda: selective_attention.made("selective", 16, width=16, depth=1, heads=2))
    attention = model.blocks[0].attention
    x = torch.randn(2, 9, 16, generator=generator(0))
    so_far = selective_attention.masked_so_far(attention, x)
    carried = attention.inspect(x[:, :-1], allow=Causal()).state.carry
    assert float(carried.max()) > 0
    torch.testing.assert_close(so_far[:, -1, :-1], carried)


def test_a_cache_has_its_size_spares_the_first_token_and_brings_none_back():
    alive = selective_attention.surviving(torch.rand(3, 12, 12, generator=generator(0)), 5)
    assert alive.sum(-1).tolist() == [[min(i + 1, 5) for i in range(12)]] * 3
    assert bool(alive[..., 0].all())
    assert bool(alive.diagonal(dim1=1, dim2=2).all())
    came_back = alive[:, 1:] & ~alive[:, :-1]
    assert not bool(came_back.tril(0).any())


def test_a_cache_of_everything_changes_nothing():
    model = built(0, lambda: selective_attention.made("selective", 16, width=16, depth=2, heads=2))
    tokens = torch.randint(16, (2, 10), generator=generator(0))
    for how in selective_attention.HOW:
        torch.testing.assert_close(selective_attention.pruned(model, tokens, 10, how, 0), model(tokens).logits)


def test_a_variable_is_its_last_value():
    batch = selective_attention.assignment(generator(0), 4, 9)
    for row, wanted in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        now = dict[int, int]()
        for token, value in zip(row, wanted, strict=True):
            if token < selective_attention.NAMES * selective_attention.VALUES:
                now[token // selective_attention.VALUES] = token % selective_attention.VALUES
            else:
                assert value == now[token - selective_attention.NAMES * selective_attention.VALUES]


@pytest.mark.parametrize(("kernel", "depth"), [(2, 3), (4, 2), (3, 4)])
def test_a_convolution_sees_as_far_as_its_kernel_and_dilation_say(kernel: int, depth: int):
    config = RecurrentConfig("cnn", 8, fossils.WIDTH, depth, kernel)
    dilated = built(0, lambda: nn.ModuleList(Convolved(config, i) for i in range(depth)))
    neighbours = built(0, lambda: nn.ModuleList(Convolved(config, 0) for _ in range(depth)))
    assert fossils.field_of_view(list(dilated)) == 1 + (kernel - 1) * (2**depth - 1)
    assert fossils.field_of_view(list(neighbours)) == 1 + (kernel - 1) * depth


def test_recall_asks_for_the_pair_at_the_distance():
    batch = fossils.recalled(generator(0), 5, 20, distance=7)
    pair = batch.tokens[:, -1 - 7] - 1
    assert (pair // fossils.VALUES == batch.tokens[:, -1] - 1 - fossils.KEYS * fossils.VALUES).all()
    assert (pair % fossils.VALUES == batch.targets[:, -1]).all()


def test_the_printed_formula_and_the_fused_call_agree():
    q, k, v = (torch.randn(1, 2, 7, 4, generator=generator(i)) for i in range(3))
    torch.testing.assert_close(fossils.textbook(q, k, v), regard.attend(q, k, v, "dot | softmax", allow=Causal()))


@pytest.mark.parametrize("kind", positions.KINDS)
def test_within_the_trained_length_both_readings_of_a_text_are_one(kind: str):
    model = built(0, lambda: positions.Placed(kind, 16, width=16, depth=1))
    tokens = torch.randint(16, (2, 2 * positions.PIECE + 1), generator=generator(0))
    long, short = positions.read_long_and_short(model, Batch(tokens[:, :-1], tokens[:, 1:]))
    assert long == pytest.approx(short, abs=1e-5)


def test_a_lead_keeps_entmax_whole_at_every_length_and_softmax_at_none():
    for items in (16, 4096):
        # Scores of one query over unit keys: a lead of 2 for the first item.
        scores = torch.zeros(1, 1, 1, items)
        scores[..., 0] = 2.0
        q, k = torch.ones(1, 1, 1, 1), scores.mT
        weights = {
            name: regard.inspect(q, k, k, f"dot(scale=1) | {name}").weights()[0, 0, 0, 0] for name in ("entmax(1.5)", "softmax")
        }
        assert float(weights["entmax(1.5)"]) == pytest.approx(1, abs=1e-6)
        assert float(weights["softmax"]) == pytest.approx(1 / (1 + (items - 1) * math.exp(-2)), rel=1e-4)


def test_steps_to_a_loss_are_read_between_two_points():
    assert angles.steps_to([4.0, 3.0, 2.0], 2.5) == pytest.approx(2.5)
    assert angles.steps_to([4.0, 3.0, 2.0], 1.0) == 3.0


def test_norms_after_a_plain_rms_norm_do_not_vary():
    x = torch.randn(1, 9, 32, generator=generator(0)) * torch.arange(1, 10).view(1, 9, 1)
    assert angles.variation(x) > 0.3
    assert angles.variation(nn.functional.rms_norm(x, (32,))) < 1e-4
