"""Risk against coverage: what refusing the least trusted answers would have bought on this sample.

    risk(c)   the share of wrong answers among the c·n with the highest scores
    AURC      its mean over c = 1/n, 2/n, … 1 (Geifman, Uziel & El-Yaniv 2019, arXiv:1805.08206)
    E-AURC    AURC less that of the best order possible, in which every right answer comes before every wrong one

Equal scores stand in no order: within them the wrong answers are spread evenly, which is the mean over all orders. A score that
says nothing thus has AURC = the error rate, and the order of the rows never matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
from .samples import Groups, Numbers, grouped, matched


@dataclass(frozen=True)
class RiskCoverage:
    """One point per distinct score, from the highest down: answers with this score or a higher one are given."""

    thresholds: Tensor
    """(M,)"""
    coverage: Tensor
    """(M,) rising to 1"""
    risk: Tensor
    """(M,)"""
    aurc: float
    best_aurc: float
    """That of the best order of these right and wrong answers."""

    @property
    def excess(self) -> float:
        """E-AURC: 0 for a score that puts every right answer above every wrong one."""
        return self.aurc - self.best_aurc

    def risk_at(self, coverage: float) -> float:
        """The risk of the first threshold that gives at least this share of the answers."""
        if not 0 < coverage <= 1:
            raise ShapeError(f"coverage={coverage!r}; it is a share of the answers, above 0 and at most 1")
        # 1e-12: a share such as 0.1 of 30 answers is three of them, whatever the last bit says.
        return float(self.risk[int((self.coverage < coverage - 1e-12).sum())])


def risk_coverage(scores: Numbers, correct: Numbers) -> RiskCoverage:
    """The curve of risk against coverage, its area, and that of the best order."""
    groups = grouped(scores, correct)
    if not groups.total:
        raise ShapeError("there are no answers; a curve needs one or more")
    n, wrong = groups.total, int(groups.errors[-1])
    given = torch.arange(1, n + 1, dtype=torch.float64)
    oracle = (given - (n - wrong)).clamp_min(0) / given
    risk = groups.errors.double() / groups.counts
    return RiskCoverage(
        groups.scores, groups.counts.double() / n, risk, float((_spread(groups) / given).mean()), float(oracle.mean())
    )


def _spread(groups: Groups) -> Tensor:
    """(n,) the expected number of wrong answers among the first 1, 2, … n, equal scores in random order."""
    sizes = groups.counts.diff(prepend=groups.counts.new_zeros(1))
    wrong = groups.errors.diff(prepend=groups.errors.new_zeros(1)).double()
    return (wrong / sizes).repeat_interleave(sizes).cumsum(0)


def auroc(scores: Numbers, positive: Numbers) -> float:
    """The probability that a positive scores higher than a negative; equal scores count half, so ½ says nothing."""
    x, flags = matched(scores, positive, "positive")
    count = int(flags.sum())
    if count in (0, len(flags)):
        raise ShapeError(f"{count} of {len(flags)} are positive; a comparison needs one of each kind")
    _, group, sizes = x.unique(sorted=True, return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    middle = (2 * ends - sizes + 1).double() / 2
    ranks = float(middle[group][flags].sum())
    return (ranks - count * (count + 1) / 2) / (count * (len(flags) - count))
