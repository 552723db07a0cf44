r"""The confluent hypergeometric limit function in logarithms, at any order and size.

    F(b, x) = ₀F₁(; b; x) = Σ_k x^k / ((b)_k k!),     I_ν(κ) = (κ/2)^ν F(ν+1, κ²/4) / Γ(ν+1)

log F is the log-normalizer of the uniform law on the sphere (b = dim/2) and, with b = 3/2, of a uniform interval.
Bessel routines underflow long before F does (I_2047(1) is 0 in float64 while F(2048, 1/4) = 1.000122), so F is computed
from positive terms only, which keeps *relative* accuracy from x = 1e-17 to x = 1e12:

1. at order ν ≥ 40 by Debye's expansion (DLMF 10.41), rewritten so that every factor 1 − p that cancels is divided out;
2. from there down to the wanted b by the contiguous relation F(b) = F(b+1) + x/(b(b+1)) F(b+2).

Both steps are plain torch operations: differentiable to any order, batched, traceable.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

DEBYE_TERMS = 8
DEBYE_ORDER = 40  # truncation error of log F below |U_9| / 40⁹ ≈ 2e-15


class Hyp0F1(NamedTuple):
    """log F(b, x), and the ratio F(b+1, x)/F(b, x) = b · ∂ₓ log F(b, x), which lies in (0, 1]."""

    log: Tensor
    ratio: Tensor


def hyp0f1(b: float, x: Tensor) -> Hyp0F1:
    """log ₀F₁(; b; x) and its ratio for b > 0 and x ≥ 0, relative accuracy about 1e-14 in float64.

    >>> import math, torch
    >>> log, ratio = hyp0f1(1.5, torch.tensor(4.0, dtype=torch.float64))    # F(3/2, z²/4) = sinh(z)/z at z = 4
    >>> abs(log.item() - math.log(math.sinh(4) / 4)) < 1e-14
    True
    """
    steps = max(0, -int((b - 1 - DEBYE_ORDER) // 1))
    log, ratio = _debye(b + steps, x)
    for k in reversed(range(steps)):
        low = b + k
        tail = x / (low * (low + 1)) * ratio
        log, ratio = log + torch.log1p(tail), 1 / (1 + tail)
    return Hyp0F1(log, ratio)


def _debye(b: float, x: Tensor) -> Hyp0F1:
    """With ν = b−1, z² = 4x/ν², t = √(1+z²), u = t−1, p = 1/t:

    log F = ν(u − log1p(u/2)) − ½log1p(u) + log(U(p)/U(1)),   F(b+1)/F(b) = 2b/(ν(1+t)) · (1 + W(p)/U(p)),

    U = Σ U_k ν^-k and W = Σ (V_k − U_k)/(1−p) ν^-k with Debye's polynomials U_k, V_k.
    """
    nu = b - 1
    debye, slope, ratio_part = (_at_order(table, nu) for table in DEBYE)
    at_one = sum(debye)
    z2 = x * (4 / nu**2)
    t = torch.sqrt(1 + z2)
    u = z2 / (1 + t)
    p = 1 / t
    correction = torch.log1p(_polynomial(slope, p) * (-u * p) / at_one)
    log = nu * (u - torch.log1p(u / 2)) - torch.log1p(u) / 2 + correction
    ratio = (2 * b / nu) / (1 + t) * (1 + _polynomial(ratio_part, p) / _polynomial(debye, p))
    return Hyp0F1(log, ratio)


def _polynomial(coefficients: list[float], p: Tensor) -> Tensor:
    total = torch.full_like(p, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * p + c
    return total


def _at_order(table: list[list[float]], nu: float) -> list[float]:
    """Σ_k polynomial_k ν^-k."""
    return [sum(row[j] * nu**-k for k, row in enumerate(table)) for j in range(len(table[0]))]


def _debye_tables() -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """U_k, (U_k(p) − U_k(1))/(p − 1) and (V_k − U_k)/(1 − p), exact until the last rounding (DLMF 10.41.9, 10.41.11).

    U_{k+1} = ½p²(1−p²)U_k′ + ⅛∫₀^p (1−5s²)U_k ds,     V_k = U_k − ½p(1−p²)U_{k−1} − p²(1−p²)U_{k−1}′
    """
    size = 3 * DEBYE_TERMS + 1
    u = [Fraction(1)] + [Fraction(0)] * (size - 1)
    drop = [Fraction(0)] * size  # U_k − V_k
    debye, slope, ratio_part = [], [], []
    for _ in range(DEBYE_TERMS + 1):
        debye.append([float(c) for c in u])
        slope.append([float(c) for c in _divide_by_p_minus_one([u[0] - sum(u), *u[1:]])])
        ratio_part.append([float(c) for c in _divide_by_p_minus_one(drop)])
        new, drop = [Fraction(0)] * (size + 3), [Fraction(0)] * (size + 3)
        for j, c in enumerate(u):
            new[j + 1] += c * (Fraction(j, 2) + Fraction(1, 8 * (j + 1)))
            new[j + 3] -= c * (Fraction(j, 2) + Fraction(5, 8 * (j + 3)))
            drop[j + 1] += c * (Fraction(1, 2) + j)
            drop[j + 3] -= c * (Fraction(1, 2) + j)
        u, drop = new[:size], drop[:size]
    return debye, slope, ratio_part


def _divide_by_p_minus_one(polynomial: list[Fraction]) -> list[Fraction]:
    """Synthetic division of a polynomial that vanishes at p = 1."""
    quotient = [Fraction(0)] * (len(polynomial) - 1)
    carry = Fraction(0)
    for j in reversed(range(1, len(polynomial))):
        carry += polynomial[j]
        quotient[j - 1] = carry
    return quotient


DEBYE = _debye_tables()


def standard_gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(concentration, 1) draws from a given generator, which torch.distributions does not take."""
    return torch.ops.aten._standard_gamma(concentration, generator)
