from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from regard.models import GPT2Config
from regard.train import OptimConfig
from regard.train.optim import adamw, clip, groups, rate


def test_matrices_decay_and_the_rest_does_not():
    model = GPT2Config(vocabulary=11, width=8, depth=1, heads=2, context=4).build()
    decayed, rest = groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in rest["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (only,) = groups(model, 0.1)
    assert only["params"] == [model.bias]


def test_decay_is_decoupled_from_the_gradient():
    model = nn.Linear(1, 1)
    before = float(model.weight.detach())
    optimizer = adamw(model, OptimConfig(lr=0.5, weight_decay=0.2))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    bias = float(model.bias.detach())
    optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(before * (1 - 0.5 * 0.2))
    assert float(model.bias.detach()) == bias


@pytest.mark.parametrize(("step", "share"), [(0, 1 / 4), (1, 2 / 4), (3, 1.0), (4, 1.0), (54, 0.55), (104, 0.1), (200, 0.1)])
def test_the_rate_warms_up_and_falls_as_a_cosine(step, share):
    c = OptimConfig(lr=2.0, floor=0.1, warmup=4)
    assert rate(c, step, steps=105) == pytest.approx(2 * share)


def test_a_schedule_shorter_than_its_warmup_is_a_warmup():
    assert rate(OptimConfig(lr=1.0, warmup=10), 4, steps=5) == pytest.approx(0.5)


@pytest.mark.parametrize(("limit", "after"), [(1.0, 1.0), (0.0, 5.0), (10.0, 5.0)])
def test_clipping_scales_the_whole_gradient(limit, after):
    p = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    p[0].grad, p[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert float(clip(p, limit)) == pytest.approx(5.0)
    assert math.hypot(float(p[0].grad), float(p[1].grad)) == pytest.approx(after, rel=1e-4)
