"""The frame: verdicts need their controls to fail, runs go on where they were broken off, and one bad study stops no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from timed import close, untimed
from typer.testing import CliRunner

import regard.study
from regard.cli.app import app
from regard.errors import ShapeError, SpecError, StateError
from regard.study.frame.report import failed_statements, fill, judged_studies, report
from regard.study.frame.results import Results, code_of, command
from regard.study.frame.run import Failure, missing, run
from regard.study.frame.study import studies, study
from regard.study.frame.verdict import Check, interval, judged

SOURCE = '''
"""A made-up study."""
from regard.study.frame.study import Published, Study
from regard.study.frame.verdict import Check, judged

def run(seed, size):
    {body}
    return {{"effect": 1.0 + 0.01 * seed, "control": 0.01 * seed, "size": size}}

def judge(records):
    return judged(Check("the effect", [r["effect"] for r in records], above=0.5, control=[r["control"] for r in records]))

def draw(records, figure):
    figure.subplots().plot([r["effect"] for r in records], label="effect")

def planted(kind, seed):
    return {{"effect": 0.0 if kind == "negative" else 1.0, "control": float(kind == "control"), "size": "full"}}

STUDY = Study(claim="It works.", source="nobody", protocol="Look.", controls=("nothing",), caption="A line.",
              run=run, judge=judge, draw=draw, planted=planted,
              published=(Published("how much", "2", lambda r: "1", lambda r: True),))
'''


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are studies too; `made_up` is one of them."""
    folder = tmp_path / "more"
    folder.mkdir()
    monkeypatch.setattr(regard.study, "__path__", [*regard.study.__path__, str(folder)])
    (folder / "made_up.py").write_text(SOURCE.format(body="pass"), encoding="utf-8")
    yield folder
    for name in [n for n in sys.modules if n in ("regard.study.made_up", "regard.study.broken")]:
        del sys.modules[name]
        delattr(regard.study, name.rsplit(".", 1)[1])
    code_of.cache_clear()


def test_every_check_must_pass_for_a_claim_to_hold():
    good, bad = Check("a", [1.0, 1.1, 0.9], above=0.1), Check("b", [0.0, 0.1, -0.1], above=0.1, condition="b is left out")
    assert judged(good).kind == "holds"
    assert judged(bad).kind == "does not hold"
    assert str(judged(good, bad)) == "holds only if a"
    assert str(judged(bad, Check("c", [2.0, 2.1], above=1, condition="there is a c"))) == "holds only if there is a c"


def test_a_line_of_a_table_has_the_first_conditions_and_how_many_passed():
    passing = [
        Check(f"{n}", [1.0, 1.0], above=0.5, condition=f"condition {n} of several that are long enough") for n in range(5)
    ]
    verdict = judged(*passing, passing[0], Check("no", [0.0, 0.0], above=0.5))
    assert str(verdict).count("condition 0") == 1, "the same condition is said once"
    assert verdict.short.startswith("holds only if condition 0")
    assert verdict.short.endswith("… (6 of 7 checks)")
    assert len(verdict.short) < 160
    assert judged(passing[0]).short == "holds"


def test_a_check_that_is_needed_decides_alone():
    good, bad = Check("a", [1.0, 1.1, 0.9], above=0.1), Check("b", [0.0, 0.1, -0.1], above=0.1, needed=True)
    assert judged(good, bad).kind == "does not hold"


def test_a_control_that_passes_spoils_its_check():
    spoiled = Check("a", [1.0, 1.1, 0.9], above=0.1, control=[1.0, 1.1, 1.2])
    assert spoiled.seen
    assert not spoiled.passed
    assert judged(spoiled).kind == "does not hold"
    assert "control" in judged(spoiled).because
    assert judged(Check("a", [1.0, 1.1, 0.9], above=0.1, control=[0.0, 0.2, -0.1])).kind == "holds"


def test_an_interval_that_reaches_over_the_bound_is_not_enough():
    assert not Check("a", [0.0, 1.0, 2.0], above=0.5).passed
    assert not Check("a", [0.9, 1.0, 1.1], above=0.5, below=1.05).passed


