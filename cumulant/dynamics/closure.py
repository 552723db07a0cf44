"""Gaussian closure: the law of infinitely many particles, carried from layer to layer (§4, §5).

    N(μ, C) under x ↦ x ± γ M ∇G(s x)     μ⁺ = L μ ± γ M k̄,   C⁺ = L C Lᵀ,   L = I ± γ s M K           (S1-T1)
    in continuous time, no norm           Ċ = 2C²,   C(t) = (C₀⁻¹ − 2t)⁻¹, infinite at t = 1/(2λ_max)     (S3-R5)

The step is affine, so that the first line is exact. The keys N(k̄, K) are the law itself, its image under a linear map,
or a fixed law. `finite_sample` has the corrections for finitely many keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.dynamics.matrices import symmetric_transport
from cumulant.dynamics.renormalize import NormalizationError
from cumulant.measures import Gaussian
from cumulant.typing import Matrices, PerQuery, Queries


class Affine(NamedTuple):
    """The map of one step on every particle: x ↦ matrix x + offset, the renormaliser included.

    matrix (*batch, d, d), offset (*batch, d), log_volume (*batch) of the ascent alone: log|det L|
    """

    matrix: Matrices
    offset: Queries
    log_volume: PerQuery


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianFlow:
    """The mean-field dynamics of a Gaussian law, which stays Gaussian: exact (S1-T1, X-5). A `Dynamics` of laws.

    step_size    γ ≥ 0; not ``step``, which is the method
    scale, sign  s and ±, as in `Ascend`
    metric       M, any (d, d) value matrix; the identity if None
    keys         a fixed Gaussian; None: the law is its own key law
    key_map      A (d, d): the keys are A x for x of the law. Theorem 1 has A = Σ
    renormalize  False; True: to N(0, I) by the symmetric map; a Gaussian: to that one. A law of lower rank is refused

    ``step`` returns the next `Gaussian` and the `Affine` map of every particle.

    >>> import torch
    >>> sigma = torch.tensor([[0.5]], dtype=torch.float64)
    >>> balance = Gaussian(torch.zeros(1, dtype=torch.float64), 1 / sigma)              # N(0, Σ⁻¹), keys Ση
    >>> law, how = GaussianFlow(key_map=sigma, renormalize=balance).step(balance)
    >>> law.covariance.item(), how.matrix.item(), how.log_volume.exp().item()           # the growth 1 + Σ is undone
    (2.0, 1.0, 1.5)
    """

    step_size: float = 1.0
    scale: float = 1.0
    sign: int = 1
    metric: Tensor | None = None
    renormalize: bool | Gaussian = False
    keys: Gaussian | None = None
    key_map: Tensor | None = None

    def __post_init__(self):
        if not 0 <= self.step_size < math.inf:
            raise ValueError(
                sentence("GaussianFlow.step_size", "a number ≥ 0", self.step_size, "Descend with sign=-1.")
            )
        if not math.isfinite(self.scale):
            raise ValueError(sentence("GaussianFlow.scale", "a finite number", self.scale, "It multiplies the logits."))
        if self.sign not in (1, -1):
            raise ValueError(sentence("GaussianFlow.sign", "+1 or -1", self.sign, "The length is step_size."))
        if not isinstance(self.renormalize, bool | Gaussian):
            got, advice = type(self.renormalize).__name__, "True restores N(0, I)."
            raise TypeError(sentence("GaussianFlow.renormalize", "True, False or a Gaussian", got, advice))
        if self.keys is not None and not isinstance(self.keys, Gaussian):
            got, advice = type(self.keys).__name__, "Ascend takes other laws."
            raise TypeError(sentence("GaussianFlow.keys", "a Gaussian or None", got, advice))
        if self.keys is not None and self.key_map is not None:
            advice = "Map the fixed keys themselves."
            raise ValueError(sentence("GaussianFlow.key_map", "None with fixed keys", "a matrix", advice))

    def init(self, state: Gaussian) -> Gaussian:
        """The law itself, or the target it is brought to."""
        law = _require_gaussian("GaussianFlow.init", state)
        return law if self.renormalize is False else self._restore(law.loc, law.covariance)[0]

    def step(self, state: Gaussian) -> tuple[Gaussian, Affine]:
        """The law after one layer, and the layer."""
        law = _require_gaussian("GaussianFlow.step", state)
        mean, covariance = law.loc, law.covariance
        value, keys = self._value(mean), self._keys(law)
        eye = torch.eye(law.dim, dtype=mean.dtype, device=mean.device)
        matrix, offset = eye + self.scale * value @ keys.covariance, _apply(value, keys.loc)
        volume = torch.linalg.slogdet(matrix).logabsdet
        mean, covariance = _apply(matrix, mean) + offset, _symmetric(matrix @ covariance @ matrix.mT)
        self._require_finite(mean, covariance)
        if self.renormalize is False:
            return Gaussian(mean, covariance), Affine(matrix, offset, volume)
        target, change, shift = self._restore(mean, covariance)
        return target, Affine(change @ matrix, _apply(change, offset) + shift, volume)

    def _value(self, like: Tensor) -> Tensor:
        """V = ± γ M"""
        if self.metric is None:
            eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
            return self.sign * self.step_size * eye
        return self.sign * self.step_size * _square("GaussianFlow.metric", self.metric, like)

    def _restore(self, mean: Tensor, covariance: Tensor) -> tuple[Gaussian, Tensor, Tensor]:
        """The target, and the symmetric affine map x ↦ R x + r to it from these moments (X-5)."""
        d = covariance.shape[-1]
        values = torch.linalg.eigvalsh(covariance)
        rank = (values > d * torch.finfo(values.dtype).eps * values[..., -1:]).sum(-1)
        if not holds(rank == d):
            got, advice = f"rank {int(rank.min())}", "Drop the flat directions."
            message = sentence("GaussianFlow", f"a covariance of full rank d={d}", got, advice)
            raise NormalizationError(message, "collapsed" if bool((rank == 0).any()) else "singular")
        target = self.renormalize
        if not isinstance(target, Gaussian):
            target = Gaussian(torch.zeros_like(mean), torch.eye(d, dtype=mean.dtype, device=mean.device))
        change = symmetric_transport(covariance, target.covariance)
        return target, change, target.loc - _apply(change, mean)

    def _require_finite(self, *moments: Tensor) -> None:
        if not all(holds(m.isfinite()) for m in moments):
            got, advice = "infinite or NaN moments", "Take smaller steps, or renormalise."
            raise NormalizationError(sentence("GaussianFlow", "finite moments", got, advice), "nonfinite")

    def _keys(self, law: Gaussian) -> Gaussian:
        if self.keys is not None:
            return self.keys
        if self.key_map is None:
            return law
        a = _square("GaussianFlow.key_map", self.key_map, law.loc)
        return Gaussian(_apply(a, law.loc), _symmetric(a @ law.covariance @ a.mT))


def covariance_flow(covariance: Tensor, t: float | Tensor, *, scale: float = 1.0, sign: int = 1) -> Tensor:
    """The covariance of a Gaussian cloud in continuous time, without a norm: Ċ = ± 2s C² (S3-R5).

        C(t) = (C₀⁻¹ ∓ 2st)⁻¹,     each eigenvalue λ/(1 ∓ 2stλ);     +inf in every entry from `blow_up_time` on

    In a finite cloud the longest particle grows at most like e^t, so the closure fails before (check F13).

    covariance (*batch, d, d), may be singular; t a number, or a tensor (*times) → (*times, *batch, d, d)

    >>> import torch
    >>> covariance_flow(torch.tensor([[0.5]]), torch.tensor([0.0, 0.5, 1.0]))[:, 0, 0]
    tensor([0.5000, 1.0000,    inf])
    """
    Gaussian(require_float("covariance_flow.covariance", covariance)[..., 0], covariance)
    values, vectors = torch.linalg.eigh(covariance)
    time = torch.as_tensor(t, dtype=covariance.dtype, device=covariance.device)
    require_finite("covariance_flow.t", time)
    left = 1 - 2 * sign * scale * time.reshape(time.shape + (1,) * values.ndim) * values.clamp_min(0)
    over = (left <= 0).any(-1)[..., None, None]
    moved = (vectors * (values / torch.where(left > 0, left, 1))[..., None, :]) @ vectors.mT
    return torch.where(over, torch.inf, moved)


def blow_up_time(covariance: Tensor, *, scale: float = 1.0, sign: int = 1) -> Tensor:
    """The time from which `covariance_flow` is infinite: 1/(2sλ_max); +inf for a descent or a point.

    (*batch, d, d) → (*batch)

    >>> import torch
    >>> blow_up_time(torch.diag(torch.tensor([0.5, 0.1])))
    tensor(1.)
    """
    Gaussian(require_float("blow_up_time.covariance", covariance)[..., 0], covariance)
    rate = 2 * sign * scale * torch.linalg.eigvalsh(covariance)[..., -1]
    return torch.where(rate > 0, 1 / torch.where(rate > 0, rate, 1), torch.inf)


def _require_gaussian(where: str, law: object) -> Gaussian:
    if not isinstance(law, Gaussian):
        raise TypeError(sentence(where, "a Gaussian", type(law).__name__, "Build Gaussian(mean, covariance)."))
    return law


def _square(where: str, matrix: Tensor, like: Tensor) -> Tensor:
    require_alike(where, require_float(where, matrix), "the law", like)
    d = like.shape[-1]
    if matrix.shape != (d, d):
        raise ValueError(sentence(where, f"shape (d={d}, d={d})", shape(matrix), "Match the law."))
    return matrix


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
