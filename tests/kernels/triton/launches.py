"""Launches of Triton kernels without a GPU: what a call would launch on tensors without memory, and its code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction, create_function_from_signature

from cumulant.kernels.triton import interpreter, library


class Launch(NamedTuple):
    """One launch of a kernel: its grid and what it was given."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass
class Recorder:
    """Stands where a kernel stands, and writes down its launches."""

    kernel: Any
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
    """What the machine code of a launch takes: registers of a thread, bytes it spills, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compiled(launch: Launch, capability: int) -> Code:
    """The launch compiled for a device of a compute capability (80, 90), as ptxas describes its code."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = launch.constants | {"debug": False}
    bound, specialization, _ = binder(*launch.args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    made = compile_kernel(source, target=target, options=parsed.__dict__)
    assert made.asm["cubin"]
    return Code(*_described(made.asm["ptx"], capability), made.metadata.shared)


def _described(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes, by the assembler and flags that Triton uses. A cubin itself tells its stack only."""
    with TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        flags = ["-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(capability)}"]
        command = [get_ptxas(capability).path, *flags, source, "-o", source.with_suffix(".cubin")]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    registers, stores, loads = (int(number) for pattern in patterns for number in re.findall(pattern, text))
    return registers, max(stores, loads)