def test_an_interval_of_five_is_students():
    x = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert x.mean == 3
    assert x.high - x.mean == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert interval([2.0]).low == 2
    wide = interval([float(n % 7) for n in range(400)])
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.1)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_an_interval_of_nothing_or_of_no_numbers_is_refused(values: list[float]):
    with pytest.raises(ShapeError, match="finite numbers"):
        interval(values)


def test_a_check_without_a_bound_is_refused():
    with pytest.raises(SpecError, match="no bound"):
        Check("a", [1.0])


def test_a_file_in_the_folder_is_a_study(made: Path):
    assert "made_up" in studies()
    assert study("made_up").name == "made_up"
    with pytest.raises(SpecError, match="did you mean 'made_up'"):
        study("madeup")


def test_a_pending_study_is_run_by_its_name_and_shown_by_no_report(made: Path, tmp_path: Path):
    (made / "broken.py").write_text(SOURCE.format(body="pass").replace("STUDY =", "PENDING ="), encoding="utf-8")
    assert "broken" not in studies()
    assert "broken" in studies(pending=True)
    # What it is called is no part of what it measures: its lines stay when it becomes a study.
    assert code_of("broken") == code_of("made_up")
    results = Results(tmp_path / "results")
    list(run([study("broken")], "full", results))
    assert len(results.lines(study("broken"), "full")) == 5
    assert "broken" not in [e.study.name for e in judged_studies(results)]


def test_what_is_measured_is_not_measured_again(made: Path, tmp_path: Path):
    results = Results(tmp_path / "out")
    lines = list(run([study("made_up")], "full", results))
    assert [line["seed"] for line in lines if not isinstance(line, Failure)] == [0, 1, 2, 3, 4]
    assert missing([study("made_up")], "full", results) == []
    assert list(run([study("made_up")], "full", results)) == []
    line = results.lines(study("made_up"), "full")[0]
    assert {"seed", "version", "command", "machine", "seconds", "code"} <= line.keys()


@pytest.mark.parametrize(
    ("first", "said"),
    [("bin/regard", "regard study run x"), ("src/regard/cli/main.py", "regard study run x"), ("bin/pytest", "regard.study")],
)
def test_a_command_is_what_was_typed_without_its_folder(first: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [first, "study", "run", "x"])
    assert command() == said


def test_a_line_that_was_cut_off_is_measured_again_and_nothing_else(made: Path, tmp_path: Path):
    results = Results(tmp_path / "out")
    list(run([study("made_up")], "full", results))
    path = results.path("made_up", "full")
    data = path.read_bytes()
    path.write_bytes(data[: data.rfind(b'"record"')])
    assert [unit.seed for unit in missing([study("made_up")], "full", results)] == [4]
    list(run([study("made_up")], "full", results))
    assert [line["seed"] for line in results.lines(study("made_up"), "full")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "text", ["[]", "null", '{"study": "made_up"}', '{"study": "made_up", "size": "full", "seed": "x", "record": {}}', "\x00"]
)
def test_lines_that_nobody_measured_are_passed_over(made: Path, tmp_path: Path, text: str):
    results = Results(tmp_path)
    results.path("made_up", "full").write_text(text + "\n", encoding="utf-8")
    assert results.lines(study("made_up"), "full") == []


def test_another_code_measures_anew_and_another_judge_does_not(made: Path, tmp_path: Path):
    results = Results(tmp_path / "out")
    list(run([study("made_up")], "full", results))
    path = made / "made_up.py"

    def rewritten(text: str) -> int:
        path.write_text(text, encoding="utf-8")
        sys.modules.pop("regard.study.made_up")
        code_of.cache_clear()
        import importlib
        import linecache

        importlib.invalidate_caches()
        linecache.clearcache()
        return len(missing([study("made_up")], "full", results))

    text = path.read_text(encoding="utf-8")
    assert rewritten(text.replace("above=0.5", "above=0.50001")) == 0
    assert rewritten(text.replace("1.0 + 0.01 * seed", "1.00 + 0.011 * seed")) == 5
    # What older code measured is still shown, until it is measured anew.
    assert results.best(study("made_up")) is not None


