"""Risk against coverage and its area, by closed forms and by counting every order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.abstention import auroc, risk_coverage

small = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6)


def aurc_of(order: list[bool]) -> float:
    """The definition: the mean of the risk of the first 1, 2, … n."""
    return sum(sum(not c for c in order[: j + 1]) / (j + 1) for j in range(len(order))) / len(order)


@given(small)
@settings(max_examples=100, deadline=None)
def test_aurc_is_the_mean_over_all_orders_of_equal_scores(rows: list[tuple[int, bool]]) -> None:
    scores, correct = [s for s, _ in rows], [c for _, c in rows]
    orders = [p for p in itertools.permutations(rows) if all(a[0] >= b[0] for a, b in itertools.pairwise(p))]
    wanted = sum(aurc_of([c for _, c in p]) for p in orders) / len(orders)
    curve = risk_coverage(scores, correct)
    assert curve.aurc == pytest.approx(wanted, abs=1e-12)
    assert curve.best_aurc == pytest.approx(min(aurc_of(list(p)) for p in itertools.permutations(correct)), abs=1e-12)
    assert curve.excess >= -1e-12


@given(small)
@settings(max_examples=100, deadline=None)
def test_curve_counts_what_each_threshold_gives(rows: list[tuple[int, bool]]) -> None:
    curve = risk_coverage([s for s, _ in rows], [c for _, c in rows])
    for t, c, r in zip(curve.thresholds.tolist(), curve.coverage.tolist(), curve.risk.tolist(), strict=True):
        taken = [right for s, right in rows if s >= t]
        assert c == pytest.approx(len(taken) / len(rows))
        assert r == pytest.approx(taken.count(False) / len(taken))
        assert curve.risk_at(c) == r
    assert curve.coverage[-1] == 1


def test_score_that_says_nothing_has_the_error_rate_as_area() -> None:
    curve = risk_coverage([0.0] * 40, [True] * 30 + [False] * 10)
    assert curve.aurc == pytest.approx(0.25, abs=1e-12)
    assert curve.risk_at(0.1) == 0.25


def test_all_right_has_no_area_and_all_wrong_the_whole() -> None:
    assert risk_coverage([3, 2, 1], [1, 1, 1]).aurc == 0
    assert risk_coverage([3, 2, 1], [0, 0, 0]).aurc == 1
    assert risk_coverage([3, 2, 1], [0, 0, 0]).excess == 0


def test_best_area_tends_to_its_closed_form() -> None:
    # r + (1 − r) ln(1 − r), the limit that Geifman, Uziel & El-Yaniv print.
    n, r = 20_000, 0.2
    curve = risk_coverage(torch.arange(n).flip(0), torch.arange(n) < (1 - r) * n)
    assert curve.excess == pytest.approx(0, abs=1e-12)
    assert curve.best_aurc == pytest.approx(r + (1 - r) * math.log(1 - r), abs=1e-4)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30).filter(
        lambda x: 0 < sum(f for _, f in x) < len(x)
    )
)
@settings(max_examples=100, deadline=None)
def test_auroc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool]]) -> None:
    pairs = [(a > b) + 0.5 * (a == b) for a, f in rows if f for b, h in rows if not h]
    assert auroc([s for s, _ in rows], [f for _, f in rows]) == pytest.approx(sum(pairs) / len(pairs))


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(regard.ShapeError, match="0 of 2 are positive"):
        auroc([1, 2], [0, 0])
    with pytest.raises(regard.ShapeError, match="no answers"):
        risk_coverage([], [])
    with pytest.raises(regard.ShapeError, match=r"coverage=0"):
        risk_coverage([1], [1]).risk_at(0)
    with pytest.raises(regard.NumericsError, match="NaN"):
        risk_coverage([math.nan], [1])
