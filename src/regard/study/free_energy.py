"""Does choosing the self that minimises *expected* surprise do better than the plain update s' = s + η g(z, s)?

The toy world. A text begins with two fixed tokens; then turns: an action of three, and two observations out of eight. In the world with
a quiet place one action is always followed by the same observation, one by any of two, one by any of eight: 0, log 2 and log 8
nats. In the world without one every action is followed by any of four: log 4 nats, whatever is done. A small decoder learns each
world from lives with habits: each life prefers one of the actions, drawn at random, and does it four times out of five. So
the decoder expects rightly, knows that there are habits, and has none of its own.

    G(s) = E over a ~ p(· | s), o ~ world(a) of mean_t −log p(o_t | a, o_<t, s)  +  precision/2 · |s − s₀|²

`acting`    `chosen_by_expected_surprise`: gradient of G over sampled continuations
`plain`     the published update: the pooled state of as many lives as `acting` sampled steps, by `imprint`
`given`     `chosen_by_free_energy`: the self under which texts that are *given* surprise least
`random`    a self of the size of `acting`'s in random directions
`luckiest`  the best of as many random selves as `acting` took steps, by the same number of continuations

All are selves of one token (`self_token`), measured on fresh continuations: mean surprise by the world's own tokens. `harm` is how much
worse a self expects lives with any habit, which it does not choose: a self could also be surprised less by expecting wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..identity.body import base_of
from ..identity.experience import observe
from ..identity.sleep.acting import ActingRule, chosen_by_expected_surprise, expected_surprise
from ..identity.sleep.free_energy import chosen_by_free_energy
from ..identity.speaking import living
from ..identity.state import Identity, SelfState
from ..identity.write.rule import Rule, imprint
from ..identity.write.self_state import SelfRule, fresh
from ..models.base import Model
from ..models.llama import LlamaConfig
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import IGNORED, Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPT = (0, 1)
"""An identity's first token sees nothing but itself, so that the second is the first to be under its influence."""
ACTIONS, OBSERVATIONS, TURNS, HABIT = 3, 8, 4, 0.8
FIRST_ACTION = len(PROMPT)
FIRST_OBSERVATION = FIRST_ACTION + ACTIONS
VOCABULARY = FIRST_OBSERVATION + OBSERVATIONS
SPREADS = (1, 2, 8)
"""Observations that may follow the quiet, the middle and the loud action."""
NOWHERE = 4
"""Observations that may follow every action of the world without a quiet place."""
WORLDS = ("quiet", "nowhere")
WAYS = ("none", "plain", "given", "random", "luckiest", "acting")
STEPS: dict[Size, int] = {"mini": 20, "quick": 250, "full": 400}
CHOOSING: dict[Size, int] = {"mini": 2, "quick": 20, "full": 30}
FRESH: dict[Size, int] = {"mini": 32, "quick": 256, "full": 512}
"""Continuations on which a self is measured."""
GAIN, HARM = 0.2, 0.1
ACTION_TOKENS = tuple(range(FIRST_ACTION, FIRST_OBSERVATION))


def answered(texts: Tensor, g: torch.Generator, quiet: bool, shift: int) -> Tensor:
    """Two observations after texts that end with an action; `shift` says which action is the quiet one."""
    kind = (texts[:, -1] - FIRST_ACTION + shift) % ACTIONS
    spread = torch.tensor(SPREADS)[kind] if quiet else torch.full_like(kind, NOWHERE)
    drawn = torch.rand(len(texts), 2, generator=g) * spread[:, None]
    return FIRST_OBSERVATION + drawn.long()


def lives(g: torch.Generator, rows: int, quiet: bool, shift: int) -> Tensor:
    """Texts of lives whose habits are drawn at random."""
    texts = torch.tensor([PROMPT]).expand(rows, -1)
    habit = torch.randint(FIRST_ACTION, FIRST_OBSERVATION, (rows, 1), generator=g)
    for _ in range(TURNS):
        other = torch.randint(FIRST_ACTION, FIRST_OBSERVATION, (rows, 1), generator=g)
        texts = torch.cat([texts, torch.where(torch.rand(rows, 1, generator=g) < HABIT, habit, other)], 1)
        texts = torch.cat([texts, answered(texts, g, quiet, shift)], 1)
    return texts


def learnt(seed: int, quiet: bool, steps: int) -> Model:
    def make() -> Model:
        return LlamaConfig(vocabulary=VOCABULARY, width=32, depth=2, heads=2, key_heads=2, hidden=64).build()

    def batch(g: torch.Generator) -> Batch:
        texts = lives(g, 32, quiet, seed % ACTIONS)
        return Batch(texts[:, :-1], texts[:, 1:])

    model = built(seed, make)
    fit(model, batch, steps, lr=5e-3, seed=seed)
    return model


