"""Does a metric written by shock give one input different outputs after different histories, and do its eigenvectors show what was lived?

    score_ij = q_i·k_j/√D − (q̂_i − k̂_j)ᵀ T (q̂_i − k̂_j),      T' = λT + α tanh|shock| k⊗q

The toy: rounds of three words, one of each of three classes in any order, then `?`, then the word that this person means. Each person
means one class. A two-layer decoder learns texts of all of them; at a person's first question it cannot know better than log 3. A
history is eight such texts, read one after another; a probe is the first round of a fresh text. T is written by the rules of `TraceRule`
(published, centred, delta), or down the gradient of the history's surprise, ∂L/∂T = −Σ_ij g_ij δδᵀ (`gradient`, 12 steps). Strengths are
chosen from three each, on other people. Peers write a matrix into the readout, logits += W ĥ, from the same history: `fast`
(W' = λW + α x⊗ĥ) and `fast delta` (W' = W + ½ (αx − Wĥ)⊗ĥ).

Controls: the trace of a person who means another class; that of the same history with its tokens shuffled; the same eigenvalues in
random directions. "KL" is between the answers to one input after two people's histories, against two histories of the same
person. "Seen" is the chance that a word of the meant class gains more than another by the directions of T when `?` looks (`directions`).

Tried: with strengths of one grid, of which the peers and the gradient chose the largest, own gains were 1.10, 1.03 and 1.02 nats
(`gradient`, `fast`, `fast delta`), and the KL of the published rule was measured only at the strength that saves most, the smallest; so the
grids reach further here, and the KL is judged at the largest strength.

On a pretrained model the same is measured by the study `identity`: traces of SmolLM2 written in one pass do no more for their own person
than for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..identity.body import base_of, body_of, frozen
from ..identity.experience import observe
from ..identity.packed import Packed
from ..identity.sleep.consolidate import draft
from ..identity.sleep.rule import SleepRule
from ..identity.speaking import living
from ..identity.state import Identity, TraceState
from ..identity.trace_directions import directions
from ..identity.write.rule import Rule, imprint
from ..identity.write.trace import TraceRule, cosine, spectrum
from ..models.base import Model
from ..models.llama import LlamaConfig
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import IGNORED, Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN, ASK, CLASSES, WORDS, ROUNDS = 0, 1, 3, 8, 3
VOCABULARY = 2 + CLASSES * WORDS
TEXTS: dict[Size, int] = {"mini": 1, "quick": 8, "full": 8}
"""Of one history."""
TRIED: dict[Size, int] = {"mini": 1, "quick": 3, "full": 3}
"""Strengths of each way to write."""
RULES = ("published", "centred", "delta")
WAYS = (*RULES, "gradient")
PEERS = ("fast", "fast delta")
CONTROLS = ("other", "shuffled", "rotated")
STRENGTHS = {
    "published": (0.0005, 0.005, 0.05), "centred": (0.005, 0.02, 0.1), "delta": (0.005, 0.02, 0.1),
    "gradient": (0.03, 0.1, 0.3), "fast": (2.0, 8.0, 32.0), "fast delta": (4.0, 16.0, 64.0),
}  # fmt: skip
STEPS: dict[Size, int] = {"mini": 5, "quick": 250, "full": 400}
PROBES = 64
GAIN, MOVED, SEEN = 0.2, 0.1, 0.7


def texts(g: torch.Generator, meant: Tensor) -> Tensor:
    """One text for each entry of `meant`, the class that its person means."""
    rows = len(meant)
    parts = [torch.full((rows, 1), BEGIN)]
    for _ in range(ROUNDS):
        words = 2 + WORDS * torch.arange(CLASSES) + torch.randint(WORDS, (rows, CLASSES), generator=g)
        order = torch.rand(rows, CLASSES, generator=g).argsort(1)
        parts += [words.gather(1, order), torch.full((rows, 1), ASK), words.gather(1, meant[:, None])]
    return torch.cat(parts, 1)


def learnt(seed: int, steps: int) -> Model:
    def batch(g: torch.Generator) -> Batch:
        t = texts(g, torch.randint(CLASSES, (64,), generator=g))
        # The words of a round are drawn at random, and only the answers can be learnt.
        answers = torch.where(t[:, :-1] == ASK, t[:, 1:], IGNORED)
        return Batch(t[:, :-1], answers)

    model = built(seed, lambda: LlamaConfig(vocabulary=VOCABULARY, width=32, depth=2, heads=2, key_heads=2, hidden=64).build())
    fit(model, batch, steps, lr=5e-3, seed=seed)
    return model


@dataclass(frozen=True)
class Lab:
    """One base, its probes, and the ways to write and to measure."""

    model: Model
    seed: int
    size: Size

    def history(self, person: int, number: int = 0) -> Tensor:
        return texts(
            generator(9000 + 100 * self.seed + 10 * person + number), torch.full((TEXTS[self.size],), person % CLASSES)
        )

    def probe(self, person: int) -> tuple[Tensor, Tensor]:
        """First rounds up to the question, and what is meant."""
        t = texts(generator(7000 + 100 * self.seed + person), torch.full((PROBES,), person % CLASSES))
        return t[:, : CLASSES + 2], t[:, CLASSES + 2]

    @torch.no_grad()
    def answers(self, who: Identity | Tensor | None, inputs: Tensor) -> Tensor:
        """Log-probabilities at the question, under an identity or a matrix in the readout."""
        body = body_of(self.model)
        with living(self.model, who if isinstance(who, Identity) else None):
            hidden = body.hidden(inputs)[:, -1]
            logits = body.head(hidden)
        if isinstance(who, Tensor):
            logits = logits + F.normalize(hidden, dim=-1) @ who.mT
        return logits.float().log_softmax(-1)

    def nats(self, who: Identity | Tensor | None, person: int) -> float:
        inputs, meant = self.probe(person)
        return float(F.nll_loss(self.answers(who, inputs), meant))

    def written(self, way: str, history: Tensor, strength: float) -> Identity | Tensor:
        if way in PEERS:
            return self.matrix(way, history, strength)
        nobody = Identity.new(base_of(self.model))
        if way == "gradient":
            return self.down(nobody, history, strength)
        rule = Rule(keep=None, trace=TraceRule(write=cast(Literal["delta"], way), rate=strength))
        for n, text in enumerate(history):
            nobody = imprint(nobody, observe(self.model, text.tolist(), source=f"text {n}"), rule)
        return nobody

    def down(self, who: Identity, history: Tensor, strength: float, steps: int = 12) -> Identity:
        """Gradient steps of the history's surprise at its answers, on a trace of rank 8."""
        body = body_of(self.model)
        work = draft(who, SleepRule(parts=("trace",), rank=8))
        optimiser = torch.optim.Adam(list(work.leaves.values()), lr=strength)
        answers = torch.where(history[:, :-1] == ASK, history[:, 1:], IGNORED)
        with frozen(self.model):
            for _ in range(steps):
                with torch.enable_grad(), body.read(work.reads(body.scales, body.device)):
                    loss = F.cross_entropy(body.logits(history[:, :-1]).flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
                    optimiser.zero_grad()
                    loss.backward()
                optimiser.step()
        return work.identity()

    @torch.no_grad()
    def matrix(self, way: str, history: Tensor, strength: float) -> Tensor:
        """W in the readout, token after token, by a Hebbian write or the delta rule."""
        hidden = F.normalize(body_of(self.model).hidden(history[:, :-1]), dim=-1)
        written = torch.zeros(VOCABULARY, hidden.shape[-1])
        for row, h in zip(history, hidden, strict=True):
            for at in (row[:-1] == ASK).nonzero().flatten().tolist():
                x = strength * F.one_hot(row[at + 1], VOCABULARY).float()
                if way == "fast":
                    written = 0.98 * written + torch.outer(x, h[at])
                else:
                    written = written + 0.5 * torch.outer(x - written @ h[at], h[at])
        return written

    def strength(self, way: str) -> float:
        """The best of three, on people of their own histories."""

        def gain(s: float) -> float:
            return sum(self.nats(self.written(way, self.history(p, 5), s), p) for p in range(CLASSES))

        tried = STRENGTHS[way][: TRIED[self.size]]
        return tried[0] if len(tried) == 1 else min(tried, key=gain)


def rotated(who: Identity, seed: int) -> Identity:
    """The same eigenvalues in random directions, one rotation for each head."""
    assert who.trace is not None
    left = who.trace.left.dense()
    turn = torch.linalg.qr(torch.randn(*left.shape[:2], left.shape[-1], left.shape[-1], generator=generator(seed)))[0]
    return replace(who, trace=TraceState(Packed.of(left @ turn), who.trace.signs))


def shuffled(history: Tensor, seed: int) -> Tensor:
    order = torch.rand(history.shape, generator=generator(seed)).argsort(1)
    return history.gather(1, order)


def seen(lab: Lab, who: Identity, person: int) -> float:
    """The chance that a word of the meant class gains more by T than a word of another."""
    gains = directions(who, lab.model, tokens=range(2, VOCABULARY), queries=[ASK]).total().view(CLASSES, WORDS)
    own, others = gains[person], gains[torch.arange(CLASSES) != person].flatten()
    more = (own[:, None] > others).double() + 0.5 * (own[:, None] == others).double()
    return float(more.mean())


def kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


def measured(lab: Lab, way: str) -> Record:
    best = lab.strength(way)
    lived = [lab.written(way, lab.history(p), best) for p in range(CLASSES)]
    again = [lab.written(way, lab.history(p, 1), best) for p in range(CLASSES)]
    base = [lab.nats(None, p) for p in range(CLASSES)]

    def gain(whose: Callable[[int], Identity | Tensor]) -> float:
        return sum(base[p] - lab.nats(whose(p), p) for p in range(CLASSES)) / CLASSES

    record: Record = {"strength": best, "own": gain(lambda p: lived[p]), "other": gain(lambda p: lived[(p + 1) % CLASSES])}
    record["shuffled"] = gain(lambda p: lab.written(way, shuffled(lab.history(p), p), best))
    inputs = [lab.probe(p)[0] for p in range(CLASSES)]
    logs = [[lab.answers(who, x) for x in inputs] for who in lived]
    record["kl"] = sum(kl(logs[p][p], logs[(p + 1) % CLASSES][p]) for p in range(CLASSES)) / CLASSES
    record["kl_same"] = sum(kl(logs[p][p], lab.answers(again[p], inputs[p])) for p in range(CLASSES)) / CLASSES
    # A strength that was chosen for what it saves may be next to nothing, and then nothing differs: so the loudest is measured too.
    loud = [[lab.written(way, lab.history(p, n), STRENGTHS[way][-1]) for n in (0, 1)] for p in range(CLASSES)]
    said = [lab.answers(loud[p][0], inputs[p]) for p in range(CLASSES)]
    record["kl_loud"] = sum(kl(said[p], lab.answers(loud[(p + 1) % CLASSES][0], inputs[p])) for p in range(CLASSES)) / CLASSES
    record["kl_loud_same"] = sum(kl(said[p], lab.answers(loud[p][1], inputs[p])) for p in range(CLASSES)) / CLASSES
    traces = [x for x in lived if isinstance(x, Identity)]
    if traces:
        turned = [rotated(x, 17 + p) for p, x in enumerate(traces)]
        record["rotated"] = gain(lambda p: turned[p])
        record["seen"] = sum(seen(lab, x, p) for p, x in enumerate(traces)) / CLASSES
        record["seen_rotated"] = sum(seen(lab, x, p) for p, x in enumerate(turned)) / CLASSES
    return record


def over_time(lab: Lab, way: str, best: float) -> Record:
    """A-B-A: the trace's cosine to what A alone wrote, what A's probes gain, and the extreme eigenvalues, history by history."""
    rule = TraceRule(write=cast(Literal["delta"], way), rate=best)
    who, first = Identity.new(base_of(lab.model)), None
    record: Record = {"cosine": [], "gain": [], "largest": [], "least": []}
    base = lab.nats(None, 0)
    for person in (0, 1, 0):
        for n, text in enumerate(lab.history(person)):
            who = imprint(who, observe(lab.model, text.tolist(), source=f"{n}"), Rule(keep=None, trace=rule))
        assert who.trace is not None
        first = who.trace if first is None else first
        values = spectrum(who.trace)
        record["cosine"].append(cosine(first, who.trace))
        record["gain"].append(base - lab.nats(who, 0))
        record["largest"].append(float(values.max()))
        record["least"].append(float(values.min()))
    return record


def run(seed: int, size: Size) -> Record:
    lab = Lab(learnt(seed, STEPS[size]), seed, size)
    record: Record = {way: measured(lab, way) for way in (*WAYS, *PEERS)}
    record["base"] = sum(lab.nats(None, p) for p in range(CLASSES)) / CLASSES
    record["aba"] = {way: over_time(lab, way, record[way]["strength"]) for way in RULES}
    return record


def judge(records: Sequence[Record]) -> Verdict:
    def of(way: str, name: str) -> list[float]:
        return [r[way][name] for r in records]

    def best_control(way: str) -> list[float]:
        return [max(r[way][c] for c in CONTROLS) for r in records]

    ahead = [r["gradient"]["own"] - max(r[p]["own"] for p in PEERS) for r in records]
    return judged(
        Check("KL of the answers to one input after two people's histories, published rule at its loudest, nats", of("published", "kl_loud"),
              above=MOVED, control=of("published", "kl_loud_same"), condition="the published k⊗q is told apart from two histories of one person"),
        Check("nats that the published trace saves its own person, against the best control", of("published", "own"), above=GAIN,
              control=best_control("published"), condition="k⊗q is written by shock"),
        Check("nats that a trace written down the gradient of surprise saves its own person", of("gradient", "own"), above=GAIN,
              control=best_control("gradient"), condition="T is written down the gradient of surprise, not by k⊗q"),
        Check("the chance that a meant word gains by the directions of the published trace", of("published", "seen"), above=SEEN,
              control=of("published", "seen_rotated"), condition="the eigenvectors are those of k⊗q"),
        Check("the chance that a meant word gains by the directions of the gradient's trace", of("gradient", "seen"), above=SEEN,
              control=of("gradient", "seen_rotated"), condition="its eigenvectors show the words that were meant"),
        Check("nats that the gradient's trace is ahead of fast weights and the delta rule", ahead, above=0.05,
              condition="fast weights do less"),
    )  # fmt: skip


COLOURS = {"own": "#0072B2", "other": "#D55E00", "shuffled": "#E69F00", "rotated": "#8C8C8C"}
MARKERS = {"own": "o", "other": "v", "shuffled": "s", "rotated": "D"}


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    every = (*WAYS, *PEERS)
    for i, way in enumerate(every):
        for j, name in enumerate(COLOURS):
            if name in records[0][way]:
                x = interval([r[way][name] for r in records])
                left.errorbar(i + 0.18 * (j - 1.5), x.mean, [[x.mean - x.low], [x.high - x.mean]], fmt=MARKERS[name], color=COLOURS[name],
                              capsize=2, markersize=4, label=name if i == 0 else None)  # fmt: skip
    left.axhline(0, color="#bbbbbb", linewidth=0.8)
    left.set_xticks(range(len(every)), [w.replace(" ", "\n") for w in every], rotation=20)
    left.set(ylabel="nats saved at the first question")
    left.legend(fontsize=7, title="whose trace", title_fontsize=7)
    for i, way in enumerate(WAYS):
        for name, colour, marker, shift in (("seen", "#0072B2", "o", -0.1), ("seen_rotated", "#8C8C8C", "D", 0.1)):
            x = interval([r[way][name] for r in records])
            middle.errorbar(i + shift, x.mean, [[x.mean - x.low], [x.high - x.mean]], fmt=marker, color=colour, capsize=2, markersize=4,
                            label=("own", "rotated")[shift > 0] if i == 0 else None)  # fmt: skip
    middle.axhline(0.5, color="#bbbbbb", linewidth=0.8, linestyle="--")
    middle.set_xticks(range(len(WAYS)), WAYS, rotation=20)
    middle.set(ylabel="chance that a meant word gains", ylim=(0, 1.05))
    middle.legend(fontsize=7)
    for colour, marker, way in zip(("#0072B2", "#E69F00", "#009E73"), "osv", RULES, strict=True):
        for name, style in (("largest", "-"), ("least", "--")):
            lines = [interval([r["aba"][way][name][n] for r in records]) for n in range(3)]
            right.plot(
                range(3), [x.mean for x in lines], style, color=colour, marker=marker, label=way if name == "largest" else None
            )
            right.fill_between(range(3), [x.low for x in lines], [x.high for x in lines], color=colour, alpha=0.15, lw=0)
    right.axhline(0, color="#bbbbbb", linewidth=0.8)
    right.set_xticks(range(3), ["A", "A-B", "A-B-A"])
    right.set(xlabel="histories", ylabel="largest and least eigenvalue")
    right.legend(fontsize=7)


def planted(kind: Plant, seed: int) -> Record:
    g = generator(seed)

    def way(works: bool) -> Record:
        noise = float(torch.rand((), generator=g)) * 0.02
        own, other, lifted = (0.8, 0.0, 0.95) if works else (0.0, 0.0, 0.5)
        if kind == "control":
            other = own
        same, turned = (own, lifted) if kind == "control" else (0.01, 0.5)
        return {"strength": 0.02, "own": own + noise, "other": other + noise, "shuffled": noise, "rotated": noise,
                "kl": own + noise, "kl_same": same, "kl_loud": own + noise, "kl_loud_same": same,
                "seen": lifted + noise / 2, "seen_rotated": turned + noise / 2}  # fmt: skip

    record = {w: way(kind != "negative") for w in WAYS} | {p: way(kind == "control") for p in PEERS}
    line = {"cosine": [1.0, 0.5, 0.9], "gain": [0.8, 0.4, 0.8], "largest": [1.0, 1.2, 1.3], "least": [-1.0, -1.1, -1.2]}
    return {**record, "base": math.log(CLASSES), "aba": dict.fromkeys(RULES, line)}


STUDY = Study(
    claim="A metric written by shock gives one input different outputs after different histories, and its eigenvectors show what was lived.",
    source="Trace Tensor Attention",
    protocol="A two-layer decoder, texts of three kinds of people; a trace is written from eight texts of one person by the published rule, by "
    "its centred and delta forms, or by twelve gradient steps, and read on the first question of 64 fresh texts. Fast weights in the readout are "
    "written from the same texts.",
    controls=(
        "the trace of a person who means something else",
        "the same history with its tokens shuffled",
        "the same eigenvalues in random directions",
        "two histories of the same person, for the KL",
    ),
    caption="Left: what each trace saves its own person, and its controls. Middle: whether its directions favour the words that were meant. Right: "
    "eigenvalues while a person's history is followed by another's and comes again.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    parts={"Trace Tensor Attention": "trace_tensor_attention.md"},
)
