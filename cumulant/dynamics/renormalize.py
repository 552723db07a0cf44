"""Normalisers of clouds of particles: of each token, and of the ensemble (S1-A4, S0-C6).

    per token    SphereNorm, RMSNorm, LayerNorm      onto a sphere or an ellipsoid: never a Gaussian (S0-C7)
    ensemble     BatchNorm, Whiten                   two moments of the law, diagonal or full (S1-T1)

    RN(αy) = RN(y) for α > 0,      RN ∘ RN = RN      without gain or bias; no ε is added to a variance unless asked

Each has ``operator_norm``, the bound of its Jacobian at y: below 1 it contracts there. None contracts everywhere, and
each raises `NormalizationError` for clouds where it is singular.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.dynamics.checks import require_positive_definite
from cumulant.dynamics.matrices import symmetric_root, symmetric_transport
from cumulant.typing import PerQuery, Queries

WHITENINGS = ("zca", "cholesky", "pca")
ROUNDING = 8  # units of rounding, relative to the largest entry, below which a spread counts as none


class NormalizationError(ValueError):
    """A normaliser is singular at a cloud; ``kind`` is "singular", "collapsed" (one point) or "nonfinite"."""

    def __init__(self, message: str, kind: str = "singular"):
        super().__init__(message)
        self.kind = kind


class Renormalize(ABC):
    """A map of clouds (*batch, n, d); ``ensemble`` says whether it acts on the law or inside each token."""

    ensemble: ClassVar[bool]

    @abstractmethod
    def __call__(self, y: Queries) -> Queries:
        """The renormalised cloud:  (*batch, n, d) → (*batch, n, d)."""

    @abstractmethod
    def operator_norm(self, y: Queries) -> PerQuery:
        """A bound of the Jacobian's norm at y: (*batch, n), or (*batch) for an ensemble map."""

    def _cloud(self, y: object) -> Tensor:
        name = type(self).__name__
        y = require_float(f"{name}.y", y)
        if y.ndim < 2 or y.shape[-1] == 0:
            raise ValueError(sentence(f"{name}.y", "a cloud (*batch, n, d), d ≥ 1", shape(y), "Add the particle axis."))
        if not holds(y.isfinite()):
            bad = f"{int((~y.isfinite()).sum())} entries that are NaN or infinite"
            raise NormalizationError(sentence(f"{name}.y", "finite values", bad, "Take smaller steps."), "nonfinite")
        return y

    def _refuse_tokens(self, bad: Tensor, what: str) -> None:
        if not holds(~bad):
            got = f"{int(bad.sum())} of {bad.numel()} tokens {what}"
            raise NormalizationError(
                sentence(type(self).__name__, "tokens it can scale", got, "Move them or drop them first.")
            )


@final
@dataclass(frozen=True, eq=False)
class Unchanged(Renormalize):
    """No normaliser: y ↦ y, (*batch, n, d).

    >>> import torch
    >>> Unchanged()(torch.tensor([[3.0, 4.0]]))
    tensor([[3., 4.]])
    """

    ensemble: ClassVar[bool] = False

    def __call__(self, y: Queries) -> Queries:
        return self._cloud(y)

    def operator_norm(self, y: Queries) -> PerQuery:
        return torch.ones_like(self._cloud(y)[..., 0])


@final
@dataclass(frozen=True, eq=False)
class SphereNorm(Renormalize):
    """r y/|y|. Jacobian (r/|y|)(I − ŷŷᵀ), of norm r/|y|: a contraction outside the sphere of radius r.

    >>> import torch
    >>> SphereNorm()(torch.tensor([[3.0, 4.0]])), SphereNorm().operator_norm(torch.tensor([[3.0, 4.0]]))
    (tensor([[0.6000, 0.8000]]), tensor([0.2000]))
    """

    radius: float = 1.0
    ensemble: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 < self.radius < math.inf:
            raise ValueError(sentence("SphereNorm.radius", "a positive number", self.radius, "1 is the unit sphere."))

    def __call__(self, y: Queries) -> Queries:
        return self.radius * self._direction(y)

    def operator_norm(self, y: Queries) -> PerQuery:
        self._direction(y)
        return self.radius / torch.linalg.vector_norm(y, dim=-1)

    def _direction(self, y: Tensor) -> Tensor:
        y = self._cloud(y)
        self._refuse_tokens((y == 0).all(-1), "have norm 0")
        return _normalize(y)


