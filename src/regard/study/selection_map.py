"""The two-axis map of mechanisms, placed by measurement, and whether the lineages of the literature are regions of it.

A row is one query and 64 keys of width 64. In the first condition 4 keys are consistent with the query (their cosine with it
is drawn from [0.3, 0.7]) and 60 are strangers; in the second all 64 are strangers.

    across    the effective number of keys, exp of the entropy of the weights, in rows of the first condition that were accepted
    upwards   the share of the weight kept off strangers, averaged over the two conditions

A mechanism that must choose gives all of its weight to strangers in the second condition, so it cannot pass ½. One that may
refuse has one number to say when; it is set on rows of its own, so that 95% of the rows with a consistent key are accepted.
`monotonic` and `selective` choose by what earlier rows did: they get 8 rows of strangers' queries before, and keys in random order; so does
`energy`, whose queries are as many as its keys. Every row of the table of selections is placed; what no entry names stands at its defaults.

The lineages are those of the prior-work map: dense blending, sparse blending, hard selection, energy, abstention, routing (a router's gate
chooses among experts as a row does among keys: top-2 for the sparsely gated mixture, top-1 for Switch). If they are regions, clusters of the
measured places (Ward's linkage, as many clusters as lineages, both axes standardised) give them back: the adjusted Rand index is 1; shuffled
labels give 0. Temperature: softmax from τ = 3 to ⅕. Whether the second axis is one for mechanisms that must choose: how far sparse, hard and
energy mechanisms stand from softmax's own curve of temperatures, at the same effective keys. What walks along the keys in their order
(`monotonic`, `selective`) does leave it, downwards: it cannot go back to a consistent key that it passed, or that earlier rows masked.

Source: GD-Attention's map of prior work; lecture "The transformer as a surveyor" for temperature.

Changed after a look at the quick size: the distance from softmax's curve was a mean, passed at 0.056 (asked 0.05) and was carried by the two `monotonic` places alone; as a
median over mechanisms, with dense ones as its control, it fails.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.inspect import inspect
from ..attention.spec import parse
from ..selection import SELECTIONS
from ..selection.gd import coherent_length
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, KEYS, FITTING, ROWS = 64, 64, 4, 256
NEAR, FAR = 0.7, 0.3
CALIBRATION = 1000
COVERAGE = 0.95
EARLIER = 8
"""Rows before the measured one, for selections that carry."""
LINEAGES: dict[str, dict[str, str]] = {
    "dense": {
        "softmax": "dot | softmax",
        "cosine": "cosine | softmax",
        "distance": "euclidean | softmax",
        "rbf": "rbf | softmax",
        "polynomial": "polynomial | softmax",
    },
    "sparse": {"entmax 1.5": "dot | entmax(1.5)", "entmax 1.25": "dot | entmax(1.25)", "sparsemax": "dot | sparsemax"},
    "hard": {
        "hard": "dot | hard",
        "top-8": "dot | topk(8)",
        "pointer": "dot | pointer",
        "monotonic": "dot | monotonic",
        "monotonic, hard": "dot | monotonic(mode=hard)",
    },
    "energy": {
        "Hopfield, 1 step": "dot | hopfield",
        "Hopfield, 3 steps": "dot | hopfield(steps=3)",
        "Hopfield, β = ½": "dot | hopfield(beta=0.5, steps=3)",
        "energy": "dot | energy",
    },
    "abstention": {
        "null slot": "dot | abstain(softmax, null_logit={lse})",
        "threshold": "dot | abstain(softmax, threshold={largest})",
        "threshold, sparsemax": "dot | abstain(sparsemax, threshold={largest})",
        "threshold, hard cosine": "cosine | abstain(hard, threshold={cosine})",
    },
    "routing": {"mixture's gate": "dot | topk(2)", "Switch's gate": "dot | topk(1)"},
    "none": {
        "GD": "euclidean | gd",
        "GD, coherent": "euclidean | gd(beta={beta}, coherence=1)",
        "GD, all coherent": "euclidean | gd(beta={beta}, coherence=1, keep=all)",
        "selective": "dot | selective",
    },
}
"""Entries by lineage and label; "none" are placed, and belong to no lineage of the six."""
TEMPERATURES = (3.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.2)


@lru_cache(maxsize=64)
def rows(seed: int, fitting: int) -> tuple[Tensor, Tensor]:
    """q (R, 1, 1, D) and k (R, 1, K, D); the first `fitting` keys are consistent with their query."""
    g = generator(seed)
    q, k = torch.randn(ROWS, 1, 1, WIDTH, generator=g), torch.randn(ROWS, 1, KEYS, WIDTH, generator=g)
    cosine = FAR + (NEAR - FAR) * torch.rand(ROWS, 1, fitting, 1, generator=g)
    near = cosine * q + (1 - cosine.square()).sqrt() * k[:, :, :fitting]
    return q, torch.cat([near, k[:, :, fitting:]], dim=2)


@lru_cache(maxsize=1)
def thresholds() -> dict[str, str]:
    """The values that accept 95% of rows with a consistent key, from rows that are used for nothing else."""
    q, k = rows(CALIBRATION, FITTING)
    scores = (q @ k.mT).flatten(1) * WIDTH**-0.5
    cosine = torch.cosine_similarity(q, k, dim=-1).flatten(1)
    nearest = (q - k).square().sum(-1).amin(-1).flatten()
    return {
        "lse": f"{float(scores.logsumexp(-1).quantile(1 - COVERAGE)):.2f}",
        "largest": f"{float(scores.amax(-1).quantile(1 - COVERAGE)):.2f}",
        "cosine": f"{float(cosine.amax(-1).quantile(1 - COVERAGE)) / 0.1:.2f}",
        "beta": f"{coherent_length(0.5) ** 2 / float(nearest.quantile(COVERAGE)):.4f}",
    }


def _looked(spec: str, seed: int, fitting: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (R, K), effective keys and acceptance (R) of the measured rows."""
    q, k = rows(seed, fitting)
    inner, at, order = parse(spec).inner, 0, None
    if inner.carries or inner.both_sides:
        g, at = generator(seed + 1), EARLIER
        count = KEYS if inner.both_sides else EARLIER + 1
        order = torch.rand(ROWS, KEYS, generator=g).argsort(1)
        k = k.gather(2, order[:, None, :, None].expand(-1, -1, -1, WIDTH))
        others = torch.randn(ROWS, 1, count, WIDTH, generator=g)
        q = torch.cat([others[:, :, :at], q, others[:, :, at + 1 :]], 2)
    seen = inspect(q, k, k, spec)
    weights = seen.weights(rows=[at])[:, 0, 0]
    if order is not None:
        weights = torch.zeros_like(weights).scatter_(1, order, weights)
    return weights, seen.effective[:, 0, at], seen.accepted[:, 0, at]


