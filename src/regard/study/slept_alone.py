"""A night writes a person into a trace alone, or into a self alone: it leans toward their own words, and toward nobody else's.

One seed is one person of the test pool of `people.natural` in a short life. Nothing is imprinted: a state with no slot to point at sleeps over the
history (a trace by `ALONE`, a self by `ALONE_SELF`), and the state after its last step is measured, whether or not a night would have been refused. Nats of the assistant's words against the base, in three conversations:

    own           the person's next conversation
    nobody's      the same under a state that slept over twelve strangers at once: what of it is the manner of being told about oneself
    another's     the next conversations of two others
    neutral       prose about the world

What one pass over the history writes into a trace, and why that belongs to nobody, is in `trace_one_pass`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..identity.body import Body, body_of, frozen
from ..identity.sleep.consolidate import unjudged
from ..identity.sleep.items import Item, answers_item, losses
from ..identity.sleep.lessons import Anchors, Lessons, lessons_of
from ..identity.sleep.rule import ALONE, ALONE_SELF, Part, SleepRule
from ..identity.speaking import living
from ..identity.state import Identity
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.generator import neutral
from .people.lab import shuffled, text_item
from .people.natural import NaturalPerson, natural
from .people.natural_data import NaturalPool
from .tasks.packaged import SMOLLM2
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..models.tokenizer import Tokenizer

CROWD = 24
"""People to draw from."""
POOL: NaturalPool = "test"
PARTS: tuple[Part, ...] = ("trace", "self")
OWN, OTHERS, PROSE = -0.3, 0.03, 0.02
"""What is asked: nats against the base at most, the band around it, and the most that prose may cost."""
DEPTH: dict[Size, int | None] = {"mini": 2, "quick": None, "full": None}
RULES: dict[Part, SleepRule] = {"trace": ALONE, "self": ALONE_SELF}
STEPS: dict[Size, int | None] = {"mini": 1, "quick": 4, "full": None}
"""Of a night; None for those of its rule."""
TEXTS: dict[Size, int] = {"mini": 1, "quick": 2, "full": 3}
"""Neutral texts that are read."""


NOBODY = (
    "My dog is Rex. I grew up in Dayton.", "I go sailing with my cousin Brett.", "I cook lasagne. I wear old trainers.", "Mine is the white van. My sister is Carol.",
    "I am Casimir. A map of the moon hangs above my sofa.", "I live on the ninth floor. My flatmate is Emile.", "I take cardamom in my coffee. I follow Benfica.",
    "My shift begins at a quarter to six. My brother-in-law drives me.", "My keys are in the blue jar. I promised her a stool.", "I teach geometry. My youngest is four.",
    "I cannot eat sesame seeds. My usual order is pancakes with jam.", "My workshop is in Mill Row. I repair barometers.",
)  # fmt: skip
"""Twelve strangers, who have nothing in common but that they talk about themselves: a night over all of them leaves a manner."""


class AloneLab:
    """One model and one pool."""

    def __init__(self, size: Size, pool: NaturalPool) -> None:
        self.size: Size = size
        self.model, tokenizer = smollm2(DEPTH[size])
        self.tokenizer: Tokenizer = tokenizer
        self.body: Body = body_of(self.model)
        self.crowd: list[NaturalPerson] = natural(CROWD + 2, 0, pool, short=True)
        self.anchors = Anchors(self.body, tokenizer)
        self.known: dict[str, Lessons | None] = {}
        self.prose = [text_item(self.body, tokenizer, t) for t in neutral("test")[: TEXTS[size]]]

    def later(self, i: int) -> Item:
        return answers_item(self.body, self.tokenizer, self.crowd[i].next)

    @torch.no_grad()
    def nats(self, who: Identity | None, items: Sequence[Item]) -> list[float]:
        with living(self.model, who):
            return [float(x) for x in losses(self.body, items)]

    @cache  # noqa: B019 (one lab lives as long as its process)
    def nobody(self, part: Part, rule: SleepRule) -> Identity:
        others = tuple(x for x in rule.unrelated if x != "stranger")
        strangers = NOBODY[: 2 if self.size == "mini" else len(NOBODY)]
        return self.night([[{"role": "user", "content": x}] for x in strangers], part, replace(rule, unrelated=others))

    def night(self, history: list[list[dict[str, str]]], part: Part, rule: SleepRule) -> Identity:
        who, lessons = Identity.new(self.body.base), self.lessons(history)
        rule = replace(rule, parts=(part,), steps=STEPS[self.size] or rule.steps)
        return who if lessons is None else unjudged(self.body, who, lessons, rule)

    def lessons(self, history: list[list[dict[str, str]]]) -> Lessons | None:
        """What both parts learn from."""
        key = history[0][0]["content"]
        if key not in self.known:
            some = replace(ALONE_SELF, statements=2) if self.size == "mini" else ALONE_SELF
            self.known[key] = lessons_of(history, some, self.anchors)
        return self.known[key]

    def person(self, i: int, rules: Mapping[Part, SleepRule]) -> Record:
        with frozen(self.model):
            history = [[dict(m) for m in c] for c in self.crowd[i].history]
            items = [self.later(i), self.later(i + 1), self.later(i + 2), *self.prose]
            base = self.nats(None, items)
            lessons, seconds = self.lessons(history), dict[str, float]()
            measured: Record = {
                "name": self.crowd[i].name,
                "base": base[0],
                "lessons": 0 if lessons is None else len(lessons.studied),
            }
            for part in PARTS:
                nobody = self.nobody(part, rules[part])
                began = time.process_time()
                who = self.night(history, part, rules[part])
                seconds[part] = round(time.process_time() - began, 2)
                states = {"own": who, "nobody": nobody, "shuffled": shuffled(who, i)}
                measured[part] = {name: _apart(self.nats(state, items), base) for name, state in states.items()}
                measured[part]["bytes"] = who.nbytes
            return measured | {"timed": seconds}


def _apart(nats: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    own, *rest = (round(x - b, 4) for x, b in zip(nats, base, strict=True))
    return {"own": own, "another": round(sum(rest[:2]) / 2, 4), "prose": round(sum(rest[2:]) / len(rest[2:]), 4)}


@cache
def _lab(size: Size, pool: NaturalPool) -> AloneLab:
    return AloneLab(size, pool)


def run(seed: int, size: Size, pool: NaturalPool = POOL, rules: Mapping[Part, SleepRule] = RULES) -> Record:
    """One person: a trace alone and a self alone."""
    return _lab(size, pool).person(seed, rules)


def of(records: Sequence[Record], part: str, what: str, state: str = "own") -> list[float]:
    return [r[part][state][what] for r in records]


def judge(records: Sequence[Record]) -> Verdict:
    checks: list[Check] = []
    for part in PARTS:
        own, another = of(records, part, "own"), of(records, part, "another")
        named = f"{part} alone, slept"
        checks += [
            Check(f"{named}: own, nats against the base", own, below=OWN, control=another, needed=True, condition=f"a {part} alone is asked for the own"),
            Check(f"{named}: another's, nats against the base", another, above=-OTHERS, below=OTHERS, condition=f"a {part} alone is asked to leave others alone"),
            Check(f"{named}: own less another's", [a - b for a, b in zip(own, another, strict=True)], below=-0.05,
                  control=[a - b for a, b in zip(of(records, part, "own", "shuffled"), of(records, part, "another", "shuffled"), strict=True)],
                  condition=f"own and another's are compared under a {part} alone"),
            Check(f"{named}: own less what nobody's state gives there", [a - b for a, b in zip(own, of(records, part, "own", "nobody"), strict=True)], below=-0.05,
                  condition=f"a {part} alone is compared with nobody's"),
            Check(f"{named}: neutral prose, nats against the base", of(records, part, "prose"), below=PROSE, condition=f"prose is read under a {part} alone"),
        ]  # fmt: skip
    return judged(*checks)


def draw(records: Sequence[Record], figure: Figure) -> None:
    both = figure.subplots(1, len(PARTS), sharex=True)
    names = {
        "own": ("own", "own"),
        "nobody's state, there": ("nobody", "own"),
        "another's": ("own", "another"),
        "neutral prose": ("own", "prose"),
    }
    for n, (axes, part) in enumerate(zip(both, PARTS, strict=True)):
        bars(axes, list(names), [interval(of(records, part, what, state)) for state, what in names.values()], n)
        axes.axvline(0, color="#666666", lw=1)
        axes.axvline(OWN, color=COLOURS[7], lw=1, ls="--")
        axes.axvspan(-OTHERS, OTHERS, color=COLOURS[7], alpha=0.2)
        axes.set(xlabel="nats against the base", title=f"{part} alone, slept")


def planted(kind: Plant, seed: int) -> Record:
    """A person who is in the state, who is not, or everybody."""
    own = {"positive": -0.5, "negative": 0.0, "control": -0.5}[kind] + 0.001 * (seed % 3)
    another = own if kind == "control" else 0.001 * (seed % 2)
    broken = {"own": 0.001 * (seed % 2), "another": 0.0, "prose": 0.0}
    state = {
        "own": {"own": own, "another": another, "prose": 0.0 if kind != "negative" else 0.2},
        "nobody": broken,
        "shuffled": broken,
        "bytes": 1,
    }
    return {"name": "Ada", "base": 3.0, "lessons": 9, **dict.fromkeys(PARTS, state)}


STUDY = Study(
    claim="A night without imprints writes one person into a trace or a self: their own next conversation, and nobody else's.",
    source="Trace Tensor Attention and Self-Conditioned Attention, and what an identity promises here",
    protocol="People of the test pool in short natural lives; a trace or a self alone sleeps over the history by the rules ALONE and ALONE_SELF; nats of the assistant's words "
    "against the base in the person's next conversation, in those of two others, and on neutral prose.",
    controls=(
        "two other people's next conversations",
        "a state that slept over twelve strangers at once",
        "the state with its layers shuffled",
        "neutral prose",
    ),
    caption="Nats against the base under a trace alone (left) and a self alone (right); nobody's slept over twelve strangers at once, and is read in the person's own next conversation. Own should lie left of the dashed line, another's and prose in the grey band.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=5,
    needs=(SMOLLM2,),
    parts={
        "Trace Tensor Attention": "trace_tensor_attention.md",
        "Self-Conditioned Attention": "self_conditioned_attention.md",
    },
)
