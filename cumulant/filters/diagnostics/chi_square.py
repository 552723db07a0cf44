"""Quantiles of χ² laws, for bands and gates."""

from __future__ import annotations

import torch

HALVINGS = 80


def chi_square_quantile(probability: float, degrees: float) -> float:
    """x with P(χ²_k ≤ x) = probability, by bisection of the incomplete gamma function.

        P(χ²_k ≤ x) = γ(k/2, x/2) / Γ(k/2)

    >>> round(chi_square_quantile(0.95, 2), 4)                                                  # −2 log 0.05
    5.9915
    """
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    low, high = 0.0, degrees + 20 * (2 * degrees) ** 0.5 + 200
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if float(below) < probability else (low, middle)
    return (low + high) / 2
