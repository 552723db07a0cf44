"""A device that cannot be waited for: tensors on meta, under modes that watch what a call does with them.

Meta tensors have shapes and no values, as tensors of a GPU have none that the CPU could see without waiting. Inside
`guard` a call fails with the place in the package where it

    reads a value      bool(t), float(t), t.item(), t.tolist(), t.nonzero(), a Boolean index, t.cpu()
    copies a number    torch.tensor(2.0, device=…): from pageable memory, so that CUDA waits for it
    makes on the CPU   torch.arange(n) without device
    mixes              a meta tensor and a CPU tensor of one axis or more in one operation

Places that are known to read, with reasons, are allowed; what they read raises what torch raises for meta tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cumulant
from cumulant.kernels import operator

PACKAGE = f"{Path(cumulant.__file__).parent}/"
LOOKS = "checks.py"  # its functions read for others, which are named in their place
aten = torch.ops.aten
READS = {
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.allclose.default),
    *(aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}
TO_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Waits(AssertionError):
    """A call that waits for the device; no RuntimeError, which the package takes for a value that cannot be read."""


def place() -> str | None:
    """Where in the package this happens: file:function; None if it is torch or transformers on its own."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith(f"/{LOOKS}"):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None


class _Operations(TorchDispatchMode):
    def __init__(self, allowed: Mapping[str, str], used: set[str]):
        super().__init__()
        self.allowed, self.used = allowed, used

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        away = [t for t in tensors if t.is_meta]
        if away:
            if func in READS or (func in INDEXED and _boolean(args[1])):
                self._read(func)
                raise RuntimeError(f"{func} needs values, which meta tensors have not")
            if any(not t.is_meta and t.ndim for t in tensors):
                raise Waits(f"{place()} mixes devices in {func}")
            if func is aten._to_copy.default and torch.device((kwargs or {}).get("device") or "meta").type == "cpu":
                self._read(func)
                return torch.zeros(away[0].shape, dtype=(kwargs or {}).get("dtype") or away[0].dtype)
        out = func(*args, **(kwargs or {}))
        made = any(isinstance(t, Tensor) and not t.is_meta and t.ndim for t in tree_leaves(out))
        if made and not tensors and place() is not None:
            raise Waits(f"{place()} makes a tensor on the CPU by {func}")
        return out

    def _read(self, func) -> None:
        where = place()
        if where is None:  # transformers reads for itself
            return
        if where not in self.allowed:
            raise Waits(f"{where} waits for the device, in {func}")
        self.used.add(where)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        where = place()
        if where is not None:
            device = torch.device((kwargs or {}).get("device") or "cpu")
            if func in FROM_PYTHON and device.type != "cpu" and not isinstance(args[0], Tensor):
                raise Waits(f"{where} copies numbers to the device, in {func.__name__}")
            if func in TO_PYTHON and args[0].is_meta:
                raise Waits(f"{where} waits for the device, in {func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def guard(allowed: Mapping[str, str], used: set[str]) -> Iterator[None]:
    """Fail where a call reads, copies, makes or mixes; ``used`` takes the allowed places that were seen to read."""
    recorded = operator.recorded
    operator.recorded = lambda: False  # the mode watches, it replaces nothing: kernels run as without it
    try:
        with _Operations(allowed, used), _Functions():
            yield
    finally:
        operator.recorded = recorded


def _boolean(indices) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
