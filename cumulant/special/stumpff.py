"""Stumpff functions: what is left of sin and cos when the first terms of their series are taken off."""

import math

import torch
from torch import Tensor

from cumulant.special.elementary import polynomial

TERMS = 14  # of Σ (−z)^j / (k+2j)! on 0 ≤ z ≤ NEAR, to the last bit
NEAR = 4.0


def stumpff(k: int, z: Tensor) -> Tensor:
    """C_k(z) = Σ_j (−z)^j / (k + 2j)! for z ≥ 0 and k ≤ 5:  C_0(θ²) = cos θ,  C_1(θ²) = sin θ / θ.

    Smooth in z, so that what turns at a rate through 0 has derivatives there.

    >>> import torch
    >>> stumpff(3, torch.tensor([0.0, 1e-30, 9.0], dtype=torch.float64))              # (θ − sin θ)/θ³: 1/6, 1/6, 0.1059
    tensor([0.1667, 0.1667, 0.1059], dtype=torch.float64)
    """
    near = z < NEAR
    coefficients = [(-1) ** j / math.factorial(k + 2 * j) for j in range(TERMS)]
    series = polynomial(coefficients, torch.where(near, z, 0))
    far = torch.where(near, NEAR, z)
    theta = far.sqrt()
    value = theta.cos() if k % 2 == 0 else theta.sin() / theta
    for order in range(k % 2, k, 2):  # C_{n+2} = (1/n! − C_n)/z
        value = (1 / math.factorial(order) - value) / far
    return torch.where(near, series, value)
