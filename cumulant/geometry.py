"""Information geometry of the family p_η: two charts, two divergences, one metric (§6, §9).

η ⟷ μ = ∇G(η)          natural and mean coordinates, inverse to each other through G and G*
B_G(a, b)               = G(a) − G(b) − ⟨∇G(b), a−b⟩ = KL(p_b ‖ p_a)     mind the order
B_G*(μ1, μ2)            = KL(p_η1 ‖ p_η2)
∇²G                     the Fisher metric; dμ = ∇²G dη
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, sentence, shape
from cumulant.kernels.dense import normalize
from cumulant.measures import Empirical, Measure
from cumulant.measures.dual import RANK
from cumulant.solve import Solution, Status
from cumulant.typing import Codes, PerQuery, Queries


def kl(measure: Measure, eta1: Queries, eta2: Queries) -> PerQuery:
    """KL(p_η1 ‖ p_η2), in natural coordinates: (*batch, q, d) twice → (*batch, q).

    >>> import torch
    >>> from cumulant import Gaussian
    >>> kl(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([3.0]), torch.tensor([1.0]))      # |η1 − η2|²/2
    tensor(2.)
    """
    return measure.kl(eta1, eta2)


def bregman(measure: Measure, a: Queries, b: Queries) -> PerQuery:
    """B_G(a, b) = G(a) − G(b) − ⟨∇G(b), a−b⟩, which is KL(p_b ‖ p_a): the arguments change places (S1-I1 corrected).

    >>> import torch
    >>> from cumulant import Gaussian
    >>> h = Gaussian(torch.zeros(1), torch.eye(1))
    >>> bregman(h, torch.tensor([3.0]), torch.tensor([1.0]))
    tensor(2.)
    """
    return measure.kl(b, a)


def dual_bregman(measure: Measure, mean1: Queries, mean2: Queries) -> PerQuery:
    """B_G*(μ1, μ2) = G*(μ1) − G*(μ2) − ⟨η2, μ1−μ2⟩ = KL(p_η1 ‖ p_η2): in mean coordinates the order stays (S1-I2).

    +inf where μ1 lies outside the hull of the support; μ2 must lie inside, where it has an η2.

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> dual_bregman(coin, torch.tensor([0.5]).double(), torch.tensor([0.25]).double())       # fair and loaded
    tensor(0.1438, dtype=torch.float64)
    """
    second = measure.natural(mean2)
    if not holds(second.status != int(Status.OUTSIDE)):
        got = f"{int((second.status == int(Status.OUTSIDE)).sum())} outside"
        advice = "Outside no natural parameter exists; measure.natural(mean2).status has where."
        raise ValueError(sentence("dual_bregman.mean2", "means inside the hull of the support", got, advice))
    return measure.conjugate(mean1) + measure.log_normalizer(second.value) - (second.value * mean1).sum(-1)


def fenchel_young(measure: Measure, eta: Queries, mean: Queries) -> PerQuery:
    """G(η) + G*(μ) − ⟨η,μ⟩ ≥ 0, zero iff μ = ∇G(η); equals KL(p_{η(μ)} ‖ p_η).

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> fenchel_young(coin, torch.zeros(1).double(), torch.tensor([[0.5], [0.75]]).double())
    tensor([0.0000, 0.1308], dtype=torch.float64)
    """
    return measure.log_normalizer(eta) + measure.conjugate(mean) - (eta * mean).sum(-1)


def to_mean(measure: Measure, eta: Queries) -> Queries:
    """η ↦ μ = ∇G(η).

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> to_mean(coin, torch.zeros(1).double())
    tensor([0.5000], dtype=torch.float64)
    """
    return measure.mean(eta)


def to_natural(measure: Measure, mean: Queries) -> Solution:
    """μ ↦ η = ∇G*(μ).

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> to_natural(coin, torch.tensor([0.75]).double()).value                                          # log 3
    tensor([1.0986], dtype=torch.float64)
    """
    return measure.natural(mean)


def inner(measure: Measure, eta: Queries, u: Queries, v: Queries) -> PerQuery:
    """The Fisher metric ⟨u,v⟩_η = uᵀ ∇²G(η) v of two tangent vectors in natural coordinates.

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
    >>> inner(coin, zero, one, 2 * one)                                                      # the variance 1/4, times 2
    tensor(0.5000, dtype=torch.float64)
    """
    return (u * measure.fisher_mv(eta, v)).sum(-1)


def natural_gradient(measure: Measure, eta: Queries, gradient: Queries) -> Queries:
    """∇²G(η)⁺ ∇_ηL = ∇_μL, the steepest direction in the Fisher metric; directions h does not span get 0.

    >>> import torch
    >>> from cumulant import Gaussian
    >>> natural_gradient(Gaussian(torch.zeros(1), 4 * torch.eye(1)), torch.zeros(1), torch.ones(1))
    tensor([0.2500])
    """
    fisher = measure.fisher(eta)
    rank = max(RANK, measure.dim * torch.finfo(fisher.dtype).eps)
    inverse = torch.linalg.pinv(fisher, rtol=rank, hermitian=True)
    return (inverse @ gradient[..., None])[..., 0]


def e_geodesic(a: Queries, b: Queries, t: float | Tensor) -> Queries:
    """(1−t) a + t b: straight in natural coordinates; p_t ∝ p_a^{1−t} p_b^t.

    >>> import torch
    >>> e_geodesic(torch.tensor([0.0]), torch.tensor([2.0]), 0.25)
    tensor([0.5000])
    """
    return torch.lerp(a, b, torch.as_tensor(t, dtype=a.dtype, device=a.device))


def m_geodesic(measure: Measure, a: Queries, b: Queries, t: float | Tensor) -> Solution:
    """The η whose mean is (1−t) ∇G(a) + t ∇G(b): straight in mean coordinates, the I-projected mixture.

    >>> import torch
    >>> from cumulant import Empirical
    >>> coin = Empirical(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    >>> a, b = torch.tensor([-1.0]).double(), torch.tensor([3.0]).double()
    >>> m_geodesic(coin, a, b, 0.5).value, e_geodesic(a, b, 0.5)
    (tensor([0.4505], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    start, end = measure.mean(a), measure.mean(b)
    return measure.natural(torch.lerp(start, end, torch.as_tensor(t, dtype=start.dtype, device=start.device)))


class MaxEntropy(NamedTuple):
    """Both sides of the duality; ``kkt_residual`` small proves both optimal.

    x             (*batch, d)  minimiser of log Σ exp(Ax + b)
    weights       (*batch, n)  ν = softmax(Ax + b), the maximiser of the dual
    primal, dual  (*batch)     values; equal at the optimum
    kkt_residual  (*batch)     see `kkt_residual`
    status        (*batch)     `Status` of the solve: BOUNDARY or OUTSIDE: 0 is not inside the hull of the rows
    """

    x: Tensor
    weights: Tensor
    primal: PerQuery
    dual: PerQuery
    kkt_residual: PerQuery
    status: Codes


def maximum_entropy(rows: Tensor, offsets: Tensor | None = None, *, mean: Tensor | None = None) -> MaxEntropy:
    """The pair of Boyd and Vandenberghe (S1-D1), solved through `Measure.natural` at mean 0.

        min_x log Σ_i exp((Ax + b)_i)      =      max_ν bᵀν − Σ ν_i log ν_i   subject to  1ᵀν = 1, Aᵀν = 0, ν ≥ 0

    rows     (*batch, n, d) is A, its rows the atoms
    offsets  (*batch, n) is b, the log base weights; −inf removes a row
    mean     (*batch, d) or (d,): the constraint is E_ν[row] = mean instead of 0, with A = rows − mean (S3-F2)

    Attention *ascends* the function that is minimised here. Without rows nothing is feasible: both values are −inf,
    the weights 0 and the status OUTSIDE.

    >>> import torch
    >>> solution = maximum_entropy(torch.tensor([[-1.0], [1.0], [3.0]], dtype=torch.float64))
    >>> solution.weights, bool(solution.kkt_residual < 1e-12)
    (tensor([0.6162, 0.2676, 0.1162], dtype=torch.float64), True)
    >>> faces = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]                     # Jaynes' loaded die
    >>> maximum_entropy(faces, mean=torch.tensor([4.5], dtype=torch.float64)).weights
    tensor([0.0544, 0.0788, 0.1142, 0.1654, 0.2398, 0.3475], dtype=torch.float64)
    """
    rows = require_float("maximum_entropy.rows", rows)
    if rows.ndim < 2:
        advice = "Use rows[:, None] for d=1."
        raise ValueError(sentence("maximum_entropy.rows", "shape (*batch, n, d)", shape(rows), advice))
    if mean is not None:
        where = "maximum_entropy.mean"
        require_alike(where, require_float(where, mean), "rows", rows)
        if mean.ndim == 0 or mean.shape[-1] != rows.shape[-1]:
            expected = f"shape (*batch, d={rows.shape[-1]})"
            raise ValueError(sentence(where, expected, shape(mean), "One number per column."))
        broadcast(where, mean.shape[:-1], rows.shape[:-2])
        rows = rows - mean[..., None, :]
        if offsets is not None:  # one set of offsets for a batch of means
            offsets = offsets[(None,) * (rows.ndim - 1 - offsets.ndim)]
    measure = Empirical(rows, offsets)
    b = torch.zeros_like(rows[..., 0]) if offsets is None else offsets
    solution = measure.natural(torch.zeros_like(rows[..., :1, :].sum(-2, keepdim=True)))
    x = solution.value[..., 0, :]
    logits = (rows @ x[..., None])[..., 0] + b
    primal, weights = normalize(logits)
    positive = weights > 0  # 0 log 0 = 0, and so is 0 · (−inf), also in the gradient
    dual = (weights * (torch.where(positive, b, 0) - torch.where(positive, weights, 1).log())).sum(-1)
    dual = torch.where(primal == -torch.inf, -torch.inf, dual)
    residual = kkt_residual(rows, b, x, weights)
    return MaxEntropy(x, weights, primal, dual, residual, solution.status[..., 0])


def kkt_residual(rows: Tensor, offsets: Tensor, x: Tensor, weights: Tensor) -> PerQuery:
    """How far (x, ν) is from optimal for both problems: the largest violation among

    ν ≥ 0,    1ᵀν = 1,    Aᵀν = 0 (in units of the largest row),    ν = softmax(Ax + b).

    1 without rows: no weights sum to 1.

    >>> import torch
    >>> rows, zero = torch.tensor([[-1.0], [1.0]]), torch.zeros(1)
    >>> [float(kkt_residual(rows, torch.zeros(2), zero, torch.tensor(w))) for w in ([0.5, 0.5], [0.75, 0.25])]
    [0.0, 0.5]
    """
    total = (weights.sum(-1) - 1).abs()
    if rows.shape[-2] == 0:
        return total
    size = torch.linalg.vector_norm(rows, dim=-1).amax(-1).clamp_min(torch.finfo(rows.dtype).tiny)
    feasible = torch.linalg.vector_norm((weights[..., None, :] @ rows)[..., 0, :], dim=-1) / size
    negative = (-weights).clamp_min(0).amax(-1)
    stationary = (weights - normalize((rows @ x[..., None])[..., 0] + offsets)[1]).abs().amax(-1)
    return torch.stack([feasible, total, negative, stationary]).amax(0)
