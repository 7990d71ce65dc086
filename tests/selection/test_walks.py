"""Selections with a memory or an energy: monotonic, selective, Hopfield, the Energy Transformer."""

from itertools import pairwise

import pytest
import torch
from helpers import F64, assert_agree, gradients, random

from regard import Causal, State, Window, attend, inspect
from regard.nn import Attention
from regard.position import Rope


def test_monotonic_is_the_double_loop_of_its_paper():
    q, k = random(1, 1, 5, 4), random(1, 1, 7, 4)
    p = torch.sigmoid(q @ k.mT / 2)[0, 0]
    expected = torch.zeros(5, 7, dtype=F64)
    for i in range(5):
        for j in range(7):
            for start in range(j + 1):
                before = expected[i - 1, start] if i else torch.tensor(float(start == 0), dtype=F64)
                passed = torch.prod(1 - p[i, start:j])
                expected[i, j] += p[i, j] * before * passed
    seen = inspect(q, k, k, "monotonic")
    assert_agree(seen.weights()[0, 0], expected)
    assert (seen.weights().sum(-1) < 1).all(), "the reader can run off the end"


def test_hard_monotonic_stops_at_the_first_key_that_is_more_likely_than_not():
    scores = torch.tensor([[-1.0, 2, -1, 3], [5, -1, -2, 1], [-1, -1, -1, -3], [9, 9, 9, 0.5]], dtype=F64)
    q, k = torch.eye(4, dtype=F64).view(1, 1, 4, 4), scores.mT.view(1, 1, 4, 4) * 2
    seen = inspect(q, k, torch.arange(4, dtype=F64).view(1, 1, 4, 1), "monotonic(mode=hard)")
    assert seen.accepted.flatten().tolist() == [True, True, False, True]
    assert seen.output.flatten().tolist() == [1, 3, 0, 3]


def test_hard_monotonic_never_goes_back():
    q, k = random(2, 3, 11, 6, scale=2), random(2, 3, 13, 6, scale=2)
    weights = inspect(q, k, k, "monotonic(mode=hard)").weights()
    at = torch.where(weights.any(-1), weights.argmax(-1), -1)
    reached = at.cummax(-1).values
    assert ((at == reached) | (at == -1)).all()


def test_certain_readers_agree_in_both_modes():
    q, k, v = random(2, 2, 7, 6, scale=1e5), random(2, 2, 7, 6), random(2, 2, 7, 3)
    hard = inspect(q, k, v, "monotonic(mode=hard)")
    # A refused reader waits in hard mode; in expectation it has run off the end for good.
    on_the_way = hard.accepted.cummin(-1).values
    assert on_the_way.sum() > 7
    assert_agree(attend(q, k, v, "monotonic")[on_the_way], hard.output[on_the_way], atol=1e-6)


def test_selective_is_its_paper_s_definition():
    """Leviathan et al. 2025, figure 2, transcribed: the first head's logits mask, not the first token, not oneself."""
    q, k, v = (random(2, 3, 7, 6) for _ in range(3))
    mask = torch.ones(7, 7).triu(1).bool()
    logits = (q @ k.mT / 6**0.5).masked_fill(mask, -torch.inf)
    S = torch.relu(logits[:, 0].clone())
    S[..., 0] = 0
    S = S * (1 - torch.eye(7, dtype=F64))
    S = torch.roll(S, 1, -2)
    S[..., 0, :] = 0
    expected = torch.softmax(logits - torch.cumsum(S, -2)[:, None], -1) @ v
    assert_agree(attend(q, k, v, "selective", allow=Causal()), expected)
    assert (expected - attend(q, k, v, allow=Causal())).abs().max() > 1e-2


@pytest.mark.parametrize("beta", [0.1, 1.0, 8.0])
def test_hopfield_energy_falls_by_half_the_squared_step_and_stays_above_zero(beta):
    """E − E⁺ ≥ ½|ξ⁺ − ξ|² for every update; E(n) is the energy after n − 1 updates."""
    xi, patterns = random(1, 2, 11, 6), random(1, 2, 7, 6)
    states, energies = [xi], []
    for steps in range(1, 13):
        seen = inspect(xi, patterns, patterns, f"hopfield(beta={beta}, steps={steps})")
        states.append(seen.output)
        energies.append(seen.energy)
    moved = [0.5 * (b - a).square().sum(-1) for a, b in pairwise(states)]
    for before, after, least in zip(energies, energies[1:], moved, strict=False):
        assert (before - after >= least - 1e-9).all()
    assert (torch.stack(energies) >= -1e-12).all()
    assert moved[0].max() > 0.1