def measured(spec: str, seed: int) -> tuple[float, float, float, float, float]:
    """Effective keys, weight kept off strangers, kept on consistent keys, leaked to strangers beside them, and given to strangers alone."""
    weights, effective, taken = _looked(spec, seed, FITTING)
    across = effective[taken].mean() if bool(taken.any()) else torch.tensor(float("nan"))
    kept, leak = weights[:, :FITTING].sum(-1).mean(), weights[:, FITTING:].sum(-1).mean()
    fooled = _looked(spec, seed + CALIBRATION + 1, 0)[0].sum(-1).mean()
    values = [float(x) for x in (across, 1 - (leak + fooled) / 2, kept, leak, fooled)]
    return values[0], values[1], values[2], values[3], values[4]


def entries() -> dict[str, tuple[str, str]]:
    """Label to lineage and spec; selections that no entry names are added at their defaults."""
    listed = {label: (lineage, spec) for lineage, each in LINEAGES.items() for label, spec in each.items()}
    named = " ".join(spec for _, spec in listed.values())
    rest = {name: ("none", f"{s.natural_geometry} | {name}") for name, s in SELECTIONS.items() if name not in named}
    return listed | rest


def run(seed: int, size: Size) -> Record:
    values, places = thresholds(), dict[str, dict[str, float | str]]()
    for label, (lineage, spec) in entries().items():
        across, up, kept, *_ = measured(spec.format(**values), seed)
        places[label] = {"lineage": lineage, "effective": across, "refusal": up, "kept": kept}
    trail = [measured(f"dot | softmax(temperature={t})", seed)[:2] for t in TEMPERATURES]
    # The temperature of a choice that has none: the scale of what it chooses by.
    hard = [measured(f"dot(scale={WIDTH**-0.5 / t}) | hard", seed)[0] for t in (TEMPERATURES[0], TEMPERATURES[-1])]
    return {
        "places": places,
        "temperature": {"effective": [x for x, _ in trail], "refusal": [y for _, y in trail]},
        "hard": {"effective": hard},
    }


def clusters(points: Tensor, count: int) -> list[int]:
    """Ward's linkage: join the two groups whose joining raises the squared distances to the means least, until `count` are left."""
    groups = [[i] for i in range(len(points))]
    while len(groups) > count:
        cost = [
            (len(a) * len(b) / (len(a) + len(b)) * float((points[a].mean(0) - points[b].mean(0)).square().sum()), i, j)
            for i, a in enumerate(groups)
            for j, b in enumerate(groups[:i])
        ]
        _, i, j = min(cost)
        groups[j] = groups[j] + groups.pop(i)
    return [next(n for n, group in enumerate(groups) if i in group) for i in range(len(points))]


