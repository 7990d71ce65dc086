"""nGPT's geometry: the state stays on the sphere, a layer turns it by its learning rate, scores see offsets only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.models import Look, NGPTConfig
from regard.models.ngpt import NGPT, SphereAttention, toward, unit

CONFIG = NGPTConfig(vocabulary=31, width=24, depth=3, heads=3)


@pytest.fixture
def model() -> NGPT:
    torch.manual_seed(5)
    return CONFIG.build().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))


def test_every_hidden_state_has_length_one(model: NGPT, x: torch.Tensor) -> None:
    for h in model(x, look=Look(hidden=True)).hidden or ():
        torch.testing.assert_close(h.norm(dim=-1), torch.ones(2, 7))


def test_alpha_zero_stays_and_alpha_one_takes_the_answer() -> None:
    h, answer = unit(torch.randn(2, 5, 8)), torch.randn(2, 5, 8)
    torch.testing.assert_close(toward(h, answer, torch.zeros(8)), h)
    torch.testing.assert_close(toward(h, answer, torch.ones(8)), unit(answer))
    torch.testing.assert_close(toward(h, answer, torch.full((8,), -0.3)), toward(h, answer, torch.full((8,), 0.3)))


def test_alphas_start_where_the_config_says(model: NGPT) -> None:
    for block in model.blocks:
        torch.testing.assert_close(block.alpha_attention(), torch.full((24,), 0.05))


def test_normalize_puts_every_weight_vector_on_the_sphere(model: NGPT, x: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.normalize_()
    assert losses[-1] < 0.5 * losses[0]
    block = model.blocks[1]
    for weight, dim in (
        (model.embed.weight, 1), (model.head.weight, 1), (block.attention.q.weight, 1), (block.attention.k.weight, 1),
        (block.attention.v.weight, 1), (block.attention.out.weight, 0), (block.ffn.up.weight, 1), (block.ffn.gate.weight, 1),
        (block.ffn.down.weight, 0),
    ):  # fmt: skip
        norms = weight.norm(dim=dim)
        torch.testing.assert_close(norms, torch.ones_like(norms))


def test_scores_see_offsets_only_whatever_s_qk_is(model: NGPT) -> None:
    attention = model.blocks[0].attention
    assert isinstance(attention, SphereAttention)
    with torch.no_grad():
        attention.s_qk.raw.copy_(torch.rand_like(attention.s_qk.raw) + 0.1)
        same = torch.randn(1, 1, 24).expand(1, 9, 24)
        seen = attention.inspect(same)
        q, k, _ = attention._project(same, same)
        turn = attention.spec.position.apply
        scores = turn(q, 0, attention.state()) @ turn(k, 0, attention.state()).mT
    for offset in (1, 3):
        line = scores.diagonal(offset, -2, -1)
        torch.testing.assert_close(line, line[..., :1].expand_as(line), rtol=1e-4, atol=1e-5)
    assert (scores.diagonal(1, -2, -1)[..., 0] - scores.diagonal(3, -2, -1)[..., 0]).abs().max() > 1e-3
    assert seen.plan is not None


def test_the_scale_is_the_root_of_the_head_width_unless_the_spec_has_one(model: NGPT) -> None:
    assert model.blocks[0].attention.spec.geometry.scale == 8**0.5
    named = NGPTConfig(vocabulary=31, width=24, depth=1, heads=3, attention="dot(scale=3) | softmax").build()
    assert named.blocks[0].attention.spec.geometry.scale == 3
