"""`calibrate`: exact binomial tests, the promise checked by drawing again and again, and inputs of every kind."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.abstention import risk_bound
from regard.abstention.calibration import binomial_tail, most_errors

answers = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=0, max_size=120)


def exact_tail(errors: int, count: int, risk: Fraction) -> Fraction:
    return sum((math.comb(count, e) * risk**e * (1 - risk) ** (count - e) for e in range(errors + 1)), Fraction(0))


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 99))
@settings(max_examples=80, deadline=None)
def test_tail_equals_the_sum_of_exact_fractions(errors: int, count: int, percent: int) -> None:
    errors = min(errors, count)
    exact = exact_tail(errors, count, Fraction(percent, 100))
    assert binomial_tail(errors, count, percent / 100) == pytest.approx(float(exact), rel=1e-10)


@pytest.mark.parametrize(("risk", "level"), [(Fraction(1, 20), Fraction(1, 20)), (Fraction(1, 3), Fraction(1, 1000)), (Fraction(9, 10), Fraction(1, 2))])  # fmt: skip
def test_most_errors_is_the_largest_number_whose_exact_tail_passes(risk: Fraction, level: Fraction) -> None:
    most = most_errors(150, float(risk), float(level)).tolist()
    for n, e in enumerate(most):
        assert e == -1 or exact_tail(e, n, risk) <= level
        assert exact_tail(e + 1, n, risk) > level


def test_most_errors_stays_exact_for_many_answers() -> None:
    most = most_errors(200_000, 0.05, 0.005).tolist()
    for n in (1_000, 20_000, 200_000):
        assert binomial_tail(most[n], n, 0.05) <= 0.005 < binomial_tail(most[n] + 1, n, 0.05)


def test_bound_has_its_closed_forms() -> None:
    assert risk_bound(0, 50, 0.95) == pytest.approx(1 - 0.05 ** (1 / 50), rel=1e-12)
    assert risk_bound(7, 7, 0.9) == 1
    # One error of two: (1 − p)² + 2p(1 − p) = 1 − p² = δ.
    assert risk_bound(1, 2, 0.75) == pytest.approx(math.sqrt(0.75), rel=1e-12)


@given(st.integers(0, 40), st.integers(1, 40), st.floats(0.5, 0.999))
@settings(max_examples=60, deadline=None)
def test_tail_at_the_bound_is_the_level(errors: int, count: int, confidence: float) -> None:
    errors = min(errors, count)
    bound = risk_bound(errors, count, confidence)
    if errors < count:
        assert binomial_tail(errors, count, bound) == pytest.approx(1 - confidence, rel=1e-9)
    assert bound >= errors / count


@given(answers, st.floats(0.05, 0.6), st.floats(0.5, 0.99))
@settings(max_examples=150, deadline=None)
def test_result_is_consistent_and_does_not_depend_on_the_order_of_rows(
    rows: list[tuple[int, bool]], risk: float, confidence: float
) -> None:
    scores, correct = [s for s, _ in rows], [c for _, c in rows]
    promise = regard.calibrate(scores, correct, risk=risk, confidence=confidence)
    assert promise == regard.calibrate(scores[::-1], correct[::-1], risk=risk, confidence=confidence)
    accepted = promise.accepts(scores)
    assert int(accepted.sum()) == promise.accepted
    assert int((accepted & ~torch.tensor(correct, dtype=torch.bool)).sum()) == promise.errors
    assert bool(promise) == (promise.threshold is not None) == (promise.accepted > 0)
    if promise:
        assert promise.bound <= risk * (1 + 1e-9)
        assert promise.observed <= promise.bound
    else:
        assert "no threshold can promise" in str(promise)
        assert (promise.coverage, promise.errors, promise.bound) == (0, 0, 1)


@given(answers, st.sampled_from([0.1, 0.3]))
@settings(max_examples=60, deadline=None)
def test_only_the_order_of_the_scores_matters(rows: list[tuple[int, bool]], risk: float) -> None:
    scores, correct = torch.tensor([s for s, _ in rows], dtype=torch.float64), [c for _, c in rows]
    plain = regard.calibrate(scores, correct, risk=risk, confidence=0.8)
    warped = regard.calibrate(scores.exp(), correct, risk=risk, confidence=0.8)
    assert (plain.accepted, plain.errors) == (warped.accepted, warped.errors)


@given(answers, st.floats(0.05, 0.4))
@settings(max_examples=60, deadline=None)
def test_a_looser_promise_never_covers_less(rows: list[tuple[int, bool]], risk: float) -> None:
    # The starts are those of the smaller risk at least, so more of them share the confidence; equal numbers make it comparable.
    scores, correct = [s for s, _ in rows], [c for _, c in rows]
    fewest = math.ceil(math.log(0.2) / math.log1p(-risk))
    looser = min(0.99, risk * 1.05)
    if sum(len(rows) >> k >= fewest for k in range(8)) == sum(
        len(rows) >> k >= math.ceil(math.log(0.2) / math.log1p(-looser)) for k in range(8)
    ):
        strict = regard.calibrate(scores, correct, risk=risk, confidence=0.8)
        assert regard.calibrate(scores, correct, risk=looser, confidence=0.8).accepted >= strict.accepted


def drawn(
    g: torch.Generator, n: int, edges: list[float], risks: list[float], bins: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform scores on (0, 1), and answers that are wrong with a risk that depends on the score's piece; in `bins` steps if given."""
    s = torch.rand(n, generator=g, dtype=torch.float64)
    piece = torch.bucketize(s, torch.tensor(edges, dtype=torch.float64))
    wrong = torch.rand(n, generator=g, dtype=torch.float64) < torch.tensor(risks, dtype=torch.float64)[piece]
    return (s if bins is None else (s * bins).floor() / bins), ~wrong