def test_one_broken_study_stops_no_other(made: Path, tmp_path: Path):
    (made / "broken.py").write_text(SOURCE.format(body="if seed == 1: raise KeyError('no such thing')"), encoding="utf-8")
    results = Results(tmp_path / "out")
    lines = list(run([study("broken"), study("made_up")], "full", results))
    failures = [line for line in lines if isinstance(line, Failure)]
    assert [(f.seed.study, f.seed.seed) for f in failures] == [("broken", 1)]
    assert "no such thing" in failures[0].why
    assert len(lines) == 10
    assert [e.study.name for e in judged_studies(results)] == ["made_up"]


def test_a_record_that_is_no_json_is_a_failure_and_not_a_crash(made: Path, tmp_path: Path):
    (made / "broken.py").write_text(SOURCE.format(body="return {'effect': float('nan')}"), encoding="utf-8")
    lines = list(run([study("broken")], "quick", Results(tmp_path)))
    assert all(isinstance(line, Failure) and "no JSON" in line.why for line in lines)


@pytest.mark.parametrize(("workers", "engine"), [(0, "processes"), (257, "processes"), (1, "threads")])
def test_workers_and_engines_out_of_range_are_refused(tmp_path: Path, workers: int, engine: str):
    with pytest.raises(SpecError):
        list(run([], "quick", Results(tmp_path), workers, engine))


def test_two_processes_measure_what_one_measures(tmp_path: Path):
    name = next(n for n, s in studies().items() if not s.needs)
    chosen = [study(name)]
    alone, beside = (Results(tmp_path / f"{w}") for w in (1, 2))
    list(run(chosen, "mini", alone, workers=1))
    list(run(chosen, "mini", beside, workers=2))
    records = [[line["record"] for line in r.lines(chosen[0], "mini")] for r in (alone, beside)]
    assert len(records[0]) == len(records[1]) == 2
    assert close(untimed(records[0]), untimed(records[1]))


def test_the_report_has_verdicts_first_and_both_numbers(made: Path, tmp_path: Path):
    results = Results(tmp_path / "studies")
    list(run([study("made_up")], "full", results))
    every = report(results)
    text = (tmp_path / "studies.md").read_text(encoding="utf-8")
    assert text.index("✓ holds") < text.index("## made_up")
    assert "| how much | 2 | 1 | [made_up](#made_up) |" in text
    html = (tmp_path / "studies" / "index.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in html
    assert "http" not in html.replace("http-equiv", "")
    summary = json.loads((tmp_path / "studies" / "made_up.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["kind"] == "holds"
    assert summary["figure"][0]["lines"][0]["y"][1] == 1.01
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- verdicts -->\nyesterday\n<!-- /verdicts -->\nb\n", encoding="utf-8")
    fill(page, every, "studies.md")
    assert "yesterday" not in page.read_text(encoding="utf-8")
    assert "[made_up](studies.md#made_up)" in page.read_text(encoding="utf-8")
    assert failed_statements(every, "x").count("\n") == 2
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(StateError, match="no block"):
        fill(page, every, "studies.md")


def test_a_report_of_nothing_says_what_to_run(tmp_path: Path):
    with pytest.raises(StateError, match="regard study run all"):
        report(Results(tmp_path / "studies"))


def test_the_command_runs_lists_shows_and_reports(made: Path, tmp_path: Path):
    out, runner = str(tmp_path / "studies"), CliRunner()

    def said(*args: str) -> str:
        result = runner.invoke(app, ["study", *args, "--out", out])
        assert result.exit_code == 0, result.output
        return result.output

    assert "Not measured" in said("show", "made_up")
    assert "made_up: holds" in said("run", "made_up", "--quick", "--workers", "1")
    assert "holds (quick)" in said("list")
    assert "passed  the effect" in said("show", "made_up")
    assert "contradicted  how much" in said("show", "made_up")
    assert "made_up" in said("report")
    unknown = runner.invoke(app, ["study", "run", "madeup", "--out", out])
    assert unknown.exit_code == 2
    assert "did you mean" in unknown.output
