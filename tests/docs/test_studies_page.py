"""What the documentation says of the studies is what their data say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.study.frame.report import failed_statements, judged_studies, markdown, verdict_table, verdict_table_in_japanese
from regard.study.frame.results import Results
from regard.study.frame.study import studies

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "studies"
JUDGED = {e.study.name: e for e in judged_studies(Results(FOLDER))}


@pytest.mark.parametrize("name", studies())
def test_every_study_was_measured_in_full(name: str):
    assert name in JUDGED, f"measure it: regard study run {name} --out docs/studies"
    assert JUDGED[name].size == "full"
    assert len(JUDGED[name].lines) >= 5
    assert (FOLDER / f"{name}.png").is_file()


@pytest.mark.parametrize("name", JUDGED)
def test_a_verdict_in_the_docs_is_the_verdict_of_its_data(name: str):
    summary = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["text"] == str(JUDGED[name].verdict), "regard study report --out docs/studies"
    assert [c["passed"] for c in summary["checks"]] == [c.passed for c in JUDGED[name].verdict.checks]


@pytest.mark.parametrize(
    ("page", "table", "link"),
    [
        ("README.md", verdict_table, "docs/studies.md"),
        ("README.ja.md", verdict_table_in_japanese, "docs/studies.md"),
        ("docs/observatory.md", failed_statements, "studies.md"),
    ],
)
def test_tables_in_other_pages_are_those_of_the_data(page: str, table, link: str):
    wanted = table(list(JUDGED.values()), link)
    assert wanted in (ROOT / page).read_text(encoding="utf-8"), (
        "regard study report --out docs/studies --fill README.md --fill README.ja.md --fill docs/observatory.md"
    )


def test_the_report_in_the_docs_is_that_of_the_data():
    assert (ROOT / "docs" / "studies.md").read_text(encoding="utf-8") == markdown(list(JUDGED.values()), "studies")
