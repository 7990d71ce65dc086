"""A self that acts: chosen by the surprise that it expects to meet, over continuations in which it acts and the world answers.

    G(s) = E over a ~ p(· | s), o ~ world(a) of mean_t −log p(o_t | a, o_<t, s)  +  precision/2 · |s − s₀|²

`chosen_by_free_energy` fits s to a text that is given; here the text depends on s. Its gradient has both parts, that of what is
expected and that of what is done, the second by the score function with the other continuations' mean as baseline (Williams 1992):

    ∇G = mean_r ∇surprise_r + (surprise_r − mean of the others) ∇log p(a_r | s)

Without a world the answers are the model's own, and the self that expects to be surprised least is the one that repeats
itself: the dark room. So a world has to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...errors import ShapeError, SpecError
from ..body import Body, body_of, frozen
from ..read.layer import layer_reads
from ..state import Form, Identity, SelfState
from ..write.self_state import fresh
from .consolidate import Draft

World = Callable[[Int[Tensor, "B N"], torch.Generator], Int[Tensor, "B n"]]
"""What the world answers to texts that end with an action; n tokens each."""


@dataclass(frozen=True)
class ActingRule:
    """How a self is chosen by acting."""

    steps: int = 12
    """Gradient steps."""
    rate: float = 0.1
    precision: float = 0.01
    """How firmly s is held where it stands."""
    rollouts: int = 32
    """Continuations sampled for each step."""
    turns: int = 4
    """Actions in each."""
    form: Form = "self_token"
    """Of a self that is not there yet."""
    start: float = 0.1
    """The size of that self's first numbers: a token of zeros would say nothing, and learn nothing."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.rollouts < 2 or self.turns < 1 or self.rate <= 0 or self.precision < 0:
            raise SpecError(f"{self}: steps is at least 0, rollouts 2, turns 1, rate above 0 and precision at least 0")


class Rollouts(NamedTuple):
    """Continuations of one prompt: the texts, and which of their tokens were done and which were met."""

    texts: Int[Tensor, "B N"]
    acted: Tensor
    """(N), True where the model spoke."""
    met: Tensor
    """(N), True where the world did."""


def chosen_by_expected_surprise(
    model: nn.Module,
    identity: Identity,
    prompt: Sequence[int],
    world: World,
    *,
    actions: Sequence[int] | None = None,
    rule: ActingRule | None = None,
) -> Identity:
    """The identity with the self that expects to be surprised least by what its own actions bring.

    `actions` are the tokens that it may say; any, if none are given.
    """
    rule = rule or ActingRule()
    body = body_of(model)
    identity.base.refuse(body.base)
    g = torch.Generator().manual_seed(rule.seed)
    start = identity.self if identity.self is not None else fresh(identity.base, rule.form)
    begin = start.s if bool(start.s.any()) else rule.start * torch.randn(start.s.shape, generator=g)
    s = begin.clone().requires_grad_()
    optimiser = torch.optim.Adam([s], lr=rule.rate)
    work = Draft(replace(identity, self=start), {"s": s}, form=start.form)
    heads = identity.base.depth * identity.base.key_heads
    allowed = None if actions is None else torch.tensor(list(actions), device=body.device)
    with frozen(model):
        for _ in range(rule.steps):
            with body.read(work.reads(body.scales, body.device)):
                lived = _rollouts(body, prompt, world, allowed, rule, g)
                with torch.enable_grad():
                    done, surprise = _told(body, lived, allowed)
                    others = (surprise.sum() - surprise).detach() / (len(surprise) - 1)
                    expected = surprise.mean() + ((surprise.detach() - others) * done).mean()
                    energy = expected + rule.precision / 2 * (s - start.s).square().sum() / heads
                    (s.grad,) = torch.autograd.grad(energy, [s])
            optimiser.step()
    return replace(identity, self=SelfState(s.detach(), start.form))


@torch.no_grad()
def expected_surprise(
    model: nn.Module,
    identity: Identity | None,
    prompt: Sequence[int],
    world: World,
    *,
    actions: Sequence[int] | None = None,
    rollouts: int = 256,
    turns: int = 4,
    seed: int = 0,
) -> tuple[float, Float[Tensor, " n"]]:
    """Mean surprise by what an identity's own actions bring, in nats a token of the world's; and how often it did each action."""
    body = body_of(model)
    if identity is not None:
        identity.base.refuse(body.base)
    allowed = None if actions is None else torch.tensor(list(actions), device=body.device)
    rule = ActingRule(rollouts=rollouts, turns=turns, seed=seed)
    with frozen(model), body.read(layer_reads([identity], body.scales, device=body.device)):
        lived = _rollouts(body, prompt, world, allowed, rule, torch.Generator().manual_seed(seed))
        surprise = _told(body, lived, allowed)[1]
    said = lived.texts[:, lived.acted]
    known = said.unique() if allowed is None else allowed
    return float(surprise.double().mean()), (said[..., None] == known).float().mean((0, 1)).cpu()


@torch.no_grad()
def _rollouts(
    body: Body, prompt: Sequence[int], world: World, allowed: Tensor | None, rule: ActingRule, g: torch.Generator
) -> Rollouts:
    """Continuations under whatever is read now: an action of the model's, the world's answer, and again."""
    if not len(prompt):
        raise ShapeError("the prompt is empty; an action follows at least one token")
    texts = torch.tensor([list(prompt)], device=body.device).expand(rule.rollouts, -1)
    roles = [0] * len(prompt)
    for _ in range(rule.turns):
        logits = _restricted(body.logits(texts)[:, -1].float(), allowed)
        drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=g).to(body.device)
        texts = torch.cat([texts, drawn if allowed is None else allowed[drawn]], 1)
        answer = world(texts, g)
        if answer.ndim != 2 or answer.shape[0] != rule.rollouts or not answer.shape[1]:
            raise ShapeError(
                f"the world answered {tuple(answer.shape)} to {rule.rollouts} texts; it gives (B, n), n at least 1"
            )
        texts = torch.cat([texts, answer.to(body.device)], 1)
        roles += [1] + [2] * answer.shape[1]
    of = torch.tensor(roles, device=body.device)
    return Rollouts(texts, of == 1, of == 2)


def _told(body: Body, lived: Rollouts, allowed: Tensor | None) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """log p of all that was done, and the mean surprise by what was met, for each continuation."""
    logits = body.logits(lived.texts)[:, :-1].float()
    acted, met = lived.acted[1:], lived.met[1:]
    answers = lived.texts[:, 1:][:, met]
    surprise = -logits[:, met].log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1).mean(-1)
    said = lived.texts[:, 1:][:, acted]
    at = said if allowed is None else (said[..., None] == allowed).float().argmax(-1)
    done = _restricted(logits[:, acted], allowed).log_softmax(-1).gather(-1, at[..., None]).squeeze(-1).sum(-1)
    return done, surprise


def _restricted(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits[..., allowed]


__all__ = ["ActingRule", "Rollouts", "World", "chosen_by_expected_surprise", "expected_surprise"]
