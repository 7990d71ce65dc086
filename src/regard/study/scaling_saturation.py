"""Why scores are divided by √d, and what a lecture printed about it.

For q and k of d independent entries with variance 1, q·k has variance d. Softmax of scores that large is nearly one-hot, and its Jacobian
diag(p) − ppᵀ is nearly zero. Divided by √d the variance is 1 at any width. Measured here at d = 8 … 512 with 32 keys, for the divisors 1,
√d and, as the wrong remedy, d (whose scores vanish instead, so that attention no longer chooses):

    variance       of the scores
    row maximum    the largest weight of a row, the mean over rows
    ∂/∂scores      the norm of the gradient of ⟨r, output⟩ for a random r, mean and median over rows
    ∂/∂q           the same gradient where it arrives: divided by the divisor, and multiplied by the keys

The last is not what the lecture derives. Where softmax saturates, the mean gradient at the scores falls only as 1/√d (rows whose two best
keys are nearly tied keep theirs), and the keys give the factor √d back: at the queries the *mean* does not vanish, the *median* does. Training
without √d gets rare, large gradients, not none.

The worked examples of the lecture (three words; softmax with −∞; a sinusoidal row; invariance; the parameters of heads; the attention of
random weights) are computed beside what was printed.

Source: lecture "Attention" (Vaswani et al. 2017 for √d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.inspect import inspect
from ..attention.operator import attend
from ..geometry.dot import Dot
from ..nn import Attention
from ..position.sinusoidal import sinusoids
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS: dict[Size, tuple[int, ...]] = {"mini": (8, 512), "quick": (8, 32, 128, 512), "full": (8, 16, 32, 64, 128, 256, 512)}
ROWS: dict[Size, int] = {"mini": 256, "quick": 1024, "full": 4096}
KEYS, VALUES = 32, 16
POWERS = {"1": 0.0, "√d": 0.5, "d": 1.0}
"""Divisors d^power by name."""
WORDS, WIDTH = 6, 8
"""As in a worked example: six words and a width that fits on a page."""
THREE = ((1.0, 0.5, 0.2, 0.1), (0.3, 1.0, 0.4, 0.2), (0.2, 0.3, 1.0, 0.5))
"""The lecture's three words; q = k = v."""


def _at(width: int, power: float, rows: int, seed: int) -> dict[str, float]:
    """One width and one divisor."""
    g = generator(1000 * seed + width)
    q, k = (torch.randn(rows, 1, n, width, generator=g) for n in (1, KEYS))
    v, r = torch.randn(rows, 1, KEYS, VALUES, generator=g), torch.randn(rows, 1, 1, VALUES, generator=g)
    geometry = Dot(scale=width**-power)
    q.requires_grad_()
    out = attend(q, k, v, geometry=geometry)
    (at_query,) = torch.autograd.grad((out * r).sum(), q)
    with torch.no_grad():
        seen = inspect(q, k, v, geometry=geometry)
        p = seen.weights()[:, 0, 0]
        at_scores = p * ((v * r).sum(-1)[:, 0] - (out * r).sum(-1)[:, 0])
        scores = (q @ k.mT).flatten() * width**-power
    norms = {"scores": at_scores.norm(dim=-1), "query": at_query.flatten(1).norm(dim=-1)}
    return {
        "variance": float(scores.double().var()),
        "maximum": float(p.amax(-1).mean()),
        **{f"mean_{n}": float(x.mean()) for n, x in norms.items()},
        **{f"median_{n}": float(x.median()) for n, x in norms.items()},
    }


def _random_weights(seed: int, spread: float, power: float = 0.5, draws: int = 200) -> float:
    """Mean row maximum of self-attention among WORDS standard normal words, its weights normal with this standard deviation."""
    g = generator(50_000 + seed)
    x = torch.randn(draws, 1, WORDS, WIDTH, generator=g)
    q, k = (x @ (spread * torch.randn(draws, 1, WIDTH, WIDTH, generator=g)) for _ in range(2))
    return float(inspect(q, k, x, geometry=Dot(scale=WIDTH**-power)).weights().amax(-1).mean())


def _lecture(seed: int) -> dict[str, object]:
    """The worked examples, computed; all but the last do not depend on the seed."""
    x = torch.tensor(THREE, dtype=torch.float64)[None, None]
    three = inspect(x, x, x, "dot | softmax")
    row = torch.tensor([[1.0, 2.0, 0.0, 3.0]], dtype=torch.float64)[None, None]
    allowed = torch.tensor([[True, True, False, True]])
    masked = inspect(row.new_ones(1, 1, 1, 1), row.mT, row.mT, geometry=Dot(scale=1.0), allow=allowed)
    g = generator(seed)
    y, order = torch.randn(1, 1, 9, 8, dtype=torch.float64, generator=g), torch.randperm(9, generator=g)
    out, shuffled = attend(y, y, y), attend(y[:, :, order], y[:, :, order], y[:, :, order])
    return {
        "three_weights": _rounded(three.weights()[0, 0]),
        "three_outputs": _rounded(three.output[0, 0]),
        "three_means": _rounded(x[0, 0].mean(0)),
        "masked": _rounded(masked.weights()[0, 0, 0]),
        "sinusoidal": _rounded(sinusoids(2, 8)[1]),
        "equivariance_error": float((shuffled - out[:, :, order]).abs().max()),
        "invariance_error": float((shuffled - out).abs().max()),
        "parameters": [sum(p.numel() for p in Attention(64, h).parameters()) for h in (1, 2, 4, 8)],
        "random_weights": _random_weights(seed, 1.0),
        "random_weights_unscaled": _random_weights(seed, 1.0, power=0.0),
        "small_weights": _random_weights(seed, (3 * WIDTH) ** -0.5),
    }


