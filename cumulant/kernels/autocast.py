"""Mixed precision: operands cast as torch.autocast casts those of a matrix product or of a loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def autocast(*tensors: T) -> tuple[T, ...]:
    """The tensors as torch.autocast casts the operands of a matrix product: inside it, all but float64 in its dtype.

    Gradients have the dtype of each tensor, through the cast.

    >>> import torch
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [t.dtype for t in autocast(torch.ones(1), torch.ones(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    if not torch._C._is_any_autocast_enabled():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return tensors
    return tuple(_cast(t) for t in tensors)


def autocast_float32(*tensors: T) -> tuple[T, ...]:
    """The tensors as torch.autocast casts the arguments of a loss: inside it, half precision in float32.

    >>> import torch
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [t.dtype for t in autocast_float32(torch.ones(1).half(), torch.ones(1, dtype=torch.float64))]
    [torch.float32, torch.float64]
    """
    return tuple(_widen(t) for t in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context whose matrix products are those of the operands' own dtype: sums stay in float32 once they are."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _cast(tensor: T) -> T:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if autocast_enabled(tensor) else tensor


def _widen(tensor: T) -> T:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    return tensor.float() if autocast_enabled(tensor) else tensor


def autocast_enabled(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor; some, such as meta, have none."""
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
