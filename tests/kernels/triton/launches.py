"""Launches of Triton kernels without a GPU: what a call would launch on tensors without memory, and its machine code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction, create_function_from_signature

from cumulant.kernels.triton import interpreter, library


class Launch(NamedTuple):
    """One launch of a kernel: its grid and what it was given."""

    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass
class Recorder:
    """Stands where a kernel stands, and writes down its launches."""

    kernel: JITFunction
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self.launches.append(Launch(self.kernel, grid, args, constants))


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches of what is called within, on devices of any kind."""
    launches: list[Launch] = []
    with monkeypatch.context() as patch:
        patch.setattr(library, "refusal", lambda kind, index: "")
        for module in interpreter.kernel_modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(value, launches))
        yield launches


class Code(NamedTuple):
    """What the machine code of a launch takes: registers of a thread, bytes spilled, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compiled(launch: Launch, capability: int) -> Code:
    """The launch compiled for a device of a compute capability (80, 90), as `ptxas` describes it."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, "enable_fp_fusion": True}
    bound, specialization, _ = binder(*launch.args, **launch.constants, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, launch.constants | options, bound, specialization, None
    )
    source = ASTSource(kernel, signature, constants, attributes)
    made = compile_kernel(source, target=target, options=parsed.__dict__)
    return Code(*_described(made.asm["cubin"]), made.metadata.shared)


def _described(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, check=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
