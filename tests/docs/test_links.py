"""Every link and picture of every Markdown page leads to a file that is there, and every anchor to a heading of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
INLINE = re.compile(r"\]\(\s*<?([^)\s>]+)")
DEFINED = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)", re.MULTILINE)
HTML = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
NAMED = re.compile(r"<[^>]+\b(?:id|name)=\"([^\"]+)\"")


def prose(text: str) -> str:
    return CODE.sub("", FENCE.sub("", text))


def targets(text: str) -> list[str]:
    return [t for pattern in (INLINE, DEFINED, HTML) for t in pattern.findall(prose(text))]


def slug(heading: str) -> str:
    """The anchor that a heading gets: lower case, no punctuation, a hyphen for each space."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", text, re.MULTILINE):
        name = slug(heading)
        again = sum(1 for other in found if re.fullmatch(re.escape(name) + r"(-\d+)?", other))
        found.append(f"{name}-{again}" if again else name)
    return frozenset([*found, *NAMED.findall(text)])


def dead(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong: list[str] = []
    for link in targets(page.read_text(encoding="utf-8")):
        address = urlsplit(link)
        if address.scheme or address.netloc:
            continue
        target = page.parent / unquote(address.path) if address.path else page
        missing = not target.exists() or (
            bool(address.fragment) and target.suffix == ".md" and unquote(address.fragment) not in anchors(target.resolve())
        )
        wrong += [link] if missing else []
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_pictures_and_anchors_exist(page: Path) -> None:
    assert dead(page) == []


def test_the_pages_have_links_to_follow() -> None:
    assert {"README.md", "README.ja.md", "CONTRIBUTING.md", "SECURITY.md"} <= {p.name for p in PAGES}
    assert sum(len(targets(p.read_text(encoding="utf-8"))) for p in PAGES) > 150


def test_dead_links_of_every_kind_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One, *two*: `three`\n\n## Again\n\n## Again\n\n```\n# no heading\n```\n", encoding="utf-8")
    good = "[a](other.md) [b](other.md#one-two-three) [c](other.md#again-1) [d](#here) [e](https://example.org/x)\n\n# Here\n\n`[f](code.md)`\n"
    page.write_text(good, encoding="utf-8")
    assert dead(page) == []
    page.write_text(
        good + '[g](gone.md) [h](other.md#no-heading) [i](#there) <img src="gone.png"> [j][k]\n\n[k]: lost.md\n',
        encoding="utf-8",
    )
    assert sorted(dead(page)) == ["#there", "gone.md", "gone.png", "lost.md", "other.md#no-heading"]
