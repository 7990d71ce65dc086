"""Does a state belong to the person it came from? Own against another's, shuffled, random, and the whole history in context.

Every person is measured on the assistant's words in their *next* conversation, in nats per token. Whatever needs two people is paired:
person i's state is also read on the next conversation of person i + 1. The study `identity` runs it person by person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...identity.body import Body, body_of, frozen
from ...identity.experience import Experience, observe
from ...identity.packed import Packed
from ...identity.sleep.answering import greedy
from ...identity.sleep.consolidate import consolidate
from ...identity.sleep.items import Item, anchor_item, answers_item, losses
from ...identity.sleep.lessons import Anchors, lessons_of
from ...identity.sleep.rule import ALONE, ALONE_SELF, Part, SleepRule
from ...identity.speaking import living
from ...identity.state import Identity, SelfState, TraceState
from ...identity.write.imprints import DEFAULT, KEEPERS
from ...identity.write.rule import Rule, imprint
from ...identity.write.self_state import SelfRule
from ...identity.write.trace import TraceRule
from ...models.tokenizer import Tokenizer
from .generator import Person, Speaker, neutral, people

SHARES = (0.125, 0.25, 0.5)
SEEDS = 5
"""Of what is random, for each person."""
LONGEST = 14
"""Tokens of an answer to a plain question at most."""
Record = dict[str, Any]
"""What was measured of one person: a line of JSON."""
FAST_TRACE = TraceRule(write="centred")


@dataclass(frozen=True)
class EvaluationPlan:
    """What is measured of each person."""

    people: int = 40
    seed: int = 0
    recall: bool = True
    shares: tuple[float, ...] = SHARES
    """Budgets of imprints that are compared."""
    keepers: tuple[str, ...] = tuple(KEEPERS)
    slept: tuple[str, ...] = ("everything", "imprints", "trace", "self")
    """States that are slept over; imprints at every share."""
    steps: int | None = None
    """Of a sleep; None for the default of `SleepRule`."""


class Lab:
    """One model, and the ways to measure a state on it."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, plan: EvaluationPlan) -> None:
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        self.body: Body = body_of(model)
        self.crowd = people(plan.people + 1, plan.seed, "test")
        texts = neutral("test")
        self.neutral_items = [
            replace(anchor_item(self.body, tokenizer, t, c), wanted=None) for t in texts[:3] for c in (True, False)
        ]
        self.neutral_base = self.loss(None, self.neutral_items)
        self.anchors = Anchors(self.body, tokenizer)

    @torch.no_grad()
    def loss(self, identity: Identity | None, items: Sequence[Item]) -> list[float]:
        with living(self.model, identity):
            return [float(x) for x in losses(self.body, items)]

    def person(self, i: int) -> Record:
        """Everything that is measured of person i."""
        with frozen(self.model):
            return self._person(i, self.crowd[i], self.crowd[i + 1])

    def _person(self, i: int, me: Person, other: Person) -> Record:
        chat = [m for c in me.history for m in c]
        mine, theirs = (answers_item(self.body, self.tokenizer, p.next) for p in (me, other))
        e = observe(self.model, chat, self.tokenizer, source="history")
        base, base_other = self.loss(None, [mine, theirs])
        measured: Record = {"i": i, "tokens": int(e.content.sum()), "base": base, "base_other": base_other}
        measured["context"] = self.in_context(chat, me.next)
        measured["keep"] = {}
        for share in self.plan.shares:
            for keep in self.plan.keepers:
                # What is random is the mean of a few seeds, other ones for every person.
                seeds = range(SEEDS * i, SEEDS * (i + 1)) if keep == "random" else (i,)
                said = [self.loss(self.keeps(e, keep, share, seed), [mine])[0] for seed in seeds]
                measured["keep"][f"{keep} {share}"] = sum(said) / len(said)
            measured["keep"][f"merged {share}"] = self.loss(self.keeps(e, DEFAULT, share, merge=True), [mine])[0]
        fast = self.keeps(e, DEFAULT, 0.25)
        measured["imprints"] = self.controls(fast, mine, theirs, i)
        measured["trace_fast"] = self.controls(imprint(self.empty, e, Rule(keep=None, trace=FAST_TRACE)), mine, theirs, i)
        for form in ("key_bias", "self_token"):
            rule = Rule(keep=None, self=SelfRule(form=form))
            measured[f"self_fast {form}"] = self.controls(imprint(self.empty, e, rule), mine, theirs, i)
        measured["aba"] = self.a_b_a(e, fast, other, mine)
        measured["damage_fast"] = self.damage(fast)
        return measured

    def after_sleep(self, i: int) -> Record:
        """What sleep does to person i; the slow part, so it has a file of its own."""
        me, other = self.crowd[i], self.crowd[i + 1]
        with frozen(self.model):
            mine, theirs = (answers_item(self.body, self.tokenizer, p.next) for p in (me, other))
            e = observe(self.model, [m for c in me.history for m in c], self.tokenizer, source="history")
            return {"i": i, "sleep": self.asleep(e, me, other, mine, theirs, i)}

    @property
    def empty(self) -> Identity:
        return Identity.new(self.body.base)

    def keeps(self, e: Experience, keep: str, share: float, seed: int = 0, merge: bool = False) -> Identity:
        """Imprints alone, a share of the tokens by one keeper."""
        return imprint(self.empty, e, Rule(keep=keep, share=share, budget=10**6, merge=merge, seed=seed))

    @torch.no_grad()
    def in_context(self, chat: list[dict[str, str]], after: Sequence[dict[str, str]]) -> float:
        last = answers_item(self.body, self.tokenizer, after)
        whole = answers_item(self.body, self.tokenizer, [*chat, *after])
        return self.loss(None, [replace(whole, at=whole.at[-len(last.at) :])])[0]

    def controls(self, identity: Identity, mine: Item, theirs: Item, seed: int, broken: bool = True) -> dict[str, float]:
        """Own, read by another's conversation, and `broken`: shuffled, and random with the same spectrum."""
        own, on_other = self.loss(identity, [mine, theirs])
        nats: dict[str, float] = {"own": own, "on_other": on_other, "bytes": identity.nbytes}
        if broken:
            nats["shuffled"] = self.loss(shuffled(identity, seed), [mine])[0]
            nats["random"] = self.loss(rotated(identity, seed), [mine])[0]
        return nats

    def a_b_a(self, e: Experience, a: Identity, other: Person, mine: Item) -> float:
        """A's next conversation after A has also been through B's history."""
        with living(self.model, a):
            b = observe(self.model, [m for c in other.history for m in c], self.tokenizer, source="b")
        return self.loss(imprint(a, b, Rule(share=0.25, budget=10**6)), [mine])[0]

    def damage(self, identity: Identity) -> dict[str, float]:
        """Nats on neutral text above the base: as answers in a chat, and as bare prose."""
        more = [a - b for a, b in zip(self.loss(identity, self.neutral_items), self.neutral_base, strict=True)]
        return {"chat": sum(more[0::2]) / len(more[0::2]), "prose": sum(more[1::2]) / len(more[1::2])}

    def asleep(self, e: Experience, me: Person, other: Person, mine: Item, theirs: Item, seed: int) -> Record:
        chat = [m for c in me.history for m in c]
        lessons = lessons_of(me.history, ALONE_SELF, self.anchors)
        measured: Record = {}

        def slept(name: str, start: Identity, parts: tuple[Part, ...]) -> Identity:
            alone = ALONE_SELF if parts == ("self",) else ALONE
            rule = replace(SleepRule() if "imprints" in parts else alone, parts=parts, seed=seed)
            rule = rule if self.plan.steps is None else replace(rule, steps=self.plan.steps)
            after, outcome = consolidate(self.model, start, me.history, self.tokenizer, rule, lessons=lessons)
            broken = not name.startswith("imprints")
            measured[name] = {
                **self.controls(after, mine, theirs, seed, broken),
                "damage": self.damage(after),
                "step": outcome.best_step,
            }
            return after

        if "everything" in self.plan.slept:
            whole = slept("everything 0.25", self.keeps(e, DEFAULT, 0.25), ("self", "trace", "imprints"))
            if self.plan.recall:
                measured["recall"] = self.recall(whole, me, other, chat)
        for share in self.plan.shares if "imprints" in self.plan.slept else ():
            slept(f"imprints {share}", self.keeps(e, DEFAULT, share), ("imprints",))
        for part in ("trace", "self"):
            if part in self.plan.slept:
                slept(part, self.empty, (part,))
        return measured

    @torch.no_grad()
    def recall(self, identity: Identity, me: Person, other: Person, chat: list[dict[str, str]]) -> Record:
        """Greedy answers to plain questions: with the history in context, with the identity, with another's questions."""
        counts: Record = {"questions": len(me.questions), "other_questions": len(other.questions)}
        with living(self.model, None):
            counts["context"] = _right(me, self.answers(me, chat))
            counts["nobody"] = _right(me, self.answers(me))
        with living(self.model, identity):
            said = self.answers(me)
            counts["own"], counts["other"] = _right(me, said), _right(other, self.answers(other))
        counts["said"] = [f"{q.text} {a}" for q, a in zip(me.questions, said, strict=True)]
        return counts

    def answers(self, who: Person, chat: Sequence[dict[str, str]] = ()) -> list[str]:
        """What is answered to a person's questions, after this chat."""
        ends = set(self.tokenizer.eos_ids)
        lines = greedy(self.body, self.tokenizer, chat, [q.text for q in who.questions], LONGEST)
        return [self.tokenizer.decode([t for t in line if t not in ends]).strip() for line, _ in lines]

    def speaker(self, i: int, me: Speaker, other: Speaker) -> Record:
        """Earlier lines, then later ones: prose without facts."""
        with frozen(self.model):
            mine, theirs = (text_item(self.body, self.tokenizer, s.later) for s in (me, other))
            e = observe(self.model, me.earlier, self.tokenizer, source=me.name)
            base, base_other = self.loss(None, [mine, theirs])
            both = text_item(self.body, self.tokenizer, f"{me.earlier}\n{me.later}")
            measured: Record = {"i": i, "name": me.name, "tokens": len(e), "base": base, "base_other": base_other}
            measured["context"] = self.loss(None, [replace(both, at=both.at[-len(mine.at) :])])[0]
            measured["keep"] = {
                keep: self.loss(self.keeps(e, keep, 0.25, i), [mine])[0]
                for keep in (DEFAULT, "shock", "attention", "random", "recency")
            }
            measured["imprints"] = self.controls(self.keeps(e, DEFAULT, 0.25), mine, theirs, i)
            return measured


