"""Knowing when not to answer: a threshold with a promise, curves of risk against coverage, and a head that learns to refuse.

    promise = regard.calibrate(scores, correct, risk=0.05, confidence=0.95)
    if promise:                                   # False: no threshold can promise it, and `promise.why` says why
        answered = promise.accepts(new_scores)    # wrong at most 5 times in 100, with 95% confidence
    risk_coverage(scores, correct).aurc           # the area under risk against coverage: less is better

A score is any number that is larger where an answer is more to be trusted: the largest probability, the largest attention score (what
`abstain(threshold=…)` compares), GD's coherence (`inspect(…).jump().coherence`), `accepted` itself, or the selection of a `SelectiveHead`.
"""

from .calibration import Calibration, calibrate, risk_bound
from .curves import RiskCoverage, auroc, risk_coverage
from .selective import Selective, SelectiveHead, selective_loss

__all__ = [
    "Calibration",
    "RiskCoverage",
    "Selective",
    "SelectiveHead",
    "auroc",
    "calibrate",
    "risk_bound",
    "risk_coverage",
    "selective_loss",
]