@final
@dataclass(frozen=True, eq=False)
class RMSNorm(Renormalize):
    """g ∘ √d y/|y|: the sphere of radius √d, then a gain per channel. Norm ≤ max|g| √d/|y|.

    gain  (d,), or a number; 1 if None

    >>> import torch
    >>> RMSNorm()(torch.tensor([[3.0, 0.0, 0.0, 4.0]]))
    tensor([[1.2000, 0.0000, 0.0000, 1.6000]])
    """

    gain: Tensor | float | None = None
    ensemble: ClassVar[bool] = False

    def __post_init__(self):
        _check_vector("RMSNorm.gain", self.gain)

    def __call__(self, y: Queries) -> Queries:
        return self._sphere(y)(y) * _per_channel("RMSNorm.gain", self.gain, y, 1.0)

    def operator_norm(self, y: Queries) -> PerQuery:
        return self._sphere(y).operator_norm(y) * _per_channel("RMSNorm.gain", self.gain, y, 1.0).abs().amax()

    def _sphere(self, y: Tensor) -> SphereNorm:
        return SphereNorm(math.sqrt(self._cloud(y).shape[-1]))


@final
@dataclass(frozen=True, eq=False)
class LayerNorm(Renormalize):
    """g ∘ (y − ȳ)/σ + b, ȳ and σ over the channels of one token (biased). Norm ≤ max|g|/σ.

    Without gain and bias it maps onto the sphere of radius √d in the hyperplane Σ_k y_k = 0, of dimension d − 2.

    gain, bias  (d,), or a number; 1 and 0 if None

    >>> import torch
    >>> LayerNorm()(torch.tensor([[1.0, 3.0]])), LayerNorm().operator_norm(torch.tensor([[1.0, 9.0]]))
    (tensor([[-1.0000,  1.0000]]), tensor([0.2500]))
    """

    gain: Tensor | float | None = None
    bias: Tensor | float | None = None
    ensemble: ClassVar[bool] = False

    def __post_init__(self):
        _check_vector("LayerNorm.gain", self.gain)
        _check_vector("LayerNorm.bias", self.bias)

    def __call__(self, y: Queries) -> Queries:
        unit = _normalize(self._centred(y)) * math.sqrt(y.shape[-1])
        bias = _per_channel("LayerNorm.bias", self.bias, y, 0.0)
        return unit * _per_channel("LayerNorm.gain", self.gain, y, 1.0) + bias

    def operator_norm(self, y: Queries) -> PerQuery:
        deviation = torch.linalg.vector_norm(self._centred(y), dim=-1) / math.sqrt(y.shape[-1])
        return _per_channel("LayerNorm.gain", self.gain, y, 1.0).abs().amax() / deviation

    def _centred(self, y: Tensor) -> Tensor:
        y = self._cloud(y)
        centred = y - y.mean(-1, keepdim=True)
        floor = ROUNDING * torch.finfo(y.dtype).eps * y.abs().amax(-1)
        self._refuse_tokens(centred.abs().amax(-1) <= floor, "have standard deviation 0")
        return centred


