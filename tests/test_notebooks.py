"""Every notebook runs from top to bottom, and is kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARTS = {
    "00_the_block": (8, 2),
    "01_ablation": (4, 2),
    "02_norms": (5, 2),
    "03_probes": (6, 2),
    "04_routing": (6, 3),
    "05_scores": (6, 1),
    "06_patching": (5, 2),
}
"""Name → how many cells of code and how many pictures: a notebook that lost one still runs."""


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(PARTS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_in_git(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which shows pictures in the notebook
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code)
    pictures = [output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert (len(code), len(pictures)) == PARTS[path.stem]
    told = [output.text for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert told == []
