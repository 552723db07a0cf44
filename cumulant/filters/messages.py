"""What later observations say about a state, as a normal factor: quotients and products of normal laws.

    β(x) = p(y_{t+1} … y_T | x_t = x, modes) ≈ exp(c + γᵀ(x − a) − ½ (x − a)ᵀ Λ (x − a))

A smoothed law N(m̂, P̂) is the filtered one N(m, P) times such a factor, so that with a = m̂

    Λ = P̂⁻¹ − P⁻¹,      γ = P⁻¹ (m̂ − m)                                                              quotient

and in return, for any law, with W = (I + P Λ)⁻¹ and d = m − a,

    P̂ = W P,            m̂ = a + W d + P̂ γ                                                            product
    log ∫ N(x; m, P) β(x) dx = c + γᵀ W d + ½ γᵀ P̂ γ − ½ dᵀ Λ W d + ½ log det W

About a = m̂ nothing large is subtracted where Λ is large: about m, γ would be Λ (m̂ − m) and more.

Where several futures j of weights w_j are merged, Λ must stay positive semidefinite to be used with other laws than the
one it was merged for. The smoothed covariance is S + D, the mean of the covariances and the covariance of the means;
S ≤ P, but S + D ≤ P need not hold. The factor has

    P̂ = S + (P − S) : D,        A : B = A (A + B)⁻¹ B,  the parallel sum

in its place: S + D up to second order where D is small against P − S, and at most P always.
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


def silent(beliefs: Beliefs) -> Message:
    """The factor 1: nothing comes later."""
    zeros = (torch.zeros_like(part) for part in (beliefs.mean, beliefs.covariance, beliefs.log_weights))
    return Message(beliefs.mean, *zeros)


def quotient(after: Beliefs, before: Beliefs, between: Tensor | None = None, rounding: Tensor | None = None) -> Message:
    """The factor that takes normal laws, and their weights, to those after it.

    ``between`` (…, d, d) is the part D of the covariance after that comes from merging; in the place of S + D the
    factor has S + (P − S) : D. All is done in units in which P is the identity. ``rounding`` (…, d) are the errors of
    the means: deviations of their size are none, and the factor says nothing of them.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> law = Beliefs(0 * one[0], 0 * one, one[None])
    >>> factor = quotient(law._replace(mean=law.mean + 1, covariance=law.covariance / 2), law)
    >>> factor.center, factor.slope, factor.precision
    (tensor([[[1.]]]), tensor([[[1.]]]), tensor([[[[1.0000]]]]))
    """
    white = whitening(before.covariance, rounding)
    eye = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
    unused = (white == 0).all(-1).to(white.dtype)[..., None] * eye
    d = 0 * eye if between is None else _through(white, between)
    apart = _times(white, after.mean - before.mean)
    learnt, apart = _learnt(eye - unused - _through(white, after.covariance) + d, apart, white, before.covariance)
    if between is not None:
        learnt = learnt - parallel_sum(learnt, d)
    share, log_det = inverse(eye - learnt)
    scale = after.log_weights - before.log_weights + (apart.square().sum(-1) - log_det) / 2
    return Message(after.mean, _times(white.mT, apart), _through(white.mT, share - eye), scale)


def _learnt(learnt: Tensor, apart: Tensor, white: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """I − S and m̂ − m in units of P, without the directions in which nothing is learnt but rounding.

    In those units a covariance is wrong by its rounding divided by the smallest correlation that counts.
    """
    size = _sizes(covariance)
    rounding = 1e2 * torch.finfo(white.dtype).eps * (white * size[..., None, :]).square().sum((-2, -1))
    eye = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
    unclear = torch.linalg.cholesky_ex(learnt - rounding[..., None, None] * eye).info != 0
    if not holds(~unclear):
        values, vectors = torch.linalg.eigh(
            learnt.detach()
        )  # gradients of eigenvectors are none where values are equal
        kept = torch.where((values > rounding[..., None])[..., None, :], vectors, 0)
        kept = torch.where(unclear[..., None, None], kept @ kept.mT, eye)
        learnt, apart = _through(kept, learnt), _times(kept, apart)
    return learnt, apart


def product(beliefs: Beliefs, message: Message) -> Beliefs:
    """Normal laws times a factor, with weights times the integrals.

    Covariances are sums of positive semidefinite terms, singular ones allowed: P̂ = W P Wᵀ + W P Λ P Wᵀ.

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
    left = _times(back, apart / size) * size
    pushed = _times(after, message.slope)
    log_det = factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    tilt = (message.slope * (left + pushed / 2)).sum(-1) - (apart * _times(message.precision, left)).sum(-1) / 2
    gain, move = message.log_scale + tilt - log_det / 2, left + pushed - apart
    # a factor for a law without variance may say nothing to a law with some, whose weight is then rounding
    sound = gain.isfinite() & move.isfinite().all(-1) & after.isfinite().flatten(-2).all(-1)
    if not holds(sound):
        gain, move = torch.where(sound, gain, 0), torch.where(sound[..., None], move, 0)
        after = torch.where(sound[..., None, None], after, covariance)
    return Beliefs(log_weights + gain, mean + move, after)