@final
@dataclass(frozen=True, eq=False)
class BatchNorm(Renormalize):
    """(y_k − ȳ_k)/σ_k, ȳ and σ over the particles (biased): means 0 and variances 1, correlations kept.

    Norm ≤ 1/min_k σ_k. With it a Gaussian of independent channels is an equilibrium that ascent leaves: correlations
    multiply by 1 + 2a/(1+a) per step, a = vs.

    >>> import torch
    >>> BatchNorm()(torch.tensor([[1.0, 5.0], [3.0, 9.0]]))
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """

    ensemble: ClassVar[bool] = True

    def __call__(self, y: Queries) -> Queries:
        centred, deviation = self._standard(y)
        return centred / deviation

    def operator_norm(self, y: Queries) -> PerQuery:
        return 1 / self._standard(y)[1].amin((-2, -1))

    def _standard(self, y: Tensor) -> tuple[Tensor, Tensor]:
        y = self._cloud(y)
        _require_particles("BatchNorm", y)
        centred = y - y.mean(-2, keepdim=True)
        deviation = centred.square().mean(-2, keepdim=True).sqrt()
        flat = deviation <= ROUNDING * torch.finfo(y.dtype).eps * y.abs().amax(-2, keepdim=True)
        if not holds(~flat):
            point = bool(flat.all(-1).any())
            got = f"{int(flat.sum())} of {flat.numel()} channels of variance 0"
            got += ": the cloud has collapsed to a point" if point else ""
            message = sentence("BatchNorm", "channels that vary over the particles", got, "Drop or move them first.")
            raise NormalizationError(message, "collapsed" if point else "singular")
        return centred, deviation


