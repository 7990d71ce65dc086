"""A threshold can promise a risk, and a trained rejection head does better than a threshold.

Answers carry a score; those below a threshold are refused. Tested on 8×8 digits under noise, three of the ten classes never seen in
training (whatever is answered to them is wrong), with four scores:

    max-softmax   the largest probability of a plain network (Chow's reject option, with the network's own probabilities)
    coherence     GD's, L_c²/L² of the nearest training image, pixel by pixel, that image's class being the answer
    selection     g of a SelectiveNet head of the same body (Geifman & El-Yaniv 2019), trained for a coverage of 0.8
    its softmax   the largest probability of that same network, whose g is not asked

The promise is `regard.calibrate`'s (an exact binomial tail; Geifman & El-Yaniv 2017): risk ≤ 0.1 with confidence 0.9. The answers held
out, one in ten of an unseen class, are the population, so that the true risk of every threshold is known; 300 answers are drawn from it 1,000 times, and a promise is
broken when the true risk of its threshold is above 0.1. The published bisection over ranks is measured beside it, and the control is the
naive rule, which takes the threshold of largest coverage whose risk on the 300 is at most 0.1.

With REGARD_CLINC=<file> (CLINC150: `{"train": [[sentence, intent], …], "val", "test", "oos_test"}`) sentences of 150 intents and sentences of
none are told apart as well, by MiniLM's vectors and fifteen known sentences per intent, read by `softmax` or chosen by `gd`.

Tried: coherence in the features of the plain network ("in features"), which has learnt to tell the seen classes apart and nothing else.
On two pilot seeds it was no better than max-softmax on unseen classes (AUROC 0.80 and 0.85 against 0.83 and 0.86), while pixels reached 0.95.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..abstention import SelectiveHead, auroc, calibrate, risk_bound, risk_coverage, selective_loss
from ..attention.inspect import inspect
from ..attention.operator import attend
from ..errors import CheckpointError
from .frame.figure import COLOURS, MARKERS, bars, line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.packaged import MINILM, sentence_vectors
from .tasks.tables import digits, split
from .tasks.training import built, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RISK, CONFIDENCE, DRAWN, ASKED = 0.1, 0.9, 300, 0.8
"""The promise, the answers that it is made from, and the coverage that the head is trained for and compared at."""
UNSEEN, NOISE = 3, 4.0
"""Classes left out, and the standard deviation of the noise on grey values of 0 … 16."""
SCORES = ("max-softmax", "coherence", "selection", "its softmax")
Scored = tuple[Tensor, Tensor]
"""A score per answer, and whether it was right; or images and their classes."""
COVERAGES = tuple(c / 20 for c in range(1, 21))


class Network(nn.Module):
    """64 grey values to features, and SelectiveNet's three heads; a plain network is trained by its answer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = SelectiveHead(32, classes=10 - UNSEEN)


