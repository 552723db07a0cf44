"""Losses over a group under DistributedDataParallel, started by torchrun, against one process with the whole batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cumulant.contrastive import info_nce, nt_xent

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_under_ddp_are_those_of_one_process(size, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.contrastive.ddp_checks", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("*.json"))]
    assert len(ranks) == size
    for found in ranks:
        added = found.pop("added up")  # what DDP averages although it was to be added up: 1/size of the encoder's
        assert added["gradient"] > 0.4
        for name, gaps in found.items():
            assert gaps["loss"] < 1e-12, name
            assert gaps["gradient"] < 1e-11, name


@pytest.mark.parametrize("loss", [info_nce, nt_xent])
def test_how_gradients_come_together_is_sum_or_mean(loss):
    x = torch.eye(3)
    assert loss(x, x, gradients="mean") == loss(x, x, gradients="sum")  # one process
    with pytest.raises(ValueError, match=rf"{loss.__name__}\.gradients: expected 'sum' or 'mean', got 'average'"):
        loss(x, x, gradients="average")
