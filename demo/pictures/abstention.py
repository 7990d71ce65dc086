"""The picture of the page on abstention: risk against coverage, and how often a promise is broken."""

from __future__ import annotations

from typing import Any

import torch

from demo.style import COLOURS, Draw, Theme
from regard.abstention import calibrate, risk_coverage

RISK, CONFIDENCE, EDGE, RISKS = 0.1, 0.9, 0.4, (0.5, 0.02)
"""Scores are uniform; answers with a score below EDGE are wrong half of the time, those above one time in fifty."""


def drawn(g: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(n, generator=g, dtype=torch.float64)
    chance = torch.where(scores < EDGE, *(torch.tensor(r, dtype=torch.float64) for r in RISKS))
    return scores, torch.rand(n, generator=g, dtype=torch.float64) >= chance


def true_risk(coverage: torch.Tensor) -> torch.Tensor:
    """Of the best share of all answers."""
    sure = coverage.clamp_max(1 - EDGE)
    return (sure * RISKS[1] + (coverage - sure) * RISKS[0]) / coverage


def abstention(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    shares = torch.linspace(0.02, 1, 99, dtype=torch.float64)
    left.plot(shares, true_risk(shares), color=theme.ink, label="the truth")
    scores, correct = drawn(torch.Generator().manual_seed(3), 400)
    curve = risk_coverage(scores, correct)
    left.plot(curve.coverage, curve.risk, color=COLOURS[0], label="400 answers")
    promise = calibrate(scores, correct, risk=RISK, confidence=CONFIDENCE)
    left.axhline(RISK, color=COLOURS[1], linestyle="--", linewidth=1)
    left.plot([promise.coverage], [promise.observed], "o", color=COLOURS[1], label=f"promised: {promise.coverage:.0%} answered")
    left.set(xlabel="share of the answers that are given", ylabel="share of them that is wrong", ylim=(0, 0.25))
    left.set_title("Risk against coverage")
    left.legend(loc="upper left")
    g, counts = torch.Generator().manual_seed(0), (50, 100, 200, 400, 800, 1600)
    broken, covered = [], []
    for n in counts:
        promises = [calibrate(*drawn(g, n), risk=RISK, confidence=CONFIDENCE) for _ in range(200)]
        reach = torch.tensor(
            [1 - max(0.0, p.threshold) if p.threshold is not None else 0.0 for p in promises], dtype=torch.float64
        )
        broken.append(float((true_risk(reach.clamp_min(1e-9)) > RISK).double().mean()))
        covered.append(float(reach.mean()))
    best = 0.6 * (RISK - RISKS[1]) / (RISKS[0] - RISK) + 0.6
    right.plot(counts, covered, "-o", color=COLOURS[0], label="answered")
    right.axhline(best, color=COLOURS[0], linestyle=":", linewidth=1, label="the most that is possible")
    right.plot(counts, broken, "-s", color=COLOURS[1], label="promises broken")
    right.axhline(1 - CONFIDENCE, color=COLOURS[1], linestyle="--", linewidth=1, label="the most that is allowed")
    right.set(xlabel="answers to calibrate on", ylabel="share", xscale="log", ylim=(-0.02, 1))
    right.set_xticks(counts, [str(n) for n in counts])
    right.minorticks_off()
    right.set_title("200 draws of each size")
    right.legend(loc="center right")


GUIDES: dict[str, tuple[Draw, tuple[float, float]]] = {"abstention": (abstention, (8.4, 3.4))}