def trained(seed: int, x: Tensor, y: Tensor, steps: int, selective: bool) -> Network:
    network, g = built(seed, Network), generator(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(steps):
        pick = torch.randint(len(x), (64,), generator=g)
        noisy = x[pick] + NOISE / 16 * torch.randn(64, 64, generator=g)
        out = network.head(network.body(noisy))
        loss = selective_loss(out, y[pick], coverage=ASKED) if selective else F.cross_entropy(out.logits, y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def coherence(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """GD's coherence with the nearest key, and which key it is."""
    jump = inspect(queries[None, None], keys[None, None], keys[None, None], "gd").jump()
    return jump.coherence[0, 0], jump.index[0, 0]


@torch.no_grad()
def answers(seed: int, plain: Network, chosen: Network, train: Scored, x: Tensor, y: Tensor) -> dict[str, Scored]:
    """Each score with what is right under it; y is −1 for unseen classes. The control's keys are noise of the same mean and spread."""
    images, classes = train
    features = plain.body(x)
    out, other = plain.head(features), chosen.head(chosen.body(x))
    near, index = coherence(x, images)
    inner, inner_index = coherence(features, plain.body(images))
    noise = images.mean(0) + images.std(0) * torch.randn(images.shape, generator=generator(seed))
    return {
        "max-softmax": (out.logits.softmax(-1).amax(-1), out.logits.argmax(-1) == y),
        "coherence": (near, classes[index] == y),
        "selection": (other.selection, other.logits.argmax(-1) == y),
        "its softmax": (other.logits.softmax(-1).amax(-1), other.logits.argmax(-1) == y),
        "in features": (inner, classes[inner_index] == y),
        "random keys": (coherence(x, noise)[0], classes[index] == y),
    }


def bisection(scores: Tensor, correct: Tensor) -> float | None:
    """The published search: halve the ranks, each step a bound at δ/log₂ n; the last threshold whose bound was low enough."""
    order = scores.argsort(descending=True)
    wrong = (~correct[order]).long().cumsum(0).tolist()
    steps, low, high, best = max(1, math.ceil(math.log2(len(scores)))), 0, len(scores) - 1, None
    for _ in range(steps):
        middle = (low + high + 1) // 2
        bound = risk_bound(wrong[middle], middle + 1, 1 - (1 - CONFIDENCE) / steps)
        best = middle if bound <= RISK else best
        low, high = (middle, high) if bound <= RISK else (low, max(low, middle - 1))
    return None if best is None else float(scores[order[best]])


def naive(scores: Tensor, correct: Tensor) -> float | None:
    curve = risk_coverage(scores, correct)
    good = (curve.risk <= RISK).nonzero()
    return float(curve.thresholds[int(good[-1])]) if len(good) else None


def promises(seed: int, scores: Tensor, correct: Tensor, draws: int) -> dict[str, dict[str, float]]:
    """How often each rule breaks its promise, and what share of the population it answers, over resamples."""
    truth = risk_coverage(scores, correct)
    levels, g = truth.thresholds.flip(0).contiguous(), generator(seed)

    def true(threshold: float | None) -> tuple[float, float]:
        at = len(levels) if threshold is None else int(torch.searchsorted(levels, threshold))
        row = len(levels) - 1 - at
        return (float(truth.risk[row]), float(truth.coverage[row])) if row >= 0 else (0.0, 0.0)

    rules: dict[str, Callable[[Tensor, Tensor], float | None]] = {
        "exact": lambda s, c: calibrate(s, c, risk=RISK, confidence=CONFIDENCE).threshold,
        "bisection": bisection,
        "naive": naive,
    }
    made: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
    for _ in range(draws):
        pick = torch.randint(len(scores), (DRAWN,), generator=g)
        for name, rule in rules.items():
            made[name].append(true(rule(scores[pick], correct[pick])))
    return {
        name: {"broken": sum(r > RISK for r, _ in m) / draws, "coverage": sum(c for _, c in m) / draws}
        for name, m in made.items()
    }


def run(seed: int, size: Size) -> Record:
    steps, draws, times = {"mini": (20, 5, 1), "quick": (600, 100, 1), "full": (2000, 1000, 4)}[size]
    table, order = digits(), torch.randperm(10, generator=generator(seed))
    new_label = torch.full((10,), -1).scatter(0, order[UNSEEN:], torch.arange(10 - UNSEEN))
    x, y = table.features.float() / 16, new_label[table.labels]
    known = (y >= 0).nonzero().flatten()
    first, second = split(len(known), seed, 0.4)
    images, classes = x[known[first]], y[known[first]]
    held = torch.cat([known[second], (y < 0).nonzero().flatten()])
    plain, again, chosen = (
        trained(s, images, classes, steps, c) for s, c in ((seed, False), (seed + 1000, False), (seed, True))
    )
    g = generator(seed + 7)
    test = torch.cat([x[held] + NOISE / 16 * torch.randn(len(held), 64, generator=g) for _ in range(times)])
    labels = y[held].repeat(times)
    every = answers(seed, plain, chosen, (images, classes), test, labels)
    with torch.no_grad():
        logits = again.head(again.body(test)).logits
    every["another start"] = (logits.softmax(-1).amax(-1), logits.argmax(-1) == labels)
    seen = labels >= 0
    curves = {n: risk_coverage(s[seen], right[seen]) for n, (s, right) in every.items()}
    return {
        "accuracy": {n: float(right[seen].float().mean()) for n, (_, right) in every.items()},
        "curves": {n: [curves[n].risk_at(c) for c in COVERAGES] for n in SCORES},
        "aurc": {n: curves[n].aurc for n in every},
        "unseen": {n: auroc(s, seen) for n, (s, _) in every.items()},
        "gain": {n: curves["max-softmax"].risk_at(ASKED) - curves[n].risk_at(ASKED) for n in every},
        **promised(seed, every, seen, draws),
        "intents": intents(seed) if size == "full" and os.environ.get("REGARD_CLINC") else None,
    }


def promised(seed: int, every: dict[str, Scored], seen: Tensor, draws: int) -> Record:
    """What can be promised for answers of which one in ten is of an unseen class."""
    unseen = (~seen).nonzero().flatten()
    strangers = unseen[torch.randperm(len(unseen), generator=generator(seed))[: int(seen.sum()) // 9]]
    rows = torch.cat([seen.nonzero().flatten(), strangers])
    population = {n: (every[n][0][rows], every[n][1][rows]) for n in SCORES[:3]}
    curves = {n: risk_coverage(s, right) for n, (s, right) in population.items()}
    scores, right = population["max-softmax"]
    mixed = scores[torch.randperm(len(rows), generator=generator(seed + 9))]
    return {
        "promises": {n: promises(seed, s, right, draws) for n, (s, right) in population.items()},
        "possible": {
            n: float(c.coverage[c.risk <= RISK].amax()) if bool((c.risk <= RISK).any()) else 0.0 for n, c in curves.items()
        },
        "population_risk": {n: float(c.risk[-1]) for n, c in curves.items()},
        "promises_of_shuffled_scores": promises(seed, mixed, right, max(5, draws // 10)),
    }


@cache
def _sentences() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Vectors and intents of the first sentences of each intent (train 30, val 10, test 15) and of all that have none."""
    path = Path(os.environ["REGARD_CLINC"])
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = {name: i for i, name in enumerate(sorted({intent for _, intent in data["train"]}))}
        vectors, labels = dict[str, Tensor](), dict[str, Tensor]()
        for part, most in (("train", 30), ("val", 10), ("test", 15), ("oos_test", 1000)):
            rows = [r for name in [*names, "oos"] for r in [r for r in data[part] if r[1] == name][:most]]
            vectors[part] = sentence_vectors([sentence for sentence, _ in rows])
            labels[part] = torch.tensor([names.get(intent, -1) for _, intent in rows])
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"REGARD_CLINC={path}: a JSON file with train, val, test and oos_test, lists of [sentence, intent] ({error})"
        ) from error
    return vectors, labels


def intents(seed: int) -> Record:
    """Half of the known sentences as keys; thresholds at 95% of the in-scope validation sentences."""
    vectors, labels = _sentences()
    half, _ = split(len(labels["train"]), seed, 0.5)
    keys, owner = vectors["train"][half], labels["train"][half]
    classes = F.one_hot(owner, int(owner.max()) + 1).float()

    def scored(x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        blended = attend(x[None, None], keys[None, None], classes[None, None], "cosine(temperature=0.05) | softmax")[0, 0]
        near, index = coherence(x, keys)
        return {"max-softmax": (blended.amax(-1), blended.argmax(-1)), "coherence": (near, owner[index])}

    parts = {name: scored(vectors[name]) for name in ("val", "test", "oos_test")}
    out: Record = {}
    for name in ("max-softmax", "coherence"):
        (val, _), (inside, said), (outside, _) = (parts[p][name] for p in ("val", "test", "oos_test"))
        least = val.quantile(0.05)
        right = (said == labels["test"]) & (inside >= least)
        every, scope = torch.cat([inside, outside]), torch.cat([torch.ones(len(inside)), torch.zeros(len(outside))])
        mixed = every[torch.randperm(len(every), generator=generator(seed))]
        out[name] = {
            "auroc": auroc(every, scope),
            "shuffled": auroc(mixed, scope),
            "accuracy": float((right.sum() + (outside < least).sum()) / len(every)),
            "refused": float((outside < least).float().mean()),
            "recall": float((inside >= least).float().mean()),
        }
    return out


def judge(records: Sequence[Record]) -> Verdict:
    def each(rule: str) -> list[float]:
        return [max(p[rule]["broken"] for p in r["promises"].values()) for r in records]

    def unseen(name: str, against: str | None = None) -> list[float]:
        return [r["unseen"][name] - (r["unseen"][against] if against else 0) for r in records]

    bought, shuffled = (
        [made["exact"]["coverage"] / max(r["possible"]["max-softmax"], 1e-9) for made, r in zip(m, records, strict=True)]
        for m in ([r["promises"]["max-softmax"] for r in records], [r["promises_of_shuffled_scores"] for r in records])
    )
    return judged(
        Check("promises broken under the worst score, share of resamples", each("exact"), below=1 - CONFIDENCE, control=each("naive"),
              needed=True, condition="the threshold is tested exactly, whatever the score"),
        Check("coverage that the promise buys of what is possible (max-softmax)", bought, above=0.5, control=shuffled,
              condition="part of the coverage may be its price"),
        Check("AUROC of coherence, seen against unseen classes", unseen("coherence"), above=0.85, control=unseen("random keys"),
              condition="what is unlike everything known is to be refused"),
        Check("AUROC of coherence above that of max-softmax", unseen("coherence", "max-softmax"), above=0,
              control=unseen("random keys", "max-softmax"), condition="it is refused by coherence rather than by probability"),
        Check("risk at 80% coverage that the trained head takes away", [r["gain"]["selection"] for r in records], above=0,
              control=[r["gain"]["another start"] for r in records], condition="the trained head is asked"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3)
    for i, name in enumerate(SCORES):
        line_with_band(
            left, COVERAGES, [interval([100 * r["curves"][name][j] for r in records]) for j in range(len(COVERAGES))], name, i
        )
    for line in left.lines:
        line.set_markevery(4)
    left.set(xlabel="share of answers given", ylabel="wrong among them (%)", title="Seen classes under noise")
    left.legend()
    rules = ("exact", "bisection", "naive")
    for i, rule in enumerate(rules):
        points = [(n, [r["promises"][n][rule] for r in records]) for n in SCORES[:3]]
        xs = [100 * interval([p["coverage"] for p in ps]).mean for _, ps in points]
        ys = [interval([100 * p["broken"] for p in ps]) for _, ps in points]
        spread = [[y.mean - y.low for y in ys], [y.high - y.mean for y in ys]]
        middle.errorbar(xs, [y.mean for y in ys], yerr=spread, fmt=MARKERS[i], color=COLOURS[i], capsize=2, label=rule)
    middle.axhline(100 * (1 - CONFIDENCE), color="#999999", linestyle="--", linewidth=1, label="allowed")
    middle.set(xlabel="answered (% of the population)", ylabel="promises broken (%)", title="Risk ≤ 10% from 300 answers")
    middle.legend()
    names = ["coherence", "in features", "max-softmax", "selection", "random keys"]
    bars(right, names, [interval([r["unseen"][n] for r in records]) for n in names])
    with_intents = [r["intents"] for r in records if r["intents"]]
    title = "Unseen digits"
    if with_intents:
        every = [*names, "intents: max-softmax", "intents: coherence"]
        right.clear()
        values = [interval([r["unseen"][n] for r in records]) for n in names]
        bars(right, every, [*values, *(interval([i[n]["auroc"] for i in with_intents]) for n in ("max-softmax", "coherence"))])
        title = "Unseen digits and intents"
    right.axvline(0.5, color="#999999", linestyle="--", linewidth=1)
    right.set(xlabel="AUROC, seen against unseen", xlim=(0.3, 1), title=title)


def planted(kind: Plant, seed: int) -> Record:
    wobble = 0.002 * (seed % 3)
    true, spoiled = kind != "negative", kind == "control"
    rule = {"exact": {"broken": 0.03 + wobble if true else 0.3 + wobble, "coverage": 0.5 if true else 0.1}, "bisection": {"broken": 0.03, "coverage": 0.45}, "naive": {"broken": 0.04 + wobble if spoiled else 0.45 + wobble, "coverage": 0.6}}  # fmt: skip
    names = (*SCORES, "in features", "random keys", "another start")
    better = 0.02 + wobble if true else -0.02 - wobble
    return {
        "accuracy": dict.fromkeys(names, 0.9),
        "curves": {n: [0.2 * c * c + wobble for c in COVERAGES] for n in SCORES},
        "aurc": dict.fromkeys(names, 0.05),
        "unseen": {
            **dict.fromkeys(names, 0.8),
            "coherence": 0.9 + wobble if true else 0.6,
            "random keys": 0.9 + wobble if spoiled else 0.5,
        },
        "gain": {
            **dict.fromkeys(names, 0.0),
            "selection": better,
            "another start": 0.02 + wobble if spoiled else wobble - 0.003,
        },
        "promises": dict.fromkeys(SCORES[:3], rule),
        "possible": dict.fromkeys(SCORES[:3], 0.65),
        "population_risk": dict.fromkeys(SCORES[:3], 0.15),
        "promises_of_shuffled_scores": {"exact": {"broken": 0.0, "coverage": 0.6 if spoiled else 0.0}},
        "intents": None,
    }


STUDY = Study(
    claim="A threshold can promise a risk, and a trained rejection head does better than a threshold.",
    source="GD-Attention's map of prior work (source 5); Geifman & El-Yaniv 2017 and 2019",
    protocol=f"8×8 digits with noise, {UNSEEN} of 10 classes unseen in training; promises of risk {RISK:g} at confidence {CONFIDENCE:g} from {DRAWN} answers, 1,000 resamples for each of three scores and each seed; risk at {ASKED:.0%} coverage of a plain network and of SelectiveNet; AUROC of seen against unseen classes; with REGARD_CLINC, sentence intents by MiniLM.",
    controls=(
        "the naive rule: the largest coverage whose risk on the sample is low enough",
        "shuffled scores, which can buy no coverage",
        "coherence with random keys of the same mean and spread",
        "a second plain network in the place of the trained head",
    ),
    caption="Left: risk on the seen classes as more is answered; lower is better, and the plain probability is the curve to beat. Middle: how often a promise turns out false, one point per score; promises tested exactly stay far below what is allowed. Right: what tells the unseen from the seen; ½ says nothing.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    needs=("sklearn", MINILM),
)