def _right(who: Person, said: Sequence[str]) -> int:
    return sum(q.value.lower() in a.lower() for q, a in zip(who.questions, said, strict=True))


def text_item(body: Body, tokenizer: Tokenizer, text: str) -> Item:
    ids = torch.tensor(tokenizer.encode(text), device=body.device)
    return Item(ids, torch.arange(1, len(ids), device=body.device))


def shuffled(identity: Identity, seed: int) -> Identity:
    """The same numbers in the wrong places: keys no longer go with their values, layers of self and trace change places."""
    g = torch.Generator().manual_seed(seed)
    L = identity.base.depth
    layers = torch.randperm(L, generator=g)
    imprints = identity.imprints
    if len(imprints):
        imprints = replace(imprints, v=imprints.v.pick(torch.randperm(len(imprints), generator=g), 2))
    me = None if identity.self is None else SelfState(identity.self.s[layers], identity.self.form)
    trace = None if identity.trace is None else TraceState(identity.trace.left.pick(layers, 0), identity.trace.signs)
    return replace(identity, self=me, trace=trace, imprints=imprints)


def rotated(identity: Identity, seed: int) -> Identity:
    """A random state with the same spectrum: every head turned by an orthogonal matrix of its own (UTUᵀ for a trace)."""
    g = torch.Generator().manual_seed(seed)
    b = identity.base
    L, G, D = b.depth, b.key_heads, b.head_width
    turn = torch.linalg.qr(torch.randn(L, G, D, D, generator=g)).Q

    def turned(x: Tensor) -> Tensor:
        return x @ turn

    imprints = identity.imprints
    if len(imprints):
        imprints = replace(imprints, k=Packed.of(turned(imprints.k.dense())), v=Packed.of(turned(imprints.v.dense())))
    me, trace = identity.self, identity.trace
    if me is not None:
        parts = me.s.view(L, -1, G, D).transpose(1, 2)
        me = SelfState(turned(parts).transpose(1, 2).reshape(L, -1), me.form)
    if trace is not None:
        trace = TraceState(Packed.of(turned(trace.left.dense())), trace.signs)
    return replace(identity, self=me, trace=trace, imprints=imprints)
