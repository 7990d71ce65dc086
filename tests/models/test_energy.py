"""The energy transformer: its step is the gradient of its energy, which falls, and ignores the order of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regard import CombinationError, Window
from regard.models import EnergyConfig, EnergyTransformer, Look
from regard.models.energy import EnergyBlock, EnergyNorm

CONFIG = EnergyConfig(vocabulary=31, width=16, heads=2, memories=11, steps=20, rate=0.02, context=16)


def tokens() -> torch.Tensor:
    return torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(4))


def loud(config: EnergyConfig = CONFIG) -> EnergyTransformer:
    torch.manual_seed(3)
    model = config.build().double()
    with torch.no_grad():
        for p in model.embed.parameters():
            p.mul_(30)
    return model.eval()


@pytest.mark.parametrize("spec", ["energy", "dot(scale=2) | energy", "energy | rope"])
def test_energies_fall_at_every_step(spec: str) -> None:
    out = loud(replace(CONFIG, attention=spec))(tokens(), look=Look(attention=True))
    assert out.energies is not None
    assert out.energies.shape == (3, 21)
    assert (out.energies.diff(dim=-1) < 0).all()
    assert (out.energies[:, 0] - out.energies[:, -1] > 1).all()


def test_steps_the_other_way_climb() -> None:
    """So the test above can fail."""
    out = loud(replace(CONFIG, rate=-0.02))(tokens(), look=Look(attention=True))
    assert out.energies is not None
    assert (out.energies.diff(dim=-1) > 0).all()


def energy_of(block: EnergyBlock, g: torch.Tensor) -> torch.Tensor:
    """The paper's formula, written out."""
    q = (g @ block.attention.q.weight.T).unflatten(-1, (2, 8)).transpose(1, 2)
    k = (g @ block.attention.k.weight.T).unflatten(-1, (2, 8)).transpose(1, 2)
    scores = block.beta * q @ k.mT
    scores = scores.masked_fill(torch.eye(g.shape[1], dtype=torch.bool), float("-inf"))
    memory = torch.relu(g @ block.memory.patterns.T).square().sum() / 2
    return -scores.logsumexp(-1).sum() / block.beta - memory


def test_the_step_is_the_gradient_of_the_energy() -> None:
    block = loud().blocks[0]
    assert isinstance(block, EnergyBlock)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        moved, energy, _ = block.descend(x, ~Window(1), None, inspect=True)
    g = block.norm(x).detach().requires_grad_()
    expected = energy_of(block, g)
    (gradient,) = torch.autograd.grad(expected, g)
    assert gradient.abs().max() > 0.1
    torch.testing.assert_close(moved - x, -block.rate * gradient, rtol=1e-9, atol=1e-11)
    assert energy is not None
    torch.testing.assert_close(energy.sum(), expected.detach())


def test_the_norms_jacobian_is_symmetric_and_positive() -> None:
    norm = EnergyNorm(6, 1e-5).double()
    jacobian = torch.autograd.functional.jacobian(norm, torch.randn(6, dtype=torch.float64))
    torch.testing.assert_close(jacobian, jacobian.T)
    assert torch.linalg.eigvalsh(jacobian).min() > -1e-12


def test_energy_ignores_the_order_of_tokens() -> None:
    block, order = loud().blocks[0], torch.randperm(7)
    assert isinstance(block, EnergyBlock)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        moved, energy, _ = block.descend(x, ~Window(1), None, inspect=True)
        other, same, _ = block.descend(x[:, order], ~Window(1), None, inspect=True)
    torch.testing.assert_close(energy, same)
    torch.testing.assert_close(moved[:, order], other)


def test_a_selection_without_an_energy_is_refused() -> None:
    with pytest.raises(CombinationError, match="descends an energy"):
        replace(CONFIG, attention="entmax(1.5)").build()
