"""Bessel functions as F(b, x) = ₀F₁(; b; x) = Σ_k x^k / ((b)_k k!), the log-normalizer of the sphere (b = dim/2)."""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.special.elementary import polynomial

DEBYE_TERMS = 11
DEBYE_ORDER = 40  # from √(ν²+κ²) = 40 on the expansion is exact to 1e-15, its second derivative to 1e-13


def far_from(dtype: torch.dtype) -> float:
    """The least κ for which Debye's expansion in 1/√(ν² + κ²) holds at every order ν to the precision of a dtype.

    >>> import torch
    >>> far_from(torch.float64), far_from(torch.float32)
    (40.0, 20.0)
    """
    return 40.0 if dtype == torch.float64 else 20.0


class Radial(NamedTuple):
    """g(κ) = log F(b, κ²/4) and its derivatives: for the sphere G, the resultant and the variances of the law.

    log g      slope g′      across g′/κ      along g″      scaled κ² g″, which does not underflow with κ^-2
    """

    log: Tensor
    slope: Tensor
    across: Tensor
    along: Tensor
    scaled: Tensor


class Hyp0F1(NamedTuple):
    """log F(b, x), and the ratio F(b+1, x)/F(b, x) = b · ∂ₓ log F(b, x), which lies in (0, 1]."""

    log: Tensor
    ratio: Tensor


def hyp0f1(b: float, x: Tensor) -> Hyp0F1:
    """log ₀F₁(; b; x) and its ratio for b ≥ ½ and x ≥ 0, relative accuracy about 1e-14 in float64.

    >>> import math, torch
    >>> log, ratio = hyp0f1(1.5, torch.tensor(4.0, dtype=torch.float64))    # F(3/2, z²/4) = sinh(z)/z at z = 4
    >>> abs(log.item() - math.log(math.sinh(4) / 4)) < 1e-14
    True
    """
    limit = far_from(x.dtype) ** 2 / 4
    far = x >= limit
    radial = bessel_radial(b, x, 2 * torch.sqrt(torch.where(far, x, limit)), far)
    return Hyp0F1(radial.log, 2 * b * radial.across)


def bessel_radial(b: float, quarter: Tensor, kappa: Tensor, far: Tensor) -> Radial:
    """g(κ) = log ₀F₁(; b; κ²/4) with g′/κ and g″ for b ≥ ½, from κ = 0 to the largest finite number.

    quarter  κ²/4, used where not ``far``: there g is a smooth function of the square, also at 0
    kappa    κ; ``far`` is where it is at least `far_from`

    Bessel routines underflow long before F does (I_2047(1) is 0 in float64 while F(2048, 1/4) = 1.000122), and
    g″ = 1 − g′² − (2b−1) g′/κ cancels; here every sum keeps its relative accuracy:

    1. at order ν ≥ 40, or far from 0, by Debye's expansion (DLMF 10.41), differentiated by hand;
    2. near 0 from there down to the wanted b by the contiguous relation F(b) = F(b+1) + x/(b(b+1)) F(b+2).

    >>> import torch
    >>> k = torch.tensor([1e-3, 1e200], dtype=torch.float64)
    >>> bessel_radial(1.0, k.square() / 4, k, k >= 40).along         # ½ at 0; 1/(2κ²) underflows
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    near = _near(b, torch.where(far, 0, quarter), torch.where(far, 0, kappa))
    away = _far(b, torch.where(far, kappa, far_from(kappa.dtype)))
    radial = Radial(*(torch.where(far, a, n) for n, a in zip(near, away, strict=True)))
    if b == 0.5:  # F = cosh κ: two atoms, whose variance 1/cosh² falls exponentially
        along = torch.exp(-2 * radial.log)
        radial = radial._replace(along=along, scaled=along * torch.where(along > 0, kappa, 0).square())
    return radial


def _near(b: float, x: Tensor, kappa: Tensor) -> Radial:
    """Down from order ≥ 40 with ρ = F(b+1)/F(b) = 2b g′/κ and σ = 2b g″/ρ²:

    y = x ρ₁/(b(b+1)),     log F = log F₁ + log(1 + y),     ρ = 1/(1 + y),     σ = 1 − y ρ₁ σ₁
    """
    steps = max(0, -int((b - 1 - DEBYE_ORDER) // 1))
    nu, square = b + steps - 1, 4 * x
    s = torch.sqrt(nu**2 + square)
    total, log = _debye_sum(nu, s), _debye_log(nu, s, square / (s + nu))
    across = 1 / (nu + s) - total.half / s.square()
    along = nu / (nu + s) / s + total.curve(square / s.square()) / s.square()
    if steps:
        top = 2 * (b + steps)
        ratio, sigma = top * across, along / (top * across.square())
        for k in reversed(range(steps)):
            low = b + k
            tail = x / (low * (low + 1)) * ratio
            log, sigma = log + torch.log1p(tail), 1 - tail * ratio * sigma
            ratio = 1 / (1 + tail)
        across, along = ratio / (2 * b), ratio.square() * sigma / (2 * b)
    return Radial(log, kappa * across, across, along, square * along)


def _far(b: float, kappa: Tensor) -> Radial:
    """By Debye's expansion at order ν = b − 1 itself; in ratios to s ≥ κ, of which no square is formed."""
    nu = b - 1
    s = torch.hypot(kappa, torch.full_like(kappa, nu))
    total, cosine = _debye_sum(nu, s), kappa / s
    slope = kappa / (nu + s) - total.half * cosine / s
    scaled = cosine.square() * (nu * (s / (nu + s)) + total.curve(cosine.square()))
    if nu >= DEBYE_ORDER:
        log = _debye_log(nu, s, kappa * (kappa / (s + nu)))
    else:  # too low for the expansion at κ = 0, so that Γ(b) comes in
        constant = math.lgamma(b) + nu * math.log(2) - math.log(2 * math.pi) / 2
        log = s - nu * torch.log(nu + s) - torch.log(s) / 2 + constant + torch.log(total.value)
    return Radial(log, slope, slope / kappa, scaled / kappa / kappa, scaled)


