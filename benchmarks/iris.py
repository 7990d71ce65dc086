"""GD on Iris, leave-one-out: every query in one call, against the published way, a bisection per query and key in Python.

Between a query and a key at distance L lies φ(x) = −log(α e^{−x²} + (1−α) e^{−(x−L)²}). The published way looks for the zero of
the derivative of what stands in the logarithm by halving [0, L], one key after another, in numpy scalars, and takes the key
whose φ there is least. Features are standardised, as they were there (Fisher 1936, 150 flowers, 4 lengths, 3 species).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import regard

from .harness import Bench, Case, Reach, Row, inferred

TITLE = "gd on Iris"
FLOWERS = Path(__file__).parent.parent / "tests" / "fixtures" / "iris.csv"
ALPHA = 0.5
CLOSE_ENOUGH, MOST_STEPS = 1e-10, 200


def cases(bench: Bench) -> list[Case]:
    return [Case("gd on Iris against bisection", lambda: _iris(bench))]


def flowers() -> tuple[np.ndarray, np.ndarray]:
    with FLOWERS.open(encoding="utf-8") as file:
        rows = [[float(x) for x in row] for row in list(csv.reader(file))[1:]]
    data = np.array(rows)
    x, species = data[:, :4], data[:, 4].astype(int)
    return (x - x.mean(0)) / x.std(0), species


def slope(x: float, L: float) -> float:
    """d/dx of α e^{−x²} + (1−α) e^{−(x−L)²}."""
    return -2 * ALPHA * x * np.exp(-(x**2)) - 2 * (1 - ALPHA) * (x - L) * np.exp(-((x - L) ** 2))


def coherence_point(L: float) -> float:
    low, high = 0.0, L
    if not slope(low, L) > 0 > slope(high, L):
        return L / 2
    for _ in range(MOST_STEPS):
        middle = 0.5 * (low + high)
        found = slope(middle, L)
        if abs(found) < CLOSE_ENOUGH or high - low < CLOSE_ENOUGH:
            return middle
        low, high = (middle, high) if found > 0 else (low, middle)
    return 0.5 * (low + high)


def energy(q: np.ndarray, k: np.ndarray) -> float:
    step = k - q
    L = float(np.linalg.norm(step))
    point = q if L == 0 else q + coherence_point(L) * (step / L)
    mixture = ALPHA * np.exp(-np.sum((point - q) ** 2)) + (1 - ALPHA) * np.exp(-np.sum((point - k) ** 2))
    return float(-np.log(mixture))


def bisected(x: np.ndarray) -> Tensor:
    """The key that each flower chooses among the others."""
    chosen: list[int] = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        energies = [energy(x[i], x[j]) for j in others]
        chosen.append(others[int(np.argmin(energies))])
    return torch.tensor(chosen)


def attended(x: Tensor, number: Tensor) -> Tensor:
    """The same through `attend`: the value of a key is its number."""
    return regard.attend(x, x, number, f"gd(alpha={ALPHA})", allow=~regard.Window(1))


def _iris(bench: Bench) -> Row:
    features, species = flowers()
    x = torch.tensor(features, dtype=torch.float32).view(1, 1, len(features), 4)
    number = torch.arange(len(features), dtype=torch.float32).view(1, 1, -1, 1)
    keys = attended(x, number).flatten().long()
    right = float((species[keys.numpy()] == species).mean())
    if not torch.equal(keys, bisected(features)):
        raise AssertionError("gd chooses other keys on Iris than the bisection of its energy")
    return bench.compare(
        "gd",
        f"Iris, {len(features)} at once, per query",
        "per-key bisection in Python",
        inferred(attended, (x, number)),
        lambda: bisected(features),
        Reach(2000, "faster"),
        truth=lambda: bisected(features).to(x.dtype).view(number.shape),
        per=len(features),
        note=f"gd on Iris: the same key for {len(features)} of {len(features)}; leave-one-out accuracy {right:.4f}.",
    )
