"""The M-projection: the member of a family nearest to a mixture, KL(mixture ‖ member) smallest (S2-E5, S2-C9).

    argmin_q KL(Σ_i w_i p_i ‖ q)   ⇔   E_q[u] = Σ_i w_i E_{p_i}[u]      u the sufficient statistic of the family

For normal laws u is x and xxᵀ, and the answer is written without subtracting squares:

    m = Σ_i w_i m_i,      P = Σ_i w_i (P_i + (m_i − m)(m_i − m)ᵀ)       within plus between
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.measures import Measure
from cumulant.solve import Solution


class ProjectedNormal(NamedTuple):
    """mean (*batch, d) and covariance (*batch, d, d) of the normal law nearest to each mixture."""

    mean: Tensor
    covariance: Tensor


def m_projection(weights: Tensor, means: Tensor, covariances: Tensor) -> ProjectedNormal:
    """The normal law with the mean and covariance of a mixture of n normal laws.

    weights (*batch, n), non-negative with sum 1; means (*batch, n, d); covariances (*batch, n, d, d); leading axes
    broadcast. Exact in the mean and the covariance; what it drops is the shape of the mixture.

    >>> import torch
    >>> m_projection(torch.tensor([0.5, 0.5]), torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1, 1))
    ProjectedNormal(mean=tensor([0.]), covariance=tensor([[2.]]))
    """
    where = "m_projection"
    _check_weights(where, weights)
    for name, part in {"means": means, "covariances": covariances}.items():
        require_alike(f"{where}.{name}", require_float(f"{where}.{name}", part), "weights", weights)
        require_finite(f"{where}.{name}", part)
    n = weights.shape[-1]
    if means.ndim < 2 or means.shape[-2] != n:
        expected = f"shape (*batch, n={n}, d), one for each weight"
        raise ValueError(sentence(f"{where}.means", expected, shape(means), "Match the weights' last axis."))
    d = means.shape[-1]
    if covariances.ndim < 3 or covariances.shape[-3:] != (n, d, d):
        expected = f"shape (*batch, n={n}, d={d}, d={d})"
        raise ValueError(sentence(f"{where}.covariances", expected, shape(covariances), "Match the means."))
    broadcast(where, weights.shape[:-1], means.shape[:-2], covariances.shape[:-3])
    mean = (weights[..., None] * means).sum(-2)
    apart = means - mean[..., None, :]
    within = (weights[..., None, None] * covariances).sum(-3)
    between = (weights[..., None] * apart).mT @ apart
    return ProjectedNormal(mean, within + (between + between.mT) / 2)


def m_projection_in(measure: Measure, weights: Tensor, eta: Tensor) -> Solution:
    """The member of an exponential family nearest to a mixture of n of its members.

        ∇G(η) = Σ_i w_i ∇G(η_i)

    measure  the base of the family on its space of statistics, such as `from_distribution(Gamma(...), full=True)`
    weights  (*batch, n), non-negative with sum 1
    eta      (*batch, n, k), the natural parameters of the members

    Returns the `Solution` of `Measure.natural`: values (*batch, k), differentiable in weights and eta.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.zeros(1), torch.eye(1))
    >>> m_projection_in(h, torch.tensor([0.25, 0.75]), torch.tensor([[0.0], [4.0]])).value
    tensor([3.])
    """
    where = "m_projection_in"
    _check_weights(where, weights)
    require_alike(f"{where}.eta", require_float(f"{where}.eta", eta), "weights", weights)
    if eta.ndim < 2 or eta.shape[-2:] != (weights.shape[-1], measure.dim):
        expected = f"shape (*batch, n={weights.shape[-1]}, k={measure.dim})"
        raise ValueError(sentence(f"{where}.eta", expected, shape(eta), "One natural parameter for each weight."))
    broadcast(where, weights.shape[:-1], eta.shape[:-2])
    target = (weights[..., None] * measure.mean(eta)).sum(-2)
    return measure.natural(target[..., None, :]).select(target.ndim - 1, 0)


def _check_weights(where: str, weights: object) -> None:
    w = require_float(f"{where}.weights", weights)
    if w.ndim < 1 or not w.shape[-1]:
        raise ValueError(sentence(f"{where}.weights", "shape (*batch, n) with n ≥ 1", shape(w), "One a component."))
    slack = 1e3 * torch.finfo(w.dtype).eps
    total = w.sum(-1)
    if not holds((w >= 0).all(-1) & ((total - 1).abs() <= slack)):
        got = f"a smallest weight of {w.min().item():.3g} and sums from {total.min().item():.6g}"
        expected, advice = "non-negative numbers with sum 1", "Divide them by their sum."
        raise ValueError(sentence(f"{where}.weights", expected, got, advice))
