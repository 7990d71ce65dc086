"""Every view in both languages, light and dark, wide and narrow: no violation, no error, nothing asked of anybody else."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import MODEL, SHOTS, Open
from playwright.sync_api import Page, expect

PATIENCE = 120_000
LAYER = "layer=18&head=6" if MODEL else "layer=1&head=1"
VIEWS = ("chat", "attention", "mechanisms", "identity", "studies")


def chat(page: Page) -> None:
    page.locator("main form button.main").click()
    expect(page.locator("article .said")).to_have_count(2, timeout=PATIENCE)


def attention(page: Page) -> None:
    page.locator("section[aria-labelledby=finder] button").first.click()
    expect(page.locator("section[aria-labelledby=finder] td").first).to_be_visible(timeout=PATIENCE)
    expect(page.locator(".maps canvas")).to_have_count(2, timeout=PATIENCE)
    expect(page.locator(".strip button[style*=background]").nth(3)).to_be_visible(timeout=PATIENCE)


def mechanisms(page: Page) -> None:
    expect(page.locator(".view dd").first).to_be_visible(timeout=PATIENCE)


def identity(page: Page) -> None:
    page.locator(".log .pick").nth(1).click(timeout=PATIENCE)
    expect(page.locator("pre.diff")).to_be_visible(timeout=PATIENCE)


def studies(page: Page) -> None:
    expect(page.locator(".detail img")).to_be_visible(timeout=PATIENCE)


ADDRESS = {
    "chat": f"#/chat?prompt={quote('What is my cat called?')}&people=,mara,tom&tokens={24 if MODEL else 8}",
    "attention": f"#/attention?{LAYER}&spec={quote('abstain(softmax, threshold=1)')}",
    "mechanisms": "#/mechanisms",
    "identity": "#/identity?id=mara",
    "studies": "#/studies?study=heads",
}


@pytest.mark.parametrize("width", [1360, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("view", VIEWS)
def test_view_is_whole(visit: Open, view: str, language: str, scheme: str, width: int):
    page = visit(ADDRESS[view], language=language, scheme=scheme, width=width)
    globals()[view](page)
    page.wait_for_timeout(300)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{view}-{language}-{scheme}-{width}.png", full_page=width == 360)
    assert page.evaluate("document.documentElement.lang") == language
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the side"
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_every_word_changes_with_the_language(visit: Open):
    page = visit("#/mechanisms")
    expect(page.get_by_role("heading", level=1)).to_have_text("Mechanisms")
    page.get_by_role("button", name="日本語").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("仕組み")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("仕組み")


def test_theme_can_be_chosen_against_the_system(visit: Open):
    page = visit("#/studies", scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("header select").select_option("dark")
    assert page.evaluate(ground) != light
