"""Consolidation, the slow write: a few gradient steps that distil what the base knows with a statement before its eyes, the base frozen.

    loss = KL(the base with one statement in its context ‖ the identity with none)      on questions which that statement answers
         + anchor · KL(the base ‖ the identity)                on everyday and unanswerable questions, strangers' chats, neutral prose

Nothing is retold word for word: next-token training on a history teaches to parrot it, the listener's words as well. Some questions
are held back. A night is looked at now and then by greedy answers to these and by everyday answers; the best state that lost neither is
returned, and the state from before where there is none.

Of an imprint only the value learns. Its key says when it is read, and the base's first token, the sink, is blind to all of them.

docs/maths.md, “The write that makes a trace somebody's”, says why a gradient writes what one pass cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import SpecError, StateError
from ...models.tokenizer import Tokenizer
from ..body import Body, body_of, frozen
from ..experience import Chat
from ..packed import Packed
from ..read.layer import LayerRead, layer_reads, token_layers
from ..state import Form, Identity, SelfState, TraceState
from .answering import ANSWER, greedy, logs_along
from .items import Item, item_said, losses
from .lessons import Anchors, Lessons, lessons_of
from .rule import SleepRule
from .sayable import sink
from .teaching import says

EARNED = 0.02
"""How much nearer to the teacher a night has to come where it answers no question more: one that came nearer by a hundredth cost a person four
points of the in-context gain."""


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
        bias, stands = None, [True] * L
        s = x.get("s", None if self.base.self is None else self.base.self.s)
        form = self.form if self.base.self is None else self.base.self.form
        if s is not None and form == "key_bias":
            bias = s.view(L, G, D)
        elif s is not None:
            sk, sv = (y[:, :, None] for y in s.view(L, 2, G, D).unbind(1))
            k, v = (sk, sv) if k is None or v is None else (torch.cat([sk, k], 2), torch.cat([sv, v], 2))
            weight = None if weight is None else F.pad(weight, (1, 0))
            stands = token_layers(s)
        left = x.get("left")
        signs = self.signs
        if left is None and self.base.trace is not None:
            left, signs = self.base.trace.left.dense(), self.base.trace.signs.float()

        def at(y: Tensor | None, i: int) -> Tensor | None:
            return None if y is None else y[None, i].to(device)

        def slots(y: Tensor | None, i: int) -> Tensor | None:
            """Without the self where it does not stand."""
            y = None if y is None else y[i] if stands[i] else y[i][:, 1:]
            return y[None].to(device) if y is not None and y.shape[1] else None

        return [
            LayerRead(
                scales[i],
                slots(k, i),
                slots(v, i),
                slots(weight, i),
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


def begun(body: Body, identity: Identity, tokenizer: Tokenizer, rule: SleepRule) -> Identity:
    """Who a night begins with: where words are to be learned and there is no self, one that is a second sink."""
    if not rule.words or identity.self is not None:
        return identity
    first = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "?"}]))[:1]
    return replace(identity, self=SelfState(sink(body, first), "self_token"))


class Look(NamedTuple):
    """A state, as it will be kept, on what was held back."""

    step: int
    loss: float
    """KL to the teacher, nats a token."""
    recalled: int
    """Questions whose greedy answer has the person's word."""
    unchanged: float
    """Share of the base's own tokens that are still said first in everyday answers."""

    def loses(self, before: Look) -> str:
        """What this look lost against the one before the night; empty where it lost nothing."""
        if self.recalled < before.recalled:
            return f"{before.recalled} questions that were held back were answered before it, and {self.recalled} after"
        if self.unchanged < before.unchanged:
            return f"{before.unchanged:.0%} of everyday answers were the base's before it, and {self.unchanged:.0%} after"
        return ""

    def earns(self, before: Look) -> bool:
        """Whether it is worth a change of the state: a question more, or so much nearer to the teacher that it is no accident."""
        return self.recalled > before.recalled or self.loss <= (1 - EARNED) * before.loss

    def better(self, other: Look) -> bool:
        return (self.recalled, -self.loss) > (other.recalled, -other.loss)