def true_risk(threshold: float, edges: list[float], risks: list[float], bins: int | None) -> float:
    """R of a threshold, in closed form."""
    steps = torch.arange(bins or 0, dtype=torch.float64) / (bins or 1)
    t = max(0.0, threshold) if bins is None else float(steps[steps >= threshold].amin())
    ends = [0.0, *edges, 1.0]
    wrong = sum(r * max(0.0, b - max(a, t)) for a, b, r in zip(ends, ends[1:], risks, strict=False))
    return wrong / (1 - t)


HARD = {
    "risk just too large everywhere": ([], [0.1001], None),
    "risk too large everywhere, tied scores": ([], [0.1001], 8),
    "falling with the score": ([0.3, 0.6], [0.5, 0.2, 0.05], None),
    "highest scores are the worst": ([0.5, 0.9], [0.05, 0.02, 0.6], None),
    "good, bad, good, bad": ([0.25, 0.5, 0.75], [0.3, 0.02, 0.25, 0.0], None),
    "good, bad, good, bad, tied scores": ([0.25, 0.5, 0.75], [0.3, 0.02, 0.25, 0.0], 12),
}


@pytest.mark.parametrize("name", HARD)
def test_promise_is_broken_no_more_often_than_it_says(name: str) -> None:
    edges, risks, bins = HARD[name]
    g, draws, confidence, broken = torch.Generator().manual_seed(0), 1000, 0.9, 0
    for _ in range(draws):
        scores, correct = drawn(g, 400, edges, risks, bins)
        promise = regard.calibrate(scores, correct, risk=0.1, confidence=confidence)
        if promise.threshold is not None and promise.threshold <= 1:
            broken += true_risk(promise.threshold, edges, risks, bins) > 0.1
    # 1,000 draws of a true rate of 10% exceed 13.1% once in a thousand times.
    assert broken <= 131


def test_promise_is_not_bought_by_refusing_everything() -> None:
    # 60% of the answers have a risk of 2%, so a promise of 10% can accept two thirds and more: 0.6·0.02 + x·0.5 = 0.1·(0.6 + x).
    g = torch.Generator().manual_seed(1)
    coverage = [
        regard.calibrate(*drawn(g, 2000, [0.4], [0.5, 0.02], None), risk=0.1, confidence=0.95).coverage for _ in range(50)
    ]
    assert 0.65 < sum(coverage) / 50 < 0.6 + 0.12


def test_one_confident_error_does_not_end_the_search() -> None:
    scores = torch.linspace(1, 0, 500, dtype=torch.float64)
    correct = torch.ones(500, dtype=torch.bool)
    correct[0] = False
    assert regard.calibrate(scores, correct, risk=0.05, confidence=0.95).coverage == 1


def test_all_right_is_promised_whole_and_all_wrong_not_at_all() -> None:
    scores = torch.randn(200)
    whole = regard.calibrate(scores, torch.ones(200), risk=0.05, confidence=0.95)
    assert whole.threshold == -math.inf
    assert whole.coverage == 1
    none = regard.calibrate(scores, torch.zeros(200), risk=0.05, confidence=0.95)
    assert none.threshold is None
    assert not none.accepts(scores).any()


def test_too_few_answers_say_how_many_are_needed() -> None:
    promise = regard.calibrate([0.5] * 58, [True] * 58, risk=0.05, confidence=0.95)
    assert not promise
    assert "59 or more" in promise.why
    assert regard.calibrate([0.5] * 59, [True] * 59, risk=0.05, confidence=0.95)


def test_no_answers_promise_nothing() -> None:
    promise = regard.calibrate([], [], risk=0.05)
    assert not promise
    assert promise.count == 0
    assert promise.coverage == 0