@final
@dataclass(frozen=True, eq=False)
class Whiten(Renormalize):
    """m + R (y − ȳ) with R A Rᵀ = B: from the covariance A of the cloud (biased) to a target B, mean to mean (S1-T1).

        zca        R = A^{−½} (A^½ B A^½)^½ A^{−½}    symmetric, the least motion; = A^{−½} for B = I
        cholesky   R = L_B L_A⁻¹                      triangular
        pca        R = B^½ Λ^{−½} Uᵀ                  principal axes of A, largest first, their largest entries positive

    In S1-T1 the symmetric one is (I + Σ)⁻¹, so that it undoes the step on every particle (X-5); the others do it up to
    a rotation. Norm |R| on fluctuations, 1/√λ_min(A) for B = I.

    mean        (d,); 0 if None
    covariance  (d, d), symmetric positive definite; the identity if None
    ridge       added to the eigenvalues of A. Above 0 a singular cloud is accepted and the target is missed

    pca has no derivative where eigenvalues of A coincide, and rotates a white cloud arbitrarily; the others do neither.

    >>> import torch
    >>> Whiten()(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]]))
    tensor([[ 1.4142,  0.0000],
            [-1.4142,  0.0000],
            [ 0.0000,  1.4142],
            [ 0.0000, -1.4142]])
    """

    kind: str = "zca"
    mean: Tensor | None = None
    covariance: Tensor | None = None
    ridge: float = 0.0
    ensemble: ClassVar[bool] = True

    def __post_init__(self):
        if self.kind not in WHITENINGS:
            raise ValueError(sentence("Whiten.kind", f"one of {', '.join(WHITENINGS)}", repr(self.kind), "Pick one."))
        if not 0 <= self.ridge < math.inf:
            raise ValueError(sentence("Whiten.ridge", "a number ≥ 0", self.ridge, "0 adds nothing."))
        _check_vector("Whiten.mean", self.mean)
        if self.covariance is not None:
            require_positive_definite("Whiten.covariance", self.covariance)

    def __call__(self, y: Queries, moments: tuple[Tensor, Tensor] | None = None) -> Queries:
        """The whitened and recoloured cloud:  (*batch, n, d) → (*batch, n, d).

        moments  mean (*batch, d) and covariance (*batch, d, d) of the population, used instead of the sample's
        """
        centre, change = self._affine(y, moments)
        return _per_channel("Whiten.mean", self.mean, y, 0.0) + (y - centre) @ change.mT

    def operator_norm(self, y: Queries, moments: tuple[Tensor, Tensor] | None = None) -> PerQuery:
        return torch.linalg.matrix_norm(self._affine(y, moments)[1], ord=2)

    def _affine(self, y: Tensor, population: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """ȳ (*batch, 1, d) and R (*batch, d, d)."""
        y = self._cloud(y)
        d, rounding = y.shape[-1], ROUNDING * torch.finfo(y.dtype).eps
        if population is None:
            _require_particles("Whiten", y)
            centre = y.mean(-2, keepdim=True)
            away = y - centre
            a = away.mT @ away / y.shape[-2]
            floor = (rounding * y.detach().abs().amax((-2, -1))).square()
        else:
            centre, a = _require_moments(population, y)
            floor = torch.zeros_like(a[..., 0, 0])
        if self.ridge:
            a = a + self.ridge * torch.eye(d, dtype=y.dtype, device=y.device)
        self._check_rank(a.detach(), floor, rounding)
        if self.covariance is not None:
            require_alike("Whiten.covariance", self.covariance, "y", y)
            if self.covariance.shape[-1] != d:
                got = shape(self.covariance)
                raise ValueError(sentence("Whiten.covariance", f"shape (d={d}, d={d})", got, "Match y."))
        return centre, self._map(a)

    def _map(self, a: Tensor) -> Tensor:
        b = self.covariance
        if self.kind == "zca":
            return symmetric_transport(a, b)
        if self.kind == "cholesky":
            factor = torch.linalg.cholesky(a)
            eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
            target = eye if b is None else torch.linalg.cholesky(b)
            return torch.linalg.solve_triangular(factor, target.expand_as(factor), upper=False, left=False)
        values, vectors = torch.linalg.eigh(a)
        values, vectors = values.flip(-1), vectors.flip(-1)
        largest = vectors.gather(-2, vectors.detach().abs().argmax(-2, keepdim=True))
        axes = (vectors * largest.sign()).mT / values.sqrt()[..., :, None]
        return axes if b is None else symmetric_root(b) @ axes

    def _check_rank(self, a: Tensor, floor: Tensor, rounding: float) -> None:
        d = a.shape[-1]
        values = torch.linalg.eigvalsh(a)
        rank = (values > torch.maximum(d * rounding * values[..., -1], floor)[..., None]).sum(-1)
        if holds(rank == d):
            return
        clouds = f" in {int((rank < d).sum())} of {rank.numel()} clouds" if rank.numel() > 1 else ""
        point = bool((rank == 0).any())
        got = f"rank {int(rank.min())}{clouds}" + (": the cloud has collapsed to a point" if point else "")
        message = sentence("Whiten", f"a covariance of full rank d={d}", got, "Pass ridge=… to regularise.")
        raise NormalizationError(message, "collapsed" if point else "singular")


def _normalize(y: Tensor) -> Tensor:
    """y/|y|, divided by its largest entry first, so that no square over- or underflows."""
    y = y / y.detach().abs().amax(-1, keepdim=True)
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


def _check_vector(where: str, value: object) -> None:
    if value is None or (isinstance(value, int | float) and math.isfinite(value)):
        return
    v = require_float(where, value)
    if v.ndim != 1:
        raise ValueError(sentence(where, "shape (d,)", shape(v), "One entry per channel."))
    require_finite(where, v)


def _per_channel(where: str, value: Tensor | float | None, y: Tensor, default: float) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((), default if value is None else value, dtype=y.dtype, device=y.device)
    require_alike(where, value, "y", y)
    if value.shape[-1] != y.shape[-1]:
        raise ValueError(sentence(where, f"shape (d={y.shape[-1]},)", shape(value), "One entry per channel."))
    return value


def _require_particles(where: str, y: Tensor) -> None:
    if y.shape[-2] == 0:
        raise NormalizationError(
            sentence(f"{where}.y", "at least one particle", "none", "An empty cloud has no moments.")
        )


def _require_moments(moments: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    mean, covariance = moments
    d = y.shape[-1]
    for name, tensor, size in (("mean", mean, (d,)), ("covariance", covariance, (d, d))):
        where = f"Whiten.moments ({name})"
        require_alike(where, require_float(where, tensor), "y", y)
        require_finite(where, tensor)
        if tensor.shape[tensor.ndim - len(size) :] != size:
            expected = "(*batch" + f", d={d}" * len(size) + ")"
            raise ValueError(sentence(where, f"shape {expected}", shape(tensor), "Match the last axis of y."))
    return mean[..., None, :], covariance
