"""Conjugate families whose observations are measured: normal with known variance, and Normal–Gamma."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.filters.family import (
    Family,
    Observed,
    check_known,
    known,
    known_of,
    noise,
    project_gamma,
    scalar_moments,
    stack,
)
from cumulant.filters.gamma_functions import digamma_gap, gamma_shape, log_rising
from cumulant.filters.protocol import StateMoments
from cumulant.special import standard_gamma

LOG_TWO_PI = math.log(2 * math.pi)


@final
@dataclass(frozen=True, eq=False)
class NormalNormal(Family):
    """Measurements y ~ N(x, v_s) of an unknown mean x ~ N(m, p), their variance known.

        m ← m + k (y − m),   p ← (1 − k) p,   k = p/(p + v_s),   y ~ N(m, p + v_s)

    variance  v_s > 0 of every mode: a number, (M,) or (T, M). A mode with a large one is an outlier mode.

    >>> import torch
    >>> p = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    >>> NormalNormal(1.0).observe(p, torch.tensor([4.0], dtype=torch.float64), 0).parameters[:, 0].tolist()
    [3.0, 0.75]
    """

    variance: Tensor | float

    names = ("mean", "variance")
    values = "finite numbers"

    def inside(self, parameters: Tensor) -> Tensor:
        return (parameters[..., 1] > 0) & parameters.isfinite().all(-1)

    def check(self, modes: int, count: int, like: Tensor) -> None:
        check_known("NormalNormal.variance", self.variance, modes, like, positive=True)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return y.isfinite()

    def recall(self, parameters: Tensor, prior: Tensor, memory: Tensor) -> Tensor:
        (m, p), (m0, p0), keep = parameters.unbind(-2), prior.unbind(-2), memory.squeeze(-2)
        variance = 1 / (keep / p + (1 - keep) / p0)
        # m + … rather than a sum of two large numbers
        return stack(m + variance * (1 - keep) / p0 * (m0 - m), variance)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        m, p = parameters.unbind(-2)
        v = known(self.variance, t, parameters)
        total, off = p + v, y - m
        log_likelihood = -(LOG_TWO_PI + total.log() + off.square() / total) / 2
        return Observed(stack(m + p / total * off, p * v / total), log_likelihood)

    def moments(self, parameters: Tensor) -> StateMoments:
        return scalar_moments(*parameters.unbind(-2))

    def expected_statistics(self, parameters: Tensor) -> Tensor:
        m, p = parameters.unbind(-2)
        return stack(m, p + m.square())

    def from_statistics(self, statistics: Tensor) -> Tensor:
        mean, square = statistics.unbind(-2)
        return stack(mean, square - mean.square())

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        m, p = parameters.unbind(-2)
        mean = (weights * m).sum(axis, keepdim=True)
        return stack(mean.squeeze(axis), (weights * (p + (m - mean).square())).sum(axis))

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        m, p = parameters.unbind(-1)
        return (m + p.sqrt() * noise(m, generator))[:, None]

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        return x[:, 0] + known_of(self.variance, t, mode, x).sqrt() * noise(x[:, 0], generator)


@final
@dataclass(frozen=True, eq=False)
class NormalGamma(Family):
    """Measurements y ~ N(μ, v_s/τ) whose mean and precision are unknown: τ ~ Gamma(α, β), μ | τ ~ N(m, 1/(κτ)).

        c = 1/v_s,   m ← (κm + cy)/(κ + c),   κ ← κ + c,   α ← α + ½,   β ← β + (y − m)²/(2(v_s + 1/κ))

    and y follows Student's law with 2α degrees of freedom. The state is (μ, τ).

    variance  v_s > 0 of every mode, in units of 1/τ: a number, (M,) or (T, M)

    Parameters are m, κ, α, β. μ has a variance only where α > 1; the covariance is +inf below.

    >>> import torch
    >>> p = torch.tensor([[0.0], [1.0], [2.0], [1.0]], dtype=torch.float64)
    >>> NormalGamma().observe(p, torch.tensor([2.0], dtype=torch.float64), 0).parameters[:, 0].tolist()
    [1.0, 2.0, 2.5, 2.0]
    """

    variance: Tensor | float = 1.0

    names = ("mean", "count", "shape", "rate")
    values = "finite numbers"

    def inside(self, parameters: Tensor) -> Tensor:
        return (parameters[..., 1:] > 0).all(-1) & parameters.isfinite().all(-1)

    def check(self, modes: int, count: int, like: Tensor) -> None:
        check_known("NormalGamma.variance", self.variance, modes, like, positive=True)

    def allowed(self, y: Tensor, count: int) -> Tensor:
        return y.isfinite()

    def recall(self, parameters: Tensor, prior: Tensor, memory: Tensor) -> Tensor:
        (m, k, a, b), (m0, k0, a0, b0), keep = parameters.unbind(-2), prior.unbind(-2), memory.squeeze(-2)
        ours, theirs = keep * k, (1 - keep) * k0
        count = ours + theirs
        between = ours * theirs / count * (m - m0).square() / 2
        rate = keep * b + (1 - keep) * b0 + between
        return stack(m + theirs / count * (m0 - m), count, keep * a + (1 - keep) * a0, rate)

    def observe(self, parameters: Tensor, y: Tensor, t: int) -> Observed:
        m, k, a, b = parameters.unbind(-2)
        v = known(self.variance, t, parameters)
        off, width = y - m, v + 1 / k
        surprise = off.square() / (2 * width)
        half = torch.full_like(a, 0.5)
        log_likelihood = (
            log_rising(a, half) - (LOG_TWO_PI + (b * width).log()) / 2 - (a + 0.5) * torch.log1p(surprise / b)
        )
        return Observed(stack(m + off / (k * width), k + 1 / v, a + 0.5, b + surprise), log_likelihood)

    def moments(self, parameters: Tensor) -> StateMoments:
        m, k, a, b = parameters.unbind(-2)
        spread = torch.where(a > 1, b / (k * torch.where(a > 1, a - 1, 1)), torch.inf)
        none = torch.zeros_like(spread)
        rows = stack(spread, none), stack(none, a / b.square())
        return StateMoments(stack(m, a / b), torch.stack(torch.broadcast_tensors(*rows), -3))

    def expected_statistics(self, parameters: Tensor) -> Tensor:
        m, k, a, b = parameters.unbind(-2)
        precision = a / b
        return stack(precision.log() - digamma_gap(a), precision, precision * m, 1 / k + precision * m.square())

    def from_statistics(self, statistics: Tensor) -> Tensor:
        mean_log, precision, first, second = statistics.unbind(-2)
        m, a = first / precision, gamma_shape(precision.log() - mean_log)
        return stack(m, 1 / (second - first * m), a, a / precision)

    def project(self, weights: Tensor, parameters: Tensor, axis: int) -> Tensor:
        m, k, a, b = parameters.unbind(-2)
        pull = weights * a / b
        centre = (pull * m).sum(axis, keepdim=True) / pull.sum(axis, keepdim=True)
        apart = (weights / k + pull * (m - centre).square()).sum(axis)
        return stack(centre.squeeze(axis), 1 / apart, *project_gamma(weights, a, b, axis))

    def draw(self, parameters: Tensor, generator: torch.Generator | None) -> Tensor:
        m, k, a, b = parameters.unbind(-1)
        precision = standard_gamma(a, generator) / b
        return torch.stack([m + noise(m, generator) / (k * precision).sqrt(), precision], -1)

    def emit(self, x: Tensor, mode: Tensor, t: int, generator: torch.Generator | None) -> Tensor:
        mean, precision = x.unbind(-1)
        return mean + (known_of(self.variance, t, mode, x) / precision).sqrt() * noise(mean, generator)
