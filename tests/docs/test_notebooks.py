"""The notebooks in examples/ run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_there_are_three_notebooks_without_outputs() -> None:
    import nbformat

    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    assert len(NOTEBOOKS) == 3
    assert [cell for cell in cells if cell.get("outputs")] == []


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    import nbformat

    if "deployment" in path.stem:
        pytest.importorskip("flwr")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=110, resources={"metadata": {"path": str(tmp_path)}}).execute()
