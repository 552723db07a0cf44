"""Whole paths on a device that is not the CPU: what is forgotten to be moved fails as it would on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
@pytest.mark.parametrize("name", ["moments", "train", "observe", "audit", "compress"])
def test_a_path_on_another_device_is_that_of_the_cpu(name, tmp_path):
    for module in ("typer", "transformers", "polars", "safetensors"):
        pytest.importorskip(module, reason="pip install cumulant[all] to run")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pretend_checks", name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"{name}: " in done.stdout
