"""Products and square roots of many small matrices whose batch is the last axis.

A loop over the small axes with one operation on whole batches each is several times faster than a call of LAPACK for
every matrix, while there are many more matrices than entries in one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_MATRICES = 64  # up to which a batched matrix product beats the loop
MANY_TERMS = 32  # in a sum from which it does too


def product(a: Tensor, b: Tensor) -> Tensor:
    """Σ_k a_ik b_kj of (p, q, n) and (q, r, n).

    >>> import torch
    >>> a = torch.arange(4.0).reshape(2, 2, 1)
    >>> product(a, a)[..., 0]
    tensor([[ 2.,  3.],
            [ 6., 11.]])
    """
    n, terms = max(a.shape[-1], b.shape[-1]), a.shape[1]
    if n <= FEW_MATRICES or not 0 < terms <= MANY_TERMS:
        return (a.movedim(-1, 0) @ b.movedim(-1, 0)).movedim(0, -1)
    total = a[:, 0, None] * b[None, 0]
    for k in range(1, terms):
        total.addcmul_(a[:, k, None], b[None, k])
    return total


def semidefinite_root(matrices: Tensor) -> Tensor:
    """L lower triangular with L Lᵀ = P of (d, d, n), Cholesky's; directions without variance have columns of zeros.

    >>> import torch
    >>> semidefinite_root(torch.tensor([[4.0, 2.0], [2.0, 1.0]])[..., None])[..., 0]
    tensor([[2., 0.],
            [1., 0.]])
    """
    d, rest, columns = matrices.shape[0], matrices, []
    floor = d * torch.finfo(matrices.dtype).eps
    for k in range(d):
        pivot = rest[0, 0]
        positive = pivot > floor * matrices[k, k].detach()
        scale = torch.where(positive, torch.where(positive, pivot, 1).rsqrt(), 0)
        column = rest[:, 0] * scale
        columns.append(torch.cat([column.new_zeros(k, *column.shape[1:]), column]) if k else column)
        rest = torch.addcmul(rest[1:, 1:], column[1:, None], column[None, 1:], value=-1)
    return torch.stack(columns, 1) if columns else matrices
