"""The commands that the README gives for several processes, run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## Past one machine")[1].split("\n## ")[0]
COMMANDS = [m.group(1).strip() for m in re.finditer(r"^    ((?:torchrun|cumulant) [^#\n]*)", SECTION, re.MULTILINE)]


def test_the_readme_has_them():
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "torchrun", "cumulant"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[:5]))
def test_a_command_of_the_readme_runs(command, tmp_path):
    words = shlex.split(command.replace("observed/on-ray", str(tmp_path / "on-ray")))
    words[0] = str(Path(sys.executable).parent / words[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if words[0].endswith("cumulant"):
        assert (tmp_path / "on-ray" / "report.html").is_file()
    else:
        assert "one process" in done.stdout  # each says how far it is from one
