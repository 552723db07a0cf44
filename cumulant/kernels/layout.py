"""How tensors must lie in memory for kernels that read them by pointer. Operations of torch take every layout."""

from __future__ import annotations

import torch
from torch import Tensor


def readable_rows(tensor: Tensor) -> Tensor:
    """(*batch, rows, width) with entries of a row side by side and rows that do not overlap; a copy only if need be.

    `.mT`, `x[..., ::2]`, `expand`, Fortran order and the factors of a decomposition are copied; batch axes may have any
    stride. A single row may claim any distance to the next one, which libraries of linear algebra still refuse.

    >>> import torch
    >>> x = torch.zeros(2, 3, 4)
    >>> readable_rows(x) is x, readable_rows(x.mT).stride(), readable_rows(x[..., :1].expand(2, 3, 4)).stride()
    (True, (12, 3, 1), (12, 4, 1))
    """
    width = tensor.shape[-1]
    fine = (width <= 1 or tensor.stride(-1) == 1) and tensor.stride(-2) >= width
    return tensor if fine else tensor.clone(memory_format=torch.contiguous_format)
