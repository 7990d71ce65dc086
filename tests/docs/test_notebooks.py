"""Every notebook of the docs runs from top to bottom, in a process of its own and on one thread."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 150_000
"""Bytes of a notebook, outputs and all, that a repository is asked to carry."""


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
# What Jupyter's own packages warn of is not ours to mend.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs_and_draws(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_is_valid_and_small(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size < LARGEST


def test_there_is_a_notebook_to_run() -> None:
    assert "demo_tta_effect" in {p.stem for p in NOTEBOOKS}
