"""The two-axis map, placed by measurement.

A row is one query and 64 keys of width 64. In the first condition 4 keys are consistent with the query (their cosine with it
is drawn from [0.3, 0.7]) and 60 are strangers; in the second all 64 are strangers.

    across    the effective number of keys, exp of the entropy of the weights, in rows of the first condition that were accepted
    upwards   the share of the weight kept off strangers, averaged over the two conditions

A mechanism that must choose gives all of its weight to strangers in the second condition, so it cannot pass ½. One that may
refuse has one number to say when; it is set on rows of its own, so that 95% of the rows with a consistent key are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from regard.attention.inspect import inspect
from regard.selection.gd import coherent_length

WIDTH, KEYS, FITTING, ROWS = 64, 64, 4, 256
NEAR, FAR = 0.7, 0.3
SEEDS = tuple(range(8))
CALIBRATION = 1000
COVERAGE = 0.95

Nudge = tuple[float, float, str]


@dataclass(frozen=True)
class Place:
    """Where a mechanism stands: means over seeds, and the standard deviation between seeds."""

    label: str
    spec: str
    effective: float
    effective_sd: float
    refusal: float
    refusal_sd: float
    kept: float
    """Weight on the consistent keys when they are there."""
    leak: float
    """Weight on strangers when consistent keys are there."""
    fooled: float
    """Weight on strangers when only strangers are there."""
    nudge: Nudge = (9, 0, "left")


@dataclass(frozen=True)
class Entry:
    label: str
    spec: str
    nudge: Nudge = (9, 0, "left")


ENTRIES = (
    Entry("softmax", "dot | softmax", (-4, 13, "right")),
    Entry("cosine", "cosine | softmax", (2, -38, "right")),
    Entry("euclidean", "euclidean | softmax", (0, -22, "center")),
    Entry("rbf", "rbf | softmax", (2, -13, "left")),
    Entry("polynomial", "polynomial | softmax", (9, -4, "left")),
    Entry("top-k (8)", "dot | topk(8)", (8, -22, "center")),
    Entry("entmax (1.5)", "dot | entmax(1.5)", (-8, 34, "right")),
    Entry("sparsemax", "dot | sparsemax", (-2, 22, "center")),
    Entry("hard", "dot | hard", (4, 13, "right")),
    Entry("Hopfield, 3 steps", "dot | hopfield(steps=3)", (-8, 9, "right")),
    Entry("GD, no threshold", "euclidean | gd", (4, -14, "right")),
    Entry("GD, coherent", "euclidean | gd(beta={beta}, coherence=1)", (4, 14, "right")),
    Entry("GD, all coherent keys", "euclidean | gd(beta={beta}, coherence=1, keep=all)", (-4, 13, "right")),
    Entry("abstain, null slot", "dot | abstain(softmax, null_logit={lse})", (-9, 0, "right")),
    Entry("abstain, threshold", "dot | abstain(softmax, threshold={largest})", (-9, 0, "right")),
    Entry("abstain (cosine, hard)", "cosine | abstain(hard, threshold={cosine})", (4, -32, "right")),
    Entry("abstain (sparsemax)", "dot | abstain(sparsemax, threshold={largest})", (-6, -15, "center")),
)

TRAILS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("softmax, τ from 3 to ⅕", "dot | softmax(temperature={x})", (3.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.2)),
    (
        "GD, coherence from 0 to 1",
        "euclidean | gd(beta={beta}, coherence={x}, keep=all)",
        (0.0, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
    ),
)


@lru_cache(maxsize=64)
def rows(seed: int, fitting: int) -> tuple[Tensor, Tensor]:
    """q (R, 1, 1, D) and k (R, 1, K, D); the first `fitting` keys are consistent with their query."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(ROWS, 1, 1, WIDTH, generator=g), torch.randn(ROWS, 1, KEYS, WIDTH, generator=g)
    cosine = FAR + (NEAR - FAR) * torch.rand(ROWS, 1, fitting, 1, generator=g)
    near = cosine * q + (1 - cosine.square()).sqrt() * k[:, :, :fitting]
    return q, torch.cat([near, k[:, :, fitting:]], dim=2)


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


def _once(spec: str, seed: int) -> tuple[float, ...]:
    q, k = rows(seed, FITTING)
    seen = inspect(q, k, k, spec)
    weights = seen.weights()[:, 0, 0]
    taken = seen.accepted.flatten()
    effective = seen.effective.flatten()[taken].mean() if bool(taken.any()) else torch.tensor(float("nan"))
    kept, leak = weights[:, :FITTING].sum(-1).mean(), weights[:, FITTING:].sum(-1).mean()
    q, k = rows(seed + CALIBRATION + 1, 0)
    fooled = inspect(q, k, k, spec).weights().sum(-1).mean()
    return tuple(float(x) for x in (effective, 1 - (leak + fooled) / 2, kept, leak, fooled))


@contextmanager
def one_thread() -> Generator[None]:
    """Tensors as small as these lose more to waiting for a second thread than it gives, tenfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def place(label: str, spec: str, nudge: Nudge = (9, 0, "left"), seeds: Iterable[int] = SEEDS) -> Place:
    found = torch.tensor([_once(spec, seed) for seed in seeds], dtype=torch.float64)
    mean = found.mean(0).tolist()
    spread = found.std(0).tolist() if len(found) > 1 else [0.0] * found.shape[1]
    return Place(label, spec, mean[0], spread[0], mean[1], spread[1], *mean[2:], nudge=nudge)


def measure(tick: Callable[[], None] = lambda: None, seeds: Iterable[int] = SEEDS) -> tuple[list[Place], list[list[Place]]]:
    """Every entry, and the trails that show how far one parameter moves a mechanism."""
    seeds, values = tuple(seeds), thresholds()
    places: list[Place] = []
    trails: list[list[Place]] = []
    with one_thread():
        for e in ENTRIES:
            places.append(place(e.label, e.spec.format(**values), e.nudge, seeds))
            tick()
        for label, spec, xs in TRAILS:
            trails.append([place(label, spec.format(x=x, **values), seeds=seeds[:2]) for x in xs])
            tick()
    return places, trails


STEPS = len(ENTRIES) + len(TRAILS)

OPEN, CLOSE = "<!-- map -->", "<!-- /map -->"


def table(places: Iterable[Place]) -> str:
    """The measured places as a Markdown table."""
    lines = ["| spec | effective keys | kept off strangers | kept | leak | fooled |", "|---|--:|--:|--:|--:|--:|"]
    for p in places:
        spread = f"{p.effective:.2f} ± {p.effective_sd:.2f} | {p.refusal:.3f} ± {p.refusal_sd:.3f}"
        spec = p.spec.replace("|", "\\|")
        lines.append(f"| `{spec}` | {spread} | {p.kept:.2f} | {p.leak:.2f} | {p.fooled:.2f} |")
    return "\n".join(lines)


def write_table(page: Path, places: Iterable[Place]) -> None:
    """Put the table between the page's two marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(OPEN)
    page.write_text(f"{before}{OPEN}\n{table(places)}\n{CLOSE}{rest.split(CLOSE)[1]}", encoding="utf-8")
