"""Gamma functions: ψ and ψ′, differences of log Γ, ψ and ψ′, the second difference of log Γ, and Gamma draws."""

import torch
from torch import Tensor

GAMMA_SHIFT = 12  # arguments are raised by this much before Stirling's series
BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]


def trigamma(a: Tensor) -> Tensor:
    """ψ′(a) = Σ_k (a+k)⁻² for a > 0; torch.polygamma(1, a) is good to 1e-9 only.

    >>> import math, torch
    >>> abs(trigamma(torch.tensor(1.0, dtype=torch.float64)).item() - math.pi**2 / 6) < 1e-15
    True
    """
    steps, z = _raised(a)
    tail = sum(b * z ** -(2 * k + 1) for k, b in enumerate(BERNOULLI, 1))
    return steps.pow(-2).sum(-1) + (1 / z + 0.5 * z.pow(-2) + tail)


def digamma(a: Tensor) -> Tensor:
    """ψ(a) for a > 0, with derivatives as exact as itself; those of torch.digamma go through torch.polygamma.

    >>> import torch
    >>> digamma(torch.tensor(1.0, dtype=torch.float64))                      # minus Euler's constant
    tensor(-0.5772, dtype=torch.float64)
    """
    steps, z = _raised(a)
    tail = sum(b / (2 * k) * z ** (-2 * k) for k, b in enumerate(BERNOULLI, 1))
    return torch.log(z) - 0.5 / z - tail - (1 / steps).sum(-1)


def digamma_gap(a: Tensor, delta: Tensor) -> Tensor:
    """ψ(a + δ) − ψ(a) for a > 0, δ ≥ 0, by positive terms.

    >>> import torch
    >>> digamma_gap(torch.tensor(1e20, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64))
    tensor(3.0000e-20, dtype=torch.float64)
    """
    steps, z = _raised(a)
    d = delta[..., None]
    rise = (d / steps / (steps + d)).sum(-1)
    tail = sum(b / (2 * k) * _power_gap(z, delta, 2 * k) for k, b in enumerate(BERNOULLI, 1))
    return rise + (torch.log1p(delta / z) + 0.5 * _power_gap(z, delta, 1) + tail)


def trigamma_gap(a: Tensor, delta: Tensor) -> Tensor:
    """ψ′(a) − ψ′(a + δ) for a > 0, δ ≥ 0, by positive terms.

    >>> import torch
    >>> trigamma_gap(torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """
    steps, z = _raised(a)
    d = delta[..., None]
    fall = (d / steps / (steps + d) * (1 / steps + 1 / (steps + d))).sum(-1)
    tail = sum(b * _power_gap(z, delta, 2 * k + 1) for k, b in enumerate(BERNOULLI, 1))
    return fall + (_power_gap(z, delta, 1) + 0.5 * _power_gap(z, delta, 2) + tail)


def log_gamma_gap(a: Tensor, delta: Tensor) -> Tensor:
    """log Γ(a + δ) − log Γ(a) for a > 0, a + δ > 0, without the difference of two logarithms.

    >>> import torch
    >>> log_gamma_gap(torch.tensor(2.0, dtype=torch.float64), torch.tensor(1e-30, dtype=torch.float64))   # δ ψ(2)
    tensor(4.2278e-31, dtype=torch.float64)
    """
    up = delta >= 0
    low, gap = torch.where(up, a, a + delta), torch.where(up, delta, -delta)
    steps, z = _raised(low)
    fall = torch.log1p(gap[..., None] / steps).sum(-1)
    tail = sum(b / (2 * k * (2 * k - 1)) * _power_gap(z, gap, 2 * k - 1) for k, b in enumerate(BERNOULLI, 1))
    rise = (z - 0.5) * torch.log1p(gap / z) + gap * (torch.log(z + gap) - 1) - (fall + tail)
    return torch.where(up, rise, -rise)


def log_beta_gap(a: Tensor, b: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """log B(a+α, b+β) − log B(a, b) with B(a, b) = Γ(a)Γ(b)/Γ(a+b): two second differences of log Γ.

    >>> import torch
    >>> one, many = torch.tensor([1.0, 1e15], dtype=torch.float64)
    >>> log_beta_gap(one, one, many, 0 * one)                             # −log(1 + α)
    tensor(-34.5388, dtype=torch.float64)
    """
    return -_log_gamma_bend(b, a, beta) - _log_gamma_bend(a, b + beta, alpha)


def _log_gamma_bend(a: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
    """log Γ(a+α+δ) − log Γ(a+α) − log Γ(a+δ) + log Γ(a) for a, α > 0 and a + δ > 0, by positive terms."""
    up = delta >= 0
    low, beta = torch.where(up, a, a + delta), torch.where(up, delta, -delta)
    steps, z = _raised(low)
    each = (alpha[..., None] / steps) * (beta[..., None] / (steps + alpha[..., None] + beta[..., None]))
    joint = torch.log1p((alpha / z) * (beta / (z + alpha + beta)))
    by_alpha, by_beta = torch.log1p(alpha / (z + beta)), torch.log1p(beta / (z + alpha))
    tail = torch.zeros_like(z)
    for k, b in enumerate(BERNOULLI, 1):
        n = 2 * k - 1
        both = torch.exp(-n * by_alpha) * -torch.expm1(-n * joint) * z**-n
        one = -torch.expm1(-n * by_alpha) * _power_gap(z, beta, n)
        tail = tail + b / (2 * k * n) * (both + one)
    bend = torch.log1p(each).sum(-1) + (alpha * by_beta + beta * by_alpha - (z - 0.5) * joint + tail)
    return torch.where(up, bend, -bend)


def _raised(a: Tensor) -> tuple[Tensor, Tensor]:
    """a, a+1, …, a+11 on a last axis, and a+12."""
    return a[..., None] + torch.arange(GAMMA_SHIFT, dtype=a.dtype, device=a.device), a + GAMMA_SHIFT


def _power_gap(z: Tensor, delta: Tensor, n: int) -> Tensor:
    """z^-n − (z+δ)^-n for δ ≥ 0."""
    return -torch.expm1(-n * torch.log1p(delta / z)) * z**-n


def standard_gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(concentration, 1) draws from a given generator, which torch.distributions does not take.

    >>> import torch
    >>> draws = standard_gamma(torch.full((10_000,), 3.0), torch.Generator().manual_seed(0))       # mean 3
    >>> abs(float(draws.mean()) - 3) < 0.1
    True
    """
    return torch.ops.aten._standard_gamma(concentration, generator)
