"""Whether Triton can serve a device, without importing it: it is installed, and compiles for the device."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

import torch

ARCHITECTURE = (8, 0)  # compute capability from which on the kernels are compiled and checked
KERNEL = "cumulant.kernels.triton.forward"


def refusal(kind: str, index: int | None) -> str:
    """Why no Triton kernel runs on the device of a kind and number, in a clause; empty if one does."""
    if interpreting():
        return "" if kind in ("cpu", "cuda") else f"its interpreter takes tensors of the CPU, not of {kind}"
    if kind != "cuda":
        return f"it runs on CUDA devices, not on {kind}"
    return installation() or architecture(index)


# as torch.compiler.assume_constant_result does, see `operator`
refusal.__dict__["_dynamo_marked_constant"] = True


def interpreting() -> bool:
    """Whether the kernels are run by Triton's interpreter (see `interpreter`)."""
    module = sys.modules.get(KERNEL)
    return module is not None and type(module.forward_kernel).__name__ == "InterpretedFunction"


@cache
def installation() -> str:
    if torch.version.hip is not None:
        return "it is compiled for CUDA devices, not for those of ROCm"
    return "" if find_spec("triton") is not None else "Triton is not installed (pip install triton)"


@cache
def architecture(index: int | None) -> str:
    try:
        found = torch.cuda.get_device_capability(index)
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, or a driver that does not answer
        return f"torch cannot ask the device ({str(error).splitlines()[0].removesuffix('.')})"
    if found >= ARCHITECTURE:
        return ""
    return f"it needs compute capability {'.'.join(map(str, ARCHITECTURE))}, not {'.'.join(map(str, found))}"