def rand_index(a: Sequence[object], b: Sequence[object]) -> float:
    """Adjusted for chance (Hubert and Arabie 1985): 1 for the same partition, 0 on average for one drawn at random."""

    def pairs(keys: Sequence[object]) -> float:
        return sum(math.comb(list(keys).count(x), 2) for x in set(keys))

    both, left, right = pairs(list(zip(a, b, strict=True))), pairs(a), pairs(b)
    chance = left * right / math.comb(len(a), 2)
    return (both - chance) / ((left + right) / 2 - chance) if left + right > 2 * chance else 0.0


def recovered(record: Record, seed: int) -> tuple[float, float, float]:
    """How well clusters give back the lineages, the same for shuffled lineages, and how well two clusters tell who may refuse."""
    places = [p for p in record["places"].values() if p["lineage"] != "none"]
    points = torch.tensor([[math.log(p["effective"]), p["refusal"]] for p in places], dtype=torch.float64)
    points = (points - points.mean(0)) / points.std(0).clamp_min(1e-9)
    labels = [p["lineage"] for p in places]
    made = clusters(points, len(set(labels)))
    g = generator(seed)
    shuffled = [rand_index(made, [labels[i] for i in torch.randperm(len(labels), generator=g).tolist()]) for _ in range(50)]
    refuses = [x == "abstention" for x in labels]
    return rand_index(made, labels), sum(shuffled) / len(shuffled), rand_index(clusters(points[:, 1:], 2), refuses)


def off_curve(record: Record, lineages: Sequence[str]) -> list[float]:
    """How far above or below softmax's curve of temperatures these stand, at their own effective keys."""
    curve = sorted(zip(record["temperature"]["effective"], record["temperature"]["refusal"], strict=True))
    gaps = list[float]()
    for place in record["places"].values():
        if place["lineage"] in lineages:
            x = min(max(place["effective"], curve[0][0]), curve[-1][0])
            (x0, y0), (x1, y1) = next((a, b) for a, b in itertools.pairwise(curve) if a[0] <= x <= b[0])
            along = (math.log(x) - math.log(x0)) / max(math.log(x1) - math.log(x0), 1e-12)
            gaps.append(abs(place["refusal"] - (y0 + along * (y1 - y0))))
    return gaps


def judge(records: Sequence[Record]) -> Verdict:
    indices = [recovered(r, seed) for seed, r in enumerate(records)]

    return judged(
        Check(
            "temperature 3 to ⅕: effective keys of softmax, first over last",
            [r["temperature"]["effective"][0] / r["temperature"]["effective"][-1] for r in records],
            above=5.0,
            control=[r["hard"]["effective"][0] / r["hard"]["effective"][-1] for r in records],
            condition="temperature is meant, which moves softmax from blending to choosing",
        ),
        Check(
            "adjusted Rand index of clusters and lineages",
            [x for x, _, _ in indices],
            above=0.5,
            control=[x for _, x, _ in indices],
            condition="six lineages are six regions",
        ),
        Check(
            "adjusted Rand index of two clusters and who may refuse",
            [x for _, _, x in indices],
            above=0.8,
            control=[x for _, x, _ in indices],
            condition="two regions are meant: what may refuse, and what must choose",
        ),
        Check(
            "distance of sparse, hard, energy and routing mechanisms from softmax's curve, their median",
            [statistics.median(off_curve(r, ("sparse", "hard", "energy", "routing"))) for r in records],
            above=0.05,
            control=[statistics.median(off_curve(r, ("dense",))) for r in records],
            condition="mechanisms that must choose differ in consistency",
        ),
    )


def draw(records: Sequence[Record], figure: Figure) -> None:
    from .frame.figure import COLOURS, MARKERS

    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    kinds = [*LINEAGES]
    curve = [[sum(r["temperature"][x][n] for r in records) / len(records) for n in range(len(TEMPERATURES))] for x in ("effective", "refusal")]  # fmt: skip
    left.plot(curve[0], curve[1], color="#999999", lw=5, alpha=0.4, label="softmax, τ from 3 to ⅕", zorder=0)
    spread = {
        label: [interval([r["places"][label][x] for r in records]) for x in ("effective", "refusal")]
        for label in records[0]["places"]
    }
    for n, kind in enumerate(kinds):
        here = [v for label, v in spread.items() if records[0]["places"][label]["lineage"] == kind]
        if here:
            left.errorbar(
                [x.mean for x, _ in here],
                [y.mean for _, y in here],
                xerr=[[max(x.mean - x.low, 0) for x, _ in here], [max(x.high - x.mean, 0) for x, _ in here]],
                yerr=[[y.mean - y.low for _, y in here], [y.high - y.mean for _, y in here]],
                fmt=MARKERS[n],
                color=COLOURS[n],
                label=kind if kind != "none" else "none of the six",
            )
    for label, (x, y) in spread.items():
        if label in NAMED:
            left.annotate(label, (x.mean, y.mean), NAMED[label], textcoords="offset points", fontsize=7.5,
                          arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#999999"}, va="center")  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_xlim(70, 0.85)
    left.set_xticks([64, 32, 16, 8, 4, 2, 1], ["64", "32", "16", "8", "4", "2", "1"])
    left.set_ylim(0, 1.08)
    left.set_xlabel("effective keys: blending to choosing")
    left.set_ylabel("weight kept off strangers")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, columnspacing=1)
    indices = [recovered(r, seed) for seed, r in enumerate(records)]
    bars = [interval([i[n] for i in indices]) for n in (0, 1, 2)]
    right.barh(range(3), [b.mean for b in bars], xerr=[[b.mean - b.low for b in bars], [b.high - b.mean for b in bars]],
               color=[COLOURS[0], COLOURS[7], COLOURS[2]], capsize=2)  # fmt: skip
    right.set_yticks(range(3), ["six clusters,\nsix lineages", "shuffled\nlineages", "two clusters,\nmay it refuse?"])
    right.invert_yaxis()
    right.axvline(1, color="#999999", ls=":", lw=1)
    right.set_xlabel("adjusted Rand index (1: the same groups)")


