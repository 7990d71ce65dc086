"""A few people in the demo: the page leads with the score of all of them, says what the numbers say, whichever way they came out, and needs no model to be drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo import demo, two, two_page
from demo.page import Picture, Section, render
from demo.screen import Screen
from demo.style import DARK, LIGHT, Draw, save
from demo.two import CONTROLS, WHOSE, Answer, Asked, Portrait, Score, Two, Word
from demo.two_figures import draw_controls, draw_crowd, draw_selves, draw_spectra
from regard.identity.why import kl
from regard.study.people.natural import natural

LOSSES = {"nobody": 3.5, "fast": 2.7, "own": 2.5, "other": 3.4, "swapped": 2.6, "shuffled": 3.6, "random": 5.0, "context": 1.5}


def portrait(name: str, **losses: float) -> Portrait:
    return Portrait(
        name,
        ("My cat is <Mochi>.", "I play.", "I eat."),
        12,
        (Word(" Mo", 6.0, 0), Word("chi", 1.0, 0), Word(" violin", 3.0, 1)),
        tuple((0.1 * n, 0.2 * n, 0.3 * n) for n in range(5)),
        ((0.4, 0.1, -0.2), (0.3, 0.0, -0.1), (0.2, 0.0, -0.6)),
        LOSSES | losses,
        ((0, 1.2), (4, 1.0)),
        300_000,
    )


CROWD = (
    Score("Mara", 3, {"own": 2, "other": 0, "nobody": 0, "context": 1}, {"own": 2.7, "other": 3.6, "nobody": 3.5, "context": 1.5}, True),
    Score("Tom", 3, {"own": 1, "other": 1, "nobody": 0, "context": 2}, {"own": 2.9, "other": 3.4, "nobody": 3.5, "context": 2.5}, True),
    Score("Una", 2, {"own": 0, "other": 0, "nobody": 0, "context": 0}, {"own": 3.4, "other": 3.5, "nobody": 3.5, "context": 3.5}),
)  # fmt: skip


def fake(**losses: float) -> Two:
    answers = (
        Answer("nobody", ("I", " do", " not", " know")),
        Answer("Mara", (" Your", " cat", " is", " Mo", "chi", "<b>"), (0.1, 0.2, 0.1, 9.0, 0.5, 0.1), 1.2),
        Answer("Tom", (" A", " dog"), (0.5, 2.0), 0.8),
        Answer("Mara, history in context", (" Mochi",)),
        Answer("Tom, history in context", (" Biscuit",)),
    )
    path = ((0.0, 0.0), (1.0, 0.5), (1.5, 0.2), (1.6, 0.1), (2.0, 0.4))
    return Two(
        CROWD,
        (portrait("Mara", **losses), portrait("Tom")),
        (Asked("What is my pet called?", answers, "Mara", ("Mochi", "Mochi the cat")),),
        (path, tuple((y, x) for x, y in path)),
        0.8,
        0.1,
        0.95,
    )


def test_the_page_shows_both_answers_and_escapes_what_a_model_says() -> None:
    shown = [Section(s.title, s.text, [p for p in s.parts if not isinstance(p, Picture)]) for s in two_page.sections(fake())]
    text = render(two_page.TITLE, two_page.lead(fake()), shown, "foot")
    assert "What is my pet called?" in text
    assert "Living as Mara" in text
    assert "Living as Tom" in text
    assert "&lt;b&gt;" in text
    assert "&lt;Mochi&gt;" in text
    assert "<b>Mara" in text
    assert "<Mochi>" not in text
    assert "docs/identity_measured.md" in text
    assert "Mara asks, and had told: Mochi." in text
    assert "nobody looked at answers first" in text
    assert "nobody was left out" in text


def test_the_page_leads_with_the_score_of_everybody_whichever_way_it_came_out() -> None:
    first = two_page.sections(fake())[0]
    assert first.title == "All of them"
    said = two_page.scored(fake())
    assert said.startswith("Of 8 natural questions the own identities answered 3, another person's 1, the model alone 0, and")
    assert "its context 3." in said
    assert "from 3.50 to 3.00 nats per token, 50% of what the whole history in context gives" in said
    blind = tuple(replace(p, losses={**p.losses, "context": 9.0}) for p in CROWD)
    assert "%" not in two_page.scored(replace(fake(), crowd=blind))
    rows = two_page.score_rows(fake())
    assert [r[0] for r in rows] == ["Mara (shown below)", "Tom (shown below)", "Una"]
    assert all(len(r) == len(two_page.score_head()) == 1 + 2 * len(WHOSE) for r in rows)
    assert all(f"{x:.2f}" in two_page.score_alt(fake()) for p in CROWD for x in p.losses.values())


def test_an_answer_that_has_what_was_told_is_marked_and_no_other() -> None:
    text = next(p.html for p in two_page.sections(fake())[1].parts if hasattr(p, "html"))  # pyright: ignore
    mara, tom = text.split("Living as Mara")[1].split("Living as Tom")
    assert "has it" in mara
    assert "has it" not in tom
    assert "has it" not in text.split("Living as Mara")[0]


def test_tokens_of_one_word_stay_together_and_a_bar_is_never_more_than_full() -> None:
    text = next(p.html for p in two_page.sections(fake())[1].parts if hasattr(p, "html"))  # pyright: ignore
    words = re.findall(r'<span class="word">(.*?)</span></span>', text)
    assert any("Mo<" in w and "chi<" in w for w in words)
    heights = [float(x) for x in re.findall(r"--h:([\d.]+)", text)]
    assert len(heights) == 8
    assert max(heights) == 1.0


def test_the_verdict_says_so_when_an_identity_is_somebodys() -> None:
    said = two_page.verdict(fake())
    assert "Mara's own identity does best, 0.90 nats per token below the next: the other person's identity." in said
    assert "failed" not in said


def test_the_remarks_say_what_the_other_identity_gives_too_and_how_near_the_context_is() -> None:
    assert "helps as well, by 0.10 and 0.10 nats" in two_page.remarks(fake())
    assert "50% of what the whole history in context gives" in two_page.remarks(fake())
    assert "helps as well" not in two_page.remarks(fake(other=3.6))
    assert "More than all" in two_page.remarks(fake(own=0.4))
    assert "More than all" not in two_page.remarks(fake())


def test_a_night_that_did_not_help_is_said_to_be_forgotten() -> None:
    both = fake()
    assert two_page.slept(both) == "Mara went from 1.20 to 1.00. Tom went from 1.20 to 1.00."
    worse = replace(both, people=(replace(both.people[0], night=((0, 1.2), (4, 1.9))), both.people[1]))
    assert "Mara did no better than before" in two_page.slept(worse)


def test_a_forgotten_night_stands_beside_one_with_more_looks() -> None:
    both = fake()
    refused = replace(
        both, people=(replace(both.people[0], night=((0, 1.2),)), replace(both.people[1], night=((0, 1.2), (8, 1.0))))
    )
    head, rows = two_page._nights(refused)
    assert head == ("", "before", "step 8")
    assert rows == [("Mara", "1.20", "–"), ("Tom", "1.20", "1.00")]


def test_a_control_far_off_does_not_press_the_others_together(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    draw_controls(figure, LIGHT, fake(random=100.0))
    assert figure.axes[0].get_xlim()[1] < 10
    assert "100.00" in {t.get_text() for t in figure.axes[0].texts}


@pytest.mark.parametrize("rival", ["nobody", "other", "shuffled", "random"])
def test_the_verdict_says_so_when_a_control_does_better(rival: str) -> None:
    said = two_page.verdict(fake(**{rival: 2.0}))
    assert f"For Mara the control failed: “{CONTROLS[rival]}” is 0.50 nats per token better" in said
    assert "Tom's own identity does best" in said


def test_every_control_has_a_row_and_stands_in_the_text_beside_the_picture() -> None:
    rows = two_page.control_rows(fake())
    assert [r[0] for r in rows] == list(CONTROLS.values())
    assert all(len(r) == len(two_page.control_head(fake())) for r in rows)
    assert all(f"{x:.2f}" in two_page.controls_alt(fake()) for x in LOSSES.values())


@pytest.mark.parametrize("draw", [draw_controls, draw_crowd, draw_selves, draw_spectra], ids=lambda d: d.__name__)
def test_a_figure_is_drawn_in_both_themes_and_they_differ(draw: object, tmp_path: Path) -> None:
    def on(figure: object, theme: object) -> None:
        draw(figure, theme, fake())  # pyright: ignore

    drawn: Draw = on
    light, dark = (save(tmp_path / f"{t.name}.png", drawn, (8, 3), t, dpi=40).read_bytes() for t in (LIGHT, DARK))
    assert light != dark
    assert len(light) > 1000


def test_the_demo_writes_one_file_that_holds_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(two, "measure", lambda screen: fake())
    page = demo.build_identities(tmp_path, Screen())
    assert page is not None
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 8
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert all(re.findall(r'<img [^>]*alt="([^"]*)"', text))
    assert "Mara's own identity does best" in capsys.readouterr().out


def test_without_the_model_a_page_of_an_earlier_run_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("old", encoding="utf-8")
    monkeypatch.setattr(two, "measure", lambda screen: None)
    assert demo.build_identities(tmp_path, Screen()) is None
    assert not (tmp_path / "index.html").exists()


def test_kl_at_each_token_has_the_mean_that_why_gives() -> None:
    p, q = torch.randn(2, 5, 11).log_softmax(-1)
    each = two.kl_each(p, q)
    assert each.shape == (5,)
    assert (each > 0).all()
    assert float(each.mean()) == pytest.approx(kl(p, q))
    assert two.kl_each(p, p).max() == 0


def test_ways_in_a_plane_keep_their_lengths_and_begin_in_the_middle() -> None:
    basis = torch.linalg.qr(torch.randn(7, 2)).Q
    flat = torch.randn(2, 4, 2)
    paths, shown = two.plane([x @ basis.mT + 3 for x in flat])
    assert shown == pytest.approx(1)
    for path, x in zip(paths, flat, strict=True):
        assert path[0] == (0, 0)
        seen = torch.tensor(path)
        torch.testing.assert_close(torch.cdist(seen, seen), torch.cdist(x, x), atol=1e-4, rtol=1e-4)
    assert two.plane([torch.zeros(3, 5), torch.zeros(3, 5)])[1] == 1


def test_two_lives_are_measured_from_the_first_word_to_the_page(tmp_path: Path) -> None:
    """The whole study on a tiny model that knows nothing: everything that the page shows is there."""
    from regard.identity.sleep.rule import SleepRule
    from tests.lives import letters, speaking

    sleep = SleepRule(steps=2, look_every=1, batch=2, statements=2)
    crowd = natural(3, 0, "train", short=True)
    found = two.Study(speaking(), letters(), sleep=sleep).of(crowd, Screen())
    assert [p.name for p in found.crowd] == [p.name for p in crowd]
    assert [p.name for p in found.people] == [p.name for p in found.crowd if p.chosen]
    assert [x.whose for x in found.asked] == [p.name for p in found.people for _ in range(two.SHOWN)]
    assert all(set(p.losses) == set(WHOSE) == set(p.right) for p in found.crowd)
    assert all(set(p.losses) == set(CONTROLS) for p in found.people)
    assert all(len(path) == len(crowd[0].history) + 2 for path in found.paths)
    assert found.paths[0][0] == (0.0, 0.0)
    assert -1.0 <= found.self_cosine <= 1.0
    sections = two_page.sections(found)
    assert "How they slept" in [s.title for s in sections]
