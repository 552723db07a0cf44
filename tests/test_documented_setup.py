"""Set-up and make commands of the README and the pages, in a bare copy of the repository with its own environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LEFT_OUT = {  # what is not run here, and why
    "make test": "it runs this file, or what it is a part of",
    "make sanitize": "tests/kernels/native/test_sanitizers.py is that command",
    "make bench": "an hour; tests/test_benchmarks.py runs the command on small inputs",
    "make fuzz": "half an hour of new cases; tests/generated runs the fixed ones",
}
SHORTER = {"MODEL=smollm2": ("--max-tokens 8192", "--max-tokens 300 --null none")}  # four minutes as it stands

pytestmark = [pytest.mark.xdist_group("documented set-up")]


def commands() -> list[str]:
    """Lines of indented blocks that begin with make or pip, without what is said about them; each once, in order."""
    lines = [re.findall(r"^    ((?:make|pip) .*)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES]
    return list(dict.fromkeys(re.split(r"\s+#\s", line)[0].strip() for found in lines for line in found))


def left_out(command: str) -> bool:
    return any(command.startswith(start) for start in LEFT_OUT)


def test_the_pages_have_both_commands_of_the_readme_and_every_extra_they_name():
    assert "make observe" in commands()
    assert 'make observe MODEL=./directory ARGS="--text my.txt"' in commands()
    assert "pip install -e '.[all]'" in commands()
    assert all(any(command.startswith(start) for command in commands()) for start in LEFT_OUT)


def bare_copy(directory: Path) -> Path:
    """The files that a clone has, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the files of a clone are listed by git: run it in a clone")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


@pytest.mark.long
def test_all_of_them_run_one_after_the_other(tmp_path: Path):
    """make comes first: it makes the environment with the tested torch in which pip then installs."""
    from tests.observatory.own_model import save_own_model
    from tests.observatory.recordings import tone

    clone = bare_copy(tmp_path / "clone")
    save_own_model(clone / "directory")
    shutil.copy(ROOT / "LICENSE", clone / "my.txt")
    tone(clone / "talk.wav", 2.0)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    # pip of the pages is that of the environment that is active
    environment = kept | {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{kept['PATH']}"}
    environment["PIP_CONSTRAINT"] = str(clone / "constraints.txt")
    for command in sorted((c for c in commands() if not left_out(c)), key=lambda c: not c.startswith("make observe")):
        line = command
        for part, (long, short) in SHORTER.items():
            line = line.replace(long, short) if part in command else line
        done = subprocess.run(
            ["bash", "-c", line], cwd=clone, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    for written in ("observed/minilm/report.html", "observed/directory/heads.parquet", "docs/_build/index.html"):
        assert (clone / written).is_file(), written
    said = subprocess.run(
        ["cumulant", "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert said.returncode == 0, said.stderr[-2000:]