@dataclass(frozen=True)
class Slept:
    """What a night did: KL to the teacher on what was held back, before, at each look, and at the end."""

    looks: tuple[Look, ...]
    """Before the first step, then in the course of the night; none where there was nothing to ask about."""
    best_step: int
    """0 where the night was refused: the identity is as it was."""
    questions: int = 0
    """How many were held back."""
    interrupted: bool = False

    @property
    def helped(self) -> bool:
        return self.best_step > 0

    @property
    def before(self) -> float:
        return self.looks[0].loss if self.looks else 0.0

    @property
    def best(self) -> float:
        return self.look.loss if self.looks else 0.0

    @property
    def look(self) -> Look:
        """At the state that came back."""
        return next(x for x in self.looks if x.step == self.best_step)

    @property
    def reason(self) -> str:
        """Why a night was refused; empty where it helped."""
        if self.helped:
            return ""
        if not self.looks:
            return (
                "the model answers no two questions with what the person stated, and a night without questions cannot be judged; or it "
                "is to learn words, and nothing that was said is the person's"
            )
        lost = [x.loses(self.looks[0]) for x in self.looks[1:]]
        return next((x for x in lost if x), f"no state was {EARNED:.0%} nearer to the teacher on what was held back")


@dataclass
class SleepCheckpoint:
    """Where a night stands; given back to `consolidate`, it goes on from there."""

    step: int
    leaves: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]]
    best: dict[str, Tensor]
    best_step: int
    looks: list[Look] = field(default_factory=lambda: list[Look]())


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
    lessons: Lessons | None = None,
) -> tuple[Identity, Slept]:
    """An identity after a night's sleep over these conversations, and what the night did.

    Ctrl-C ends the night early and keeps the best so far. `on_step` sees where it stands, to be saved; given back as `night`, it
    goes on from there. `lessons` are those of this history, made before.
    """
    rule = rule or SleepRule()
    body = body_of(model)
    identity.base.refuse(body.base)
    if not any(len(c) for c in history):
        raise StateError("there is no history to sleep over; imprint a conversation first")
    # What the history is compared with is the base, whoever lives in the model meanwhile.
    with frozen(model), body.read([None] * body.base.depth):
        if lessons is None:
            lessons = lessons_of(history, rule, Anchors(body, tokenizer), lambda x: tell("asking about what was said", x))
        work = draft(begun(body, identity, tokenizer, rule), rule)
        if lessons is None or (rule.words and lessons.sayable is None):
            return identity, Slept((), 0)
        optimiser = torch.optim.Adam(_groups(work, rule))
        still = None
        if "v" in work.leaves and rule.still > 0:
            still = still_directions(body, draft(identity, rule), lessons.anchors, rule.still)
        if night is None:
            start = {n: x.detach().clone() for n, x in work.leaves.items()}
            night = SleepCheckpoint(0, {}, {}, start, 0, [_looked(body, identity, lessons, 0)])
        else:
            _resume(work, optimiser, night)
        interrupted = False
        try:
            while night.step < rule.steps:
                _step(body, work, optimiser, lessons.of(night.step, rule), night.step / rule.steps, still)
                night.step += 1
                if night.step % rule.look_every == 0 or night.step == rule.steps:
                    _look(body, work, lessons, night)
                _remember(work, optimiser, night)
                on_step(night)
                tell("sleeping", night.step / rule.steps)
        except KeyboardInterrupt:
            interrupted = True
    slept = Slept(tuple(night.looks), night.best_step, len(lessons.held), interrupted)
    if not slept.helped:
        return identity, slept
    work.leaves = night.best
    woken = work.identity()
    return replace(woken, life=replace(woken.life, sleeps=woken.life.sleeps + 1)), slept


