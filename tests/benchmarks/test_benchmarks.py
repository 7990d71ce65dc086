"""The harness measures what it says. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as driver
from benchmarks import beside, devices, entmax, iris, memory, picks, report, trace
from benchmarks.harness import Bench, Case, Pairs, Reach, Row, Settings, agree, quartiles, take_turns, trained

TINY = Settings(repeats=2, fewest=1, seconds=0.05, shrink=32, quick=True)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def row(**changes: object) -> Row:
    fields = {"what": "trace | rope", "run": "forward, N=8", "peer": "SDPA", "ours": 0.0012, "theirs": 0.001, "value": 1.2,
              "low": 1.1, "high": 1.3, "reach": Reach(1.15, "times")}  # fmt: skip
    return Row(**(fields | changes))  # pyright: ignore


def test_ratios_pair_the_turns_and_faster_turns_them_over() -> None:
    pairs = Pairs(ours=[1.0, 2.0], theirs=[2.0, 8.0])
    assert pairs.ratios("times") == [0.5, 0.25]
    assert pairs.ratios("faster") == [2.0, 4.0]


def test_quartiles_of_five_are_its_second_and_fourth() -> None:
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0)


def test_reach_is_at_most_for_a_cost_and_at_least_for_a_speedup() -> None:
    assert Reach(1.15, "times").met(1.15)
    assert not Reach(1.15, "times").met(1.16)
    assert Reach(100, "faster").met(100)
    assert not Reach(100, "faster").met(99)
    assert row(reach=None).met is None


def test_turns_are_interleaved_and_the_order_changes() -> None:
    order: list[str] = []

    def ours() -> None:
        order.append("o")
        time.sleep(0.021)

    def peer() -> None:
        order.append("p")
        time.sleep(0.021)

    pairs = take_turns(ours, peer, Settings(repeats=3, seconds=60))
    assert "".join(order) == "oopp" + "op" + "po" + "op"
    assert len(pairs.ours) == len(pairs.theirs) == 3
    assert all(t >= 0.021 for t in (*pairs.ours, *pairs.theirs))


def test_a_row_out_of_time_still_has_the_fewest_pairs() -> None:
    pairs = take_turns(lambda: time.sleep(0.021), lambda: None, Settings(repeats=50, fewest=4, seconds=0))
    assert len(pairs.ours) == 4


def test_a_wrong_result_is_refused_before_anything_is_timed() -> None:
    x = torch.arange(4.0)
    agree((x, x), (x, x + 1e-6), 1e-4, "near")
    with pytest.raises(AssertionError, match="result 1 differs"):
        agree((x, x), (x, x + 1e-3), 1e-4, "far")
    with pytest.raises(AssertionError, match="nan"):
        agree(x, x * float("nan"), 1e-4, "not a number")
    with pytest.raises(AssertionError, match="should be"):
        agree(x, x.view(2, 2), 1e-4, "shape")


def test_table_shows_value_quartiles_reach_and_whether_it_is_met() -> None:
    lines = report.table([row(), row(value=150.0, reach=Reach(100, "faster"), kind="faster"), row(reach=None)]).splitlines()
    assert lines[0] == "| what | run | against | ours | peer | ratio | quartiles | reach | met |"
    assert lines[2] == "| trace \\| rope | forward, N=8 | SDPA | 1.2 ms | 1 ms | 1.2 × | 1.1 – 1.3 | ≤ 1.15 × | no |"
    assert lines[3].endswith("| 150 × faster | 1.1 – 1.3 | ≥ 100 × faster | yes |")
    assert lines[4].endswith("| – | – |")
    assert "順伝播, N=8" in report.table([row()], "ja")


def test_results_are_written_read_back_and_hold_no_date(tmp_path: Path) -> None:
    where = {"torch": "2", "python": "3", "cpu": "one", "threads": 2}
    report.write("some", "Some", [row(note="as it is"), row(reach=None)], where, tmp_path)
    text = (tmp_path / "some.md").read_text(encoding="utf-8")
    assert "- as it is\n" in text
    record = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert set(record) == {"name", "title", "environment", "rows"}
    assert record["rows"][0]["met"] is False
    found = report.read("some", tmp_path)
    assert found == ([row(note="as it is"), row(reach=None)], where)
    assert report.read("other", tmp_path) is None


def test_only_what_stands_between_the_markers_of_a_page_changes(tmp_path: Path) -> None:
    where = {"torch": "2", "python": "3", "cpu": "one", "threads": 2}
    page = "a\n<!-- speed -->\nold\n<!-- /speed -->\nz\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    (tmp_path / "docs" / "speed.md").write_text(page, encoding="utf-8")
    (tmp_path / "README.ja.md").write_text("no markers\n", encoding="utf-8")
    what, run, peer = report.SHOWN[0]
    rows = [row(), row(what=what, run=run, peer=peer)]
    changed = [tmp_path / "README.md", tmp_path / "docs" / "speed.md"]
    assert report.update_docs(tmp_path, rows, where) == changed
    few, everything = (path.read_text(encoding="utf-8") for path in changed)
    for text in (few, everything):
        assert text.startswith("a\n<!-- speed -->\n| what ")
        assert text.endswith("\n<!-- /speed -->\nz\n")
        assert "old" not in text
    assert run in few
    assert "N=8" not in few
    assert run in everything
    assert "N=8" in everything
    assert report.update_docs(tmp_path, rows, where) == changed
    assert [path.read_text(encoding="utf-8") for path in changed] == [few, everything]


def test_every_row_of_the_readme_is_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = {
        (r["what"], r["run"], r["peer"]) for f in results.glob("*.json") for r in json.loads(f.read_text()).get("rows", ())
    }
    assert set(report.SHOWN) <= measured


def test_the_comparison_of_devices_runs_on_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that measures a GPU, on the CPU's own backends: results agree with tiles, forward and backward."""
    monkeypatch.setattr(devices, "LENGTHS", (1024,))
    monkeypatch.setattr(devices, "WINDOW", 9)
    rows = driver.main(["--device", "cpu", "--out", str(tmp_path)], TINY)
    named = {r.what.split(" (")[0] for r in rows}
    assert named == set(devices.SPECS)
    assert {r.peer for r in rows} == {"SDPA", "package entmax"}
    assert {r.run for r in rows} == {"forward, N=32", "forward + backward, N=32"}
    assert "cpu, torch" in (tmp_path / "devices_cpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (["--device", "xpu"], "finds no xpu device here"),
        (["--device", "abacus"], "names no device of torch"),
        (["trace", "--device", "cpu"], "without trace"),
        (["--dtype", "float16"], "--dtype is for --device"),
    ],
)
def test_a_device_that_is_not_there_is_a_clear_error(
    arguments: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        driver.main(arguments)
    assert because in capsys.readouterr().err


def test_every_timed_comparison_agrees_with_its_peer_on_short_rows(tmp_path: Path) -> None:
    modules = {"trace": trace, "entmax": entmax, "picks": picks}
    rows = driver.measure(Bench(TINY), modules, tmp_path)
    assert len(rows) == 5 + 8 + 3
    assert all(r.low is not None and r.high is not None and r.low <= r.value <= r.high for r in rows)
    assert {p.name for p in tmp_path.iterdir()} == {f"{n}.{e}" for n in modules for e in ("json", "md")}


def test_bisection_on_iris_chooses_the_nearest_flower() -> None:
    x = iris.flowers()[0][:40]
    exact = torch.cdist(torch.tensor(x), torch.tensor(x), compute_mode="donot_use_mm_for_euclid_dist")
    near = exact.fill_diagonal_(float("inf")).amin(-1)
    assert torch.allclose(exact.gather(1, iris.bisected(x).unsqueeze(1)).squeeze(1), near)


def test_footprint_counts_the_worst_moment_and_not_what_is_returned() -> None:
    x = torch.ones(1000)

    def call() -> tuple[torch.Tensor, ...]:
        wide = x.repeat(3)
        wider = wide.repeat(2)
        return (wider[:1000] * 2,)

    found = memory.footprint(call)
    assert found.largest == 4 * 6000
    # The number 2 is a tensor of a few bytes for a moment.
    assert 0 <= found.peak - 4 * (3000 + 6000) < 64


def test_footprint_sees_the_square_matrix_of_plain_attention() -> None:
    q = torch.randn(1, 1, 64, 8, requires_grad=True)
    found = memory.footprint(trained(lambda x: torch.softmax(x @ x.mT, -1) @ x, (q,)))
    assert found.largest >= 64 * 64 * 4


def test_every_selection_has_a_row_of_memory() -> None:
    assert all(isinstance(c, Case) for c in memory.cases(Bench(TINY)))


def test_an_unknown_name_says_which_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        driver.main(["speed"])
    assert "there are trace, positions" in capsys.readouterr().err


@pytest.mark.parametrize("where", beside.ELSEWHERE)
def test_a_neighbour_works_while_it_is_let_and_is_gone_afterwards(where: str) -> None:
    found = beside._row(Bench(TINY), "sparsemax", where)  # pyright: ignore
    assert found.value > 0
    assert where in found.run
    with beside.neighbour(beside.ELSEWHERE[where]) as other:
        assert other.poll() is None
        assert (os.getsid(other.pid) == os.getsid(0)) is not beside.ELSEWHERE[where]
    assert other.poll() is not None


@pytest.mark.parametrize("what", ["GPT 6 × 384", beside.OWN_THREADS])
def test_a_training_step_beside_other_work_leaves_the_threads_as_they_were(what: str) -> None:
    before = torch.get_num_threads()
    assert beside._row(Bench(TINY), what, "a process of this session").value > 0  # pyright: ignore
    assert torch.get_num_threads() == before


def test_third_parties_are_what_neither_of_us_used(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = iter((10.0, 10.5))
    monkeypatch.setattr(beside, "seconds_worked", lambda: next(worked))
    monkeypatch.setattr(beside.time, "process_time", iter((1.0, 1.2)).__next__)
    monkeypatch.setattr(beside.time, "perf_counter", iter((0.0, 0.1, 0.9, 1.0)).__next__)
    assert beside._watched(lambda: None, 1)[1] == pytest.approx(0.3)  # pyright: ignore