def test_equal_scores_are_accepted_together_or_not_at_all() -> None:
    # A wrong half of a tie cannot be told from its right half.
    scores = [1.0] * 100 + [0.0] * 100
    correct = [True] * 150 + [False] * 50
    promise = regard.calibrate(scores, correct, risk=0.1, confidence=0.95)
    assert promise.accepted == 100
    assert promise.accepts([1.0, 0.0]).tolist() == [True, False]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_two_valued_scores_of_every_type_are_told_apart_in_their_own_type(dtype: torch.dtype) -> None:
    scores = torch.tensor([1] * 100 + [0] * 100).to(dtype)
    correct = torch.tensor([1] * 100 + [0] * 100)
    promise = regard.calibrate(scores, correct, risk=0.1, confidence=0.95)
    assert promise.threshold is not None
    assert promise.accepted == 100
    assert torch.equal(scores >= promise.threshold, correct.bool())
    assert torch.equal(promise.accepts(scores), correct.bool())


def test_lists_arrays_tensors_and_grids_give_one_result() -> None:
    g = torch.Generator().manual_seed(2)
    scores, correct = drawn(g, 300, [0.5], [0.4, 0.01], None)
    wanted = regard.calibrate(scores, correct, risk=0.1, confidence=0.9)
    assert wanted
    for s, c in (
        (scores.tolist(), correct.tolist()),
        (scores.numpy(), correct.numpy()),
        (scores.clone().requires_grad_(), correct.long()),
        (scores.view(3, 5, 20), correct.view(3, 5, 20).float()),
        (tuple(scores.tolist()), np.asarray(correct.tolist(), dtype=np.int8)),
    ):
        assert regard.calibrate(s, c, risk=0.1, confidence=0.9) == wanted


def test_infinite_scores_are_scores() -> None:
    scores = torch.tensor([math.inf] * 100 + [-math.inf] * 100)
    promise = regard.calibrate(scores, [True] * 100 + [False] * 100, risk=0.1, confidence=0.95)
    assert promise.accepted == 100
    assert promise.accepts([math.inf, 0.0, -math.inf, math.nan]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("scores", "correct", "says"),
    [
        ([0.1, math.nan], [1, 0], r"NaN at \[1\]"),
        ([0.1, 0.2], [1, 0, 1], r"\(2,\) and correct is \(3,\)"),
        ([0.1, 0.2], [1, 2], r"holds \[2\]"),
        ([0.1, 0.2], [1, math.nan], "right"),
        ([0.1, 0.2], [0.5, 1], r"0\.5"),
        ("high", [1], "scores is 'high'"),
        (None, None, "scores is None"),
        ([[0.1], [0.2, 0.3]], [1, 0], "list of numbers"),
        (torch.zeros(2, dtype=torch.complex64), [1, 0], "complex"),
    ],
)
def test_what_is_no_score_or_no_answer_is_refused_with_its_value(scores: object, correct: object, says: str) -> None:
    with pytest.raises(regard.RegardError, match=says):
        regard.calibrate(scores, correct, risk=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, 1, -0.1, 2, math.nan, "5%", None, True])
def test_risk_and_confidence_lie_between_zero_and_one(wrong: object) -> None:
    with pytest.raises(regard.SpecError, match="risk="):
        regard.calibrate([0.1], [1], risk=wrong)  # type: ignore[arg-type]
    with pytest.raises(regard.SpecError, match="confidence="):
        regard.calibrate([0.1], [1], risk=0.1, confidence=wrong)  # type: ignore[arg-type]


def test_calibrated_coherence_makes_gd_refuse_what_the_promise_refuses() -> None:
    g = torch.Generator().manual_seed(3)
    k = torch.nn.functional.normalize(torch.randn(1, 1, 64, 16, generator=g), dim=-1)
    picked = torch.randint(64, (400,), generator=g)
    noise = torch.rand(400, 1, generator=g) * 1.2 * torch.randn(400, 16, generator=g) / 4
    q = torch.nn.functional.normalize(k[0, 0, picked] + noise * 2, dim=-1)[None, None]
    jump = regard.inspect(q, k, k, "gd").jump()
    promise = regard.calibrate(jump.coherence[0, 0], jump.index[0, 0] == picked, risk=0.1, confidence=0.9)
    assert 0 < promise.coverage < 1
    seen = regard.inspect(q, k, k, f"gd(coherence={promise.threshold})")
    assert torch.equal(seen.accepted[0, 0], promise.accepts(jump.coherence[0, 0]))


def test_calibrated_score_makes_abstain_refuse_what_the_promise_refuses() -> None:
    g = torch.Generator().manual_seed(4)
    k, picked = torch.randn(1, 1, 64, 16, generator=g), torch.randint(64, (400,), generator=g)
    q = (k[0, 0, picked] * torch.rand(400, 1, generator=g) + 0.5 * torch.randn(400, 16, generator=g))[None, None]
    largest = q @ k.mT / 4
    best, index = largest[0, 0].max(-1)
    promise = regard.calibrate(best, index == picked, risk=0.2, confidence=0.9)
    assert promise.threshold is not None
    assert 0 < promise.coverage < 1
    seen = regard.inspect(q, k, k, f"abstain(hard, threshold={promise.threshold - 1e-5})")
    assert torch.equal(seen.accepted[0, 0], promise.accepts(best))
