"""How Gaussian a cloud of states is, and how locally linear: each number beside that of Gaussian clouds (S1-F2, S1-F3).

The null is a set of Gaussian clouds with the same covariance, the same number of vectors and the same uncertainty of
the covariance that whitens them, so that what is left of the difference is not the size of the sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DIRECTIONS = 64  # along which the sliced distance is taken
NULLS = 16  # Gaussian clouds
PRINCIPAL = 16  # directions that Mardia's statistics look at
RECONSTRUCTED, NEIGHBOURS = 32, 8  # vectors that are rebuilt, each from so many
SMALL = 1e-5  # variances below this part of the largest count as none


class Axes(NamedTuple):
    """Principal axes: mean (D,), variance (r,) descending, basis (D, r); r is the rank that is used."""

    mean: Tensor
    variance: Tensor
    basis: Tensor


class Shape(NamedTuple):
    """Numbers that say how Gaussian and how smooth a cloud is; NaN where there are too few vectors.

    sliced_w2   root mean square over directions of the distance W₂ of a whitened projection to N(0, 1)
    skewness    Mardia's b₁ = mean_ij ⟨y_i, y_j⟩³ in the whitened principal directions (0 for a Gaussian)
    kurtosis    Mardia's b₂ = mean |y_i|⁴, divided by k (k + 2), its value for a Gaussian
    lle_error   |x − Σ w_j x_j| / |x − mean| for x rebuilt from its nearest neighbours, Σ w_j = 1; the mean over vectors
    """

    sliced_w2: float
    skewness: float
    kurtosis: float
    lle_error: float


class Comparison(NamedTuple):
    """A cloud beside `NULLS` Gaussian ones: their mean and their 5 % and 95 % points."""

    seen: Shape
    null_mean: Shape
    null_low: Shape
    null_high: Shape
    rank: int
    principal: int


NOTHING = Shape(math.nan, math.nan, math.nan, math.nan)


def effective_rank(variance: Tensor) -> float:
    """exp of the entropy of the shares of variance; 0 of nothing.

    >>> import torch
    >>> round(effective_rank(torch.ones(5)), 9), effective_rank(torch.tensor([1.0, 0.0]))
    (5.0, 1.0)
    """
    total = float(variance.sum())
    if not total > 0:
        return 0.0
    share = variance.double().clamp_min(0) / total
    return math.exp(float(-torch.xlogy(share, share).sum()))


def participation_ratio(variance: Tensor) -> float:
    """(Σλ)² / Σλ²; 0 of nothing.

    >>> import torch
    >>> participation_ratio(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    square = float(variance.double().square().sum())
    return float(variance.double().sum()) ** 2 / square if square > 0 else 0.0


def axes(mean: Tensor, covariance: Tensor, count: int) -> Axes:
    """The axes with variance to speak of, and never more than half as many as there were vectors."""
    value, basis = torch.linalg.eigh(covariance.double())
    value, basis = value.flip(0).clamp_min(0), basis.flip(1)
    rank = int((value > SMALL * value[0]).sum()) if len(value) and value[0] > 0 else 0
    rank = min(rank, (count - 1) // 2)
    return Axes(mean.double(), value[: max(rank, 0)], basis[:, : max(rank, 0)])


def compare(sample: Tensor, along: Axes, count: int, *, seed: int = 0, drawn: dict | None = None) -> Comparison:
    """``sample`` (m, D) beside Gaussian clouds whose axes come from ``count`` vectors, as its own do.

    drawn   Gaussian clouds are put here and taken from here, for they depend on sizes only
    """
    rank, m = len(along.variance), len(sample)
    principal = min(PRINCIPAL, rank)
    if rank < 1 or m < 4 * NEIGHBOURS:
        return Comparison(NOTHING, NOTHING, NOTHING, NOTHING, rank, principal)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rank, DIRECTIONS, dtype=torch.float64, generator=generator)
    directions = directions / torch.linalg.vector_norm(directions, dim=0)
    root = along.variance.sqrt()
    scores = (sample.double() - along.mean) @ along.basis  # (m, r)
    seen = Shape(*_gaussianity(scores / root, directions, principal), lle_error(scores))
    drawn = {} if drawn is None else drawn
    key = (m, rank, count, seed)
    if key not in drawn:
        clouds = [_gaussian(m, rank, count, generator) for _ in range(NULLS)]
        drawn.clear()  # one size at a time is enough
        drawn[key] = [(raw, _gaussianity(white, directions, principal)) for raw, white in clouds]
    nulls = [(*known, lle_error(raw * root)) for raw, known in drawn[key]]
    table = torch.tensor(nulls, dtype=torch.float64)  # (NULLS, statistics)
    low, high = (Shape(*table.quantile(q, 0).tolist()) for q in (0.05, 0.95))
    return Comparison(seen, Shape(*table.mean(0).tolist()), low, high, rank, principal)


def sliced_w2(white: Tensor, directions: Tensor) -> float:
    """W₂ to N(0, 1) along directions (r, k), root mean square; white (m, r)."""
    m = len(white)
    level = (torch.arange(m, dtype=torch.float64) + 0.5) / m
    target = torch.special.ndtri(level)
    return float(((white @ directions).sort(0).values - target[:, None]).square().mean().sqrt())


def mardia(white: Tensor) -> tuple[float, float]:
    """b₁ and b₂ / (k (k + 2)) of whitened vectors (m, k)."""
    k = white.shape[1]
    return float((white @ white.mT).pow(3).mean()), float(white.square().sum(1).square().mean()) / (k * (k + 2))


def lle_error(x: Tensor) -> float:
    """Mean relative error of the first vectors of x (m, r) rebuilt from their nearest neighbours among all.

    w = argmin |x_i − Σ_j w_j x_j|²,   Σ w_j = 1,        with a ridge of 10⁻³ tr C / k on the local Gram matrix C
    """
    some = x[:RECONSTRUCTED]
    distance = torch.cdist(some, x)
    distance[torch.arange(len(some)), torch.arange(len(some))] = torch.inf
    near = x[distance.topk(NEIGHBOURS, largest=False).indices]  # (n, k, r)
    away = near - some[:, None]
    gram = away @ away.mT
    ridge = 1e-3 * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(x.dtype).tiny)
    weight = torch.linalg.solve(
        gram + ridge[:, None, None] * torch.eye(NEIGHBOURS, dtype=x.dtype), x.new_ones(NEIGHBOURS)
    )
    weight = weight / weight.sum(1, keepdim=True)
    miss = torch.linalg.vector_norm((weight[..., None] * away).sum(1), dim=1)
    size = torch.linalg.vector_norm(some - x.mean(0), dim=1)
    return float((miss / size.clamp_min(torch.finfo(x.dtype).tiny)).mean())


