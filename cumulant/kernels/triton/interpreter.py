"""Kernels run by Triton's interpreter, in NumPy on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

LANGUAGE = ("triton.language", "triton.language.standard")
KERNELS = tuple(f"cumulant.kernels.triton.{name}" for name in ("tiles", "forward", "few_rows", "backward"))


def kernel_modules() -> list[ModuleType]:
    """The modules with functions in Triton."""
    return [import_module(name) for name in KERNELS]


@contextmanager
def interpreter() -> Iterator[None]:
    """Within it, what the environment variable TRITON_INTERPRET=1 does for a whole process: no GPU is needed, and the
    compiler is not used. One thread at a time."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # imported before the switch: what is imported under it stays interpreted
    modules = [*map(import_module, LANGUAGE), *kernel_modules()]
    saved = []
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        try:
            for module in modules:
                for name, value in list(vars(module).items()):
                    if isinstance(value, JITFunction):
                        saved.append((module, name, value))
                        setattr(module, name, InterpretedFunction(value.fn))
            yield
        finally:
            for module, name, value in saved:
                setattr(module, name, value)