def _rounded(x: Tensor) -> list[float]:
    return (x.double() * 1e6).round().div(1e6).flatten().tolist()


def run(seed: int, size: Size) -> Record:
    table = {
        name: {str(width): _at(width, power, ROWS[size], seed) for width in WIDTHS[size]} for name, power in POWERS.items()
    }
    return {"divided by": table, "lecture": _lecture(seed)}


def judge(records: Sequence[Record]) -> Verdict:
    def slope(name: str) -> list[float]:
        """Of log variance against log width."""
        slopes = list[float]()
        for r in records:
            points = [(math.log(int(d)), math.log(x["variance"])) for d, x in r["divided by"][name].items()]
            mx, my = (sum(p[i] for p in points) / len(points) for i in (0, 1))
            slopes.append(sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points))
        return slopes

    def widest(name: str, what: str) -> list[float]:
        return [r["divided by"][name][max(r["divided by"][name], key=int)][what] for r in records]

    def falls(name: str, what: str) -> list[float]:
        """At the widest over the narrowest."""
        narrow = [r["divided by"][name][min(r["divided by"][name], key=int)][what] for r in records]
        return [w / n for w, n in zip(widest(name, what), narrow, strict=True)]

    return judged(
        Check("undivided: power of d in the scores' variance", slope("1"), 0.95, 1.05, slope("√d"), "q·k has variance d"),
        Check(
            "divided by √d: variance of the scores at the widest",
            widest("√d", "variance"),
            0.9,
            1.1,
            widest("d", "variance"),
            "√d, and no other power, keeps the variance at 1",
        ),
        Check(
            "undivided: mean row maximum at the widest",
            widest("1", "maximum"),
            above=0.8,
            control=widest("√d", "maximum"),
            condition="saturation is meant, which √d prevents",
        ),
        Check(
            "undivided: mean gradient at the scores, widest over narrowest",
            falls("1", "mean_scores"),
            below=0.25,
            control=falls("√d", "mean_scores"),
            condition="the gradient is taken at the scores, where it vanishes",
        ),
        Check(
            "undivided: median gradient at the queries, widest over narrowest",
            falls("1", "median_query"),
            below=0.25,
            control=falls("√d", "median_query"),
            condition="the typical row is meant: its gradient at the query vanishes",
        ),
        Check(
            "undivided: mean gradient at the queries, widest over narrowest",
            falls("1", "mean_query"),
            below=0.25,
            control=falls("√d", "mean_query"),
            condition="the mean gradient at the query vanishes as well",
        ),
        Check(
            f"standard normal weights: mean row maximum among {WORDS} words",
            [r["lecture"]["random_weights"] for r in records],
            below=0.25,
            control=[r["lecture"]["random_weights_unscaled"] for r in records],
            condition="random weights attend almost uniformly",
        ),
    )


def draw(records: Sequence[Record], figure: Figure) -> None:
    from .frame.figure import line_with_band

    widths = [int(d) for d in records[0]["divided by"]["1"]]
    panels = (
        ("variance", "variance of the scores", True),
        ("maximum", f"largest of {KEYS} weights, mean over rows", False),
        ("gradient", "gradient of ⟨r, output⟩, 1 at d = 8", True),
    )
    for axes, (what, label, log) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(d) for d in widths])
        axes.set_xlabel("width d")
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log")
        if what != "gradient":
            for n, name in enumerate(POWERS):
                values = [interval([r["divided by"][name][str(d)][what] for r in records]) for d in widths]
                line_with_band(axes, widths, values, f"divided by {name}", (1, 0, 2)[n])
            continue
        shown = (("√d", "mean_query", "√d: queries, mean", 0), ("1", "mean_scores", "1: scores, mean", 1),
                 ("1", "mean_query", "1: queries, mean", 4), ("1", "median_query", "1: queries, median", 3))  # fmt: skip
        for name, key, said, index in shown:
            rows = [r["divided by"][name] for r in records]
            values = [interval([max(r[str(d)][key], 1e-12) / r[str(widths[0])][key] for r in rows]) for d in widths]
            line_with_band(axes, widths, values, said, index)
        axes.set_ylim(bottom=3e-3)
    figure.axes[0].legend()
    figure.axes[2].legend(loc="lower left")


