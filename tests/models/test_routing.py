"""Experts and clusters: every choice is the plain one, loads are counted, nothing leaks between clusters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard import Causal, CombinationError, ShapeError, SpecError, parse
from regard.models import RoutingConfig
from regard.models.clusters import ClusteredAttention
from regard.models.experts import Experts


def plain(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted: the definition."""
    p = experts.router(x).softmax(-1)
    weight, chosen = p.topk(experts.chosen)
    weight = weight / weight.sum(-1, keepdim=True) if experts.chosen > 1 else weight
    gate = torch.zeros_like(p).scatter(-1, chosen, weight)
    return sum(gate[..., i : i + 1] * e(x) for i, e in enumerate(experts.experts))


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_a_mixture_is_its_definition_and_so_are_its_gradients(chosen: int) -> None:
    experts, x = Experts(8, 13, 5, chosen).double(), torch.randn(2, 7, 8, dtype=torch.float64)
    out, route = experts(x)
    torch.testing.assert_close(out, plain(experts, x))
    assert route.accepted.all()
    weights = list(experts.parameters())
    found = torch.autograd.grad(out.square().sum(), weights, allow_unused=True)
    expected = torch.autograd.grad(plain(experts, x).square().sum(), weights, allow_unused=True)
    for weight, a, b in zip(weights, found, expected, strict=True):
        a, b = (torch.zeros_like(weight) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b)


def test_balance_is_one_when_even_and_the_number_of_experts_when_one_takes_all() -> None:
    experts = Experts(4, 3, 4, 1)
    with torch.no_grad():
        experts.router.weight.copy_(torch.eye(4) * 50)
        even, route = experts(torch.eye(4)[None])[1].balance, experts(torch.eye(4)[None])[1]
        crowded = experts(torch.eye(4)[:1].expand(1, 6, 4))[1].balance
    assert even == pytest.approx(1.0)
    assert crowded == pytest.approx(4.0)
    torch.testing.assert_close(route.load, torch.full((4,), 0.25))


def test_in_training_a_full_expert_lets_tokens_pass_and_at_use_it_takes_all() -> None:
    experts = Experts(4, 3, 4, 1, capacity=1.0)
    with torch.no_grad():
        experts.router.weight.copy_(torch.eye(4) * 50)
        x = torch.eye(4)[:1].expand(1, 8, 4)
        out, route = experts.train()(x)
        assert route.accepted.sum() == 2, "8 tokens over 4 experts leave room for 2 each"
        assert route.accepted[:2].all()
        assert (out[0, 2:] == 0).all()
        assert (out[0, :2] != 0).any()
        assert experts.eval()(x)[1].accepted.all()


def test_the_balance_loss_spreads_tokens() -> None:
    torch.manual_seed(2)
    experts, x = Experts(6, 5, 4, 1), torch.randn(1, 64, 6) + 1.5
    optimizer = torch.optim.Adam(experts.router.parameters(), lr=0.05)
    before = experts(x)[1].load.max()
    for _ in range(60):
        optimizer.zero_grad()
        experts(x)[1].balance.backward()
        optimizer.step()
    assert experts(x)[1].load.max() < before


def noisy(experts: int = 5, chosen: int = 2) -> Experts:
    """A noisy gate whose router has opinions."""
    torch.manual_seed(4)
    made = Experts(6, 7, experts, chosen, gate="noisy").double()
    with torch.no_grad():
        made.router.weight.normal_()
        made.noise.weight.normal_()
    return made


def test_a_noisy_gate_is_noisy_in_training_and_plain_at_use() -> None:
    experts, x = noisy(), torch.randn(2, 9, 6, dtype=torch.float64)
    assert not torch.equal(experts.train()(x)[0], experts(x)[0])
    torch.testing.assert_close(experts.eval()(x)[0], plain(experts, x))


def test_a_noisy_gate_adds_a_normal_of_the_trained_spread_to_each_score() -> None:
    experts, x = noisy().train(), torch.randn(1, 1, 6, dtype=torch.float64).expand(1, 4000, 6)
    scored = experts._scores(x[0])
    drawn = scored.noised - experts.router(x[0])
    torch.testing.assert_close(drawn.std(0), F.softplus(experts.noise(x[0, :1]))[0], rtol=0.05, atol=0)
    assert (drawn.mean(0).abs() < 0.15).all()


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_the_smooth_load_is_how_often_an_expert_is_chosen_when_its_own_noise_is_drawn_again(chosen: int) -> None:
    experts, x = noisy(chosen=chosen).train(), torch.randn(3, 6, dtype=torch.float64)
    scored = experts._scores(x)
    times = torch.zeros(3, 5, dtype=torch.float64)
    for _ in range(4000):
        fresh = scored.clean + torch.randn_like(scored.clean) * scored.spread
        for i in range(5):
            again = scored.noised.clone()
            again[:, i] = fresh[:, i]
            times[:, i] += (again.topk(chosen).indices == i).any(-1) / 4000
    weight = torch.zeros_like(scored.clean)
    weight[:, 0] = 1
    load = times.sum(0) / times.sum()
    balance = experts._noisy_balance(scored, weight, torch.zeros(5))
    assert float(balance.detach()) == pytest.approx(0.5 * 5 * (1 + float(load.square().sum())), rel=0.02)


