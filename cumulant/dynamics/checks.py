"""Checks of arguments that are clouds or positive definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import holds, require_finite, require_float, sentence, shape


def require_cloud(where: str, x: object, *, finite: bool = True) -> Tensor:
    """A cloud (*batch, n, d) of at least one particle."""
    cloud = require_float(where, x)
    if cloud.ndim < 2 or 0 in cloud.shape[-2:]:
        expected = "a cloud (*batch, n, d) of at least one particle"
        raise ValueError(sentence(where, expected, shape(cloud), "Add the particle axis."))
    if finite:
        require_finite(where, cloud)
    return cloud


def require_positive_definite(where: str, matrix: object) -> Tensor:
    """The lower Cholesky factor of a symmetric positive definite (*batch, d, d), or a sentence."""
    m = require_float(where, matrix)
    if m.ndim < 2 or m.shape[-1] != m.shape[-2]:
        raise ValueError(sentence(where, "a square matrix (d, d)", shape(m), "Use torch.diag for a diagonal."))
    require_finite(where, m)
    slack = 1e3 * torch.finfo(m.dtype).eps * m.detach().abs().amax((-2, -1), keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(m)
    if not holds((m - m.mT).abs() <= slack) or not holds(failed == 0):
        got = "one that is not"
        raise ValueError(sentence(where, "a symmetric positive definite matrix", got, "Clip its eigenvalues above 0."))
    return factor
