"""The evidence: intervals are those of a bootstrap over people, controls keep what they say, and a broken run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import apart, someone

from regard.identity.state import Base
from regard.identity.write.trace import spectrum
from regard.study.evaluate import measure, records, rotated, shuffled
from regard.study.evidence import PEERS, Figure, bootstrap, goals, markdown, speaker_table, summary

BASE = Base("f" * 64, depth=3, key_heads=2, head_width=8)


def test_an_interval_is_about_two_standard_errors_either_way():
    sample = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    found = bootstrap(sample.tolist())
    error = float(sample.std()) / math.sqrt(400)
    assert found.mean == pytest.approx(float(sample.mean()))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.15 * error)
    assert found.count == 400
    assert bootstrap(sample.tolist()) == found


def test_pairs_stay_pairs():
    bottom = [1.0, 5.0, 2.0, 9.0, 3.0, 0.5]
    # Twice as much for each person is twice as much in every draw; drawn apart, it would spread.
    found = bootstrap([2 * x for x in bottom], bottom)
    assert found.mean == pytest.approx(2)
    assert (found.low, found.high) == pytest.approx((2, 2))
    other = bootstrap([2 * x for x in reversed(bottom)], bottom)
    assert other.mean == pytest.approx(2)
    assert other.high - other.low > 0.5


def test_one_person_has_no_interval():
    assert bootstrap([0.7]) == Figure(pytest.approx(0.7), pytest.approx(0.7), pytest.approx(0.7), 1)


def test_figures_are_written_with_their_sign():
    assert str(Figure(-0.5, -0.75, 0.25, 3)) == "-0.500 (-0.750 to +0.250)"
    assert Figure(0.5, 0.25, 0.75, 3).percent() == "50% (25%–75%)"


@pytest.mark.parametrize("form", ["key_bias", "self_token"])
def test_a_rotated_state_keeps_spectrum_and_lengths_and_nothing_else(form: Any):
    me = someone(BASE, form=form)
    other = rotated(me, 1)
    assert me.trace is not None
    assert me.self is not None
    assert other.trace is not None
    assert other.self is not None
    assert apart(spectrum(me.trace), spectrum(other.trace)) < 0.05 * float(spectrum(me.trace).abs().max())
    for a, b in ((me.imprints.k, other.imprints.k), (me.imprints.v, other.imprints.v)):
        assert apart(a.dense().norm(dim=-1), b.dense().norm(dim=-1)) < 0.05
        assert apart(a.dense(), b.dense()) > 0.5
    heads = [x.self.s.view(3, -1, 2, 8).norm(dim=-1) for x in (me, other)]  # type: ignore[union-attr]
    assert apart(heads[0], heads[1]) < 1e-4
    assert apart(me.self.s, other.self.s) > 0.1
    # Keys and values of one head are turned together, so that who is near to whom stays.
    gram = [x.imprints.k.dense() @ x.imprints.k.dense().mT for x in (me, other)]
    assert apart(gram[0], gram[1]) < 0.2
    assert rotated(me, 1).digest() == other.digest() != rotated(me, 2).digest()
    assert torch.equal(other.imprints.weight, me.imprints.weight)


def test_a_shuffled_state_has_the_same_numbers_in_other_places():
    me = someone(BASE, slots=9)
    other = shuffled(me, 3)
    assert torch.equal(me.imprints.k.codes, other.imprints.k.codes)
    assert not torch.equal(me.imprints.v.codes, other.imprints.v.codes)
    for name, x in me.tensors().items():
        assert torch.equal(x.flatten().sort().values, other.tensors()[name].flatten().sort().values)
    assert shuffled(me, 3).digest() == other.digest()
    assert shuffled(me.only("imprints"), 3).trace is None


def test_a_line_that_was_cut_off_is_skipped_and_takes_no_other_with_it(tmp_path: Path):
    out = tmp_path / "deep" / "people.jsonl"
    assert records(out) == []
    measured: list[int] = []

    def each(i: int) -> dict[str, Any]:
        measured.append(i)
        return {"i": i, "name": "Zoë \u2028 日"}

    measure(each, [0, 1], out)
    whole = out.read_bytes()
    for lost in (1, 5, 8, 9, len(whole) // 2 - 1):
        # A cut may go through a letter of several bytes.
        out.write_bytes(whole[:-lost])
        measure(each, [0, 1], out)
        found = records(out)
        assert sorted(r["i"] for r in found) == [0, 1]
        assert found[0] == {"i": 0, "name": "Zoë \u2028 日"}
    before = len(measured)
    measure(each, [0, 1], out)
    assert len(measured) == before, "who is in the file is not measured again"


def person(i: int, **more: Any) -> dict[str, Any]:
    """Made-up figures: the base needs 4 nats, the history in context saves 2, everything else is in between."""
    base = 4.0 + 0.1 * i

    def state(own: float, on_other: float) -> dict[str, float]:
        return {
            "own": base - own,
            "on_other": base + 0.1 - on_other,
            "shuffled": base + 0.5,
            "random": base + 0.25,
            "bytes": 1000 + i,
        }

    keepers = ("shock", "learned", "merged")
    return {
        "i": i, "tokens": 100, "base": base, "base_other": base + 0.1, "context": base - 2.0,
        "keep": {f"{k} {s}": base - 1.0 for k in keepers for s in (0.125, 0.25, 0.5)},
        "imprints": state(1.0, 0.2), "trace_fast": state(0.1, 0.1), "self_fast key_bias": state(0.3, 0.0),
        "self_fast self_token": state(0.4, 0.0), "aba": base - 0.9, "damage_fast": {"chat": 0.01, "prose": 0.02},
        **more,
    }  # fmt: skip


def night(i: int) -> dict[str, Any]:
    rest = {"damage": {"chat": 0.03, "prose": 0.04}, "step": 8}
    names = ("everything 0.25", "imprints 0.125", "imprints 0.25", "imprints 0.5", "trace", "self")
    found: dict[str, Any] = {n: {**person(i)["imprints"], **rest} for n in names}
    found["recall"] = {"questions": 8, "context": 6, "own": 3, "nobody": 0, "other_questions": 7, "other": 1, "said": []}
    return found


def test_a_summary_is_the_means_of_the_people():
    s = summary([person(2), person(0), person(1)])
    assert s["people"] == 3
    assert s["base"].mean == pytest.approx(4.1)
    assert s["gain"].mean == pytest.approx(2.0)
    assert s["keep"]["shock 0.25"].mean == pytest.approx(0.5)
    assert s["aba"].mean == pytest.approx(0.45)
    state = s["states"]["imprints"]
    assert state["own"].mean == pytest.approx(-1.0)
    assert state["shuffled"].mean == pytest.approx(0.5)
    assert state["random"].mean == pytest.approx(0.25)
    assert state["bytes"] == 1002
    # Person i's state on i + 1's conversation: 0.2 better than that person's own base.
    assert state["other"].mean == pytest.approx(-0.2)
    assert state["other"].count == 2
    assert state["own − other"].mean == pytest.approx(-0.8)
    assert "slept" not in s


def test_people_who_are_not_neighbours_make_no_pairs():
    s = summary([person(0), person(2)])
    assert "other" not in s["states"]["imprints"]
    assert "–" in markdown(s)


def test_a_summary_of_people_who_slept_has_their_nights_and_what_they_recalled():
    s = summary([person(i, sleep=night(i)) for i in range(3)])
    assert s["slept"]["everything 0.25"]["share"].mean == pytest.approx(0.5)
    assert s["slept"]["trace"]["damage"]["prose"].mean == pytest.approx(0.04)
    assert s["recall"]["own"].mean == pytest.approx(3 / 8)
    assert s["recall"]["other"].mean == pytest.approx(1 / 7)
    assert s["recall"]["own of context"].mean == pytest.approx(0.5)


def test_goals_are_met_or_missed_by_what_was_measured():
    assert [g.what for g in goals(summary([person(0)]))] == [], "nothing is asked of what was not measured"
    rows = [person(i, sleep=night(i)) for i in range(3)]
    found = {g.what: g for g in goals(summary(rows))}
    assert found["imprints, fast: own − another's"].met
    assert not found["trace, fast: own − another's"].met
    assert found["self as a token, fast: own − another's"].met
    assert not found["everything 0.25, slept: share of the gain"].met
    assert found["trace alone, slept: own − base"].met
    assert not found["trace alone, slept: another's − base"].met
    assert not found["recall, of what is recalled in context"].met
    assert not found["neutral text in a chat, everything slept"].met
    assert found["bytes of a person, everything at a quarter"].met
    assert "imprints, fast, at 12.5 / 25 / 50%" not in found
    for share, own in ((0.125, 1.0), (0.25, 1.0), (0.5, 1.5)):
        for r in rows:
            r["keep"] |= {f"{peer} {share}": r["base"] - own + (0.2 if peer != "random" else 0.1) for peer in PEERS}
    keep = {g.what: g for g in goals(summary(rows))}["imprints, fast, at 12.5 / 25 / 50%"]
    assert not keep.met, "behind at one budget is behind"
    assert "70% (random)" in keep.asked
    assert "**missed**" in markdown(summary(rows))


def test_tables_have_as_many_cells_in_every_row():
    s = summary([json.loads(json.dumps(person(i, sleep=night(i)))) for i in range(3)])
    text = markdown(s)
    assert "nan" not in text
    width = 0
    for line in text.splitlines():
        cells = line.count("|")
        if line.startswith("|"):
            assert width in (0, cells), line
            width = cells
        else:
            width = 0
    assert "| shock | 50% (50%–50%) | 50% (50%–50%) | 50% (50%–50%) |" in text
    assert "45%" in text


def test_a_table_of_speakers_says_who_helped():
    rows = [
        {"i": i, "name": f"S{i}", "tokens": 9, "base": 4.0, "base_other": 4.0, "context": 3.5, "keep": {"learned": 3.75},
         "imprints": person(i)["imprints"]}
        for i in range(3)
    ]  # fmt: skip
    text = speaker_table(rows)
    assert "3 speakers" in text
    assert "| learned | -0.250 (-0.250 to -0.250) |" in text