def test_a_noisy_gate_begins_even_and_its_balance_says_so() -> None:
    torch.manual_seed(0)
    experts = Experts(6, 7, 4, 2, gate="noisy").train()
    route = experts(torch.randn(4, 200, 6))[1]
    assert float(route.balance.detach()) == pytest.approx(1.0, abs=0.02)
    torch.testing.assert_close(route.load, torch.full((4,), 0.25), atol=0.03, rtol=0)


def test_the_noisy_balance_is_the_number_of_experts_when_one_takes_all_and_its_gradient_spreads_them() -> None:
    experts = Experts(4, 3, 4, 1, gate="noisy").train()
    with torch.no_grad():
        experts.router.weight[0] = 50
    balance = experts(torch.ones(1, 6, 4))[1].balance
    assert float(balance.detach()) == pytest.approx(4.0, abs=1e-4)
    with torch.no_grad():
        experts.router.weight[0] = 0.3
    (slope,) = torch.autograd.grad(experts(torch.ones(1, 400, 4))[1].balance, [experts.router.weight])
    assert (slope[0] > 0).all(), "the crowded expert is pushed down"
    assert (slope[1:].mean(0) < 0).all()


def test_all_experts_chosen_leaves_nothing_to_balance_but_weights() -> None:
    experts, x = noisy(experts=3, chosen=3).train(), torch.randn(1, 5, 6, dtype=torch.float64)
    assert 1 <= experts(x)[1].balance <= 3


def test_a_gate_of_another_name_is_refused() -> None:
    with pytest.raises(SpecError, match="gate='loud' is not one of plain, noisy"):
        Experts(4, 3, 4, 2, gate="loud")


def test_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ShapeError, match="chosen=5 of experts=4"):
        Experts(4, 3, 4, 5)


def test_the_model_reports_the_balance_of_its_layers() -> None:
    x = torch.randint(0, 31, (2, 9))
    out = RoutingConfig(vocabulary=31, width=16, depth=3, heads=2, experts=4).build()(x)
    assert len(out.routes) == 3
    assert out.balance.requires_grad
    torch.testing.assert_close(out.balance, torch.stack([r.balance for r in out.routes]).mean())
    assert RoutingConfig(vocabulary=31, width=16, depth=1, heads=2, experts=1).build()(x).balance is None


@pytest.fixture
def clustered() -> ClusteredAttention:
    torch.manual_seed(1)
    return ClusteredAttention(12, 2, parse("dot | softmax | rope"), clusters=3).eval()


def test_queries_meet_their_own_cluster_and_their_own_position_only(clustered: ClusteredAttention) -> None:
    x = torch.randn(2, 9, 12)
    with torch.no_grad():
        weights = clustered.inspect(x, allow=Causal()).weights()
        q, k, _ = clustered._project(x, x)
        same = clustered.nearest(q).unsqueeze(-1) == clustered.nearest(k).unsqueeze(-2)
    expected = (same | torch.eye(9, dtype=torch.bool)) & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(weights > 0, expected)
    assert 0.1 < expected.float().mean() < 0.45, "some pairs of the causal half meet and some do not"


def test_k_means_moves_centroids_to_the_vectors_in_training_only(clustered: ClusteredAttention) -> None:
    clustered.decay = 0.8
    x = torch.randn(4, 16, 12)

    def fit() -> torch.Tensor:
        q, k, _ = clustered._project(x, x)
        both = F.normalize(torch.cat([q, k], dim=2), dim=-1)
        return (both @ clustered.centroids.mT).amax(-1).mean()

    with torch.no_grad():
        before, start = fit(), clustered.centroids.clone()
        clustered(x)
        assert torch.equal(clustered.centroids, start)
        clustered.train()
        for _ in range(30):
            clustered(x)
        assert fit() > before + 0.05
    torch.testing.assert_close(clustered.centroids.norm(dim=-1), torch.ones(2, 3))


def test_selections_that_need_every_key_are_refused() -> None:
    with pytest.raises(CombinationError, match="clusters choose"):
        ClusteredAttention(12, 2, parse("selective"), clusters=3)
