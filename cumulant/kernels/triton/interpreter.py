"""Kernels run by Triton's interpreter, in NumPy on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

KERNELS = tuple(f"cumulant.kernels.triton.{name}" for name in ("tiles", "forward", "few_rows", "backward"))


def kernel_modules() -> list[ModuleType]:
    """The modules with functions in Triton. Those that are launched have names that end in "_kernel"."""
    return [import_module(name) for name in KERNELS]


@contextmanager
def interpreter() -> Iterator[None]:
    """Within it, what the environment variable TRITON_INTERPRET=1 does for a whole process: no GPU is needed, and the
    compiler is not used. One thread at a time."""
    import triton.language as tl
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    modules = kernel_modules()  # imported before the switch: what is imported under it stays interpreted
    # all that the interpreter replaces, most of which it does not put back
    language = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base, tl.condition, tl.dtype)
    before = [(owner, dict(vars(owner))) for owner in (*modules, *language)]
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        try:
            for owner in (*modules, tl, tl.standard):
                for name, value in list(vars(owner).items()):
                    if isinstance(value, JITFunction):
                        run = InterpretedFunction(value.fn)
                        # called by kernels, it need not replace the language once more
                        inner = owner in modules and not name.endswith("_kernel")
                        setattr(owner, name, run.rewrite() if inner else run)
            yield
        finally:
            for owner, saved in before:
                for name, value in list(vars(owner).items()):
                    if name in saved and value is not saved[name]:
                        setattr(owner, name, saved[name])
                    elif name not in saved and owner in language and owner is not tl.standard:
                        delattr(owner, name)
