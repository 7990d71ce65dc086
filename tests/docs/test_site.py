"""The site's own checks, without the site generator: what is laid out, what is in the navigation, and what a built page may load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'self'; img-src 'self' data:">"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text(
        POLICY + '<a href="guide/#part">a guide</a> <a href="https://example.org">elsewhere</a>'
    )
    (tmp_path / "guide" / "index.html").write_text(POLICY + '<h2 id="part">Part</h2><a href="..">home</a><img src="../a.png">')
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.css").write_text("body { background: url(a.png) }")
    (tmp_path / "a.js").write_text('fetch("search.json"); const svg = "http://www.w3.org/2000/svg";')
    return tmp_path


def test_every_page_is_laid_out_and_in_the_navigation(site: ModuleType, tmp_path: Path) -> None:
    pages = site.stage(ROOT, tmp_path)
    site.check_navigation(pages)
    assert {p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")} <= set(pages)
    assert {Path("index.md"), Path("ja.md"), Path("contributing.md"), Path("notebooks/demo_tta_effect.md")} <= set(pages)
    assert "](quickstart.md)" in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_a_page_that_is_not_in_the_navigation_is_refused(site: ModuleType) -> None:
    pages = site.navigation()
    with pytest.raises(site.SiteError, match=r"does not list lost\.md"):
        site.check_navigation([*pages, Path("lost.md")])
    with pytest.raises(site.SiteError, match="which does not exist"):
        site.check_navigation(pages[1:])


def test_links_follow_their_targets_and_code_stays(site: ModuleType) -> None:
    places = {Path("README.md"): Path("index.md"), Path("docs/a.md"): Path("a.md"), Path("docs/b/c.md"): Path("b/c.md")}
    text = "[a](docs/a.md#x)\n\n```\n[a](docs/a.md)\n```\n"
    assert site.relocated(text, Path("README.md"), places) == "[a](a.md#x)\n\n```\n[a](docs/a.md)\n```\n"
    assert site.relocated("[r](../../README.md)", Path("docs/b/c.md"), places) == "[r](../index.md)"
    with pytest.raises(site.SiteError, match=r"there is no src/x\.py"):
        site.relocated("[x](src/x.py)", Path("README.md"), places)
    with pytest.raises(site.SiteError, match=r"pyproject\.toml leads out of the site"):
        site.relocated("[x](pyproject.toml)", Path("README.md"), places)


def test_a_whole_site_passes(site: ModuleType, built: Path) -> None:
    assert site.check_site(built) == 3


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("index.html", '<script src="https://cdn.example.org/x.js"></script>', "another host"),
        ("index.html", '<link rel="stylesheet" href="//fonts.example.org/x.css">', "another host"),
        ("index.html", '<link href="https://fonts.example.org" rel="preconnect" crossorigin>', "another host"),
        ("index.html", '<img src="http://example.org/x.png">', "another host"),
        ("index.html", "<style>@import url(https://example.org/x.css);</style>", "another host"),
        ("index.html", '<p style="background: url(https://example.org/x.png)">', "another host"),
        ("index.html", '<script>fetch("https://example.org/x.json")</script>', "another host"),
        ("a.css", '@import "https://example.org/x.css";', "another host"),
        ("a.css", "@font-face { src: url(https://example.org/x.woff2) }", "another host"),
        ("a.js", 'import("https://example.org/x.js")', "another host"),
        ("a.js", 'const s = document.createElement("script"); s.src="https://example.org/x.js"', "another host"),
        ("index.html", '<a href="gone/">gone</a>', "leads nowhere"),
        ("index.html", '<img src="gone.png">', "leads nowhere"),
        ("index.html", '<a href="guide/#gone">gone</a>', "an anchor that is not there"),
    ],
)
def test_what_is_dead_or_comes_from_another_host_is_refused(
    site: ModuleType, built: Path, file: str, text: str, said: str
) -> None:
    (built / file).write_text(POLICY + text if file.endswith(".html") else text)
    with pytest.raises(site.SiteError, match=said):
        site.check_site(built)


@pytest.mark.parametrize("policy", ["", POLICY.replace("data:", "https://example.org"), POLICY.replace("'self'", "*")])
def test_a_page_that_lets_its_browser_load_from_other_hosts_is_refused(site: ModuleType, built: Path, policy: str) -> None:
    (built / "index.html").write_text(policy + "<p>text</p>")
    with pytest.raises(site.SiteError, match="Content-Security-Policy"):
        site.check_site(built)


def test_a_page_that_the_generator_left_out_is_noticed(site: ModuleType, built: Path) -> None:
    site.check_built([Path("index.md"), Path("guide.md")], built)
    with pytest.raises(site.SiteError, match=r"api/nn\.md: was not built"):
        site.check_built([Path("index.md"), Path("api/nn.md")], built)
