"""A threshold that promises a risk (after Geifman & El-Yaniv 2017, arXiv:1705.08500), with fixed-sequence tests in place of their search.

Answers come with a score; those whose score reaches a threshold t are given, the others refused. The selective risk R(t) is the
probability that an answer that is given is wrong. From n answers known to be right or wrong, independent and from one distribution,
`calibrate` looks for the t that accepts most while

    P( R(t) ≤ risk ) ≥ confidence = 1 − δ,

whatever the distribution, the model, and the score; nothing is assumed of R, and ties are allowed.

**The test.** Of N answers accepted by a threshold that does not depend on them, the number of wrong ones is Binomial(N, R). Seeing E or
fewer has the probability F(E; N, R), which falls as R grows, so F(E; N, risk) ≤ δ rejects "R > risk" with error δ at most: exact, no
normal approximation.

**The search.** G starts are fixed before any answer is seen: accept all n, the best n/2, n/4, … down to the fewest that could pass. Each
has the level δ/G. From a start whose test passes, the threshold is lowered score by score, each tested at the same level, as
long as every test passes. The largest coverage reached from any start is the result.

**Why no further correction is needed.** Take one start: j answers above w, the (j+1)-th highest score, and level δ' = δ/G.
(1) Given w, the N answers above w are independent draws from {s > w}. If R(> w) > risk, their test passes with probability δ' at most.
(2) Otherwise let t₁ ≤ w be the first threshold below w with R beyond the risk (the limit of such ones, if there is no first). A false
promise has to pass the test at t₁. Let U = {s ≥ c} be what lies above the interval of good thresholds over t₁, so that R(U) ≤ risk
≤ R(t₁), and what lies between has a risk of at least R(U). That w fell into this interval says: at most j answers are in U, more
than j reach t₁. Given that N reach t₁, errors grow stochastically as fewer of the N are in U; so, given the event, they are at least
Binomial(N, R(t₁)), hence at least Binomial(N, risk): the test at t₁ passes with probability δ' at most.
Both cases exclude each other, so one start is wrong with probability δ' at most, and G starts with δ. ∎

The published search halves an interval of ranks and pays δ/log₂ n per step; which ranks it visits depends on the answers, which its union
bound over steps does not count. Here the starts are as few, they are fixed, and between them every rank is tried for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from .samples import Groups, Numbers, as_tensor, grouped


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` can promise. True where there is a threshold."""

    threshold: float | None
    """Give the answers whose score is at least this; −inf where all may be given, None where nothing can be promised."""
    risk: float
    confidence: float
    count: int
    """Answers that it was calibrated on."""
    accepted: int
    errors: int
    """The wrong ones among the accepted."""
    bound: float
    """The least risk that these counts would promise; 1 where nothing is accepted."""
    why: str

    def __bool__(self) -> bool:
        return self.threshold is not None

    @property
    def coverage(self) -> float:
        """The share of the answers that would be given; 0 where nothing can be promised."""
        return self.accepted / self.count if self.count else 0.0

    @property
    def observed(self) -> float:
        """The share of wrong answers among the accepted; 0 where there are none."""
        return self.errors / self.accepted if self.accepted else 0.0

    def accepts(self, scores: Numbers) -> Tensor:
        """True where the answer may be given; NaN is refused, and everything is where nothing can be promised."""
        x = as_tensor(scores, "scores").double()
        return torch.zeros_like(x, dtype=torch.bool) if self.threshold is None else x >= self.threshold

    def __str__(self) -> str:
        return self.why


def calibrate(scores: Numbers, correct: Numbers, *, risk: float, confidence: float = 0.95) -> Calibration:
    """The threshold that accepts most among those whose risk is at most `risk`, with this confidence.

        promise = regard.calibrate(scores, correct, risk=0.05, confidence=0.95)
        promise.threshold, promise.coverage

    Args:
        scores: one per answer, larger where it is more to be trusted; any shape, any kind of number, no NaN.
        correct: of the same shape, True or 1 where the answer was right. Use answers that neither the model nor the score was
            fitted to, drawn as those to come will be: the promise is for such answers, and for no others.
        risk: the largest share of wrong answers among those that are given, strictly between 0 and 1.
        confidence: the probability, over the draw of these answers, that the promise is true.
    """
    for name, x in (("risk", risk), ("confidence", confidence)):
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < 1:
            raise SpecError(
                f"{name}={x!r}; it lies strictly between 0 and 1, as in {name}={'0.05' if name == 'risk' else '0.95'}"
            )
    groups = grouped(scores, correct)
    n, delta = groups.total, 1 - confidence
    fewest = math.ceil(math.log(delta) / math.log1p(-risk))
    starts = [n >> halved for halved in range(n.bit_length()) if n >> halved >= fewest]
    level = delta / max(1, len(starts))
    passes = groups.errors <= most_errors(n, risk, level)[groups.counts]
    reached = max((_walk(groups, passes, start) for start in starts), default=_Reached(0, False))
    if not reached.rows:
        best = int(groups.counts[(groups.errors == 0)].amax()) if bool((groups.errors == 0).any()) else 0
        why = (
            f"no threshold can promise a risk of {risk:g} with confidence {confidence:g} from {n} answers: "
            + (f"{fewest} or more are needed, all of them right" if n < fewest else f"the best {best} are right, and then errors come too soon")
        )  # fmt: skip
        return Calibration(None, risk, confidence, n, 0, 0, 1.0, why)
    last = reached.rows - 1
    accepted, errors = int(groups.counts[last]), int(groups.errors[last])
    threshold = float("-inf") if accepted == n else float(groups.scores[last])
    if accepted < n and not reached.walked:
        threshold = _next_above(float(groups.scores[last + 1]), as_tensor(scores, "scores").dtype)
    bound = risk_bound(errors, accepted, 1 - level)
    why = (
        f"scores of {threshold:.6g} or more: risk at most {risk:g} with confidence {confidence:g}; "
        f"{accepted} of {n} answers ({accepted / n:.1%}), {errors} of them wrong"
    )
    return Calibration(threshold, risk, confidence, n, accepted, errors, bound, why)


