"""The comparison that the tests share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def close(ours, theirs, tolerance: float = 1e-12, *, rtol: float | None = None) -> None:
    """Fail unless |ours − theirs| ≤ tolerance + rtol |theirs| in every entry; rtol is `tolerance` unless it is given.

    Tensors and arrays must agree in shape and dtype. Numbers have neither and stand for every entry; lists of numbers
    have a shape but no dtype. A NaN equals nothing.
    """
    dtype = next((x.dtype for x in map(_typed, (ours, theirs)) if x is not None), torch.float64)
    a, b = (torch.as_tensor(x, dtype=dtype) if (y := _typed(x)) is None else y for x in (ours, theirs))
    if isinstance(ours, NUMBER) or isinstance(theirs, NUMBER):
        a, b = torch.broadcast_tensors(a, b)
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance if rtol is None else rtol)


NUMBER = int | float | np.number


def _typed(values) -> Tensor | None:
    """The values as a tensor that keeps their dtype, None for numbers and lists."""
    if isinstance(values, Tensor):
        return values.detach()
    return torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else None