class _DebyeSum(NamedTuple):
    """Debye's sum U(w) = Σ U_k(ν/s) ν^-k at w = max(ν, 40)/s, ½ + E with E = w U′/U, and w E′.

    With s = √(ν²+κ²):  g′/κ = 1/(ν+s) − (½ + E)/s²,     g″ = ν/(s(ν+s)) + ((½ + E)(κ²−ν²) + κ² w E′)/s⁴
    """

    value: Tensor
    half: Tensor
    bend: Tensor

    def curve(self, cosine2: Tensor) -> Tensor:
        """((½ + E)(κ²−ν²) + κ² w E′)/s² from κ²/s²."""
        return self.half * (2 * cosine2 - 1) + cosine2 * self.bend


def _debye_sum(nu: float, s: Tensor) -> _DebyeSum:
    debye, w = _at_order(DEBYE[0], nu), max(nu, DEBYE_ORDER) / s
    u = polynomial(debye, w)
    first = polynomial([i * c for i, c in enumerate(debye)], w) / u
    second = polynomial([i * (i - 1) * c for i, c in enumerate(debye)], w) / u
    return _DebyeSum(u, 0.5 + first, first + second - first.square())


def _debye_log(nu: float, s: Tensor, excess: Tensor) -> Tensor:
    """g = excess − ν log(1 + excess/2ν) − ½log(s/ν) + log(U(w)/U(1)) with excess = s − ν, for ν ≥ 40."""
    slope = polynomial(_at_order(DEBYE[1], nu), nu / s) / sum(_at_order(DEBYE[0], nu))
    log = excess - nu * torch.log1p(excess / (2 * nu)) - torch.log1p(excess / nu) / 2
    return log + torch.log1p(-(excess / s) * slope)


def _at_order(table: list[list[float]], nu: float) -> list[float]:
    """Σ_k polynomial_k(p) ν^-k by powers of w = p · max(ν, 40)/ν, which stay in range for any ν, also 0."""
    scale = max(nu, DEBYE_ORDER)
    if nu >= DEBYE_ORDER:
        return [sum(row[j] * nu**-k for k, row in enumerate(table)) for j in range(len(table[0]))]
    return [
        sum(row[j] * (nu / scale) ** (j - k) * scale**-k for k, row in enumerate(table) if j >= k)
        for j in range(len(table[0]))
    ]


def _debye_tables() -> tuple[list[list[float]], list[list[float]]]:
    """U_k, with powers p^k to p^3k, and (U_k(p) − U_k(1))/(p − 1), exact until the last rounding (DLMF 10.41.9).

    U_{k+1} = ½p²(1−p²)U_k′ + ⅛∫₀^p (1−5s²)U_k ds
    """
    size = 3 * DEBYE_TERMS + 1
    u = [Fraction(1)] + [Fraction(0)] * (size - 1)
    debye, slope = [], []
    for _ in range(DEBYE_TERMS + 1):
        debye.append([float(c) for c in u])
        slope.append([float(c) for c in _divide_by_p_minus_one([u[0] - sum(u), *u[1:]])])
        new = [Fraction(0)] * (size + 3)
        for j, c in enumerate(u):
            new[j + 1] += c * (Fraction(j, 2) + Fraction(1, 8 * (j + 1)))
            new[j + 3] -= c * (Fraction(j, 2) + Fraction(5, 8 * (j + 3)))
        u = new[:size]
    return debye, slope


def _divide_by_p_minus_one(polynomial: list[Fraction]) -> list[Fraction]:
    """Synthetic division of a polynomial that vanishes at p = 1."""
    quotient = [Fraction(0)] * (len(polynomial) - 1)
    carry = Fraction(0)
    for j in reversed(range(1, len(polynomial))):
        carry += polynomial[j]
        quotient[j - 1] = carry
    return quotient


DEBYE = _debye_tables()