class _Reached(NamedTuple):
    rows: int
    """Distinct scores that are accepted, from the highest down."""
    walked: bool
    """Reached by lowering the threshold: then every threshold above the next score is as good, and the lowest accepted score is one."""


def _walk(groups: Groups, passes: Tensor, start: int) -> _Reached:
    """How far one start leads."""
    if start == groups.total:
        return _Reached(len(passes) if bool(passes[-1]) else 0, True)
    first_refused = int(torch.searchsorted(groups.counts, start, right=True))
    if first_refused == 0 or not bool(passes[first_refused - 1]):
        return _Reached(0, False)
    further = int(passes[first_refused:].long().cumprod(0).sum())
    return _Reached(first_refused + further, further > 0)


def _next_above(score: float, dtype: torch.dtype) -> float:
    """The least number of this type above a score, so that comparing in the scores' own type refuses the score itself."""
    if not dtype.is_floating_point:
        return score + 1
    x = torch.tensor(score, dtype=dtype)
    if dtype in (torch.float32, torch.float64):
        return float(torch.nextafter(x, torch.tensor(float("inf"), dtype=dtype)))
    step = torch.finfo(dtype).smallest_normal if score == 0 else abs(score) * torch.finfo(dtype).eps
    return float((x.double() + step).to(dtype))


def most_errors(count: int, risk: float, level: float) -> Tensor:
    """For N = 0 … count, the largest E with P(Binomial(N, risk) ≤ E) ≤ level; −1 where even no error says too little.

    One more draw takes from the tail what leaves it, F(E; N+1) = F(E; N) − risk·f(E; N), and one more error adds its own probability,
    so each N costs one step. f and F stay near `level`, where float64 has its sixteen digits.
    """
    most = [-1] * (count + 1)
    begin = math.ceil(math.log(level) / math.log1p(-risk))
    if begin > count:
        return torch.tensor(most)
    errors, mass = 0, math.exp(begin * math.log1p(-risk))
    tail, odds = mass, risk / (1 - risk)
    for n in range(begin, count + 1):
        following = mass * odds * (n - errors) / (errors + 1)
        if tail + following <= level:
            errors, mass, tail = errors + 1, following, tail + following
        most[n] = errors
        tail -= risk * mass
        mass *= (1 - risk) * (n + 1) / (n + 1 - errors)
    return torch.tensor(most)


def binomial_tail(errors: int, count: int, risk: float) -> float:
    """P(Binomial(count, risk) ≤ errors), summed exactly."""
    if errors >= count or risk <= 0:
        return 1.0
    if risk >= 1:
        return 0.0
    log_p, log_q = math.log(risk), math.log1p(-risk)
    top = math.lgamma(count + 1)
    terms = (
        math.exp(top - math.lgamma(e + 1) - math.lgamma(count - e + 1) + e * log_p + (count - e) * log_q)
        for e in range(errors + 1)
    )
    return min(1.0, math.fsum(terms))


def risk_bound(errors: int, count: int, confidence: float = 0.95) -> float:
    """The upper confidence limit of a risk from the wrong answers among `count`, exact (Clopper & Pearson 1934).

    The largest p with P(Binomial(count, p) ≤ errors) ≥ 1 − confidence; for no error it is 1 − (1 − confidence)^(1/count).
    """
    if isinstance(errors, bool) or not isinstance(errors, int) or not isinstance(count, int) or not 0 <= errors <= count:
        raise SpecError(
            f"{errors!r} errors of {count!r} answers; both are whole numbers, and there are no more errors than answers"
        )
    if not 0 < confidence < 1:
        raise SpecError(f"confidence={confidence!r}; it lies strictly between 0 and 1, as in confidence=0.95")
    if errors == count:
        return 1.0
    delta = 1 - confidence
    if errors == 0:
        return -math.expm1(math.log(delta) / count)
    low, high = errors / count, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if binomial_tail(errors, count, middle) > delta else (low, middle)
    return high