def unjudged(body: Body, identity: Identity, lessons: Lessons, rule: SleepRule) -> Identity:
    """The state after all steps of a night, whatever it lost: for studies of what is learned. Values are moved along any direction."""
    if rule.words and lessons.sayable is None:
        return identity
    with body.read([None] * body.base.depth):
        work = draft(begun(body, identity, lessons.anchors.tokenizer, rule), rule)
        optimiser = torch.optim.Adam(_groups(work, rule))
        for step in range(rule.steps):
            _step(body, work, optimiser, lessons.of(step, rule), step / rule.steps, None)
    return work.identity()


def _step(
    body: Body, work: Draft, optimiser: torch.optim.Adam, lesson: list[tuple[float, Item]], share: float, still: Tensor | None
) -> None:
    """One gradient step, `share` of the night gone; of values, only along what is not held still."""
    optimiser.zero_grad()
    with torch.enable_grad(), body.read(work.reads(body.scales, body.device)):
        each = losses(body, [item for _, item in lesson])
        torch.stack([w * x for (w, _), x in zip(lesson, each, strict=True)]).sum().backward()
    for group in optimiser.param_groups:
        group["lr"] = group["pace"] * (1 - 0.8 * share)
    before = work.leaves["v"].detach().clone() if still is not None else None
    optimiser.step()
    if still is not None and before is not None:
        v = work.leaves["v"].data
        v -= still @ (still.mT @ (v - before))


def still_directions(body: Body, work: Draft, anchors: Anchors, share: float) -> Float[Tensor, "L G m R"]:
    """Orthonormal directions over the slots of each layer and head, along which values are not moved; unused ones are zero.

    C = Σ over unrelated texts of ∂surprise/∂v (∂surprise/∂v)ᵀ, (m, m): its largest eigenvectors are the mixtures of slots that such texts
    read. As many as make up `share` of its trace are held still, so that a night hardly moves what is said to anybody else.
    """
    v = work.leaves["v"]
    read = v.new_zeros(*v.shape[:3], v.shape[2])
    for item in anchors.still():
        with torch.enable_grad(), body.read(work.reads(body.scales, body.device)):
            (grad,) = torch.autograd.grad(losses(body, [replace(item, wanted=None)])[0], [v])
        read += len(item.at) * grad @ grad.mT
    energy, directions = torch.linalg.eigh(read.double())
    # Ascending: a direction is held where what lies above it does not yet make up the share.
    above = energy.clamp(min=0).flip(-1).cumsum(-1).flip(-1) - energy
    held = above < share * energy.clamp(min=0).sum(-1, keepdim=True)
    most = int(held.sum(-1).max())
    return (directions * held[..., None, :]).float()[..., v.shape[2] - most :]


def _look(body: Body, work: Draft, lessons: Lessons, night: SleepCheckpoint) -> None:
    """Judge the state as it will be kept: packed. The best that lost nothing is set aside."""
    look = _looked(body, work.identity(), lessons, night.step)
    best = next(x for x in night.looks if x.step == night.best_step)
    night.looks.append(look)
    if not look.loses(night.looks[0]) and look.earns(night.looks[0]) and look.better(best):
        night.best_step = night.step
        night.best = {n: x.detach().clone() for n, x in work.leaves.items()}


@torch.no_grad()
def _looked(body: Body, identity: Identity, lessons: Lessons, step: int) -> Look:
    held, tokenizer = lessons.held, lessons.anchors.tokenizer
    everyday = lessons.anchors.judged()
    with body.read(layer_reads([identity], body.scales, device=body.device)):
        along = logs_along(body, [(x.ids, x.at) for x in (*(y.item for y in held), *everyday)])
        said = greedy(body, tokenizer, [], [x.question.text for x in held], ANSWER)
    loss = sum(float(item_said(x.item, logs)) for x, logs in zip(held, along, strict=False)) / len(held)
    same = [logs.argmax(-1) == x.ids[x.at] for x, logs in zip(everyday, along[len(held) :], strict=True)]
    recalled = sum(says(tokenizer.decode(answer.tokens), x) for answer, x in zip(said, held, strict=True))
    return Look(step, loss, recalled, float(torch.cat(same).float().mean()))


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
