"""The normal family, and the Normal–Gamma family of a mean and a precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.families.base import ExponentialFamily, StateMoments, standard_normal
from cumulant.families.gamma import GammaFamily, symmetric
from cumulant.families.gamma_functions import gamma_shape
from cumulant.special import digamma, log_left, standard_gamma


@final
@dataclass(frozen=True)
class NormalFamily(ExponentialFamily):
    """x ~ N(m, v) with the statistics x and x²; parameters m, v.

    >>> import torch
    >>> NormalFamily().natural(torch.tensor([3.0, 2.0]))
    tensor([ 1.5000, -0.2500])
    """

    unbounded = 1

    def natural(self, parameters: Tensor) -> Tensor:
        mean, variance = parameters.unbind(self.dim)
        half = 0.5 / variance
        return self.stack(2 * half * mean, -half)

    def from_natural(self, natural: Tensor) -> Tensor:
        first, second = natural.unbind(self.dim)
        return self.stack(first / 2 / -second, 0.5 / -second)

    def log_partition(self, parameters: Tensor) -> Tensor:
        mean, variance = parameters.unbind(self.dim)
        return (mean.square() / variance + variance.log()) / 2

    def log_partition_gap(self, parameters: Tensor, eta: Tensor) -> Tensor:
        """A(θ + η) − A(θ), never formed as that difference, which would lose a small η in the rounding of A."""
        (mean, variance), (tilt, extra) = parameters.unbind(self.dim), eta.unbind(self.dim)
        half = 0.5 / variance
        left = half - extra
        moved = (tilt / left) * (half * mean + tilt / 4) + (extra / left) * (half * mean.square())
        return moved - log_left(extra, half) / 2

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.square()], self.dim)

    def mean(self, parameters: Tensor) -> Tensor:
        mean, variance = parameters.unbind(self.dim)
        return self.stack(mean, mean.square() + variance)

    def from_mean(self, mean: Tensor) -> Tensor:
        first, second = mean.unbind(self.dim)
        return self.stack(first, second - first.square())

    def fisher(self, parameters: Tensor) -> Tensor:
        """Cov[u] = ∇²A(θ) as (…, 2, 2), for parameters on the last axis."""
        mean, variance = parameters.unbind(self.dim)
        return symmetric(variance, 2 * mean * variance, 2 * variance * (variance + 2 * mean.square()))

    def moments(self, parameters: Tensor) -> StateMoments:
        return self._scalar_moments(*parameters.unbind(self.dim))

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """Within plus between, without subtracting squares."""
        means, variances = parameters.unbind(self.dim)
        mean = (weights * means).sum(axis, keepdim=True)
        return self.stack(mean.squeeze(axis), (weights * (variances + (means - mean).square())).sum(axis))

    def sample(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        mean, variance = parameters.unbind(self.dim)
        return (mean + variance.sqrt() * standard_normal(variance, generator)).unsqueeze(self.dim)

    def interpolate(self, parameters: Tensor, other: Tensor, share: Tensor) -> Tensor:
        (m, v), (m0, v0), share = parameters.unbind(self.dim), other.unbind(self.dim), share.squeeze(self.dim)
        variance = 1 / (share / v + (1 - share) / v0)
        # m + … rather than a sum of two large numbers
        return self.stack(m + variance * (1 - share) / v0 * (m0 - m), variance)


@final
@dataclass(frozen=True)
class NormalGammaFamily(ExponentialFamily):
    """x = (μ, τ) with τ ~ Gamma(α, β) and μ | τ ~ N(m, 1/(κτ)); parameters m, κ, α, β.

    μ has a variance only where α > 1; the covariance is +inf below.
    """

    unbounded = 1

    def natural(self, parameters: Tensor) -> Tensor:
        m, count, shape, rate = parameters.unbind(self.dim)
        return self.stack(shape - 0.5, -rate - count * m.square() / 2, count * m, -count / 2)

    def from_natural(self, natural: Tensor) -> Tensor:
        first, second, third, fourth = natural.unbind(self.dim)
        count = -2 * fourth
        m = third / count
        return self.stack(m, count, first + 0.5, -second - third * m / 2)

    def log_partition(self, parameters: Tensor) -> Tensor:
        _, count, shape, rate = parameters.unbind(self.dim)
        return torch.lgamma(shape) - shape * rate.log() - count.log() / 2

    def statistics(self, x: Tensor) -> Tensor:
        mean, precision = x.unbind(self.dim)
        return self.stack(precision.log(), precision, precision * mean, precision * mean.square())

    def mean(self, parameters: Tensor) -> Tensor:
        m, count, shape, rate = parameters.unbind(self.dim)
        precision = shape / rate
        return self.stack(digamma(shape) - rate.log(), precision, precision * m, 1 / count + precision * m.square())

    def from_mean(self, mean: Tensor) -> Tensor:
        mean_log, precision, first, second = mean.unbind(self.dim)
        m, shape = first / precision, gamma_shape(precision.log() - mean_log)
        return self.stack(m, 1 / (second - first * m), shape, shape / precision)

    def moments(self, parameters: Tensor) -> StateMoments:
        m, count, shape, rate = parameters.unbind(self.dim)
        spread = torch.where(shape > 1, rate / (count * torch.where(shape > 1, shape - 1, 1)), torch.inf)
        none = torch.zeros_like(spread)
        rows = self.stack(spread, none), self.stack(none, shape / rate.square())
        covariance = torch.stack(torch.broadcast_tensors(*rows), self.dim - 1)
        return StateMoments(self.stack(m, shape / rate), covariance)

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        m, count, shape, rate = parameters.unbind(self.dim)
        pull = weights * shape / rate
        centre = (pull * m).sum(axis, keepdim=True) / pull.sum(axis, keepdim=True)
        apart = (weights / count + pull * (m - centre).square()).sum(axis)
        precision = GammaFamily(self.dim).project(weights, self.stack(shape, rate), axis)
        return self.stack(centre.squeeze(axis), 1 / apart, *precision.unbind(self.dim))

    def sample(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        m, count, shape, rate = parameters.unbind(self.dim)
        precision = standard_gamma(shape, generator) / rate
        return self.stack(m + standard_normal(m, generator) / (count * precision).sqrt(), precision)

    def interpolate(self, parameters: Tensor, other: Tensor, share: Tensor) -> Tensor:
        (m, k, a, b), (m0, k0, a0, b0) = parameters.unbind(self.dim), other.unbind(self.dim)
        share = share.squeeze(self.dim)
        ours, theirs = share * k, (1 - share) * k0
        count = ours + theirs
        between = ours * theirs / count * (m - m0).square() / 2
        rate = share * b + (1 - share) * b0 + between
        return self.stack(m + theirs / count * (m0 - m), count, share * a + (1 - share) * a0, rate)
