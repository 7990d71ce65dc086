"""Consolidation, the slow write: a few anchored gradient steps on self, trace and imprints together, the base frozen.

    loss = surprise of the history, read again with spans left out, and retold with none of it before its eyes
         + KL(the model with the whole history before its eyes ‖ the identity with none of it)      in other wordings
         + anchor · KL(the base ‖ the identity)                                  on neutral text and on strangers' chats

Some answers are held back: the state that did best on them is returned, and if none did better than the state before, that state is. Of
an imprint only the value learns. Its key says when it is read, and was learned on many people together with how widely heads open to
it; one person's night would only spoil that.

docs/maths.md, “The write that makes a trace somebody's”, says why this is the fast write done right: the gradient of surprise is a signed,
shock-weighted outer product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import SpecError, StateError
from ...models.tokenizer import Tokenizer
from ..body import Body, body_of, frozen
from ..experience import Chat
from ..packed import Packed
from ..read.layer import LayerRead, layer_reads
from ..state import Form, Identity, SelfState, TraceState
from .items import Item, history_item, losses
from .lessons import Anchors, Lessons, interview, retold
from .rule import SleepRule


@dataclass(eq=False)
class Draft:
    """The numbers of an identity as leaves of a gradient."""

    base: Identity
    leaves: dict[str, Tensor]
    signs: Tensor | None = None
    form: Form = "key_bias"

    def reads(self, scales: Sequence[float], device: torch.device | str = "cpu") -> list[LayerRead | None]:
        L, G, D = self.base.base.depth, self.base.base.key_heads, self.base.base.head_width
        imprints, x = self.base.imprints, self.leaves
        k, v, weight = None, None, None
        if len(imprints):
            k, v = imprints.k.dense(), x["v"] if "v" in x else imprints.v.dense()
            weight = imprints.weight if bool(imprints.weight.any()) else None
        bias: Tensor | None = None
        s = x.get("s", None if self.base.self is None else self.base.self.s)
        form = self.form if self.base.self is None else self.base.self.form
        if s is not None and form == "key_bias":
            bias = s.view(L, G, D)
        elif s is not None:
            sk, sv = (y[:, :, None] for y in s.view(L, 2, G, D).unbind(1))
            k, v = (sk, sv) if k is None or v is None else (torch.cat([sk, k], 2), torch.cat([sv, v], 2))
            weight = None if weight is None else F.pad(weight, (1, 0))
        left = x.get("left")
        signs = self.signs
        if left is None and self.base.trace is not None:
            left, signs = self.base.trace.left.dense(), self.base.trace.signs.float()

        def at(y: Tensor | None, i: int) -> Tensor | None:
            return None if y is None else y[None, i].to(device)

        return [
            LayerRead(
                scales[i],
                at(k, i),
                at(v, i),
                at(weight, i),
                at(left, i),
                None if signs is None else signs[None].to(device),
                at(bias, i),
            )
            for i in range(L)
        ]

    def identity(self) -> Identity:
        """The identity with these numbers written into it."""
        identity, x = self.base, self.leaves
        if "v" in x:
            identity = replace(identity, imprints=replace(identity.imprints, v=Packed.of(x["v"])))
        if "left" in x:
            assert self.signs is not None
            identity = replace(identity, trace=TraceState(Packed.of(x["left"]), self.signs.to(torch.int8)))
        if "s" in x:
            identity = replace(identity, self=SelfState(x["s"].detach().float().clone(), self.form))
        return identity


def draft(identity: Identity, rule: SleepRule) -> Draft:
    """Leaves for the parts that the rule names; a trace that is not there yet starts as exactly none."""
    L, G, D = identity.base.depth, identity.base.key_heads, identity.base.head_width
    leaves: dict[str, Tensor] = {}
    signs: Tensor | None = None
    form = rule.form if identity.self is None else identity.self.form
    if "imprints" in rule.parts and len(identity.imprints):
        leaves["v"] = identity.imprints.v.dense()
    if "trace" in rule.parts:
        if identity.trace is not None:
            leaves["left"], signs = identity.trace.left.dense(), identity.trace.signs.float()
        else:
            if rule.rank > D:
                raise SpecError(
                    f"rank={rule.rank}: a head of this model is {D} wide, and its trace has at most as many columns"
                )
            half = rule.rank // 2
            # L₊ = L₋ makes T = L₊L₊ᵀ − L₋L₋ᵀ zero, and yet its gradient is not.
            one = torch.randn(L, G, half, D, generator=torch.Generator().manual_seed(rule.seed)) * (0.1 / D**0.5)
            leaves["left"] = torch.cat([one, one.clone()], 2)
            signs = torch.cat([torch.ones(half), -torch.ones(half)])
    if "self" in rule.parts:
        width = G * D * (1 if form == "key_bias" else 2)
        leaves["s"] = torch.zeros(L, width) if identity.self is None else identity.self.s.clone()
    if not leaves:
        raise StateError(f"there is nothing to consolidate: parts={rule.parts}, and no imprints are kept yet")
    return Draft(identity, {n: x.requires_grad_() for n, x in leaves.items()}, signs, form)


@dataclass(frozen=True)
class Slept:
    """What a night did: nats per token on what was held back, before, at each look, and at the end."""

    before: float
    looks: tuple[tuple[int, float], ...]
    best: float
    best_step: int
    interrupted: bool = False

    @property
    def helped(self) -> bool:
        return self.best < self.before


@dataclass
class SleepCheckpoint:
    """Where a night stands; given back to `consolidate`, it goes on from there."""

    step: int
    leaves: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]]
    best: dict[str, Tensor]
    best_loss: float
    best_step: int
    before: float
    looks: list[tuple[int, float]] = field(default_factory=lambda: list[tuple[int, float]]())


def consolidate(
    model: nn.Module,
    identity: Identity,
    history: Sequence[Chat],
    tokenizer: Tokenizer,
    rule: SleepRule | None = None,
    *,
    tell: Callable[[str, float | None], object] = lambda what, share: None,
    night: SleepCheckpoint | None = None,
    on_step: Callable[[SleepCheckpoint], object] = lambda night: None,
    items: list[Item] | None = None,
    anchors: Anchors | None = None,
) -> tuple[Identity, Slept]:
    """An identity after a night's sleep over these conversations, and what the night did.

    Ctrl-C ends the night early and keeps the best so far. `on_step` sees where it stands, to be saved; given back as `night`, it
    goes on from there. What comes back is never worse than what went in on what was held back. `items` is an interview that was
    made before, and `anchors` what many nights on one model may share.
    """
    rule = rule or SleepRule()
    body = body_of(model)
    identity.base.refuse(body.base)
    if not any(len(c) for c in history):
        raise StateError("there is no history to sleep over; imprint a conversation first")
    # What the history is compared with is the base, whoever lives in the model meanwhile.
    with frozen(model), body.read([None] * body.base.depth):
        if items is None:
            tell("asking itself about the history", None)
            items = interview(body, tokenizer, [dict(m) for c in history for m in c], rule.questions)
        held, lessons = _split(body, tokenizer, history, items, rule, anchors)
        work = draft(identity, rule)
        optimiser = torch.optim.Adam(_groups(work, rule))
        if night is None:
            before = _mean_loss(body, identity, held)
            night = SleepCheckpoint(
                0, {}, {}, {n: x.detach().clone() for n, x in work.leaves.items()}, before, 0, before, [(0, before)]
            )
        else:
            _resume(work, optimiser, night)
        interrupted = False
        try:
            while night.step < rule.steps:
                _step(body, work, optimiser, lessons, night.step, rule)
                night.step += 1
                if night.step % rule.look_every == 0 or night.step == rule.steps:
                    _look(body, work, held, night)
                _remember(work, optimiser, night)
                on_step(night)
                tell("sleeping", night.step / rule.steps)
        except KeyboardInterrupt:
            interrupted = True
    slept = Slept(night.before, tuple(night.looks), night.best_loss, night.best_step, interrupted)
    if not slept.helped:
        return identity, slept
    work.leaves = night.best
    woken = work.identity()
    return replace(woken, life=replace(woken.life, sleeps=woken.life.sleeps + 1)), slept


def _split(
    body: Body, tokenizer: Tokenizer, history: Sequence[Chat], items: list[Item], rule: SleepRule, anchors: Anchors | None
) -> tuple[list[Item], Lessons]:
    """The questions that are held back, and all that is learned from."""
    held, studied = items[: rule.held_back * 2 : 2], [*items[1 : rule.held_back * 2 : 2], *items[rule.held_back * 2 :]]
    again = [item for c in history if len(c) if len((item := history_item(body, tokenizer, c)).at)]
    if not held or not again:
        raise StateError("nobody says anything in this history, or no questions were held back; there is nothing to sleep over")
    return held, Lessons(studied, again, retold(body, tokenizer, history), anchors or Anchors(body, tokenizer))


def _step(body: Body, work: Draft, optimiser: torch.optim.Adam, lessons: Lessons, step: int, rule: SleepRule) -> None:
    """One gradient step."""
    optimiser.zero_grad()
    # Each step draws from a seed of its own, so that a night that was broken off goes on as it would have.
    lesson = lessons.of(step, rule, torch.Generator().manual_seed(rule.seed * 100_003 + step))
    with torch.enable_grad(), body.read(work.reads(body.scales, body.device)):
        each = losses(body, [item for _, item in lesson])
        torch.stack([w * x for (w, _), x in zip(lesson, each, strict=True)]).sum().backward()
    for group in optimiser.param_groups:
        group["lr"] = group["pace"] * (1 - 0.8 * step / rule.steps)
    optimiser.step()


def _look(body: Body, work: Draft, held: list[Item], night: SleepCheckpoint) -> None:
    """The loss on what was held back, of the state as it will be kept: packed. The best state is set aside."""
    loss = _mean_loss(body, work.identity(), held)
    night.looks.append((night.step, loss))
    if loss < night.best_loss:
        night.best_loss, night.best_step = loss, night.step
        night.best = {n: x.detach().clone() for n, x in work.leaves.items()}


@torch.no_grad()
def _mean_loss(body: Body, identity: Identity, items: list[Item]) -> float:
    with body.read(layer_reads([identity], body.scales, device=body.device)):
        return sum(float(x) for x in losses(body, items)) / len(items)


def _groups(work: Draft, rule: SleepRule) -> list[dict[str, Any]]:
    """Each tensor at its own pace: imprints by the spread of their numbers, self and trace as they are."""
    paces = {"left": rule.rate, "s": rule.self_rate}
    if "v" in work.leaves:
        paces["v"] = rule.value_rate * float(work.leaves["v"].detach().std())
    return [{"params": [x], "lr": paces[n], "pace": paces[n]} for n, x in work.leaves.items()]


def _remember(work: Draft, optimiser: torch.optim.Adam, night: SleepCheckpoint) -> None:
    night.leaves = {n: x.detach().clone() for n, x in work.leaves.items()}
    state = optimiser.state
    night.moments = {
        n: (state[x]["exp_avg"].clone(), state[x]["exp_avg_sq"].clone()) for n, x in work.leaves.items() if x in state
    }


def _resume(work: Draft, optimiser: torch.optim.Adam, night: SleepCheckpoint) -> None:
    """Put the leaves and the optimiser where the night left them."""
    if {n: x.shape for n, x in night.leaves.items()} != {n: x.shape for n, x in work.leaves.items()}:
        raise StateError("this night was spent over another state; start a new one")
    for name, x in work.leaves.items():
        x.data.copy_(night.leaves[name])
        mean, square = night.moments[name]
        optimiser.state[x] = {"step": torch.tensor(float(night.step)), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
