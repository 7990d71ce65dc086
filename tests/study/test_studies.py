"""What every study must do: measure in miniature, judge planted data rightly, and draw. A new study is tested by being there."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
from matplotlib.figure import Figure
from timed import close, untimed

from regard.study.frame.figure import shown
from regard.study.frame.run import Failure, Seed, measured
from regard.study.frame.study import PLANTS, Plant, Record, Study, studies
from regard.study.frame.verdict import Verdict

STUDIES = studies(pending=True)
EVERY = pytest.mark.parametrize("name", STUDIES)


def planted(study: Study, kind: Plant) -> list[dict[str, Any]]:
    return [study.planted(kind, seed) for seed in study.seeds_of("full")]


@cache
def mini(name: str, seed: int) -> Record:
    line = measured(Seed(name, seed, "mini"), "test")
    assert not isinstance(line, Failure), line.why
    return line["record"]


@EVERY
def test_a_study_in_miniature_gives_json_that_can_be_judged_and_drawn(name: str):
    study = STUDIES[name]
    if study.lacking:
        pytest.skip(f"needs {', '.join(study.lacking)}")
    records = [mini(name, seed) for seed in study.seeds_of("mini")]
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    verdict = study.judge(records)
    assert isinstance(verdict, Verdict)
    assert all(math.isfinite(check.measured.mean) for check in verdict.checks)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    study.draw(records, figure)
    figure.draw_without_rendering()
    panels = shown(figure)
    assert panels
    assert all(panel.keys() & {"lines", "bars", "points", "pictures"} for panel in panels if panel.get("x") or panel.get("y"))
    for statement in study.published:
        assert statement.measured(records)
        assert isinstance(statement.contradicted(records), bool)


@EVERY
def test_the_same_seed_gives_the_same_record(name: str):
    study = STUDIES[name]
    if study.lacking:
        pytest.skip(f"needs {', '.join(study.lacking)}")
    # What was timed differs from run to run, and its name says so.
    first, again = untimed(mini(name, 0)), untimed(study.run(0, "mini"))
    assert close(first, again) or first == again, "the second is there for the difference that it prints"


@pytest.mark.parametrize(
    "other", [{"a": [1.0, 2]}, {"a": [1.0, 2, 3.000001]}, {"a": [1.0, 2.0, 3.0]}, {"b": [1.0, 2, 3.0]}, {}]
)
def test_a_record_is_close_to_what_differs_in_rounding_alone(other: Record):
    assert close({"a": [1.0, 2, 3.0]}, {"a": [1.0 + 1e-15, 2, 3.0]})
    assert not close({"a": [1.0, 2, 3.0]}, other)


@EVERY
def test_a_planted_truth_holds(name: str):
    verdict = STUDIES[name].judge(planted(STUDIES[name], "positive"))
    assert verdict.kind == "holds", verdict.because


@EVERY
def test_a_planted_untruth_does_not_hold(name: str):
    assert STUDIES[name].judge(planted(STUDIES[name], "negative")).kind == "does not hold"


@EVERY
def test_what_the_control_shows_too_never_holds(name: str):
    assert STUDIES[name].judge(planted(STUDIES[name], "control")).kind == "does not hold"


@EVERY
def test_planted_records_have_the_shape_of_measured_ones(name: str):
    study = STUDIES[name]
    if study.lacking:
        pytest.skip(f"needs {', '.join(study.lacking)}")
    record = mini(name, 1)
    for kind in PLANTS:
        assert study.planted(kind, 0).keys() <= record.keys() | {"timed"}, kind


@EVERY
def test_a_study_says_what_it_tests_in_plain_sentences(name: str):
    study = STUDIES[name]
    assert study.claim.endswith(".")
    assert study.protocol.endswith(".")
    assert study.caption.endswith(".")
    assert study.controls
    assert study.seeds >= 5
    assert study.source
