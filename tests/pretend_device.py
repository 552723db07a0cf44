"""A device that is not the CPU and holds real numbers: torch's Python backend, with tensors in the memory of the CPU.

`register` makes a device "pretend" known to this process, for good: use it in a process of its own. Its tensors compute
as those of the CPU do, and as on a GPU no operation takes a tensor of the CPU beside one of the device, numbers (no
axes) excepted. So a path that runs here moves what it has to move.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,  # pyright: ignore[reportPrivateUsage]
    _setup_privateuseone_for_python_backend,  # pyright: ignore[reportPrivateUsage]
)

NAME = "pretend"
aten = torch.ops.aten
_composite = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
BETWEEN = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}  # what may take both devices
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

MADE_BY_RESIZING = {torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.randperm}


class Pretend(Tensor):
    """A tensor of the device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor):
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.size(), device=f"{NAME}:0", **options)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, held: Tensor):
        self.held = held

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, *args, **(kwargs or {}))


def compute(func, *args, **kwargs):
    """One operation, on the numbers of its tensors."""
    if _composite(func.name(), "CompositeImplicitAutograd"):
        found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    leaves = tree_leaves((args, kwargs))
    ours = {id(t.held): t for t in leaves if isinstance(t, Pretend)}
    if func in INDEXED:  # as torch does on CUDA: indices may lie on the CPU
        leaves = tree_leaves((args[0], args[2:], kwargs))
    if func not in BETWEEN and ours:
        theirs = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Pretend) and t.ndim]
        if theirs:
            shapes = ", ".join(str(tuple(t.shape)) for t in theirs)
            raise RuntimeError(f"{func} was given tensors on {NAME} and on the CPU, of shape {shapes}")
    device = kwargs.get("device")
    here = device is not None and torch.device(device).type != NAME
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    return out if here else tree_map(lambda t: _wrapped(t, ours), out)


def _held(value):
    return value.held if isinstance(value, Pretend) else value


def _wrapped(value, ours: dict[int, Pretend]):
    if not isinstance(value, Tensor) or isinstance(value, Pretend):
        return value
    same = ours.get(id(value))  # what was changed in place is what it was
    return Pretend(value) if same is None else same


class _Module(_DummyBackendModule):
    """What torch asks of a device beside operations."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _FromPython(TorchFunctionMode):
    """Functions that fill or resize a tensor they have made, which the backend of Python cannot do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if func in MADE_BY_RESIZING and device is not None and torch.device(device).type == NAME:
            return func(*args, **(kwargs | {"device": "cpu"})).to(NAME)  # pyright: ignore[reportOptionalOperand]
        if func is Tensor.new_tensor and isinstance(args[0], Pretend):
            return torch.tensor(args[1], **({"dtype": args[0].dtype} | (kwargs or {}))).to(NAME)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Pretend):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(i) if isinstance(i, list) else i for i in index), *args[2:])
        return func(*args, **(kwargs or {}))


def register() -> None:
    """Make the device known."""
    _FromPython().__enter__()
    # tensors of the Python backend cannot be cast in inference mode; what it forbids is not looked at here
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    globals()["_library"] = library  # lives as long as the process
