"""The arguments of the native kernel (arguments.h, field by field) and its entry points."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from cumulant.kernels.native.library import library

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.bool: 4, torch.uint8: 4}
ROW_RESULTS = (  # statistics of a query: one number, or a vector of the width of values or atoms
    *("log_normalizer", "mean", "atom_mean", "mean_score", "score_variance", "mean_log_weight"),
    *("value_trace", "atom_trace", "max_score", "log_sum_square", "sink_mass", "max_logit"),
)
GRADIENTS_IN = (
    *("log_normalizer", "mean", "atom_mean", "mean_score", "score_variance", "mean_log_weight"),
    *("value_trace", "atom_trace", "log_sum_square"),
)
MAX_BINS = 16
PLAIN = (Tensor, Parameter)  # types that have memory of their own; a subclass may have none


class Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("group", ctypes.c_int64 * 4),
        ("fold", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _operands(*names: str) -> list[tuple[str, type]]:
    return [(name, Operand) for name in names]


class Call(ctypes.Structure):
    _fields_ = (
        ("axes", ctypes.c_int64 * 4),
        *_integers(
            "fold", "period", "keys", "width", "value_width", "precision", "causal", "window", "offset", "threads"
        ),
        ("scale", ctypes.c_double),
        *_pointers("starts", "lengths"),
        *_operands("eta", "atoms", "values", "per_atom", "per_pair", "mask", "sink", "value_centre", "atom_centre"),
        *_operands("output"),
        *_pointers(*ROW_RESULTS, "best"),
        *_integers("bins"),
        *_pointers("edges", "bin_mass"),
        *_operands("marked"),
        *_pointers("marked_mass"),
        *_integers("irregular"),
        *_pointers("irregular_rows"),
        *_pointers(*(f"d_{name}" for name in GRADIENTS_IN)),
        *_pointers("d_eta", "d_atoms", "d_values", "d_per_atom", "d_sink"),
        *_operands("d_per_pair"),
        *_pointers("vector", "d_fisher", "fisher", "d_vector"),
    )


Entry = Callable[[object], int]


@cache
def entries() -> dict[str, Entry] | None:
    """forward, backward, fisher and fisher_backward by name; None where no native kernel serves."""
    loaded = library()
    if loaded is None:
        return None
    loaded.functions.cumulant_call_bytes.restype = ctypes.c_int64
    if loaded.functions.cumulant_call_bytes() != ctypes.sizeof(Call):
        return None
    found = {}
    for name in ("forward", "backward", "fisher", "fisher_backward"):
        function = getattr(loaded.functions, f"cumulant_{name}")
        function.argtypes, function.restype = (ctypes.POINTER(Call),), ctypes.c_int64
        found[name] = function
    return found


def enter(name: str, call: Call, threads: int | None = None) -> int:
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