def _gaussianity(white: Tensor, directions: Tensor, principal: int) -> tuple[float, float, float]:
    return sliced_w2(white, directions), *mardia(white[:, :principal])


def _gaussian(m: int, rank: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """m Gaussian vectors, and the same whitened by the covariance that they and count − m others would give.

    The others enter through their mean and their scatter alone, drawn from its Wishart law by Bartlett's factor.
    """
    z = torch.randn(m, rank, dtype=torch.float64, generator=generator)
    rest = count - m
    mean, scatter = z.mean(0), (z - z.mean(0)).mT @ (z - z.mean(0))
    if rest > 0:
        other = torch.randn(rank, dtype=torch.float64, generator=generator) / math.sqrt(rest)
        gap = other - mean
        scatter = scatter + _wishart(rank, rest - 1, generator) + (m * rest / count) * torch.outer(gap, gap)
        mean = mean + rest / count * gap
    factor = torch.linalg.cholesky(scatter / count)
    return z - mean, torch.linalg.solve_triangular(factor, (z - mean).mT, upper=False).mT


def _wishart(rank: int, degrees: int, generator: torch.Generator) -> Tensor:
    """Scatter of ``degrees`` standard Gaussian vectors."""
    if degrees <= 2 * rank:  # too few for Bartlett's factor, or as cheap directly
        z = torch.randn(degrees, rank, dtype=torch.float64, generator=generator)
        return z.mT @ z
    normal = torch.randn(rank, rank, dtype=torch.float64, generator=generator).tril(-1)
    # torch draws chi-square variables from its global generator only
    source = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
    factor = normal + torch.from_numpy(source.chisquare(degrees - np.arange(rank))).sqrt().diag()
    return factor @ factor.mT
