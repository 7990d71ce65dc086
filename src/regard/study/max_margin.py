"""Gradient descent on attention converges in direction to the max-margin token selector.

A prompt is T tokens with keys k_t and scores γ_t (what a token is worth for the label). Attention with a trained query p reads
f = Σ_t softmax(k·p)_t γ_t, and the logistic loss of f is descended over n prompts (Tarzanagh et al. 2023). The loss falls for ever only if
p grows, and the direction in which it grows is claimed to be that of the hard-margin support vector machine that separates each prompt's
best token from its others:

    p_mm = argmin |p|   with   p·(k_best − k_t) ≥ 1   for every other token t of every prompt

The machine is solved by coordinate ascent on its dual in float64, and its conditions (margins, and weights on binding constraints only)
are checked. Measured: the cosine between p and p_mm by step. The gradient is attend's own (a test compares them), written with the largest
weight taken out of it, so that it keeps its direction when the weights of all other tokens underflow.

What the theorem asks for: separable tokens, and other tokens of equal score. Even then some problems lose a prompt: its best token starts so
far behind that the other prompts' margins grow first, and it falls behind for ever; the direction is then the machine's of the prompts that
are won, which is measured too. What the theorem does not cover: scores that all differ (a start may lead to another token's margin), tokens that cannot be separated, Adam, steps a hundred times as
large, and the values trained along with the query. Plain descent grows like log(steps), so that its direction is slow; normalised steps (the
same path in another time) are what the published experiments run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .frame.figure import bars, line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPTS, TOKENS, WIDTH, NARROW = 5, 4, 16, 3
PROBLEMS = {"mini": 3, "quick": 8, "full": 16}
STEPS = {"mini": 200, "quick": 2000, "full": 10000}
SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
SEPARATED = 0.999
"""A margin of the machine above this (it is 1 where it is solved) counts as separated."""


class Problem(NamedTuple):
    """P problems at once."""

    keys: Tensor
    """(P, n, T, d)"""
    scores: Tensor
    """(P, n, T); token 0 has the largest."""


Step = Callable[[Tensor, Tensor], Tensor]
"""From a gradient divided by e^M, and M, to the change of p."""


def problems(g: torch.Generator, count: int, width: int = WIDTH, equal: bool = True) -> Problem:
    keys = torch.randn(count, PROMPTS, TOKENS, width, generator=g, dtype=torch.float64)
    scores = torch.zeros(count, PROMPTS, TOKENS, dtype=torch.float64)
    if not equal:
        scores = torch.rand(count, PROMPTS, TOKENS, generator=g, dtype=torch.float64) * 1.8 - 0.9
    scores[..., 0] = 1
    return Problem(keys, scores)


def machine(keys: Tensor, chosen: Tensor, sweeps: int = 1500) -> tuple[Tensor, Tensor]:
    """p (P, d) that separates each prompt's chosen token (P, n) from its others, and the smallest margin, 1 where it is solved."""
    P, n, T, d = keys.shape
    best = keys.gather(2, chosen[..., None, None].expand(P, n, 1, d))
    others = torch.ones(P, n, T, dtype=torch.bool).scatter_(2, chosen[..., None], False)
    rows = (best - keys)[others].view(P, n * (T - 1), d)
    size = rows.square().sum(-1)
    force, p = torch.zeros(P, rows.shape[1], dtype=torch.float64), torch.zeros(P, d, dtype=torch.float64)
    for _ in range(sweeps):
        for i in range(rows.shape[1]):
            moved = torch.relu(force[:, i] + (1 - (rows[:, i] * p).sum(-1)) / size[:, i])
            p = p + (moved - force[:, i]).unsqueeze(-1) * rows[:, i]
            force[:, i] = moved
        margins = (rows @ p.unsqueeze(-1))[..., 0]
        if bool(((margins - 1).clamp_max(0).abs().amax() < 1e-10) & ((force * (margins - 1)).abs().amax() < 1e-9)):
            break
    return p, (rows @ p.unsqueeze(-1))[..., 0].amin(-1)


