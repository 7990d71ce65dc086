"""The study of keepers: how shares are counted, and that the table in the docs is that of the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.study.frame.results import Results, records_of
from regard.study.frame.study import study
from regard.study.keepers import planted, shares_of, table

ROOT = Path(__file__).parents[2]


def test_whoever_gains_little_from_the_whole_history_weighs_little():
    records = [planted("positive", seed) for seed in range(2)]
    records[1]["natural"] |= {"context": 3.9, "keep": {"words 0.25": 3.8}}
    records[0]["natural"]["keep"]["words 0.25"] = 3.0
    shares = shares_of(records, "natural", "words 0.25")
    assert sum(shares) / 2 == pytest.approx((1.0 + 0.2) / (2.0 + 0.1))


def test_the_table_in_the_docs_is_that_of_the_data():
    measured = Results(ROOT / "docs" / "studies").best(study("keepers"))
    assert measured is not None, "measure it: regard study run keepers --out docs/studies"
    assert table(records_of(measured[1])) in (ROOT / "docs" / "identity_measured.md").read_text(encoding="utf-8")
