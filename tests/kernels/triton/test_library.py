"""Where Triton serves, what it says where it does not, and that nothing of it is loaded before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from cumulant import moments
from cumulant.kernels.triton import forward, library, tiles
from cumulant.kernels.triton.interpreter import interpreter


def test_triton_is_not_imported_before_it_serves():
    code = """
import sys, torch, cumulant
cumulant.moments(torch.ones(2, 3), torch.ones(4, 3))
assert not any(name.split(".")[0] == "triton" for name in sys.modules), "triton"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({}, "it runs on CUDA devices, not on cpu"),
        ({"statistics": "all"}, "it runs on CUDA devices, not on cpu"),
    ],
)
def test_elsewhere_a_sentence_says_why(arguments, got):
    with pytest.raises(ValueError, match=f"expected a request that 'triton' can serve, got {got}. Use 'streaming'"):
        moments(torch.ones(2, 3), torch.ones(4, 3), backend="triton", **arguments)


def test_what_it_does_not_serve_it_says():
    x = torch.ones(4, 3)
    refused = [
        ((x, x), {"statistics": "all"}, "it forms no traces, here atom_trace"),
        ((x.double(), x.double()), {}, "sums are formed in float32, not torch.float64"),
        ((torch.ones(4, 300), torch.ones(4, 300)), {}, "atoms and values have at most 256 entries, not 300"),
    ]
    with interpreter():
        for tensors, options, got in refused:
            with pytest.raises(ValueError, match=got):
                moments(*tensors, backend="triton", **options)
        assert moments(*refused[1][0]).mean.dtype == torch.float64  # by another kernel


def test_the_reason_names_the_device(monkeypatch):
    assert library.refusal("mps", None) == "it runs on CUDA devices, not on mps"
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    library.installation.cache_clear()
    assert library.refusal("cuda", 0) == "Triton is not installed (pip install triton)"
    monkeypatch.undo()
    library.installation.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    library.architecture.cache_clear()
    assert library.refusal("cuda", 0) == "it needs compute capability 8.0, not 7.5"
    library.architecture.cache_clear()
    with interpreter():
        assert library.refusal("mps", None) == "its interpreter takes tensors of the CPU, not of mps"
        assert not library.refusal("cpu", None)


def test_the_interpreter_leaves_nothing_behind():
    before = dict(vars(tl.core)), dict(vars(tl)), dict(vars(tl.tensor))
    with interpreter():
        moments(torch.ones(2, 3), torch.ones(4, 3), backend="triton")
    assert isinstance(forward.forward_kernel, JITFunction)
    assert isinstance(tiles.start_of, JITFunction)
    assert isinstance(tl.max, JITFunction)
    assert (dict(vars(tl.core)), dict(vars(tl)), dict(vars(tl.tensor))) == before
    assert not library.interpreting()