NAMED: dict[str, tuple[float, float]] = {
    "softmax": (-30, -28), "rbf": (8, 8), "polynomial": (-30, -22), "hard": (-10, -30), "GD": (-52, -44), "entmax 1.5": (-66, -24),
    "top-8": (-44, -30), "monotonic": (10, 12), "monotonic, hard": (-66, 24), "Hopfield, 3 steps": (-60, 26), "energy": (-30, 26),
    "null slot": (-44, 14), "threshold": (-50, 10), "GD, coherent": (-46, 14), "selective": (8, -20), "linear": (8, 12),
    "threshold, hard cosine": (-96, -14),
}  # fmt: skip
"""Where the names of some places stand, in points from them."""


def planted(kind: Plant, seed: int) -> Record:
    """Positive: a region for each lineage, two of them above all others. Negative: all in one place. Control: nothing that the controls lack."""
    wobble = 0.002 * (seed % 3)
    where = {"dense": (50.0, 0.05), "sparse": (8.0, 0.2), "hard": (1.0, 0.2), "energy": (20.0, 0.4), "routing": (2.0, 0.4),
             "abstention": (4.0, 0.95), "none": (5.0, 0.4)}  # fmt: skip
    places = dict[str, dict[str, float | str]]()
    for n, (label, (lineage, _)) in enumerate(entries().items()):
        x, y = where[lineage] if kind == "positive" else (2.0 + n % 7, 0.4 + 0.003 * (n * 5 % 11))
        places[label] = {"lineage": lineage, "effective": x * (1 + wobble), "refusal": y + wobble * (n % 2), "kept": 0.9}
    trail = [40.0, 30, 20, 10, 7, 5, 3, 2] if kind != "negative" else [10.0] * 8
    flat = [40.0, 2.0] if kind == "control" else [1.0, 1.0]
    return {
        "places": places,
        "temperature": {
            "effective": [x + 1e-3 * n for n, x in enumerate(trail)],
            "refusal": [0.05 if kind == "positive" else 0.4] * 8,
        },
        "hard": {"effective": flat},
    }


STUDY = Study(
    claim="Mechanisms of attention fall into six lineages on two axes, from blending to choosing and from weak to strong control of "
    "consistency, and temperature moves attention from blending to choosing.",
    source='GD-Attention\'s map of prior work (source 5 of the sources); lecture "The transformer as a surveyor" (source 4)',
    protocol="One query and 64 random keys of width 64, 4 of them consistent with it, or none; 256 rows of each kind a seed. Effective keys and the "
    "weight kept off strangers place every selection of the library; clusters of the places are compared with the lineages.",
    controls=(
        "lineages shuffled among the mechanisms must not be given back by the clusters",
        "a hard choice, its scores scaled as temperature scales them, must not move",
    ),
    caption="Left: every mechanism where it was measured; grey, softmax as its temperature falls. Those that must choose stand on one curve "
    "whatever their lineage; only what may refuse leaves it. Right: how well clusters of the places give back the six lineages, shuffled ones, "
    "and the two groups that may refuse and must choose. Bars are 95% intervals over seeds.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=8,
    published=(
        Published(
            "the mechanisms fall into six lineages on two axes",
            "six regions",
            lambda rs: (
                f"adjusted Rand index {interval([recovered(r, n)[0] for n, r in enumerate(rs)])} for the six, "
                f"{interval([recovered(r, n)[2] for n, r in enumerate(rs)])} for two: may refuse, must choose"
            ),
            lambda rs: interval([recovered(r, n)[0] for n, r in enumerate(rs)]).high < 0.5,
        ),
    ),
)