def planted(kind: Plant, seed: int) -> Record:
    wobble = 1 + 0.005 * (seed % 3)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for name, power in POWERS.items():
        tables[name] = {}
        for d in (8, 512):
            variance = wobble * d ** (1 - 2 * power)
            saturates = power == 0 and d == 512
            small = 0.05 if saturates else 1.0
            tables[name][str(d)] = {
                "variance": variance, "maximum": 0.9 if saturates else 0.15, "mean_scores": small, "median_scores": small,
                "mean_query": small * wobble, "median_query": small,
            }  # fmt: skip
    if kind == "control":
        # Whatever one divides by, the same happens.
        tables["√d"] = tables["1"]
        tables["d"]["512"]["variance"] = tables["√d"]["512"]["variance"]
    if kind == "negative":
        for table in tables.values():
            table["512"] = dict(table["8"], variance=2 * table["8"]["variance"])
    uniform = 0.2 if kind != "negative" else 0.85
    lecture = {
        "random_weights": uniform, "random_weights_unscaled": 0.9 if kind == "positive" else uniform, "small_weights": 0.24,
        "masked": [0.09, 0.2447, 0.0, 0.6652], "three_weights": [0.3333] * 9, "three_outputs": [0.5] * 12,
        "three_means": [0.5] * 4, "sinusoidal": [0.8415] * 8, "equivariance_error": 0.0, "invariance_error": 1.0,
        "parameters": [16384] * 4,
    }  # fmt: skip
    return {"divided by": tables, "lecture": lecture}


def _row(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{x:.3f}" for x in values) + "]"


STUDY = Study(
    claim="Without √d scores have variance d, softmax saturates and gradients vanish; with it they do not, and random weights attend "
    "almost uniformly.",
    source='Lecture "Attention" (source 3 of the sources); Vaswani et al. 2017',
    protocol="Standard normal queries, 32 keys and values at widths 8 to 512, 4,096 rows a seed; scores divided by 1, √d and d; variance, mean "
    "row maximum, and the gradient of a random reading of the output at the scores and at the queries. Random weights: 6 standard "
    "normal words of width 8, standard normal projections, 200 draws a seed.",
    controls=(
        "scores divided by √d must not saturate, nor lose their gradient",
        "scores divided by d must not keep variance 1",
        "random weights without √d must not attend uniformly",
    ),
    caption="Left: the variance of a score grows as d, stays at 1, or vanishes. Middle: undivided, one key of 32 takes nearly all. Right: "
    "gradients relative to those at d = 8. Undivided, the mean at the scores and the median at the queries vanish; the mean at the queries "
    "does not: few rows carry all of it. Bands are 95% intervals over seeds.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    published=(
        Published(
            "the table of weights that random projections give",
            "about 0.2 everywhere",
            lambda rs: (
                f"mean row maximum {interval([r['lecture']['random_weights'] for r in rs])} with standard normal projections of 6 words; "
                f"{interval([r['lecture']['small_weights'] for r in rs])} where they are as small as torch.nn.Linear's"
            ),
            lambda rs: interval([r["lecture"]["random_weights"] for r in rs]).low > 0.3,
        ),
        Published(
            "softmax([1, 2, −∞, 3])",
            "a row that sums to 0.9",
            lambda rs: f"{_row(rs[0]['lecture']['masked'])}, which sums to {sum(rs[0]['lecture']['masked']):.4f}",
            lambda rs: abs(sum(rs[0]["lecture"]["masked"]) - 0.9) > 0.05,
        ),
        Published(
            "three words, q = k = v, √4: the outputs of the first two words",
            "both the mean of all words, which not even the printed weights give",
            lambda rs: (
                f"{_row(rs[0]['lecture']['three_outputs'][:4])} and {_row(rs[0]['lecture']['three_outputs'][4:8])}; "
                f"the mean is {_row(rs[0]['lecture']['three_means'])}"
            ),
            lambda rs: rs[0]["lecture"]["three_outputs"][:4] != rs[0]["lecture"]["three_means"],
        ),
        Published(
            "the sinusoidal row of position 1 at width 8",
            "exponents 4i/d in place of 2i/d: [0.841, 0.541, 0.010, 1.000, 0.000, …]",
            lambda rs: _row(rs[0]["lecture"]["sinusoidal"]),
            lambda rs: abs(rs[0]["lecture"]["sinusoidal"][2] - 0.01) > 1e-3,
        ),
        Published(
            "self-attention without positions under a permutation of its words",
            "invariant",
            lambda rs: (
                f"equivariant to {max(r['lecture']['equivariance_error'] for r in rs):.0e}; outputs change place by place by up to "
                f"{max(r['lecture']['invariance_error'] for r in rs):.1f}"
            ),
            lambda rs: min(r["lecture"]["invariance_error"] for r in rs) > 0.1,
        ),
        Published(
            "parameters of multi-head attention of width d with h heads",
            "O(d²/h)",
            lambda rs: f"{rs[0]['lecture']['parameters']} at d = 64 for h = 1, 2, 4, 8: 4d² for every h; d²/h is one head's",
            lambda rs: len(set(rs[0]["lecture"]["parameters"])) == 1,
        ),
    ),
)
