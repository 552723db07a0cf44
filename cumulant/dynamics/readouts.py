"""Statistics of a cloud of particles: distance to a Gaussian, cumulants, rank, clusters, energy.

Each is a function of a cloud x (*batch, n, d), one number per cloud unless it says otherwise, O(n · directions) or
O(n d²); the energy and `effective_keys` are attention over all pairs. Directions come from NumPy's generator, so that
values are reproducible on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant import special
from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.dynamics.checks import require_cloud
from cumulant.kernels import moments
from cumulant.typing import Codes, PerQuery, Queries

ROUNDING = 8  # units of rounding, relative to the largest entry, below which a spread counts as none
MAX_CLUSTERS = 60  # that `READOUTS["clusters"]` counts; one more means more


def w2_to_gaussian(x: Queries, directions: int = 64, seed: int = 1) -> PerQuery:
    """Sliced distance to the Gaussian of the same moments along each direction (§5.5).

        mean over u of  (1/n Σ_k (z_(k) − Φ⁻¹((k+½)/n))²)^½,      z = ⟨u,x⟩ standardised and sorted

    A Gaussian sample is not at 0 but within `gaussian_band`. In one dimension there is one direction. A direction
    without spread counts as a point mass at 0, at distance (1/n Σ q_k²)^½.  (*batch, n, d) → (*batch)

    >>> import torch
    >>> round(w2_to_gaussian(torch.tensor([[-1.0], [1.0]], dtype=torch.float64)).item(), 6)      # 1 − Φ⁻¹(¾)
    0.32551
    """
    z = _standardised("w2_to_gaussian", x, directions, seed)
    level = (torch.arange(x.shape[-2], dtype=x.dtype, device=x.device) + 0.5) / x.shape[-2]
    gap = z.sort(-1).values - torch.special.ndtri(level)
    return gap.square().mean(-1).sqrt().mean(-1)


class GaussianBand(NamedTuple):
    """Mean and standard deviation of `w2_to_gaussian` over Gaussian samples."""

    mean: float
    std: float


def gaussian_band(n: int, d: int, draws: int = 20, seed: int = 0, directions: int = 64) -> GaussianBand:
    """`w2_to_gaussian` of clouds of n independent N(0, I_d) particles, the null distribution of that distance.

    >>> band = gaussian_band(600, 1)
    >>> round(band.mean, 4), round(band.std, 4)
    (0.0549, 0.0136)
    """
    for name, value, least in (("n", n, 1), ("d", d, 1), ("draws", draws, 2)):
        _require_count(f"gaussian_band.{name}", value, least)
    rng = np.random.default_rng(seed)
    samples = (torch.from_numpy(rng.standard_normal((n, d))) for _ in range(draws))
    values = torch.stack([w2_to_gaussian(x, directions) for x in samples])
    return GaussianBand(values.mean().item(), values.std().item())


def cumulants(x: Queries, order: int = 4, directions: int = 64, seed: int = 1) -> Tensor:
    """Standardised cumulants κ_1 … κ_order along directions, averaged:  (*batch, n, d) → (*batch, order).

        κ_k = m_k − Σ_{j<k} (k−1 choose j−1) κ_j m_{k−j},      m_k = mean z^k

    Odd orders average |κ|, because u and −u give opposite signs; κ_1 = 0 and κ_2 = 1 by standardising. A direction
    without spread has all cumulants 0.

    >>> import torch
    >>> cumulants(torch.tensor([[-1.0], [1.0]]), 4)
    tensor([ 0.,  1.,  0., -2.])
    """
    _require_count("cumulants.order", order, 1)
    z = _standardised("cumulants", x, directions, seed)
    power, raw = torch.ones_like(z), []
    for _ in range(order):
        power = power * z
        raw.append(power.mean(-1))
    kappa: list[Tensor] = []
    for k in range(1, order + 1):
        known = [math.comb(k - 1, j - 1) * kappa[j - 1] * raw[k - j - 1] for j in range(1, k)]
        kappa.append(raw[k - 1] - torch.stack(known).sum(0) if known else raw[0])
    return torch.stack([(c.abs() if k % 2 == 0 else c).mean(-1) for k, c in enumerate(kappa)], -1)


def skewness(x: Queries, directions: int = 64, seed: int = 1) -> PerQuery:
    """Mean of |κ_3| over directions:  (*batch, n, d) → (*batch).

    >>> import torch
    >>> skewness(torch.tensor([[0.0], [0.0], [0.0], [1.0]]))
    tensor(1.1547)
    """
    return cumulants(x, 3, directions, seed)[..., 2]


def kurtosis(x: Queries, directions: int = 64, seed: int = 1) -> PerQuery:
    """Mean excess kurtosis κ_4 over directions:  (*batch, n, d) → (*batch). −6/(d+2) on a uniform sphere.

    >>> import torch
    >>> kurtosis(torch.tensor([[-1.0], [1.0]]))
    tensor(-2.)
    """
    return cumulants(x, 4, directions, seed)[..., 3]


def effective_rank(x: Queries) -> PerQuery:
    """exp of the entropy of the covariance's eigenvalues, as shares:  (*batch, n, d) → (*batch); 0 for one point.

    >>> import torch
    >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    tensor(2.)
    """
    away, flat = _centred(require_cloud("effective_rank.x", x, finite=False))
    gram = away.mT @ away if x.shape[-1] <= x.shape[-2] else away @ away.mT  # the same eigenvalues but for zeros
    return torch.where(flat, 0, special.effective_rank(torch.linalg.eigvalsh(gram).clamp_min(0)))


class Clusters(NamedTuple):
    """count (*batch) of clusters, limit + 1 if there are more; sizes (*batch, k) descending, filled up with 0."""

    count: Codes
    sizes: Codes


def clusters(x: Queries, tol: float = 0.05, limit: int | None = None) -> Clusters:
    """Greedy clusters: in order, each particle joins the first one whose first member is within tol √d, or starts one.

    limit  stop beyond so many clusters; without it a cloud that has not clustered costs O(n² d)

    >>> import torch
    >>> clusters(torch.tensor([[0.0], [1.0], [0.01], [1.02], [1.01]]))
    Clusters(count=tensor(2), sizes=tensor([3, 2]))
    """
    require_cloud("clusters.x", x, finite=False)
    if not tol > 0:
        raise ValueError(sentence("clusters.tol", "a positive number", tol, "It is relative to √d."))
    if limit is not None:
        _require_count("clusters.limit", limit, 1)
    sizes_of = [
        _cluster_sizes(cloud, tol * math.sqrt(x.shape[-1]), limit) for cloud in x.detach().reshape(-1, *x.shape[-2:])
    ]
    width = max([0, *map(len, sizes_of)])
    sizes = torch.tensor([s + [0] * (width - len(s)) for s in sizes_of], dtype=torch.int64, device=x.device)
    count = torch.tensor([len(s) for s in sizes_of], dtype=torch.int64, device=x.device)
    return Clusters(count.reshape(x.shape[:-2]), sizes.reshape(*x.shape[:-2], width))


def _cluster_sizes(cloud: Tensor, radius: float, limit: int | None) -> list[int]:
    """Cluster sizes, descending; cluster by cluster, which gives the same result as particle by particle."""
    sizes: list[int] = []
    while len(cloud) and (limit is None or len(sizes) <= limit):
        away = torch.linalg.vector_norm(cloud - cloud[0], dim=-1) >= radius
        sizes.append(len(cloud) - int(away.sum()))
        cloud = cloud[away]
    return sorted(sizes, reverse=True)


def mean_cosine(x: Queries) -> PerQuery:
    """Mean of ⟨x̂_i,x̂_j⟩ over all pairs, each particle with itself included: |mean x̂|².  (*batch, n, d) → (*batch).

    A particle at 0 has no direction and counts 0.

    >>> import torch
    >>> mean_cosine(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    tensor(0.5000)
    """
    norm = torch.linalg.vector_norm(require_cloud("mean_cosine.x", x, finite=False), dim=-1, keepdim=True)
    return (x / torch.where(norm == 0, 1, norm)).mean(-2).square().sum(-1)


def mean_norm(x: Queries) -> PerQuery:
    """Mean of |x_i|:  (*batch, n, d) → (*batch).

    >>> import torch
    >>> mean_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor(2.5000)
    """
    return torch.linalg.vector_norm(require_cloud("mean_norm.x", x, finite=False), dim=-1).mean(-1)


def log_interaction_energy(x: Queries, beta: float, log_weights: Tensor | None = None) -> PerQuery:
    """log E(X), E = ½ Σ_ij h_i h_j e^{β⟨x_i,x_j⟩}, in linear memory:  (*batch, n, d) → (*batch).

    On the sphere E never decreases under attention of any step size, unmasked, with Q = K = V = I (X-4).

    log_weights  w_i = log h_i (*batch, n); every particle counts 1 if None

    >>> import torch
    >>> log_interaction_energy(torch.eye(2), 1.0).exp()                                                 # e + 1
    tensor(3.7183)
    """
    require_cloud("log_interaction_energy.x", x, finite=False)
    if not isinstance(beta, int | float) or not math.isfinite(beta):
        raise ValueError(sentence("log_interaction_energy.beta", "a finite number", beta, "It multiplies the scores."))
    if log_weights is not None:
        where = "log_interaction_energy.log_weights"
        require_alike(where, require_float(where, log_weights), "x", x)
        if log_weights.shape[-1] != x.shape[-2]:
            expected = f"shape (*batch, n={x.shape[-2]})"
            raise ValueError(sentence(where, expected, shape(log_weights), "One weight per particle."))
    g = moments(beta * x, x, log_weights=log_weights, statistics=()).log_normalizer.to(x.dtype)
    return torch.logsumexp(g if log_weights is None else g + log_weights, -1) - math.log(2)


def effective_keys(x: Queries, scale: float = 1.0) -> PerQuery:
    """Mean over particles of 1/Σ_j a_ij², the effective number of keys (X-8, X-9):  (*batch, n, d) → (*batch).

    >>> import torch
    >>> effective_keys(torch.zeros(7, 2))
    tensor(7.0000)
    """
    require_cloud("effective_keys.x", x, finite=False)
    return moments(scale * x, x, statistics=("effective_atoms",)).effective_atoms.to(x.dtype).mean(-1)


READOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "w2_to_gaussian": w2_to_gaussian,
    "skewness": skewness,
    "kurtosis": kurtosis,
    "cumulants": cumulants,
    "effective_rank": effective_rank,
    "clusters": lambda x: clusters(x, limit=MAX_CLUSTERS).count,
    "mean_cosine": mean_cosine,
    "mean_norm": mean_norm,
    "effective_keys": effective_keys,
}


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """x about its mean, and whether that is zero up to rounding (*batch)."""
    away = x - x.mean(-2, keepdim=True)
    floor = ROUNDING * torch.finfo(x.dtype).eps * x.abs().amax((-2, -1))
    return away, away.abs().amax((-2, -1)) <= floor


def _standardised(where: str, x: Tensor, directions: int, seed: int) -> Tensor:
    """⟨u,x⟩ with mean 0 and variance 1 (biased) over particles (*batch, directions, n); 0 where there is no spread."""
    _require_count(f"{where}.directions", directions, 1)
    d = require_cloud(f"{where}.x", x, finite=False).shape[-1]
    along = np.ones((1, 1)) if d == 1 else np.random.default_rng(seed).standard_normal((directions, d))
    along = along / np.linalg.norm(along, axis=1, keepdims=True)
    z = torch.from_numpy(along).to(dtype=x.dtype, device=x.device) @ x.mT
    largest = z.abs().amax(-1, keepdim=True)
    z = z - z.mean(-1, keepdim=True)
    deviation = z.square().mean(-1, keepdim=True).sqrt()
    flat = deviation <= ROUNDING * torch.finfo(x.dtype).eps * largest
    return torch.where(flat, 0, z / torch.where(flat, 1, deviation))


def _require_count(where: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(sentence(where, f"an integer ≥ {least}", value, "Pass a count."))