def parallel_sum(a: Tensor, b: Tensor) -> Tensor:
    """A (A + B)⁻¹ B of positive semidefinite matrices (…, d, d) of which one is of size 1, up to rounding.

    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> round(parallel_sum(one, one).item(), 4), round(parallel_sum(one, 1e9 * one).item(), 4)
    (0.5, 1.0)
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    share, _ = torch.linalg.solve_ex(a + b + _floor(a) * eye, b)
    both = a @ share
    return (both + both.mT) / 2


def whitening(covariance: Tensor, rounding: Tensor | None = None) -> Tensor:
    """W (…, d, d) with W P Wᵀ = I; where P is singular, the identity on the directions that vary and rows of 0 else.

    Entries with a deviation below ten times their ``rounding`` (…, d) do not vary.

    >>> import torch
    >>> whitening(torch.tensor([[4.0]])), whitening(torch.tensor([[0.0]]))
    (tensor([[0.5000]]), tensor([[0.]]))
    """
    size, floor = _sizes(covariance), torch.full_like(covariance[..., 0, 0], _floor(covariance))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    correlation = covariance / (size[..., None] * size[..., None, :])
    if rounding is not None:
        known = covariance.diagonal(dim1=-2, dim2=-1) > (10 * rounding).square()
        correlation = torch.where(known[..., None] & known[..., None, :], correlation, 0)
        floor = torch.maximum(floor, torch.where(known, rounding / size, 0).square().sum(-1))
    root, failed = torch.linalg.cholesky_ex(correlation)
    sound = ((failed == 0) & (root.diagonal(dim1=-2, dim2=-1).square().amin(-1) > floor))[..., None, None]
    if holds(sound):
        return torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False) / size[..., None, :]
    values, vectors = torch.linalg.eigh(correlation)
    varies = values > floor[..., None]
    scale = torch.where(varies, torch.where(varies, values, 1).rsqrt(), 0)
    root = torch.linalg.cholesky(torch.where(sound, correlation, eye))
    white = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
    return torch.where(sound, white, scale[..., None] * vectors.mT) / size[..., None, :]


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


def _floor(like: Tensor) -> float:
    """The smallest eigenvalue of a correlation matrix that counts; the square of rounding would be too much, 1 lost."""
    return torch.finfo(like.dtype).eps ** 0.65


def _through(matrix: Tensor, covariance: Tensor) -> Tensor:
    image = matrix @ covariance @ matrix.mT
    return (image + image.mT) / 2


def _rounding(like: Tensor) -> float:
    return 1e1 * like.shape[-1] * torch.finfo(like.dtype).eps


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
