"""A self that acts: it goes where the world surprises least, only where there is such a place, and leaves the model alone."""

from __future__ import annotations

import pytest
import torch

from regard.errors import ShapeError, SpecError
from regard.identity import ActingRule, Identity, base_of, chosen_by_expected_surprise, expected_surprise
from regard.study.free_energy import ACTION_TOKENS, PROMPT, answered, learnt


@pytest.fixture(scope="module")
def model():
    return learnt(0, quiet=True, steps=150)


def world(texts, g):
    return answered(texts, g, quiet=True, shift=0)


def test_a_self_that_acts_goes_where_it_is_quiet(model):
    rule = ActingRule(steps=16, rollouts=24)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    acting = chosen_by_expected_surprise(model, Identity.new(base_of(model)), PROMPT, world, actions=ACTION_TOKENS, rule=rule)
    before, did_before = expected_surprise(model, None, PROMPT, world, actions=ACTION_TOKENS)
    after, did_after = expected_surprise(model, acting, PROMPT, world, actions=ACTION_TOKENS)
    assert after < before - 0.2
    assert did_after[0] > did_before[0] + 0.2
    assert all(torch.equal(p, weights[n]) and p.requires_grad for n, p in model.named_parameters())


def test_the_same_seed_chooses_the_same_self(model):
    rule = ActingRule(steps=2, rollouts=4, turns=2)
    once, again = (chosen_by_expected_surprise(model, Identity.new(base_of(model)), PROMPT, world, rule=rule) for _ in range(2))
    assert torch.equal(once.self.s, again.self.s)


def test_precision_holds_a_self_where_it_stands(model):
    start = chosen_by_expected_surprise(
        model, Identity.new(base_of(model)), PROMPT, world, rule=ActingRule(steps=1, rollouts=4)
    )

    def moved(precision: float) -> float:
        rule = ActingRule(steps=6, rollouts=8, turns=2, rate=0.02, precision=precision)
        s = chosen_by_expected_surprise(model, start, PROMPT, world, actions=ACTION_TOKENS, rule=rule).self.s
        return float((s - start.self.s).norm())

    assert moved(1e6) < 0.5 * moved(0.0)


def test_the_gradient_is_that_of_expected_surprise_computed_exactly(model):
    """Two actions, one turn, a world that answers without chance: the mean over rollouts tends to the sum over actions."""
    from dataclasses import replace

    from regard.identity.body import body_of
    from regard.identity.read.layer import layer_reads
    from regard.identity.sleep import acting
    from regard.identity.sleep.consolidate import Draft
    from regard.identity.state import SelfState

    def sure(texts, g):
        return (texts[:, -1:] + 3).clamp(max=12)

    body, allowed = body_of(model), torch.tensor(ACTION_TOKENS)
    nobody = Identity.new(base_of(model))
    start = SelfState(0.5 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), "self_token")
    s = start.s.clone().requires_grad_()
    work = Draft(replace(nobody, self=start), {"s": s}, form="self_token")
    texts = torch.cat([torch.tensor([PROMPT]).expand(3, -1), allowed[:, None]], 1)
    texts = torch.cat([texts, sure(texts, None)], 1)
    roles = torch.tensor([0, 0, 1, 2])
    every = acting.Rollouts(texts, roles == 1, roles == 2)
    with body.read(work.reads(body.scales)):
        done, surprise = acting._told(body, every, allowed)
        exact = torch.autograd.grad((done.exp() * surprise).sum(), s, retain_graph=True)[0]
        p = done.detach().exp()
        mean = (p * surprise.detach()).sum()
        estimate = torch.autograd.grad((p * (surprise + (surprise.detach() - mean) * done)).sum(), s)[0]
    assert exact.abs().max() > 1e-4
    torch.testing.assert_close(estimate, exact, rtol=1e-3, atol=1e-6)
    with body.read(layer_reads([replace(nobody, self=start)], body.scales)):
        torch.testing.assert_close(acting._told(body, every, allowed)[1], surprise, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_done_is_refused(model):
    nobody = Identity.new(base_of(model))
    with pytest.raises(ShapeError, match="prompt is empty"):
        chosen_by_expected_surprise(model, nobody, [], world)
    with pytest.raises(ShapeError, match=r"the world answered \(3,\) to 32 texts"):
        chosen_by_expected_surprise(model, nobody, PROMPT, lambda t, g: torch.zeros(3, dtype=torch.long))
    with pytest.raises(SpecError, match="rollouts 2"):
        ActingRule(rollouts=1)
