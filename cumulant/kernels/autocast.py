"""Mixed precision: what torch.autocast does to the operands of a matrix product, done to ours."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def autocast(*tensors: T) -> tuple[T, ...]:
    """The tensors as torch.autocast would hand them to a matrix product: unchanged outside of it; inside, every
    floating tensor but float64 in its dtype. Gradients come back in the dtype of each tensor, through the cast.

    >>> import torch
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [t.dtype for t in autocast(torch.ones(1), torch.ones(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    return tuple(_cast(t) for t in tensors)


def _cast(tensor: T) -> T:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
