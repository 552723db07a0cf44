"""The Kalman update in Joseph's form: slower than elimination, but right where the prior is vague and the sensor sharp.

    P⁺ = (I − g hᵀ) P (I − g hᵀ)ᵀ + g gᵀ,      g = P h / (hᵀP h + 1)        for one whitened entry of y at a time

Both terms are positive semidefinite, whereas P − g hᵀP subtracts nearly equal numbers and loses log₁₀(hᵀP h) digits.
"""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor


class Conditioned(NamedTuple):
    """mean (k, d), covariance (k, d, d) and log-likelihood (k) of k separate updates."""

    mean: Tensor
    covariance: Tensor
    log_likelihood: Tensor


def joseph(
    mean: Tensor, covariance: Tensor, y: Tensor, observed: Tensor, matrix: Tensor, offset: Tensor, noise: Tensor
) -> Conditioned:
    """Condition N(mean, covariance) on y = H x + c + N(0, R), entries of y that were not ``observed`` left out.

    mean (k, d), covariance (k, d, d), y and observed (k, m), matrix H (k, m, d), offset c (k, m), noise R (k, m, m).

    >>> import torch
    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> vague = joseph(0 * one[0], 1e20 * one, one[0], one[0] > 0, one, 0 * one[0], 1e-4 * one)
    >>> vague.mean, vague.covariance
    (tensor([[1.]], dtype=torch.float64), tensor([[[0.0001]]], dtype=torch.float64))
    """
    both = observed[:, :, None] & observed[:, None, :]
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    root = torch.linalg.cholesky(torch.where(both, noise, eye))  # a missing entry: a row of H that is 0, noise 1
    rows = torch.linalg.solve_triangular(root, torch.where(observed[:, :, None], matrix, 0), upper=False)
    whitened = torch.linalg.solve_triangular(root, torch.where(observed, y - offset, 0)[..., None], upper=False)[..., 0]
    surprise = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + observed.to(y.dtype).sum(-1) * log(2 * pi)
    unit = torch.eye(mean.shape[-1], dtype=y.dtype, device=y.device)
    for entry in range(y.shape[-1]):
        h = rows[:, entry, :, None]  # (k, d, 1)
        cross = covariance @ h
        variance = (h.mT @ cross)[:, :, 0].clamp_min(0) + 1  # (k, 1)
        gain = cross / variance[..., None]
        error = whitened[:, entry, None] - (h * mean[..., None]).sum(1)
        mean = mean + gain[..., 0] * error
        keep = unit - gain @ h.mT
        covariance = keep @ covariance @ keep.mT + gain @ gain.mT
        surprise = surprise + (error.square() / variance + variance.log())[:, 0]
    return Conditioned(mean, (covariance + covariance.mT) / 2, -surprise / 2)
