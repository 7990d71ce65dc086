"""The tour: what it measures comes out as mathematics says, and its page needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo import demo, speed, two
from demo import map as two_axis
from demo.__main__ import main
from demo.extras import need
from demo.page import Code, Section, Table, render
from demo.scene import EIGHT, look, scene
from demo.screen import Screen


def test_demo_writes_a_page_that_needs_nothing_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, chart = speed.measure, two_axis.measure
    monkeypatch.setattr(speed, "measure", lambda tick: clock(tick, length=32, rounds=1))
    monkeypatch.setattr(two_axis, "measure", lambda tick: chart(tick, seeds=(0,)))
    monkeypatch.setattr(two, "measure", lambda screen: None)
    assert main(["demo", str(tmp_path)]) == 0
    text = (tmp_path / "operator.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script|@import|url\(", text)
    pictures = set(re.findall(r'(?:src|srcset)="([^"]+)"', text))
    assert len(pictures) == 6
    assert all(p.startswith("data:image/png;base64,") for p in pictures)
    assert "The same pretrained model under another attention" in text
    assert all(re.findall(r'<img [^>]*alt="([^"]+)"', text))
    said = capsys.readouterr().out
    assert "euclidean | gd" in said
    assert "\x1b[" not in said
    assert said.strip().endswith("regard studio")


def test_the_eight_views_do_what_their_remarks_say() -> None:
    s = scene()
    seen = {v.title: look(v, s) for v in EIGHT}
    assert len(seen) == 8
    assert (seen["hard"].support == 1).all()
    assert (seen["top-k"].support <= 3).all()
    assert seen["sparsemax"].support.float().mean() < seen["softmax"].support.float().mean()
    assert 0 < (~seen["GD"].accepted[0, 0]).sum() < 12
    far = torch.arange(24).unsqueeze(1) - torch.arange(24)
    reach = {n: float((seen[n].weights(heads=[0])[0, 0] * far).sum()) for n in ("softmax", "ALiBi")}
    assert reach["ALiBi"] < 0.6 * reach["softmax"]


def test_the_map_puts_blending_left_selection_right_and_refusal_above() -> None:
    values = two_axis.thresholds()
    place = {e.label: two_axis.place(e.label, e.spec.format(**values), seeds=(0, 1)) for e in two_axis.ENTRIES}
    assert place["rbf"].effective > place["softmax"].effective > place["sparsemax"].effective > place["hard"].effective == 1
    for label in ("softmax", "entmax (1.5)", "hard", "GD, no threshold", "Hopfield, 3 steps"):
        assert place[label].refusal <= 0.5
        assert place[label].fooled == pytest.approx(1, abs=1e-4)
    for label in ("GD, coherent", "abstain, threshold", "abstain, null slot"):
        assert place[label].refusal > 0.7
        assert place[label].kept > 0.5


def test_a_mechanism_that_refuses_everything_would_show_it_in_what_it_keeps() -> None:
    nothing = two_axis.place("", "dot | abstain(softmax, threshold=1000)", seeds=(0,))
    assert nothing.refusal == 1
    assert nothing.kept == 0


def test_clock_gives_each_mechanism_a_ratio() -> None:
    found = speed.measure(length=32, rounds=1)
    assert [t.spec for t in found] == list(speed.SPECS)
    assert all(t.ratio > 0 and t.backend in ("sdpa", "flash", "tiled") for t in found)


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(ImportError, match=r"regard\[figures\]"):
        need("a_module_that_is_not_there")


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        need("a_module_that_is_not_there")

    monkeypatch.setattr(demo, "build", refuse)
    assert main(["demo", str(tmp_path)]) == 1
    assert "pip install 'regard[figures]'" in capsys.readouterr().err


def test_plain_table_lines_up(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table("title", ("name", "ms"), [("a", "1.0"), ("long name", "10.0")])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "title"
    assert len({len(line) for line in lines[1:]}) == 1


def test_page_escapes_what_it_is_given() -> None:
    page = render("<t>", "a & b", [Section("s", "x", [Code("<b>"), Table("c", ("h",), [("<i>",)])])], "foot")
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;i&gt;" in page


def test_import_regard_does_not_import_the_figures() -> None:
    code = "import sys, regard; print([m for m in ('matplotlib', 'rich', 'demo') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
