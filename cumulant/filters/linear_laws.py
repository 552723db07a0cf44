"""Linear laws u | z ~ N(A z + b, V): given exactly, or the best linear ones for two variables with joint moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds
from cumulant.families import StateMoments


class LinearLaw(NamedTuple):
    """coefficient A (…, r, p), offset b (…, r) and noise V (…, r, r) of u | z ~ N(A z + b, V).

    In the layout of the engine (`cumulant.filters.protocol`) the sequences are one more axis, the last.
    """

    coefficient: Tensor
    offset: Tensor
    noise: Tensor


def linear_law(before: StateMoments, after: StateMoments, cross: Tensor) -> LinearLaw:
    """The best linear law of u given z for joint moments, in the layout of the engine: what sigma points determine.

        A = Cov(u, z) Cov(z)⁺,      b = E[u] − A E[z],      V = Cov(u) − A Cov(z) Aᵀ

    before  mean (*hypotheses, p, batch) and covariance (*hypotheses, p, p, batch) of z, the belief about x_{t−1}
    after   mean (*hypotheses, r, batch) and covariance (*hypotheses, r, r, batch) of u, the predicted x_t
    cross   (*hypotheses, r, p, batch), Cov(u, z)

    Directions in which z is certain have coefficient 0. V is positive semidefinite if the joint covariance is, up to
    rounding.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> z, u = StateMoments(one[0], 2 * one), StateMoments(0 * one[0], 9 * one)
    >>> [part.item() for part in linear_law(z, u, 4 * one)]                                # u = 2 z − 2 + N(0, 1)
    [2.0, -2.0, 1.0]
    """
    covariance, both = before.covariance.movedim(-1, 0), cross.movedim(-1, 0)
    coefficient = regression(both.mT, covariance)
    mean = (coefficient @ before.mean.movedim(-1, 0)[..., None])[..., 0]
    noise = after.covariance.movedim(-1, 0) - coefficient @ both.mT
    parts = coefficient, after.mean.movedim(-1, 0) - mean, (noise + noise.mT) / 2
    return LinearLaw(*(part.movedim(0, -1) for part in parts))


def regression(cross: Tensor, covariance: Tensor) -> Tensor:
    """Cov(x, z) Cov(z)⁺ from Cov(z, x) (…, p, r) and Cov(z) (…, p, p); directions in which z is certain are left out.

    >>> import torch
    >>> regression(torch.tensor([[1.0], [1.0]]), torch.ones(2, 2))         # z = (x, x) twice the same
    tensor([[0.5000, 0.5000]])
    """
    size = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    size = torch.where(size > 0, size, 1)[..., None]
    correlation, cross = covariance / (size * size.mT), cross / size
    root, failed = torch.linalg.cholesky_ex(correlation)
    floor = 1e2 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    sound = (failed == 0) & (root.diagonal(dim1=-2, dim2=-1).square().amin(-1) > floor)
    if holds(sound):
        return (torch.cholesky_solve(cross, root) / size).mT
    inverse = torch.linalg.pinv(correlation, hermitian=True, rtol=floor)
    sound = sound[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(torch.where(sound, correlation, eye))
    return (torch.where(sound, torch.cholesky_solve(cross, root), inverse @ cross) / size).mT