def test_hopfield_energy_is_ramsauer_s():
    xi, x = random(1, 1, 5, 4), random(1, 1, 7, 4)
    lse = torch.logsumexp(2 * xi @ x.mT, -1) / 2
    largest = x.norm(dim=-1).max()
    expected = -lse + 0.5 * xi.square().sum(-1) + torch.log(torch.tensor(7.0)) / 2 + 0.5 * largest**2
    assert_agree(inspect(xi, x, x, "hopfield(beta=2)").energy, expected)


def test_hopfield_with_one_step_is_attention_and_retrieves_a_stored_pattern():
    x = random(1, 1, 7, 16)
    assert_agree(attend(x, x, x, "hopfield"), attend(x, x, x))
    noisy = x + 0.2 * random(1, 1, 7, 16)
    torch.testing.assert_close(attend(noisy, x, x, "hopfield(beta=8, steps=3)"), x, rtol=0, atol=1e-3)


def descended(module: Attention, g: torch.Tensor, beta: float, allow) -> torch.Tensor:
    """E = −(1/β) Σ log Σ exp(β K_B·Q_C), written with the module's own projections."""
    q, k = (f(g).unflatten(-1, (module.heads, -1)).transpose(1, 2) for f in (module.q, module.k))
    scores = (beta * q @ k.mT).masked_fill(~allow, -torch.inf)
    return -torch.logsumexp(scores, -1).sum() / beta


def test_energy_transformer_s_update_is_the_gradient_of_its_energy_which_falls():
    module = Attention(12, 3, "energy").to(F64)
    g = random(1, 7, 12).requires_grad_()
    others = ~torch.eye(7, dtype=torch.bool)
    update = module(g, allow=~Window(1))
    (gradient,) = torch.autograd.grad(descended(module, g, 0.5, others), g)
    assert_agree(update, -gradient)
    energies = []
    with torch.no_grad():
        for _ in range(20):
            energies.append(float(descended(module, g, 0.5, others)))
            g = g + 0.05 * module(g, allow=~Window(1))
    assert all(after < before for before, after in pairwise(energies))


def test_energy_s_own_rows_are_the_log_sum_exp():
    q, k = random(1, 2, 5, 4), random(1, 2, 5, 4)
    assert_agree(inspect(q, k, None, "energy").energy, -torch.logsumexp(q @ k.mT / 2, -1))


def test_energy_turns_its_update_back_into_the_frame_before_rope():
    q, k = (random(1, 2, 5, 4).requires_grad_() for _ in range(2))
    energy = -2 * torch.logsumexp(attend_scores(q, k), -1).sum()
    dq, dk = torch.autograd.grad(energy, (q, k))
    out = attend(q, k, None, "energy | rope")
    assert_agree(out, torch.cat([-dq, -dk], -1))


def attend_scores(q, k):
    return Rope().rotate(q, 0) @ Rope().rotate(k, 0).mT / 2


def test_expected_monotonic_gives_gradients_through_the_walk():
    q, k, v = (random(1, 1, 5, 4).requires_grad_() for _ in range(3))
    whole = attend(q, k, v, "monotonic")
    (early,) = gradients(whole[:, :, 4:], [q])
    assert early[:, :, 0].abs().max() > 1e-6, "the last row depends on where the first one stopped"


def test_carry_can_be_handed_over_in_pieces():
    q, k, v = (random(1, 2, 9, 4) for _ in range(3))
    state = State()
    pieces = []
    for start, stop in ((0, 4), (4, 9)):
        seen = inspect(q[:, :, start:stop], k, v, "monotonic", state=State(carry=state.carry, offset=start))
        pieces.append(seen.output)
        state = seen.state
    assert_agree(torch.cat(pieces, 2), attend(q, k, v, "monotonic"))