def gradient(p: Tensor, keys: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of the loss by p (P, d), divided by e^M; and M, which is far below 0 where only the direction can still be held."""
    logits = (keys @ p[:, None, :, None])[..., 0]
    logs = torch.log_softmax(logits, dim=-1)
    f = (logs.exp() * scores).sum(-1)
    first = logs.argmax(-1, keepdim=True)
    others = logs.scatter(2, first, float("-inf"))
    largest = others.amax((1, 2))
    # Σ_t a_t (γ_t − f) = 0, so keys may be counted from the first choice, whose weight of nearly 1 then drops out.
    moved = (others - largest[:, None, None]).exp() * (scores - f.unsqueeze(-1))
    away = keys - keys.gather(2, first.unsqueeze(-1).expand(*first.shape, keys.shape[-1]))
    slope = (moved.unsqueeze(-1) * away).sum(2)
    signal = F.logsigmoid(-f)
    most = signal.amax(-1)
    return -((signal - most.unsqueeze(-1)).exp().unsqueeze(-1) * slope).mean(1), largest + most


def plain(rate: float) -> Callable[[], Step]:
    return lambda: lambda g, largest: -rate * g * largest.exp().unsqueeze(-1)


def normalised(rate: float) -> Callable[[], Step]:
    return lambda: lambda g, _: -rate * g / g.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def adam(rate: float) -> Callable[[], Step]:
    def start() -> Step:
        memory: list[Tensor] = []

        def step(g: Tensor, largest: Tensor) -> Tensor:
            g = g * largest.exp().unsqueeze(-1)
            m, v, n = memory or [torch.zeros_like(g), torch.zeros_like(g), torch.zeros(())]
            m, v, n = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square(), n + 1
            memory[:] = [m, v, n]
            return -rate * m / (1 - 0.9**n) / ((v / (1 - 0.999**n)).sqrt() + 1e-150)

        return step

    return start


def descend(
    problem: Problem, start: Tensor, rule: Callable[[], Step], steps: int, towards: Tensor
) -> tuple[Tensor, dict[str, list[float]]]:
    """The last p, and the cosine with `towards` of each problem at the steps that are shown."""
    p, step, seen = start.clone(), rule(), dict[str, list[float]]()
    for n in range(1, steps + 1):
        p = p + step(*gradient(p, *problem))
        if n in SHOWN or n == steps:
            seen[str(n)] = torch.cosine_similarity(p, towards, dim=-1).tolist()
    return p, seen


def jointly(problem: Problem, start: Tensor, g: torch.Generator, steps: int) -> Tensor:
    """The query p where the values' head v is trained with it: labels ±1, values the keys, normalised steps for both."""
    keys, rule = problem.keys, normalised(0.1)()
    labels = torch.randint(0, 2, keys.shape[:2], generator=g).double() * 2 - 1
    p, v = start.clone(), 0.01 * torch.randn(start.shape, generator=g, dtype=torch.float64)
    for _ in range(steps):
        worth = labels.unsqueeze(-1) * (keys @ v[:, None, :, None])[..., 0]
        weights = torch.softmax((keys @ p[:, None, :, None])[..., 0], dim=-1)
        signal = F.logsigmoid(-(weights * worth).sum(-1))
        read = (weights.unsqueeze(-1) * keys).sum(2)
        by_v = -((signal - signal.amax(-1, keepdim=True)).exp() * labels).unsqueeze(-1) * read
        p, v = p + rule(*gradient(p, keys, worth)), v + rule(by_v.mean(1), signal)
    return p


def run(seed: int, size: Size) -> Record:
    g, count, steps = generator(seed), PROBLEMS[size], STEPS[size]
    problem = problems(g, count)
    best = torch.zeros(count, PROMPTS, dtype=torch.long)
    towards, margin = machine(problem.keys, best)
    other, _ = machine(problem.keys, torch.randint(1, TOKENS, best.shape, generator=g))
    start = 0.1 * torch.randn(count, WIDTH, generator=g, dtype=torch.float64)
    rules = {"normalised": normalised(0.1), "plain": plain(1.0), "large": plain(100.0), "adam": adam(0.01)}
    record: Record = {"margin": margin.tolist(), "cosines": {}, "controls": {}, "elsewhere": {}}
    ends = dict[str, Tensor]()
    for name, rule in rules.items():
        ends[name], record["cosines"][name] = descend(problem, start, rule, steps, towards)
    random = torch.randn(count, WIDTH, generator=g, dtype=torch.float64)
    record["controls"] = {
        "random direction": _cosine(random, towards),
        "start": _cosine(start, towards),
        "other tokens": _cosine(ends["normalised"], other),
    }
    won = {name: _won(problem.keys, ends[name]) for name in ("normalised", "plain")}
    record["won"] = {name: _cosine(ends[name], machine(keys, best)[0]) for name, (keys, _) in won.items()}
    record["all won"] = won["normalised"][1].all(-1).double().tolist()
    unequal = problems(g, count, equal=False)
    aim, _ = machine(unequal.keys, best)
    p, _ = descend(unequal, start, normalised(0.1), steps, aim)
    record["elsewhere"] = {"unequal, best": _cosine(p, aim)} | _own("unequal", unequal.keys, p)
    p = jointly(problem, start, g, steps)
    record["elsewhere"] |= _own("joint", problem.keys, p) | {"joint, best": _cosine(p, towards)}
    narrow = problems(g, count, NARROW)
    tight, margins = machine(narrow.keys, best, sweeps=300)
    early, _ = descend(narrow, start[:, :NARROW], plain(1.0), steps // 10, tight)
    late, _ = descend(narrow, early, plain(1.0), steps - steps // 10, tight)
    record["inseparable"] = {
        "share": float((margins < SEPARATED).double().mean()),
        "growth": (late.norm(dim=-1) / early.norm(dim=-1)).tolist(),
        "chosen": [float(x) for x in ((narrow.keys @ late[:, None, :, None])[..., 0].argmax(-1) == 0).double().mean(-1)],
    }
    return record


def _cosine(a: Tensor, b: Tensor) -> list[float]:
    return torch.cosine_similarity(a, b, dim=-1).tolist()


def _won(keys: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The problems without the prompts whose best token p does not choose (a prompt that is won stands in their place), and which are won."""
    won = (keys @ p[:, None, :, None])[..., 0].argmax(-1) == 0
    first = won.int().argmax(-1, keepdim=True)
    index = torch.where(won, torch.arange(won.shape[1]), first)
    return keys.gather(1, index[..., None, None].expand_as(keys)), won


def _own(name: str, keys: Tensor, p: Tensor) -> dict[str, list[float]]:
    """The cosine with the machine of the tokens that p chose itself, whichever these are."""
    return {f"{name}, chosen": _cosine(p, machine(keys, (keys @ p[:, None, :, None])[..., 0].argmax(-1))[0])}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(r: Record, rule: str) -> list[float]:
    return r["cosines"][rule][max(r["cosines"][rule], key=int)]


def judge(records: Sequence[Record]) -> Verdict:
    def end(rule: str) -> list[float]:
        return [_mean(_last(r, rule)) for r in records]

    def seen(part: str, name: str) -> list[float]:
        return [_mean(r[part][name]) for r in records]

    random, other = seen("controls", "random direction"), seen("controls", "other tokens")
    return judged(
        Check("normalised steps: cosine with the machine of the prompts that are won", seen("won", "normalised"), above=0.99, control=other, condition="it is asked of the prompts whose best token is chosen at all"),
        Check("plain steps: the same", seen("won", "plain"), above=0.95, control=random, condition="plain steps are given time (0.95 is asked of them)"),
        Check("normalised steps: cosine with the machine of all prompts", end("normalised"), above=0.99, control=other, condition="no prompt is lost"),
        Check("scores that all differ: cosine with the machine of the tokens chosen", seen("elsewhere", "unequal, chosen"), above=0.99, control=random, condition="scores differ and the margin is that of whichever tokens are chosen"),
        Check("scores that all differ: cosine with the machine of the best tokens", seen("elsewhere", "unequal, best"), above=0.99, control=other, condition="scores differ"),
        Check("values trained too: cosine with the machine of the tokens chosen", seen("elsewhere", "joint, chosen"), above=0.99, control=seen("elsewhere", "joint, best"), condition="values are trained too"),
        Check("Adam: cosine with the machine", end("adam"), above=0.99, control=other, condition="Adam takes the steps"),
        Check("steps a hundred times as large: cosine with the machine", end("large"), above=0.99, control=other, condition="steps are large"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    names = {"normalised": "normalised steps", "plain": "plain steps", "large": "plain, 100 × as large", "adam": "Adam"}
    for n, (rule, name) in enumerate(names.items()):
        steps = sorted(records[0]["cosines"][rule], key=int)
        angles = [
            interval([_mean([math.degrees(math.acos(max(-1.0, min(1.0, c)))) for c in r["cosines"][rule][s]]) for r in records])
            for s in steps
        ]
        line_with_band(left, [int(s) for s in steps], angles, name, n)
    left.axhline(90, color="#999999", lw=1, ls=":")
    left.text(11000, 91, "a random direction", fontsize=7.5, color="#666666", ha="right")
    left.set(xscale="log", xlabel="steps", ylabel="angle to the max-margin direction (degrees)", ylim=(0, 100))
    left.set_title("other tokens of equal score")
    left.legend(loc="upper right", bbox_to_anchor=(1, 0.88))
    shown = {
        "all prompts": [_mean(_last(r, "normalised")) for r in records],
        "prompts that are won": [_mean(r["won"]["normalised"]) for r in records],
        "unequal scores, best tokens": [_mean(r["elsewhere"]["unequal, best"]) for r in records],
        "unequal scores, chosen tokens": [_mean(r["elsewhere"]["unequal, chosen"]) for r in records],
        "values trained too, chosen tokens": [_mean(r["elsewhere"]["joint, chosen"]) for r in records],
        "control: other tokens": [_mean(r["controls"]["other tokens"]) for r in records],
        "control: random direction": [_mean(r["controls"]["random direction"]) for r in records],
    }
    bars(right, list(shown), [interval(v) for v in shown.values()])
    right.axvline(1, color="#999999", lw=1, ls=":")
    right.axvline(0, color="black", lw=0.8)
    right.set(xlabel="cosine with the machine of …", xlim=(-0.6, 1.1))
    right.set_title("after normalised steps")


def planted(kind: Plant, seed: int) -> Record:
    """Cosines of 0.999 where the claim is true, 0.3 where it is not."""
    near, far = [0.9999 - 1e-6 * seed] * 3, [0.3 + 0.01 * seed] * 3
    told, not_told = (far if kind == "negative" else near), (near if kind == "control" else far)
    return {
        "margin": [1.0] * 3,
        "cosines": {rule: {"1": far, "200": told} for rule in ("normalised", "plain", "large", "adam")},
        "won": {"normalised": told, "plain": told},
        "all won": [1.0] * 3,
        "controls": {"random direction": not_told, "start": not_told, "other tokens": not_told},
        "elsewhere": {"unequal, best": told, "unequal, chosen": told, "joint, chosen": told, "joint, best": not_told},
        "inseparable": {"share": 1.0, "growth": [1.0] * 3, "chosen": [0.5] * 3},
    }


STUDY = Study(
    claim="Gradient descent on attention converges in direction to the max-margin selector of each prompt's best token.",
    source="prior-work map of GD-Attention, §5 of the sources; Tarzanagh et al. 2023",
    protocol="Five prompts of four tokens with random keys of width 16, the query of softmax attention trained by full gradients on the logistic "
    "loss, float64; the cosine of the query with the hard-margin support vector machine, solved by coordinate ascent, by step: normalised and plain "
    "steps, steps a hundred times as large, Adam; scores that all differ; values trained too; keys of width 3, which cannot be separated.",
    controls=(
        "a random direction",
        "the machine that separates randomly chosen other tokens",
        "where values are trained too, the machine of tokens fixed beforehand",
    ),
    caption="Left: the angle to the max-margin direction falls to a few degrees with normalised steps (what is left are prompts that are lost), slowly "
    "with plain ones, and stays near 30° with Adam and with large steps. Right: the cosine at the end; where scores differ or values are trained, the direction is that of the tokens it happens to choose.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
)
