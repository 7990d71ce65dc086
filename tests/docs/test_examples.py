"""Every Python example of the docs and the READMEs runs: per file, in order, in one namespace, with a fixed seed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> list[tuple[int, str]]:
    """Line numbers and sources of a page's examples."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)), textwrap.dedent(m.group(2))) for m in BLOCK.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=name)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "example"}
    for line, source in examples(page):
        # Blank lines in front give errors the line number that they have on the page.
        exec(compile("\n" * line + source, str(page), "exec"), space)


def test_there_are_examples_to_run() -> None:
    assert sum(len(examples(p)) for p in PAGES) > 25
