"""What later observations say about a state, as a normal factor: quotients and products of normal laws.

    β(x) = p(y_{t+1} … y_T | x_t = x, modes) ≈ exp(c + γᵀ(x − a) − ½ (x − a)ᵀ Λ (x − a))

A smoothed law N(m̂, P̂) is the filtered one N(m, P) times such a factor, so that with a = m

    Λ = P̂⁻¹ − P⁻¹,      γ = P̂⁻¹ (m̂ − m)                                                              quotient
    P̂ = (P⁻¹ + Λ)⁻¹,    m̂ = m + P̂ (γ − Λ (m − a)),    log ∫ N(x; m, P) β(x) dx                       product

Where several futures j of weights w_j are merged, Λ must stay positive semidefinite to be used with other laws than the
one it was merged for. The smoothed covariance is S + D, the mean of the covariances and the covariance of the means;
S ≤ P, but S + D ≤ P need not hold. The factor has

    P̂ = S + (P − S) : D,        A : B = A (A + B)⁻¹ B,  the parallel sum

in place: S + D up to second order where D is small against P − S, and at most P always.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds
from cumulant.filters.beliefs import Beliefs


class Message(NamedTuple):
    """The factor β of every hypothesis: a = center (batch, *modes, d), γ = slope, Λ = precision, c = log_scale."""

    center: Tensor
    slope: Tensor
    precision: Tensor
    log_scale: Tensor

    def unsqueeze(self, axis: int) -> Message:
        """One factor for hypotheses that differ in one more mode."""
        return Message(*(part.unsqueeze(axis) for part in self))


class Inverse(NamedTuple):
    """P⁻¹ and log det P."""

    matrix: Tensor
    log_det: Tensor


def quotient(after: Beliefs, before: Beliefs) -> Message:
    """The factor that takes normal laws, and their weights, to those after it.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> law = Beliefs(0 * one[0], 0 * one, one[None])
    >>> factor = quotient(law._replace(mean=law.mean + 1, covariance=law.covariance / 2), law)
    >>> factor.slope, factor.precision
    (tensor([[[2.0000]]]), tensor([[[[1.0000]]]]))
    """
    new, old = inverse(after.covariance), inverse(before.covariance)
    apart = after.mean - before.mean
    slope = _times(new.matrix, apart)
    gain = ((slope * apart).sum(-1) - old.log_det + new.log_det) / 2
    scale = after.log_weights - before.log_weights - gain
    return Message(before.mean, slope, new.matrix - old.matrix, scale)


def product(beliefs: Beliefs, message: Message) -> Beliefs:
    """Normal laws times a factor, with weights times the integrals.

    Covariances are sums of positive semidefinite terms, singular ones allowed: with W = (I + P Λ)⁻¹,
    P̂ = W P Wᵀ + W P Λ P Wᵀ.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> law = Beliefs(0 * one[0], 0 * one, one[None])
    >>> one = torch.ones(1, 1, 1)
    >>> [part.item() for part in product(law, Message(0 * one, 2 * one, one[..., None], 0 * one[0]))[1:]]
    [1.0, 0.5]
    """
    log_weights, mean, covariance = beliefs
    size = _sizes(covariance)
    units = size[..., None] * size[..., None, :]
    p, precision = covariance / units, message.precision * units
    spread = p @ precision
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    factors, pivots, _ = torch.linalg.lu_factor_ex(eye + spread)
    back = torch.linalg.lu_solve(factors, pivots, eye.expand_as(factors))
    after = back @ (p + spread @ p) @ back.mT * units
    after = (after + after.mT) / 2
    apart = mean - message.center
    bent = _times(message.precision, apart)
    slope = message.slope - bent
    move = _times(after, slope)
    log_det = factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    gain = ((2 * message.slope - bent) * apart).sum(-1) + (slope * move).sum(-1) - log_det
    return Beliefs(log_weights + message.log_scale + gain / 2, mean + move, after)


def bounded(within: Tensor, between: Tensor, before: Tensor) -> Tensor:
    """S + (P − S) : D from S = within, D = between and P = before, all (…, d, d).

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> round(bounded(one, one, 2 * one).item(), 4), round(bounded(one, 1e9 * one, 2 * one).item(), 4)
    (1.5, 2.0)
    """
    size = _sizes(before)
    units = size[..., None] * size[..., None, :]
    d, rest = between / units, (before - within) / units
    eye = torch.eye(d.shape[-1], dtype=d.dtype, device=d.device)
    share, _ = torch.linalg.solve_ex(rest + d + _rounding(d) * eye, d)
    part = rest @ share * units
    return within + (part + part.mT) / 2


def inverse(covariance: Tensor) -> Inverse:
    """P⁻¹ and log det P of (…, d, d); where P is singular, of P with variances of the size of rounding added.

    >>> import torch
    >>> inverse(torch.tensor([[4.0]])), inverse(torch.tensor([[0.0]])).matrix.isfinite()
    (Inverse(matrix=tensor([[0.2500]]), log_det=tensor(1.3863)), tensor([[True]]))
    """
    size = _sizes(covariance)
    units = size[..., None] * size[..., None, :]
    correlation = covariance / units
    root, failed = torch.linalg.cholesky_ex(correlation)
    rounding = _rounding(covariance)
    singular = (failed != 0) | (root.diagonal(dim1=-2, dim2=-1).square().amin(-1) <= rounding)
    if not holds(~singular):
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        for ridge in (rounding, rounding**0.5, 1e1 * covariance.shape[-1]):  # the last is above every correlation
            raised = torch.where(singular[..., None, None], correlation + ridge * eye, correlation)
            root, failed = torch.linalg.cholesky_ex(raised)
            if holds(failed == 0):
                break
    matrix = torch.cholesky_inverse(root) / units
    return Inverse(matrix, 2 * (root.diagonal(dim1=-2, dim2=-1).log() + size.log()).sum(-1))


def _sizes(covariance: Tensor) -> Tensor:
    """Standard deviations, in which units no entry is small because of its unit; 1 where squares would overflow."""
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    certain = variances <= torch.finfo(covariance.dtype).tiny ** 0.5
    return torch.where(certain, 1, torch.where(certain, 1, variances).sqrt())


def _rounding(like: Tensor) -> float:
    return 1e1 * like.shape[-1] * torch.finfo(like.dtype).eps


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