def random_self(who: Identity, size: float, g: torch.Generator) -> Identity:
    s = torch.randn(fresh(who.base, "self_token").s.shape, generator=g)
    return replace(who, self=SelfState(s * (size / float(s.norm())), "self_token"))


@torch.no_grad()
def surprise_at(model: Model, who: Identity | None, texts: Tensor) -> float:
    """Mean surprise by the observations of texts that are given."""
    with living(model, who):
        logs = model(texts[:, :-1]).logits.log_softmax(-1)
    targets = texts[:, 1:]
    asked = torch.where(targets >= FIRST_OBSERVATION, targets, IGNORED)
    return float(torch.nn.functional.nll_loss(logs.flatten(0, 1), asked.flatten(), ignore_index=IGNORED))


def selves(model: Model, seed: int, quiet: bool, steps: int) -> dict[str, Identity | None]:
    """Every way to come by a self, at this seed."""
    shift, nobody = seed % ACTIONS, Identity.new(base_of(model))
    g = generator(1000 + seed)
    rule = ActingRule(steps=steps, rollouts=32, turns=TURNS, seed=seed)

    def world(texts: Tensor, drawn: torch.Generator) -> Tensor:
        return answered(texts, drawn, quiet, shift)

    acting = chosen_by_expected_surprise(model, nobody, PROMPT, world, actions=ACTION_TOKENS, rule=rule)
    assert acting.self is not None
    size = float(acting.self.s.norm())
    plain, writing = nobody, Rule(keep=None, self=SelfRule(form="self_token"))
    for life in lives(g, steps, quiet, shift):
        plain = imprint(plain, observe(model, life.tolist()), writing)
    text = lives(g, 1, quiet, shift)[0].tolist()
    given = chosen_by_free_energy(
        model, random_self(nobody, 0.1, g), text, steps=steps, rate=rule.rate, precision=rule.precision
    )
    draws = [random_self(nobody, size, g) for _ in range(steps)]
    tried = [
        expected_surprise(model, d, PROMPT, world, actions=ACTION_TOKENS, rollouts=32, turns=TURNS, seed=seed)[0] for d in draws
    ]
    luckiest = draws[min(range(len(tried)), key=lambda i: tried[i])]
    return {"none": None, "plain": plain, "given": given, "random": draws[0], "luckiest": luckiest, "acting": acting}


def run(seed: int, size: Size) -> Record:
    record: Record = {}
    for name in WORLDS:
        quiet = name == "quiet"
        model = learnt(seed, quiet, STEPS[size])
        held = lives(generator(2000 + seed), 128, quiet, seed % ACTIONS)
        before = surprise_at(model, None, held)
        ways: Record = {}
        for way, who in selves(model, seed, quiet, CHOOSING[size]).items():
            met, did = expected_surprise(
                model, who, PROMPT, lambda t, g, q=quiet: answered(t, g, q, seed % ACTIONS), actions=ACTION_TOKENS,
                rollouts=FRESH[size], turns=TURNS, seed=3000 + seed,
            )  # fmt: skip
            by_kind = [float(did[(kind - seed % ACTIONS) % ACTIONS]) for kind in range(ACTIONS)]
            ways[way] = {"surprise": met, "acts": by_kind, "harm": surprise_at(model, who, held) - before}
        record[name] = ways
    return record


def judge(records: Sequence[Record]) -> Verdict:
    def gained(by: str, over: str, world: str = "quiet") -> list[float]:
        return [r[world][over]["surprise"] - r[world][by]["surprise"] for r in records]

    nowhere = gained("acting", "plain", "nowhere")
    return judged(
        Check("surprise that acting saves against the plain update, nats", gained("acting", "plain"), above=GAIN,
              control=gained("random", "plain"), condition="the self acts, and the world has a place where acting lowers surprise",
              needed=True),
        Check("the same, against a world in which acting cannot lower surprise", gained("acting", "plain"), above=GAIN,
              control=nowhere, condition="the world has a quiet place"),
        Check("surprise that acting saves against a self fitted to a given text, nats", gained("acting", "given"), above=GAIN,
              control=gained("random", "given"), condition="continuations are sampled, not given"),
        Check("what acting costs on lives with any habit, nats", [r["quiet"]["acting"]["harm"] for r in records], below=HARM,
              condition="lives that it would not have chosen are expected as well as before"),
    )  # fmt: skip


