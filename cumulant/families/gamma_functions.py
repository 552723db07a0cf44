"""Inverses of the expected statistics of Gamma and Dirichlet laws, and the differences of gamma functions they need.

    log_minus_digamma(a) = log a − ψ(a) ≈ 1/(2a)    log E[x] − E[log x] of a Gamma variable of shape a
    log_rising(a, y) = log Γ(a + y) − log Γ(a)      in predictive laws after much data, where both terms are huge

From a = 16 on both come from Stirling's series, whose leading terms cancel by hand; the relative error is about 1e-14
for every a > 0. The derivatives of `gamma_shape` and `dirichlet_concentration` are exact to third order.

`cumulant.special` has such differences with relative accuracy for steps of any size and sign, at twelve times the
memory. A filter takes them at every step, for y ≥ 0: hence `log_rising` beside `log_gamma_gap`, and `trigamma` as one
call of the zeta function.
"""

import torch
from torch import Tensor

LARGE = 16.0
MAX_STEPS = 60
CLOSE = 1e-9  # Newton decrement from which one more step reaches rounding
# B_2k / (2k (2k−1)) of log Γ and B_2k / 2k of ψ, k = 1 … 7 (DLMF 5.11.1, 5.11.2)
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


def log_minus_digamma(a: Tensor) -> Tensor:
    """log a − ψ(a) for a > 0, falling from ∞ to 0 like 1/(2a).

    >>> import torch
    >>> log_minus_digamma(torch.tensor([1.0, 1e9], dtype=torch.float64))             # Euler's constant; 5e-10
    tensor([5.7722e-01, 5.0000e-10], dtype=torch.float64)
    """
    small, large = a.clamp_max(LARGE), a.clamp_min(LARGE)
    square = large.reciprocal().square()
    series = 0.5 / large + square * _polynomial(DIGAMMA, square)
    return torch.where(a < LARGE, small.log() - torch.digamma(small), series)


def log_minus_digamma_slope(a: Tensor) -> Tensor:
    """The derivative 1/a − ψ′(a) of `log_minus_digamma`, negative."""
    small, large = a.clamp_max(LARGE), a.clamp_min(LARGE)
    square = large.reciprocal().square()
    slopes = tuple(2 * (k + 1) * c for k, c in enumerate(DIGAMMA))
    series = -square * (0.5 + _polynomial(slopes, square) / large)
    return torch.where(a < LARGE, small.reciprocal() - trigamma(small), series)


def log_rising(a: Tensor, y: Tensor) -> Tensor:
    """log Γ(a + y) − log Γ(a) = log a(a+1)…(a+y−1) for a > 0, y ≥ 0.

    >>> import math, torch
    >>> rise = log_rising(torch.tensor(1e12, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    >>> abs(rise.item() - 24 * math.log(10)) < 1e-11                           # log a + log(a + 1)
    True
    """
    small, large = a.clamp_max(LARGE), a.clamp_min(LARGE)
    end = large + y
    series = (large - 0.5) * torch.log1p(y / large) + y * (end.log() - 1) + _tail(end) - _tail(large)
    return torch.where(a < LARGE, torch.lgamma(small + y) - torch.lgamma(small), series)


def gamma_shape(gap: Tensor) -> Tensor:
    """a with log a − ψ(a) = gap, for gap > 0: the shape of a Gamma law from log E[x] − E[log x].

    >>> import torch
    >>> gamma_shape(log_minus_digamma(torch.tensor([1e-3, 2.5, 1e9], dtype=torch.float64)))
    tensor([1.0000e-03, 2.5000e+00, 1.0000e+09], dtype=torch.float64)
    """
    with torch.no_grad():
        s = gap.detach()
        a = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
        for _ in range(5):
            a = _shape_step(a, s)
    # from here on the steps move nothing but carry derivatives: each doubles the order to which they are exact
    return _shape_step(_shape_step(a, gap), gap) if gap.requires_grad else a


def dirichlet_concentration(mean_logs: Tensor) -> Tensor:
    """a with ψ(a_k) − ψ(Σ a) = E[log x_k], for mean_logs (…, k) of a law inside the simplex.

    Accurate to a relative Σa · 1e-16 in float64: that much of the statistics is left after the leading terms cancel.

    >>> import torch
    >>> a = torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64)
    >>> dirichlet_concentration(torch.digamma(a) - torch.digamma(a.sum()))
    tensor([2.0000, 3.0000, 0.5000], dtype=torch.float64)
    """
    exact = mean_logs.double()
    g = exact.detach()
    p, eps = g.exp(), torch.finfo(g.dtype).eps
    rounding = 4 * eps * (1 + g.abs().amax(-1, keepdim=True))
    # where x is rarely near a face the geometric means sum to 1 − (k−1)/(2Σa); where it is, a_k is about −1/E[log x_k]
    total = (g.shape[-1] - 1) / (2 * (1 - p.sum(-1, keepdim=True)).clamp_min(eps))
    a = total * p + 1 / (1 - g)
    with torch.no_grad():
        for _ in range(MAX_STEPS):
            residual, move = _concentration_step(a, g)
            decrement = (residual * move).sum(-1, keepdim=True).clamp_min(0).sqrt()
            a = a - move / (1 + 2 * decrement).maximum((2 * move / a).amax(-1, keepdim=True))  # a at most halves
            if not (decrement > CLOSE + rounding * a.sum(-1, keepdim=True)).any():
                break
    if mean_logs.requires_grad:
        for _ in range(2):
            a = a - _concentration_step(a, exact)[1]
    return a.to(mean_logs.dtype)


def trigamma(a: Tensor) -> Tensor:
    """ψ′(a) to full precision; torch.polygamma(1, a) is off by 5e-10."""
    return torch.special.zeta(torch.full_like(a, 2.0), a)


def _shape_step(a: Tensor, gap: Tensor) -> Tensor:
    """Newton's step for log gap as a function of log a, which is nearly straight with a slope between −1 and −1/2."""
    here = log_minus_digamma(a)
    slope = a * log_minus_digamma_slope(a) / here
    return a * torch.exp((gap.log() - here.log()) / slope)


def _concentration_step(a: Tensor, mean_logs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Newton step of φ(a) = Σ log Γ(a_k) − log Γ(Σa) − Σ a_k E[log x_k].

    Its Hessian is diagonal plus rank one (Minka 2000).
    """
    total = a.sum(-1, keepdim=True)
    residual = (a / total).log() - log_minus_digamma(a) + log_minus_digamma(total) - mean_logs
    inverse = 1 / trigamma(a)
    # positive, because 1/ψ′ is superadditive; rounding must not say otherwise
    common = 1 / trigamma(total)
    common = (common - inverse.sum(-1, keepdim=True)).maximum(torch.finfo(a.dtype).eps * common)
    shift = (residual * inverse).sum(-1, keepdim=True) / common
    return residual, (residual + shift) * inverse


def _tail(z: Tensor) -> Tensor:
    """log Γ(z) − (z − ½) log z + z − ½ log 2π for z ≥ 16."""
    return _polynomial(STIRLING, z.reciprocal().square()) / z


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
