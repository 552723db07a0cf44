"""Sums of exponentials over several processes against the same sums in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cumulant.kernels.collectives import Ranks

ROOT = Path(__file__).parents[2]
THREE, FOUR = (pytest.param(size, marks=pytest.mark.long) for size in (3, 4))


def run(job: str, size: int, place: Path) -> list[dict]:
    """What every rank found."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.sharded_checks", job]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(place)], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    errors = [p.communicate(timeout=300)[1].decode()[-3000:] for p in started]
    assert all(p.returncode == 0 for p in started), "\n".join(errors)
    return [json.loads(p.read_text()) for p in sorted(place.glob("*.json"))]


def assert_small(found: list[dict]) -> None:
    """1e-12 in float64, 1e-6 in float32."""
    for rank, errors in enumerate(found):
        assert errors
        for name, error in errors.items():
            bound = 1e-6 if "float32" in name else 1e-12
            assert error <= bound, f"rank {rank}, {name}: {error:.2e}"


@pytest.mark.parametrize("size", [2, THREE, FOUR])
def test_values_and_gradients_are_those_of_one_process(size, tmp_path):
    found = run("agreement", size, tmp_path)
    assert len(found) == size
    assert len(found[0]) >= 2 * 2 * 10
    assert_small(found)


@pytest.mark.parametrize("size", [THREE, FOUR])
def test_uneven_and_empty_shards(size, tmp_path):
    assert_small(run("uneven", size, tmp_path))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), FOUR])
def test_a_sharded_measure_is_the_measure(size, tmp_path):
    found = run("measures", size, tmp_path)
    for errors in found:
        assert errors.pop("sample (statistical)") < 0.1
        assert errors.pop("natural") < 1e-7
        assert errors.pop("conjugate") < 1e-9
    assert_small(found)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), FOUR])
def test_losses_over_a_group_are_those_of_one_process(size, tmp_path):
    found = run("losses", size, tmp_path)
    assert len(found[0]) == 2 * (6 * 3 + 1 + 4 * 3)
    assert_small(found)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts bytes in /proc; un-skip on Linux")
@pytest.mark.parametrize("size", [2, FOUR])
def test_bytes_sent_are_those_of_the_cost_model(size, tmp_path):
    found = run("traffic", size, tmp_path)
    for name in found[0]:
        mean = sum(f[name] for f in found) / size
        assert abs(mean - 1) <= 0.05, f"{name}: {mean:.3f} of what the model says"


@pytest.mark.long
def test_bad_input_is_one_sentence_on_every_rank_and_an_absent_rank_is_named(tmp_path):
    found = run("refusals", 3, tmp_path)
    assert len(found) == 2  # the absent rank wrote nothing
    for messages in found:
        assert "eta float64 (2, 3)" in messages["shape"]
        assert "(3, 3)" in messages["shape"]
        assert "on rank 1" in messages["shape"]
        assert "float32" in messages["dtype"]
        assert "float64" in messages["dtype"]
        assert "mean" in messages["statistics"]
        assert "atoms float64 (*, 3)" in messages["dimension"]
        assert "(*, 2)" in messages["dimension"]
        assert "gradients True" in messages["gradients"]
        assert "gradients False" in messages["gradients"]
        assert "Pad the sequence" in messages["zigzag"]
        assert "key index of the first query (q=2, n=12)" in messages["offset"]
        assert "no table of pairs" in messages["ring mask"]
        assert "replicated or sharded" in messages["queries"]
        assert "with sharded queries" in messages["layout"]
        assert "Empirical" in messages["measure"]
        assert "positive number of seconds" in messages["timeout"]
        assert "0 … 11" in messages["words"]
        assert "label_smoothing over a group" in messages["smooth cap"]
        assert "None with symmetric" in messages["symmetric"]
        assert "nothing from rank 1" in messages["absent"]
        assert "within 1.5 s" in messages["absent"]
        assert float(messages["seconds"]) < 10


def test_without_a_group_it_says_how_to_start():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="torchrun"):
        Ranks()


def test_a_group_of_one(tmp_path):
    """One process is a group too, and a mesh of one axis names it."""
    from torch.distributed.device_mesh import init_device_mesh

    from cumulant import Empirical
    from cumulant.measures.sharded import shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        atoms = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        eta = torch.ones(3, 2, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "keys"))
        part = shard(Empirical(atoms), mesh["keys"])
        torch.testing.assert_close(part.mean(eta), Empirical(atoms).mean(eta), rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="DeviceMesh of one axis, got 2 axes"):
            shard(Empirical(atoms), mesh)
    finally:
        dist.destroy_process_group()
