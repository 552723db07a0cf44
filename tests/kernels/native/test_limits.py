"""The native kernel at its limits: memory beside the results, very many keys, and tests repeated without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cumulant import moments
from tests.kernels.native.problems import native, threads

ROOT = Path(__file__).parents[3]

MEMORY = """
import re, torch
from cumulant import moments
torch.set_num_threads({threads})
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
def once(q, n):
    eta, atoms, values = (torch.randn(2, k, 48, requires_grad={gradients}) for k in (q, n, n))
    start = peak()
    m = moments(eta, atoms, values, causal=True, offset=n - q, statistics={statistics})
    made = [m.log_normalizer, *m.statistics.values()]
    if {gradients}:
        total = m.mean.sum() + m.entropy.sum() + m.value_trace.sum()
        made += torch.autograd.grad(total, (eta, atoms, values))
    return peak() - start - sum(t.untyped_storage().nbytes() for t in {{t.data_ptr(): t for t in made}}.values())
once({q}, 300)
print(once({q}, {n}))
"""


@native
@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("q", "n"), [(20_000, 5_000), (3, 400_000), (300, 200_000)])
def test_memory_beside_the_results_is_a_few_megabytes_a_thread(q, n, gradients, count):
    """At most 8 MiB for each thread; through a trace, gradients that come in are one more row of numbers a query."""
    statistics = '("mean", "entropy", "value_trace")' if gradients else '"all"'
    code = MEMORY.format(threads=count, q=q, n=n, gradients=gradients, statistics=statistics)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(count)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    incoming = 2 * q * (48 + 8) * 4 if gradients else 0
    assert float(run.stdout) <= (8 * count << 20) + incoming + (2 << 20), float(run.stdout) / 2**20


@native
@pytest.mark.long
@pytest.mark.parametrize("q", [1, 20])
def test_more_keys_than_a_float_can_count(q):
    """2²⁴ + 11 keys of one number: masses, indices and gradients are those of sums in float64."""
    n = (1 << 24) + 11
    generator = torch.Generator().manual_seed(0)
    atoms = torch.randn(n, 1, generator=generator)
    atoms[-3] = 9.0  # the largest, beyond 2²⁴
    eta = torch.linspace(0.2, 1.5, q)[:, None]
    leaves = [eta.requires_grad_(), atoms.requires_grad_()]
    with threads(2):
        found = moments(*leaves, backend="native", statistics=("mean", "entropy", "value_trace", "max_score"))
        total = found.log_normalizer.sum() + found.max_score.sum() + found.mean.sum()
        slopes = torch.autograd.grad(total, leaves)
    x = atoms.detach().double()[:, 0]
    for i in range(q):
        logits = eta[i, 0].double() * x
        g = torch.logsumexp(logits, 0)
        p = torch.exp(logits - g)
        mean = (p * x).sum()
        variance = (p * (x - mean).square()).sum()
        assert abs(float(found.log_normalizer[i] - g)) < 3e-6 * float(g)
        assert abs(float(found.mean[i, 0] - mean)) < 1e-5
        assert abs(float(found.value_trace[i] - variance)) < 1e-4 * float(variance)
        assert abs(float(found.max_score[i]) - 9 * float(eta[i, 0])) < 1e-5
        assert abs(float(slopes[0][i, 0]) - float(mean + 9 + variance)) < 1e-4 * 9
    assert float(slopes[1][-3, 0]) > float(eta.sum())
    assert float(slopes[1].isfinite().all())


@pytest.mark.long
@pytest.mark.parametrize("tests", ["tests/kernels", "tests/measures", "tests/test_attention.py"])
def test_without_the_native_kernel(tests):
    """CUMULANT_NATIVE=0: what users have for whom nothing could be compiled."""
    environment = os.environ | {"CUMULANT_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-x", "-m", "not long", "-p", "no:cacheprovider", "--ignore=tests/kernels/native/test_library.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
