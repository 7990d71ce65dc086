"""The two-axis map of the tour and of docs/map.md: some mechanisms as `regard.study.selection_map` measures them, and their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.study.frame.run import one_thread
from regard.study.selection_map import measured, thresholds

SEEDS = tuple(range(8))

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


def place(label: str, spec: str, nudge: Nudge = (9, 0, "left"), seeds: Iterable[int] = SEEDS) -> Place:
    found = torch.tensor([measured(spec, seed) for seed in seeds], dtype=torch.float64)
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
