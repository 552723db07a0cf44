"""Calls of the native kernel: its entry points, and tensors as its operands."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from cumulant.kernels.native.arguments import (
    ENTRY_POINTS,
    Call,
    CollapseCall,
    EliminationCall,
    LossCall,
    NormalizationCall,
    Operand,
)
from cumulant.kernels.native.library import library

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.bool: 4, torch.uint8: 4}
PLAIN = (Tensor, Parameter)  # types that have memory of their own; a subclass may have none


Entry = Callable[[object], int]


@cache
def entries() -> dict[str, Entry] | None:
    """The functions of `ENTRY_POINTS` by name; None where no native kernel serves."""
    loaded = library()
    if loaded is None:
        return None
    found = {}
    for name, structure in ENTRY_POINTS.items():
        function = getattr(loaded.functions, f"cumulant_{name}")
        function.argtypes, function.restype = (ctypes.POINTER(structure),), ctypes.c_int64
        found[name] = function
    return found


def recorded() -> bool:
    """Whether operators of torch are recorded or replaced as they are called: by the compiler, by torch.jit.trace, by a
    mode such as that of fake tensors. A call of the native kernel would escape them."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def enter(
    name: str, call: Call | LossCall | NormalizationCall | CollapseCall | EliminationCall, threads: int | None = None
) -> int:
    """Run an entry point, with torch's number of threads by default; the number of irregular results."""
    functions = entries()
    assert functions is not None
    call.threads = threads or torch.get_num_threads()
    irregular = functions[name](ctypes.byref(call))
    if irregular < 0:
        raise MemoryError("cumulant: the native kernel could not allocate its working memory. Use smaller batches.")
    return irregular


def point(operand: Operand, tensor: Tensor, strides: tuple[int, ...], row: int) -> None:
    """Let an operand refer to a tensor."""
    operand.data = tensor.data_ptr()
    operand.dtype = DTYPES[tensor.dtype]
    operand.group[:] = strides[:4]
    operand.fold = strides[4]
    operand.row = row
