"""CITATION.cff says what the package says of itself."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

import regard

ROOT = Path(__file__).parents[2]


def test_citation_agrees_with_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert str(cited["version"]) == regard.__version__
    assert cited["license"] == project["license"]
    assert cited["authors"] == project["authors"]
    assert cited["keywords"] == project["keywords"]
