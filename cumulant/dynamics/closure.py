"""Laws instead of particles: what infinitely many particles do. What few of them do to it is in `finite`.

    N(μ, C) under x ↦ x ± γ M ∇G(s x)     μ⁺ = L μ ± γ M k̄,   C⁺ = L C Lᵀ,   L = I ± γ s M K           (S1-T1)
    in continuous time, no norm           Ċ = 2C²,   C(t) = (C₀⁻¹ − 2t)⁻¹, infinite at t = 1/(2λ_max)     (S3-R5)

The step is affine, so that the first line is exact. The keys N(k̄, K) are the law itself, its image under a linear map,
or a law that stands still. A mixture is closed only approximately: each component is carried by the tangent of the step
at its own mean (S1-P2′).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.dynamics.finite import condensation_scale, condensed, effective_sample_size, fluctuation, saturation
from cumulant.dynamics.matrices import symmetric_transport
from cumulant.dynamics.renormalize import Refused
from cumulant.kernels.dense import normalize
from cumulant.measures import Gaussian, Measure
from cumulant.measures.compose import Sum
from cumulant.measures.transform import Scaled
from cumulant.typing import Matrices, PerQuery, Queries

__all__ = [
    "Affine",
    "GaussianFlow",
    "Mixture",
    "MixtureFlow",
    "Tangents",
    "blow_up_time",
    "condensation_scale",
    "condensed",
    "covariance_flow",
    "effective_sample_size",
    "fluctuation",
    "gaussian_flow",
    "saturation",
]


class Affine(NamedTuple):
    """A step as every particle of the law sees it: x ↦ matrix x + offset, the renormaliser included.

    matrix (*batch, d, d), offset (*batch, d), log_volume (*batch) of the ascent alone: log|det L|
    """

    matrix: Matrices
    offset: Queries
    log_volume: PerQuery


@dataclass(frozen=True, kw_only=True, eq=False)
class _LawFlow:
    """± γ M, s and the target, which both flows have."""

    step_size: float = 1.0
    scale: float = 1.0
    sign: int = 1
    metric: Tensor | None = None
    renormalize: bool | Gaussian = False

    def __post_init__(self):
        name = type(self).__name__
        if not 0 <= self.step_size < math.inf:
            raise ValueError(sentence(f"{name}.step_size", "a number ≥ 0", self.step_size, "Descend with sign=-1."))
        if not math.isfinite(self.scale):
            raise ValueError(sentence(f"{name}.scale", "a finite number", self.scale, "It multiplies the logits."))
        if self.sign not in (1, -1):
            raise ValueError(sentence(f"{name}.sign", "+1 or -1", self.sign, "The length is step_size."))
        if not isinstance(self.renormalize, bool | Gaussian):
            got, advice = type(self.renormalize).__name__, "True restores N(0, I)."
            raise TypeError(sentence(f"{name}.renormalize", "True, False or a Gaussian", got, advice))

    def _value(self, like: Tensor) -> Tensor:
        """V = ± γ M"""
        if self.metric is None:
            eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
            return self.sign * self.step_size * eye
        return self.sign * self.step_size * _square(f"{type(self).__name__}.metric", self.metric, like)

    def _restore(self, mean: Tensor, covariance: Tensor) -> tuple[Gaussian, Tensor, Tensor]:
        """The target, and the symmetric affine map x ↦ R x + r to it from these moments (X-5a)."""
        d = covariance.shape[-1]
        values = torch.linalg.eigvalsh(covariance)
        rank = (values > d * torch.finfo(values.dtype).eps * values[..., -1:]).sum(-1)
        if not holds(rank == d):
            got, advice = f"rank {int(rank.min())}", "Drop the flat directions."
            message = sentence(type(self).__name__, f"a covariance of full rank d={d}", got, advice)
            raise Refused(message, "collapsed" if bool((rank == 0).any()) else "singular")
        target = self.renormalize
        if not isinstance(target, Gaussian):
            target = Gaussian(torch.zeros_like(mean), torch.eye(d, dtype=mean.dtype, device=mean.device))
        change = symmetric_transport(covariance, target.covariance)
        return target, change, target.loc - _apply(change, mean)

    def _require_finite(self, *moments: Tensor) -> None:
        if not all(holds(m.isfinite()) for m in moments):
            got, advice = "moments that are not", "Take smaller steps, or renormalise."
            raise Refused(sentence(type(self).__name__, "finite moments", got, advice), "nonfinite")


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianFlow(_LawFlow):
    """The mean field of a Gaussian cloud: exact, and again a Gaussian (S1-T1, X-5b). A `Dynamics` of laws.

    step_size    γ ≥ 0; not ``step``, which is the method
    scale, sign  s and ±, as in `Ascend`
    metric       M, any (d, d) value matrix; the identity if None
    keys         a Gaussian that stands still; None: the law is its own key law
    key_map      A (d, d): the keys are A x for x of the law. Theorem 1 has A = Σ
    renormalize  False; True: to N(0, I) by the symmetric map; a Gaussian: to that one. A law of lower rank is refused

    ``step`` returns the next `Gaussian` and the `Affine` map that took every particle there.

    >>> import torch
    >>> sigma = torch.tensor([[0.5]], dtype=torch.float64)
    >>> balance = Gaussian(torch.zeros(1, dtype=torch.float64), 1 / sigma)              # N(0, Σ⁻¹), keys Ση
    >>> law, how = GaussianFlow(key_map=sigma, renormalize=balance).step(balance)
    >>> law.covariance.item(), how.matrix.item(), how.log_volume.exp().item()           # the growth 1 + Σ is undone
    (2.0, 1.0, 1.5)
    """

    keys: Gaussian | None = None
    key_map: Tensor | None = None

    def __post_init__(self):
        super().__post_init__()
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

    def _keys(self, law: Gaussian) -> Gaussian:
        if self.keys is not None:
            return self.keys
        if self.key_map is None:
            return law
        a = _square("GaussianFlow.key_map", self.key_map, law.loc)
        return Gaussian(_apply(a, law.loc), _symmetric(a @ law.covariance @ a.mT))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Σ_i π_i N(m_i, C_i), a probability: π is the softmax of the log weights.

    log_weights (k,), loc (k, d), covariance (k, d, d)
    """

    log_weights: Tensor
    loc: Tensor
    covariance: Tensor

    def __post_init__(self):
        Gaussian(self.loc, self.covariance)
        w = require_float("Mixture.log_weights", self.log_weights)
        require_alike("Mixture.log_weights", w, "loc", self.loc)
        if self.loc.ndim != 2 or self.covariance.ndim != 3 or w.shape != self.loc.shape[:1] or not len(w):
            expected, got = "log_weights (k,), loc (k, d), covariance (k, d, d)", f"{shape(w)} and {shape(self.loc)}"
            raise ValueError(sentence("Mixture", expected, got, "One weight per component."))
        if not holds(w < torch.inf) or not holds(w.amax() > -torch.inf):
            raise ValueError(sentence("Mixture.log_weights", "a finite positive mass", w.tolist(), "-inf is absent."))

    @property
    def shares(self) -> Tensor:
        """π (k,)"""
        return normalize(self.log_weights)[1]

    @property
    def law(self) -> Measure:
        """The mixture as a measure: its mean and Fisher matrix are those of Proposition 2′."""
        parts = zip(self.shares.log(), self.loc, self.covariance, strict=True)
        return Sum(tuple(Scaled(Gaussian(m, c), w) for w, m, c in parts))

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (d,) and covariance (d, d) of the whole."""
        mean = self.shares @ self.loc
        away = self.loc - mean
        return mean, torch.einsum("k,kij->ij", self.shares, self.covariance + away[:, :, None] * away[:, None, :])


class Tangents(NamedTuple):
    """What a step of `MixtureFlow` did.

    log_volume  ()  mean over the components of log|det| of the ascent at their means
    bend        ()  how far the step is from its tangent one standard deviation from a mean, in units of that; the
                    largest over components and principal axes. 0: the closure is exact
    """

    log_volume: Tensor
    bend: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureFlow(_LawFlow):
    """The mean field of a Gaussian mixture, approximately: each component moves by the tangent at its mean (S1-P2′).

        m_i ↦ m_i ± γ M ∇G(s m_i),     C_i ↦ J_i C_i J_iᵀ,     J_i = I ± γ s M ∇²G(s m_i),     π_i unchanged

    Exact for one component, and in the limit of narrow ones; ``bend`` of the step's `Tangents` says how far from it.
    The mixture is its own key law. Arguments as in `GaussianFlow`. A `Dynamics` of `Mixture` states.

    >>> import torch
    >>> two = Mixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), 0.01 * torch.ones(2, 1, 1))
    >>> law, how = MixtureFlow(step_size=0.5).step(two)
    >>> law.loc, law.covariance.flatten(), how.bend                               # 1 + ½(tanh 1 + 0.01)
    (tensor([[-1.3858],
            [ 1.3858]]), tensor([0.0148, 0.0148]), tensor(0.0160))
    """

    def init(self, state: Mixture) -> Mixture:
        """The mixture itself, or brought to the moments of the target."""
        mixture = _require_mixture("MixtureFlow.init", state)
        return mixture if self.renormalize is False else self._renormalized(mixture)

    def step(self, state: Mixture) -> tuple[Mixture, Tangents]:
        """The mixture after one layer, and how good the approximation was."""
        before = _require_mixture("MixtureFlow.step", state)
        law, value, eta = before.law, self._value(before.loc), self.scale * before.loc
        tangent = torch.eye(law.dim, dtype=eta.dtype, device=eta.device) + self.scale * value @ law.fisher(eta)
        mean = before.loc + law.mean(eta) @ value.mT
        covariance = _symmetric(tangent @ before.covariance @ tangent.mT)
        self._require_finite(mean, covariance)
        volume = torch.linalg.slogdet(tangent).logabsdet
        how = Tangents(torch.where(before.shares > 0, before.shares * volume, 0).sum(), self._bend(before, value, law))
        after = Mixture(before.log_weights, mean, covariance)
        return (after if self.renormalize is False else self._renormalized(after)), how

    def _renormalized(self, mixture: Mixture) -> Mixture:
        _, change, shift = self._restore(*mixture.moments)
        covariance = _symmetric(change @ mixture.covariance @ change.mT)
        return Mixture(mixture.log_weights, mixture.loc @ change.mT + shift, covariance)

    def _bend(self, mixture: Mixture, value: Tensor, law: Measure) -> Tensor:
        """Second differences of the step along the principal axes (k, d, d) of the components."""
        variance, axes = torch.linalg.eigh(mixture.covariance)
        width = variance.clamp_min(0).sqrt()
        arms = (axes * width[:, None, :]).mT  # (k, axis, d)
        ends = torch.stack([mixture.loc[:, None] + arms, mixture.loc[:, None] - arms])
        far = law.mean((self.scale * ends).flatten(0, 2)).reshape(ends.shape)
        off = (far.mean(0) - law.mean(self.scale * mixture.loc)[:, None]) @ value.mT
        ratio = torch.linalg.vector_norm(off, dim=-1) / torch.where(width > 0, width, 1)
        return torch.where((width > 0) & (mixture.shares > 0)[:, None], ratio, 0).amax()


def covariance_flow(covariance: Tensor, t: float | Tensor, *, scale: float = 1.0, sign: int = 1) -> Tensor:
    """The covariance of a Gaussian cloud in continuous time, without a norm: Ċ = ± 2s C² (S3-R5).

        C(t) = (C₀⁻¹ ∓ 2st)⁻¹,     each eigenvalue λ/(1 ∓ 2stλ);     +inf in every entry from `blow_up_time` on

    No finite cloud does that: its longest particle grows at most like e^t, so the closure breaks before (F13).

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
    """When `covariance_flow` is infinite: 1/(2sλ_max); never (+inf) for a descent or a point.

    (*batch, d, d) → (*batch)

    >>> import torch
    >>> blow_up_time(torch.diag(torch.tensor([0.5, 0.1])))
    tensor(1.)
    """
    Gaussian(require_float("blow_up_time.covariance", covariance)[..., 0], covariance)
    rate = 2 * sign * scale * torch.linalg.eigvalsh(covariance)[..., -1]
    return torch.where(rate > 0, 1 / torch.where(rate > 0, rate, 1), torch.inf)