COLOURS = {
    "none": "#8C8C8C",
    "plain": "#E69F00",
    "given": "#CC79A7",
    "random": "#56B4E9",
    "luckiest": "#009E73",
    "acting": "#0072B2",
}


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
    for w, (world, marker) in enumerate(zip(WORLDS, "os", strict=True)):
        for i, way in enumerate(WAYS):
            x = interval([r[world][way]["surprise"] for r in records])
            left.errorbar(i + 0.16 * (2 * w - 1), x.mean, [[x.mean - x.low], [x.high - x.mean]], fmt=marker, color=COLOURS[way],
                          markerfacecolor=COLOURS[way] if w == 0 else "white", capsize=3)  # fmt: skip
    for world, marker, face in zip(("with a quiet place", "without one"), "os", ("#444444", "white"), strict=True):
        left.plot([], [], marker, color="#444444", markerfacecolor=face, label=world)
    left.axhline(math.log(NOWHERE), color="#bbbbbb", linewidth=0.8, linestyle="--")
    left.set_xticks(range(len(WAYS)), WAYS, rotation=30)
    left.set_ylim(-0.1, None)
    left.set(ylabel="surprise by the world, nats a token")
    left.legend(title="world", fontsize=8, title_fontsize=8)
    for i, way in enumerate(WAYS):
        shares = [sum(r["quiet"][way]["acts"][k] for r in records) / len(records) for k in range(ACTIONS)]
        for k, (colour, hatch) in enumerate((("#0072B2", ""), ("#E69F00", "//"), ("#D55E00", ".."))):
            middle.bar(i, shares[k], bottom=sum(shares[:k]), color=colour, hatch=hatch, edgecolor="white",
                       label=("quiet", "middle", "loud")[k] if i == 0 else None)  # fmt: skip
        x = interval([r["quiet"][way]["harm"] for r in records])
        right.errorbar(i, x.mean, [[x.mean - x.low], [x.high - x.mean]], fmt="o", color=COLOURS[way], capsize=3)
    middle.set_xticks(range(len(WAYS)), WAYS, rotation=30)
    middle.set(ylabel="share of actions, quiet world", ylim=(0, 1.25))
    middle.set_yticks([0, 0.25, 0.5, 0.75, 1])
    middle.legend(fontsize=7, ncols=3, loc="upper center", columnspacing=0.8, handlelength=1.2)
    right.axhline(0, color="#bbbbbb", linewidth=0.8)
    right.set_xticks(range(len(WAYS)), WAYS, rotation=30)
    right.axhline(HARM, color="#bbbbbb", linewidth=0.8, linestyle="--")
    right.set(ylabel="harm on lives with any habit, nats", ylim=(-1.2 * HARM, 1.2 * HARM))


def planted(kind: Plant, seed: int) -> Record:
    g = generator(seed)

    def way(surprise: float, quiet: float, harm: float = 0.0) -> Record:
        noise = float(torch.randn((), generator=g)) * 0.02
        return {"surprise": surprise + noise, "acts": [quiet, (1 - quiet) / 2, (1 - quiet) / 2], "harm": harm + noise / 4}

    by = {"positive": 0.1, "negative": 0.9, "control": 0.1}[kind]
    other = 0.1 if kind == "control" else 0.9
    quiet = {w: way(0.9, 0.33) for w in WAYS} | {"acting": way(by, 0.9), "random": way(other, 0.5)}
    nowhere = {w: way(math.log(NOWHERE), 0.33) for w in WAYS}
    if kind == "control":
        nowhere["acting"] = way(0.5, 0.9)
    return {"quiet": quiet, "nowhere": nowhere}


STUDY = Study(
    claim="Choosing the self that minimises expected surprise is better than the plain update.",
    source="Self-Conditioned Attention, its extension by free energy and active inference",
    protocol="A two-layer decoder learns a toy world from lives with any habit; a self of one token is then chosen by the gradient of "
    "expected surprise over sampled continuations, by the plain update over as many lives, by a fit to a given text, or at random; all are "
    "measured on 512 fresh continuations of four turns.",
    controls=(
        "a self of the same size in random directions",
        "a world in which every action is followed by the same noise",
        "lives with any habit, where a self that merely expects wrongly would be surprised more",
    ),
    caption="Left: surprise of each way to come by a self, in the world with a quiet place and in the one without. Middle: what each did. "
    "Right: what it costs on lives that it did not choose.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    parts={"Self-Conditioned Attention": "self_conditioned_attention.md"},
)
