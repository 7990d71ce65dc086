"""The docs cover the tables: a mechanism without a page, a picture and a row to choose it by is not finished."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from demo.map import CLOSE, ENTRIES, OPEN
from demo.pictures import GUIDES, PICTURES
from regard.geometry import GEOMETRIES
from regard.position import POSITIONS
from regard.selection import SELECTIONS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "mechanisms"
SHARED = {"sparsemax": "entmax", "learned": "sinusoidal"}
"""Two mechanisms on one page."""

NAMES = [*GEOMETRIES, *SELECTIONS, *POSITIONS]


@pytest.mark.parametrize("name", [*NAMES, "allow"])
def test_every_mechanism_has_a_page_with_picture_example_and_source(name: str) -> None:
    page = SHARED.get(name, name)
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert name in text
    assert f"../images/{page}.png" in text
    assert "```python" in text
    assert "**Traps" in text
    if name != "allow":
        assert "**Use" in text
        assert "o not use" in text
        assert "**Cost.**" in text
        assert "**Source.**" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_has_one_row_in_the_table_to_choose_by(name: str) -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| \[`{name}`\]\(mechanisms/{SHARED.get(name, name)}\.md\) \|", text, re.MULTILINE)
    assert len(rows) == 1


def test_every_page_has_a_drawing_that_makes_its_picture() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == set(PICTURES)


@pytest.mark.parametrize("name", GUIDES)
def test_every_picture_of_a_guide_is_shown_in_one(name: str) -> None:
    shown = [p.name for p in (ROOT / "docs").glob("*.md") if f"images/{name}.png" in p.read_text(encoding="utf-8")]
    assert len(shown) == 1
    assert (ROOT / "docs" / "images" / f"{name}.png").exists()


@pytest.mark.parametrize("page", ["trace_tensor_attention", "self_conditioned_attention", "notebooks/demo_tta_effect"])
def test_what_is_said_of_identity_elsewhere_is_reached_from_its_guide(page: str) -> None:
    assert f"]({page}." in (ROOT / "docs" / "identity.md").read_text(encoding="utf-8")


def test_pictures_are_small() -> None:
    sizes = {p.name: p.stat().st_size for p in (ROOT / "docs" / "images").glob("*.png")}
    assert len(sizes) >= len(PICTURES)
    assert {n: s for n, s in sizes.items() if s > 80_000} == {}


def test_the_map_page_holds_a_row_for_each_entry() -> None:
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    table = text.split(OPEN)[1].split(CLOSE)[0]
    assert table.count("\n| `") == len(ENTRIES)


def test_both_readmes_show_the_same_code_and_the_same_links() -> None:
    english, japanese = ((ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "README.ja.md"))

    def code(text: str) -> list[str]:
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        return [line.split("#")[0].rstrip() for b in blocks for line in b.splitlines()]

    def links(text: str) -> set[str]:
        return set(re.findall(r"\]\((docs/[^)]+)\)", text))

    assert code(english) == code(japanese)
    assert links(english) == links(japanese)