def gaussian_flow(law: Gaussian, t: float, *, scale: float = 1.0, sign: int = 1) -> Gaussian:
    """A Gaussian cloud carried along ẋ = ± ∇G(sx) for a time t before `blow_up_time`: still a Gaussian.

        μ̇ = ± (I + sC)μ,     so that along an eigenvector of C₀   μ(t) = e^{±t} μ₀ (1 ∓ 2stλ)^{−½}

    >>> import torch
    >>> gaussian_flow(Gaussian(torch.ones(1), 0.5 * torch.eye(1)), 0.5).loc                              # e^½ √2
    tensor([2.3316])
    """
    law = _require_gaussian("gaussian_flow", law)
    end = blow_up_time(law.covariance, scale=scale, sign=sign)
    if t < 0 or not holds(t < end):
        advice = "The closure is infinite from there on."
        expected = f"a time from 0 to before {end.min().item():.6g}"
        raise ValueError(sentence("gaussian_flow.t", expected, t, advice))
    values, vectors = torch.linalg.eigh(law.covariance)
    left = 1 - 2 * sign * scale * t * values.clamp_min(0)
    along = _apply(vectors.mT, law.loc) * math.exp(sign * t) / left.sqrt()
    return Gaussian(_apply(vectors, along), _symmetric(covariance_flow(law.covariance, t, scale=scale, sign=sign)))


def _require_gaussian(where: str, law: object) -> Gaussian:
    if not isinstance(law, Gaussian):
        raise TypeError(sentence(where, "a Gaussian", type(law).__name__, "Build Gaussian(mean, covariance)."))
    return law


def _require_mixture(where: str, state: object) -> Mixture:
    if not isinstance(state, Mixture):
        advice = "Build Mixture(log_weights, loc, covariance)."
        raise TypeError(sentence(where, "a Mixture", type(state).__name__, advice))
    return state


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
