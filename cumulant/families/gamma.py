"""The Gamma and Dirichlet families, whose statistics are logarithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.families.base import ExponentialFamily, StateMoments
from cumulant.families.gamma_functions import dirichlet_concentration, gamma_shape, log_minus_digamma
from cumulant.special import (
    digamma,
    digamma_gap,
    log_beta_gap,
    log_gamma_gap,
    log_left,
    standard_gamma,
    trigamma,
    trigamma_gap,
)


@final
@dataclass(frozen=True)
class GammaFamily(ExponentialFamily):
    """x ~ Gamma(α, β) with the statistics x and log x; parameters α, β.

    >>> import torch
    >>> GammaFamily().mean(torch.tensor([3.0, 2.0], dtype=torch.float64))            # 3/2, ψ(3) − log 2
    tensor([1.5000, 0.2296], dtype=torch.float64)
    """

    def natural(self, parameters: Tensor) -> Tensor:
        shape, rate = parameters.unbind(self.dim)
        return self.stack(-rate, shape)

    def from_natural(self, natural: Tensor) -> Tensor:
        first, second = natural.unbind(self.dim)
        return self.stack(second, -first)

    def log_partition(self, parameters: Tensor) -> Tensor:
        shape, rate = parameters.unbind(self.dim)
        return torch.lgamma(shape) - shape * rate.log()

    def log_partition_gap(self, parameters: Tensor, eta: Tensor) -> Tensor:
        """A(θ + η) − A(θ), never formed as that difference, which would lose a small η in the rounding of A."""
        (shape, rate), (tilt, extra) = parameters.unbind(self.dim), eta.unbind(self.dim)
        return log_gamma_gap(shape, extra) - extra * torch.log(rate) - (shape + extra) * log_left(tilt, rate)

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.log()], self.dim)

    def mean(self, parameters: Tensor) -> Tensor:
        shape, rate = parameters.unbind(self.dim)
        return self.stack(shape / rate, digamma(shape) - torch.log(rate))

    def from_mean(self, mean: Tensor) -> Tensor:
        x, log_x = mean.unbind(self.dim)
        shape = gamma_shape(x.log() - log_x)
        return self.stack(shape, shape / x)

    def fisher(self, parameters: Tensor) -> Tensor:
        """Cov[u] = ∇²A(θ) as (…, 2, 2), for parameters on the last axis."""
        shape, rate = parameters.unbind(self.dim)
        return symmetric(shape / rate / rate, 1 / rate, trigamma(shape))

    def moments(self, parameters: Tensor) -> StateMoments:
        shape, rate = parameters.unbind(self.dim)
        return self._scalar_moments(shape / rate, shape / rate.square())

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """log E[x] − E[log x] is summed from terms of one sign: what the means differ by, and what each law has."""
        shapes, rates = parameters.unbind(self.dim)
        means = shapes / rates
        mean = (weights * means).sum(axis, keepdim=True)
        apart = means / mean - 1
        near = apart.abs() < 0.5
        between = torch.where(near, apart - torch.log1p(torch.where(near, apart, 0)), apart - (means / mean).log())
        shape = gamma_shape((weights * (between + log_minus_digamma(shapes))).sum(axis))
        return self.stack(shape, shape / mean.squeeze(axis))

    def sample(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        shape, rate = parameters.unbind(self.dim)
        return (standard_gamma(shape, generator) / rate).unsqueeze(self.dim)

    def sample_log(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """log x, exact where x itself underflows."""
        shape, rate = parameters.unbind(self.dim)
        return (log_standard_gamma(shape, generator) - rate.log()).unsqueeze(self.dim)


@final
@dataclass(frozen=True)
class DirichletFamily(ExponentialFamily):
    """x ~ Dirichlet(a) on K probabilities with the statistics log x; parameters and natural parameters a.

    With K = 2 this is Beta(a, b) of x and 1 − x.

    >>> import torch
    >>> DirichletFamily().mean(torch.ones(2, dtype=torch.float64))                   # −log x is exponential
    tensor([-1., -1.], dtype=torch.float64)
    """

    def natural(self, parameters: Tensor) -> Tensor:
        return parameters

    def from_natural(self, natural: Tensor) -> Tensor:
        return natural

    def log_partition(self, parameters: Tensor) -> Tensor:
        return torch.lgamma(parameters).sum(self.dim) - torch.lgamma(parameters.sum(self.dim))

    def log_partition_gap(self, parameters: Tensor, eta: Tensor) -> Tensor:
        """log B(a+η) − log B(a), for parameters on the last axis.

        Σ_i log B(S_i + Σ_{j<i} η_j, a_i + η_i) − log B(S_i, a_i) with S_i = Σ_{j<i} a_j
        """
        a = parameters.expand_as(eta)
        before, moved = a.cumsum(-1)[..., :-1], eta.cumsum(-1)[..., :-1]
        moved = torch.where(moved + before > 0, moved, (a + eta).cumsum(-1)[..., :-1] - before)
        return log_beta_gap(before, a[..., 1:], moved, eta[..., 1:]).sum(-1)

    def statistics(self, x: Tensor) -> Tensor:
        return x.log()

    def mean(self, parameters: Tensor) -> Tensor:
        """ψ(a) − ψ(Σa), by terms of one sign."""
        return -digamma_gap(parameters, self._others(parameters))

    def from_mean(self, mean: Tensor) -> Tensor:
        return dirichlet_concentration(mean.movedim(self.dim, -1)).movedim(-1, self.dim)

    def fisher(self, parameters: Tensor) -> Tensor:
        """Cov[u] = diag ψ′(a) − ψ′(Σa) as (…, K, K), for parameters on the last axis."""
        common = trigamma(parameters.sum(-1))[..., None, None]
        eye = torch.eye(parameters.shape[-1], dtype=parameters.dtype, device=parameters.device)
        return torch.diag_embed(trigamma_gap(parameters, self._others(parameters))) - common * (1 - eye)

    def moments(self, parameters: Tensor) -> StateMoments:
        total = parameters.sum(self.dim, keepdim=True)
        mean = parameters / total
        eye = torch.eye(mean.shape[self.dim], dtype=mean.dtype, device=mean.device)
        eye = eye.reshape(*eye.shape, *[1] * (-1 - self.dim))
        spread = mean.unsqueeze(self.dim - 1) * (eye - mean.unsqueeze(self.dim))
        return StateMoments(mean, spread / (total + 1).unsqueeze(self.dim))

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        # in double precision, because Σa rests on what is left of the logarithms once their leading terms cancel
        logs = (weights.unsqueeze(self.dim).double() * self.mean(parameters.double())).sum(axis)
        return self.from_mean(logs).to(parameters.dtype)

    def sample(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        x = standard_gamma(parameters, generator).clamp_min(torch.finfo(parameters.dtype).tiny)
        return x / x.sum(self.dim, keepdim=True)

    def sample_statistics(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        """log x, exact where x itself underflows."""
        log_x = log_standard_gamma(parameters, generator)
        return log_x - torch.logsumexp(log_x, self.dim, keepdim=True)

    def _others(self, parameters: Tensor) -> Tensor:
        """What the other coordinates have in sum."""
        count = parameters.shape[self.dim]
        others = 1 - torch.eye(count, dtype=parameters.dtype, device=parameters.device)
        return (parameters.movedim(self.dim, -1) @ others).movedim(-1, self.dim)


def log_standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """log of Gamma(c, 1) draws, exact where the draws themselves underflow: Gamma(c) = Gamma(c+1) U^{1/c}."""
    uniform = 1 - torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return standard_gamma(shape + 1, generator).log() + uniform.log() / shape


def symmetric(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[[a, b], [b, c]]"""
    return torch.stack([torch.stack([a, b], dim=-1), torch.stack([b, c], dim=-1)], dim=-2)
