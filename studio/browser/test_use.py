"""The page as it is used: by mouse and keyboard, with exports, links and dialogs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import ENVIRONMENT, PYTHON, SHOTS, Open
from playwright.sync_api import Page, expect

PATIENCE = 120_000
NASTY = "<img src=x onerror=\"document.title='owned'\">"


def strip_is_coloured(page: Page) -> None:
    expect(page.locator(".strip button[style*=background]").nth(3)).to_be_visible(timeout=PATIENCE)


def test_what_a_token_looks_at_follows_the_keyboard(visit: Open):
    page = visit(f"#/attention?text={quote('My cat is called Mochi.')}&row=3")
    strip_is_coloured(page)
    heading = page.locator(".stage h2").first
    before = heading.inner_text()
    page.locator(".strip button[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(heading).not_to_have_text(before)
    page.locator(".scroller").first.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    expect(page.locator(".map .said").first).to_contain_text("→")
    assert "row=3" in page.url


def test_table_says_what_the_map_shows(visit: Open):
    page = visit(f"#/attention?text={quote('My cat is called Mochi.')}&row=5")
    strip_is_coloured(page)
    page.locator(".maps summary").click()
    weights = [float(x) for x in page.locator(".maps td.num").all_inner_texts()]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1, abs=0.01)


def test_link_shows_the_same_again(visit: Open):
    page = visit(f"#/attention?text={quote('The sea is')}")
    strip_is_coloured(page)
    page.get_by_label("Layer", exact=True).fill("2")
    page.get_by_label("Compare with").fill("hard")
    page.get_by_role("button", name="Add").click()
    expect(page.locator(".maps canvas")).to_have_count(2, timeout=PATIENCE)
    again = visit(address=page.url)
    expect(again.locator(".maps canvas")).to_have_count(2, timeout=PATIENCE)
    assert again.get_by_label("Layer", exact=True).input_value() == "2"
    assert again.get_by_label("Text", exact=True).input_value() == "The sea is"


def test_refused_mechanism_is_said_beside_the_others(visit: Open, server: str):
    page = visit("#/studies")
    page.goto("about:blank")
    context = page.context
    bare = context.new_page()
    bare.goto(f"{server}/studio/#/attention?text=abc&spec=nonsense")
    expect(bare.locator(".maps .bad-note")).to_contain_text("nonsense")


def test_rows_of_a_long_text_come_as_it_is_scrolled(visit: Open):
    page = visit("#/studies")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.post_data or "") if r.url.endswith("/v1/attention") else None)
    page.goto(page.url.split("#")[0] + f"#/attention?text={quote('word ' * 180)}&row=0")
    page.locator(".scroller").first.wait_for(timeout=PATIENCE)
    page.wait_for_timeout(1500)
    rows = {tuple(json.loads(x)["rows"]) for x in asked}
    assert len(rows) > 1
    assert max(last for _, last in rows) < 500, "what is out of sight is not asked for"
    page.locator(".scroller").first.evaluate("e => e.scrollTop = e.scrollHeight")
    page.wait_for_timeout(1500)
    assert max(json.loads(x)["rows"][1] for x in asked) == 900


def test_pictures_and_numbers_can_be_saved(visit: Open, tmp_path: Path):
    for view in ("attention?text=abcdef&row=3", "mechanisms", "identity?id=mara", "studies?study=heads", "chat"):
        page = visit(f"#/{view}")
        page.wait_for_timeout(1500)
        for kind in ("PNG", "JSON"):
            with page.expect_download(timeout=PATIENCE) as waiting:
                page.get_by_role("button", name=kind, exact=True).click()
            data = Path(waiting.value.path()).read_bytes()
            if kind == "PNG":
                assert data.startswith(b"\x89PNG")
                (SHOTS / "exports").mkdir(parents=True, exist_ok=True)
                (SHOTS / "exports" / f"{view.partition('?')[0]}.png").write_bytes(data)
                assert len(data) > 1500
            else:
                json.loads(data)


def test_what_anybody_says_is_text_and_never_markup(visit: Open):
    page = visit(f"#/chat?prompt={quote(NASTY)}&people=,mara&tokens=4")
    page.locator("main form button.main").click()
    expect(page.locator(".asked")).to_contain_text("<img src=x")
    expect(page.locator("article .said")).to_have_count(1, timeout=PATIENCE)
    page.goto(page.url.split("#")[0] + f"#/attention?text={quote(NASTY)}")
    strip_is_coloured(page)
    assert page.locator("main img").count() == 0
    assert page.title() != "owned"


def test_key_is_kept_in_this_tab_alone(visit: Open):
    page = visit("#/studies")
    page.locator("header details summary").click()
    page.get_by_label("Key", exact=True).fill("rg-secret")
    page.get_by_role("button", name="Use this key").click()
    assert page.evaluate("sessionStorage.getItem('regard.key')") == "rg-secret"
    assert "rg-secret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    with page.expect_request(lambda r: "/v1/" in r.url) as asked:
        page.get_by_role("link", name="Attention").click()
    assert asked.value.headers["authorization"] == "Bearer rg-secret"


def test_query_moves_by_keyboard_and_the_weights_follow(visit: Open):
    page = visit("#/mechanisms?g=euclidean&s=softmax&at=0,0")
    table = page.locator("section[aria-label='What the query weighs'] tbody")
    expect(table).to_be_visible(timeout=PATIENCE)
    before = table.inner_text()
    page.locator(".query").focus()
    for _ in range(4):
        page.keyboard.press("Shift+ArrowUp")
    expect(table).not_to_have_text(before)
    page.wait_for_timeout(300)
    assert "at=0%2C1" in page.url
    shares = [float(x) for x in table.locator("td.num").all_inner_texts()]
    assert sum(shares) == pytest.approx(1, abs=0.01)


def test_gd_refuses_when_coherence_is_asked_for(visit: Open):
    page = visit("#/mechanisms?g=euclidean&s=gd&at=2,2&gd.coherence=4&gd.beta=6")
    expect(page.locator(".query.refused")).to_be_visible(timeout=PATIENCE)


def test_somebody_is_begun_told_forked_rolled_back_made_to_forget_and_deleted(visit: Open):
    page = visit("#/identity")
    page.get_by_role("button", name="New identity").click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.get_by_label("Name").fill("ines")
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_label("Person")).to_have_value("ines", timeout=PATIENCE)
    for text, source in (("I bake bread on Sundays.", "chat"), ("My boat is red.", "letter")):
        page.get_by_label("Tell something").fill(text)
        page.get_by_label("Source", exact=True).fill(source)
        page.get_by_role("button", name="Imprint", exact=True).click()
        expect(page.locator(".lines").first).to_contain_text(text, timeout=PATIENCE)
    assert page.locator(".log .pick").count() == 3
    page.locator(".log .pick").nth(1).click()
    page.get_by_role("button", name="Fork here").click()
    page.get_by_role("dialog").get_by_role("button", name="Fork here").click()
    expect(page.locator("option", has_text="ines-2")).to_have_count(1, timeout=PATIENCE)
    page.get_by_role("button", name="Forget line 2").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("cannot be undone")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator(".lines").first).to_contain_text("My boat is red.")
    page.get_by_role("button", name="Forget line 2").click()
    dialog.get_by_role("button", name="Forget").click()
    expect(page.locator(".lines").first).not_to_contain_text("My boat is red.", timeout=PATIENCE)
    page.locator(".log .pick").last.click()
    page.get_by_role("button", name="Go back").click()
    page.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(page.locator(".log .pick").first).to_contain_text("rollback", timeout=PATIENCE)
    for name in ("ines", "ines-2"):
        page.get_by_label("Person").select_option(name)
        expect(page.locator("dl.facts")).to_be_visible(timeout=PATIENCE)
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator("option", has_text=name)).to_have_count(1 if name == "ines" else 0, timeout=PATIENCE)


def test_everything_is_reached_by_tab(visit: Open):
    page = visit("#/mechanisms")
    expect(page.locator(".view dd").first).to_be_visible(timeout=PATIENCE)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className").startswith("skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = set[str]()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent || '').slice(0, 6)"
            )
        )
    assert {"Key A,", "Query;"} <= seen


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 360])
def test_file_of_its_own_needs_no_server(visit: Open, folder: Path, language: str, scheme: str, width: int):
    out = folder / "view.html"
    if not out.exists():
        command = [
            "view",
            "When Mary and John went to the store, John gave a drink to Mary",
            "--spec",
            "abstain(softmax, threshold=1)",
        ]
        model = (folder / "model.txt").read_text()
        subprocess.run(
            [str(PYTHON), "-m", "regard.cli.main", *command, "--model", model, "--layers", "0-2", "--out", str(out)],
            check=True,
            env=ENVIRONMENT,
        )
    page = visit(address=f"file://{out}#layer=1&head=2", language=language, scheme=scheme, width=width)
    expect(page.locator(".strip button[style*=background]").nth(3)).to_be_visible(timeout=PATIENCE)
    expect(page.locator(".maps canvas")).to_have_count(2)
    page.wait_for_timeout(500)
    drawn = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert page.locator(".maps canvas").first.evaluate(drawn) > 20
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"view-{language}-{scheme}-{width}.png", full_page=width == 360)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    with page.expect_download(timeout=PATIENCE) as waiting:
        page.get_by_role("button", name="JSON", exact=True).click()
    assert json.loads(Path(waiting.value.path()).read_text())["layer"] == 1
