"""How Gaussian a sample of states is, and how locally linear, beside samples that are Gaussian (S1-F2, S1-F3).

States are taken about the means of their sequences, so that sequences may differ in their means. If they are Gaussian,
x_i = m_s + e_i with e_i ~ N(0, C), then the sequence means and the scatter EᵀE of the residuals are sufficient for m
and C, and given them

    E = U (EᵀE)^½,        U uniform among the frames that sum to 0 over every sequence.

The null draws U. So it has the covariance of the states, knows which of the vectors behind it were sampled, and is
exact for any C, any means and any number of vectors: what is left of a difference is not their number.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DIRECTIONS = 64  # along which the sliced distance is taken
NULL_SAMPLES = 200  # Gaussian samples beside the first three numbers
RECONSTRUCTION_NULLS = 16  # beside the error of reconstruction, which needs every direction of a sample
TAIL_SHARE = 0.005  # of the Gaussian samples on either side of the band
STUDENT_QUANTILE = 2.947  # quantile of Student's t at 1 − TAIL_SHARE with RECONSTRUCTION_NULLS − 1 degrees of freedom
MARDIA_DIRECTIONS = 16  # directions that Mardia's statistics look at
NEIGHBOURS = 8  # vectors from which one is rebuilt
MIN_VARIANCE_SHARE = 1e-5  # variances below this part of the largest count as none
MIN_FREEDOM = 512  # residual degrees of freedom that a verdict needs at least, and twice the number of channels
MAX_NUMBERS = 1 << 21  # numbers of Gaussian samples that are held at once


class PrincipalAxes(NamedTuple):
    """Principal axes: mean (D,), variance (r,) descending, basis (D, r); r is the rank that is used."""

    mean: Tensor
    variance: Tensor
    basis: Tensor


class ShapeStatistics(NamedTuple):
    """Numbers that say how Gaussian and how smooth a sample is; NaN where there are too few vectors.

    All are of vectors x about the means of their sequences, y the same after whitening.

    sliced_w2   root mean square over directions of the distance W₂ of a whitened projection to N(0, 1)
    skewness    Mardia's b₁ = mean_ij ⟨y_i, y_j⟩³ in the whitened principal directions (0 for a Gaussian)
    kurtosis    Mardia's b₂ = mean |y_i|⁴, divided by k (k + 2), its value for a Gaussian
    lle_error   |x − Σ w_j x_j| / |x − mean| for x rebuilt from its nearest neighbours, Σ w_j = 1; a trimmed mean
    """

    sliced_w2: float
    skewness: float
    kurtosis: float
    lle_error: float


class Comparison(NamedTuple):
    """A sample beside Gaussian ones: their mean, and the band that holds 99 % of them."""

    observed: ShapeStatistics
    null_mean: ShapeStatistics
    null_low: ShapeStatistics
    null_high: ShapeStatistics
    rank: int
    principal: int


NO_SHAPE = ShapeStatistics(math.nan, math.nan, math.nan, math.nan)


def participation_ratio(variance: Tensor, count: int | None = None) -> float:
    """(Σλ)² / Σλ²; 0 of nothing.

    count   of the vectors whose covariance has these eigenvalues: Σλ² is then less by (Σλ)²/n, which is their scatter

    >>> import torch
    >>> participation_ratio(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    square, total = float(variance.double().square().sum()), float(variance.double().sum())
    if not square > 0:
        return 0.0
    if count is not None:
        square = max(square - total**2 / count, total**2 / int((variance > 0).sum()))
    return total**2 / square


def principal_axes(mean: Tensor, covariance: Tensor, count: int) -> PrincipalAxes:
    """The axes with variance to speak of, and never more than half as many as there were vectors."""
    value, basis = torch.linalg.eigh(covariance.double())
    value, basis = value.flip(0).clamp_min(0), basis.flip(1)
    rank = int((value > MIN_VARIANCE_SHARE * value[0]).sum()) if len(value) and value[0] > 0 else 0
    rank = min(rank, (count - 1) // 2)
    return PrincipalAxes(mean.double(), value[: max(rank, 0)], basis[:, : max(rank, 0)])


def needed_freedom(channels: int) -> int:
    """Residual degrees of freedom, vectors less sequences, from which a verdict is given.

    >>> needed_freedom(64), needed_freedom(576)
    (512, 1152)
    """
    return max(MIN_FREEDOM, 2 * channels)


class SampleLayout(NamedTuple):
    """Which vectors were sampled of those behind a covariance.

    count, sequences   vectors behind the covariance, and sequences about whose means they are taken
    group              of every sampled vector: 0 … g − 1 for its sequence
    share              of these sequences: how much was sampled; 0 if nothing was subtracted from its vectors
    """

    count: int
    sequences: int
    group: tuple[int, ...]
    share: tuple[float, ...]

    @classmethod
    def of(cls, m: int, count: int, sequences: int, sequence: Tensor | None, length: Tensor | None) -> SampleLayout:
        """Without the numbers (m,) of their sequences and the lengths of those, all are of one sequence."""
        if sequence is None or length is None:
            sequence, length = torch.zeros(m, dtype=torch.int64), torch.full((m,), count)
        group, sampled = sequence.unique(return_inverse=True, return_counts=True)[1:]
        whole = torch.zeros_like(sampled).scatter_reduce_(0, group, length, "amax").double()
        share = torch.where(whole > 0, (sampled / whole).clamp(max=1), 0)
        return cls(count, sequences, tuple(group.tolist()), tuple(share.tolist()))


def compare_with_gaussian(
    sample: Tensor,
    along: PrincipalAxes,
    count: int,
    *,
    sequences: int = 1,
    sequence: Tensor | None = None,
    length: Tensor | None = None,
    seed: int = 0,
    drawn: dict | None = None,
) -> Comparison:
    """``sample`` (m, D) beside Gaussian samples whose axes come from ``count`` vectors, as its own do.

    sequences          about whose means those vectors are taken
    sequence, length   (m,) the number of the sequence of each sampled vector, and its length; one of all if None
    drawn              Gaussian samples are put here and taken from here, for they depend on sizes only
    """
    rank, m = len(along.variance), len(sample)
    principal = min(MARDIA_DIRECTIONS, rank)
    if rank < 1 or m < 4 * NEIGHBOURS:
        return Comparison(NO_SHAPE, NO_SHAPE, NO_SHAPE, NO_SHAPE, rank, principal)
    sizes, drawn = SampleLayout.of(m, count, sequences, sequence, length), {} if drawn is None else drawn
    root = along.variance.sqrt()
    scores = (sample.double() - along.mean) @ along.basis  # (m, r)
    basis, mixing = _directions(rank, seed)
    observed = ShapeStatistics(*_gaussianity(scores / root, basis @ mixing, principal), lle_error(scores))
    table = _null_table(sizes, len(mixing), seed)  # (NULL_SAMPLES, 3)
    errors = torch.tensor([lle_error(white * root) for white in _null_samples(sizes, rank, seed, drawn)]).double()
    log = errors.clamp_min(torch.finfo(torch.float64).tiny).log()
    wide = math.sqrt(1 + 1 / RECONSTRUCTION_NULLS) * STUDENT_QUANTILE * float(log.std())
    mean = _shape(table.mean(0), float(errors.mean()))
    low = _shape(table.quantile(TAIL_SHARE, 0), math.exp(float(log.mean()) - wide))
    high = _shape(table.quantile(1 - TAIL_SHARE, 0), math.exp(float(log.mean()) + wide))
    return Comparison(observed, mean, low, high, rank, principal)


def _shape(first: Tensor, lle: float) -> ShapeStatistics:
    return ShapeStatistics(float(first[0]), float(first[1]), float(first[2]), lle)


def _directions(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Directions (r, DIRECTIONS) as a product of an orthonormal basis (r, k) of what they span and a mixing (k, ·).

    Where there is room they are orthonormal, so that a null depends on no more than k of the r directions.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rank, DIRECTIONS, dtype=torch.float64, generator=generator)
    if rank >= DIRECTIONS:
        return torch.linalg.qr(normal).Q, torch.eye(DIRECTIONS, dtype=torch.float64)
    return torch.eye(rank, dtype=torch.float64), normal / torch.linalg.vector_norm(normal, dim=0)


@lru_cache(maxsize=16)
def _null_table(sizes: SampleLayout, rank: int, seed: int) -> Tensor:
    """(NULL_SAMPLES, 3): sliced distance, skewness and kurtosis of Gaussian samples.

    k columns of a uniform frame of r are a uniform frame of k, so that at most DIRECTIONS are drawn whatever r is.
    """
    generator, rows, mixing = torch.Generator().manual_seed(seed), [], _directions(rank, seed)[1]
    at_once = max(1, MAX_NUMBERS // (len(sizes.group) * DIRECTIONS))
    while len(rows) < NULL_SAMPLES:
        samples = _whitened(sizes, rank, min(NULL_SAMPLES - len(rows), at_once), generator)
        rows += [_gaussianity(white, mixing, min(MARDIA_DIRECTIONS, rank)) for white in samples]
    return torch.tensor(rows, dtype=torch.float64)


def _null_samples(sizes: SampleLayout, rank: int, seed: int, drawn: dict) -> Tensor:
    """(nulls, m, r) whitened Gaussian samples: the first columns of those with the most directions so far."""
    if sizes not in drawn or drawn[sizes].shape[-1] < rank:
        drawn.clear()  # one size at a time is enough
        generator = torch.Generator().manual_seed(seed + 1)
        drawn[sizes] = torch.cat([_whitened(sizes, rank, 1, generator) for _ in range(RECONSTRUCTION_NULLS)])
    return drawn[sizes][..., :rank]


def sliced_w2(white: Tensor, directions: Tensor) -> float:
    """W₂ to N(0, 1) along directions (r, k), root mean square; white (m, r)."""
    m = len(white)
    target = torch.special.ndtri((torch.arange(m, dtype=torch.float64) + 0.5) / m)
    along = np.sort((directions.mT @ white.mT).numpy())  # many times as fast as torch's for columns of this length
    return float((torch.from_numpy(along) - target).square().mean().sqrt())


def mardia(white: Tensor) -> tuple[float, float]:
    """b₁ and b₂ / (k (k + 2)) of whitened vectors (m, k).

    mean_ij ⟨y_i, y_j⟩³ = Σ_abc (mean_i y_ia y_ib y_ic)²,        which needs no products of all pairs
    """
    m, k = white.shape
    third = (white[:, :, None] * white[:, None]).flatten(1).mT @ white / m  # (k², k)
    return float(third.square().sum()), float(white.square().sum(1).square().mean()) / (k * (k + 2))


def reconstructed_vectors(m: int, rank: int) -> int:
    """How many of m vectors are rebuilt: the fewer directions, the more the error differs between vectors.

    >>> reconstructed_vectors(512, 5), reconstructed_vectors(512, 576), reconstructed_vectors(20, 5)
    (128, 32, 20)
    """
    return min(m, max(32, min(128, 2048 // max(1, rank))))


def lle_error(x: Tensor) -> float:
    """Relative error of the first `reconstructed_vectors` of x (m, r), each from its nearest neighbours among all.

    w = argmin |x_i − Σ_j w_j x_j|²,   Σ w_j = 1,        with a ridge of 10⁻³ tr C / k on the local Gram matrix C

    The mean over vectors leaves out a tenth at either end: in few directions one vector near the mean of all, to whose
    distance from it the error is relative, or one outside its neighbours may weigh more than all others.
    """
    some = x[: reconstructed_vectors(*x.shape)]
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
    error = (miss / size.clamp_min(torch.finfo(x.dtype).tiny)).sort().values
    return float(error[len(error) // 10 : len(error) - len(error) // 10].mean())


def _gaussianity(white: Tensor, directions: Tensor, principal: int) -> tuple[float, float, float]:
    return sliced_w2(white, directions), *mardia(white[:, :principal])


def _whitened(sizes: SampleLayout, rank: int, samples: int, generator: torch.Generator) -> Tensor:
    """(samples, m, r): the sampled rows of Gaussian residuals, whitened by the covariance of all of them.

    Of a sequence with n vectors k are sampled, and their residuals have the covariance I − 11ᵀ/n, whose root is
    I − (1 − √(1 − k/n)) 11ᵀ/k. The others enter through their scatter alone, drawn from its Wishart law.
    """
    group, share = torch.tensor(sizes.group), torch.tensor(sizes.share, dtype=torch.float64)
    m, full = len(group), share >= 1
    z = torch.randn(samples, m, rank, dtype=torch.float64, generator=generator)
    size = torch.bincount(group, minlength=len(full)).double()
    means = z.new_zeros(samples, len(full), rank).index_add_(1, group, z) / size[:, None]
    own = z - (full.double()[:, None] * means)[:, group]  # what is free: of a whole sequence one less
    rest = max(0, sizes.count - sizes.sequences - (m - int(full.sum())))
    scatter = own.mT @ own + _wishart(samples, rank, rest, generator)
    residual = z - ((1 - (1 - share).sqrt())[:, None] * means)[:, group]
    factor = torch.linalg.cholesky(scatter / sizes.count)
    return torch.linalg.solve_triangular(factor, residual.mT, upper=False).mT


def _wishart(samples: int, rank: int, degrees: int, generator: torch.Generator) -> Tensor:
    """(samples, r, r): scatters of ``degrees`` standard Gaussian vectors, by Bartlett's factor."""
    if degrees <= 2 * rank:  # too few for the factor, or as cheap directly
        z = torch.randn(samples, degrees, rank, dtype=torch.float64, generator=generator)
        return z.mT @ z
    normal = torch.randn(samples, rank, rank, dtype=torch.float64, generator=generator).tril(-1)
    # torch draws chi-square variables from its global generator only
    source = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
    chi = torch.from_numpy(source.chisquare(degrees - np.arange(rank), size=(samples, rank))).sqrt()
    factor = normal + torch.diag_embed(chi)
    return factor @ factor.mT
