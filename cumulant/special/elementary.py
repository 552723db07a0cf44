"""Elementary functions with exact tails: log(sinh y / y), c e^t, log(1 − t/r), log det(I + F), entropies of spectra."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SINH_TERMS = 10  # (sinh y − y)/y³ on |y| ≤ 1 to the last bit
SINH = [1 / math.factorial(2 * k + 3) for k in range(SINH_TERMS)]
COSH = [(2 * k + 2) / math.factorial(2 * k + 3) for k in range(SINH_TERMS)]  # (y cosh y − sinh y)/y³


def polynomial(coefficients: Sequence[float], p: Tensor) -> Tensor:
    """Σ_k c_k p^k by Horner's rule."""
    total = torch.full_like(p, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * p + c
    return total


def log_sinhc(y: Tensor) -> Tensor:
    """log(sinh y / y) by positive terms, for |y| ≤ 1; beyond, `log_sinhc_gap` is measured from |y|.

    >>> import torch
    >>> log_sinhc(torch.tensor([1e-100, 1.0], dtype=torch.float64))
    tensor([1.6667e-201,  1.6144e-01], dtype=torch.float64)
    """
    y2 = y.square()
    return torch.log1p(y2 * polynomial(SINH, y2))


def langevin(y: Tensor) -> Tensor:
    """L(y) = coth y − 1/y = (y cosh y − sinh y)/(y sinh y), the slope of `log_sinhc`, for |y| ≤ 1.

    >>> import torch
    >>> langevin(torch.tensor([3e-20, 1.0], dtype=torch.float64))
    tensor([1.0000e-20, 3.1304e-01], dtype=torch.float64)
    """
    y2 = y.square()
    return y * polynomial(COSH, y2) / (1 + y2 * polynomial(SINH, y2))


def langevin_slope(y: Tensor) -> Tensor:
    """L′(y) = 1/y² − 1/sinh² y = (sinh y − y)(sinh y + y)/(y sinh y)², for |y| ≤ 1.

    >>> import torch
    >>> langevin_slope(torch.tensor([0.0, 1.0], dtype=torch.float64))
    tensor([0.3333, 0.2759], dtype=torch.float64)
    """
    y2 = y.square()
    cubic = polynomial(SINH, y2)
    return cubic * (2 + y2 * cubic) / (1 + y2 * cubic).square()


def log_sinhc_gap(y: Tensor) -> Tensor:
    """log(sinh y / y) − y = log((1 − e^{−2y})/(2y)) for y ≥ 1.

    >>> import torch
    >>> log_sinhc_gap(torch.tensor([1.0, 1e300], dtype=torch.float64))
    tensor([  -0.8386, -691.4687], dtype=torch.float64)
    """
    return torch.log1p(-torch.exp(-2 * y)) - torch.log(y) - math.log(2)


def times_exp(factor: Tensor, t: Tensor) -> Tensor:
    """c e^t where e^t alone would overflow or underflow: the exponential in two halves.

    >>> import torch
    >>> times_exp(torch.tensor(1e-300, dtype=torch.float64), torch.tensor(800.0, dtype=torch.float64))
    tensor(2.7264e+47, dtype=torch.float64)
    """
    half = torch.exp(t / 2)
    return factor * half * half


def times_expm1(factor: Tensor, t: Tensor) -> Tensor:
    """c (e^t − 1); the slope is c e^t also where e^t − 1 rounds to −1, while that of torch.expm1 is 0 there.

    >>> import torch
    >>> t = torch.tensor([-50.0, 1e-20], dtype=torch.float64, requires_grad=True)
    >>> torch.autograd.grad(times_expm1(torch.ones_like(t), t).sum(), t)[0]
    tensor([1.9287e-22, 1.0000e+00], dtype=torch.float64)
    """
    small = t.abs() <= 1
    large = times_exp(factor, torch.where(small, 0, t)) - factor
    return torch.where(small, factor * torch.expm1(torch.where(small, t, 0)), large)


def log_left(t: Tensor, rate: Tensor) -> Tensor:
    """log(1 − t/r) for t < r, r > 0, elementwise: e^… is the share of the rate that a query leaves, exact at 0 and r.

    >>> import torch
    >>> log_left(torch.tensor([1e-30, -1e308], dtype=torch.float64), torch.tensor(1e-3, dtype=torch.float64))
    tensor([-1.0000e-27,  7.1610e+02], dtype=torch.float64)
    """
    near, far = t > rate / 2, -t / 2 > rate  # the last also where t/r overflows
    by_left = torch.where(near, torch.where(near, rate - t, rate) / rate, 1).log()
    by_size = torch.log(torch.where(far, rate - t, rate)) - torch.log(rate)
    by_ratio = torch.log1p(-torch.where(near | far, 0, t) / rate)
    return torch.where(near, by_left, torch.where(far, by_size, by_ratio))


def log_det_plus_identity(matrix: Tensor) -> Tensor:
    """log det(I + F) for positive semidefinite F (*batch, d, d), to relative accuracy also where F is small.

    From the Cholesky factor L of I + F: the pivot L_kk² is 1 + F_kk − Σ_{j<k} L_kj², whose logarithm needs no 1.

    >>> import torch
    >>> log_det_plus_identity(1e-20 * torch.eye(2, dtype=torch.float64))
    tensor(2.0000e-20, dtype=torch.float64)
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(eye + matrix)  # fails only on what is no number
    factor = torch.where((failed > 0)[..., None, None], torch.nan, factor)
    pivot = factor.diagonal(dim1=-2, dim2=-1)
    small = pivot < 1.25
    above = matrix.diagonal(dim1=-2, dim2=-1) - factor.tril(-1).square().sum(-1)
    by_gap = torch.log1p(torch.where(small, above, 0).clamp_min(-0.5))
    return torch.where(small, by_gap, 2 * pivot.log()).sum(-1)


def effective_rank(variance: Tensor, count: int | None = None) -> Tensor:
    """exp of the entropy of the shares of variance, (…, k) → (…); 0 without variance.

    count   of the vectors whose covariance has these eigenvalues (k,): their scatter makes the rank too small, and is
            then taken out to first order, H + Σ_ij λ_i λ_j (log λ_i − log λ_j)/(λ_i − λ_j) / (2 n Σλ)

    >>> import torch
    >>> effective_rank(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])).round(decimals=4)
    tensor([3., 1.])
    >>> x = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    >>> spectrum = torch.linalg.eigvalsh(x.T.cov())
    >>> round(float(effective_rank(spectrum))), round(float(effective_rank(spectrum, 200)))
    (78, 96)
    """
    total = variance.sum(-1)
    positive = total > 0
    share = variance.clamp_min(0) / torch.where(positive, total, 1)[..., None]
    entropy = torch.special.entr(share).sum(-1)
    if count is not None and bool(positive):
        share = share[share > 1e-12 * share.max()]
        entropy = (entropy + _lost_entropy(share) / (2 * count)).clamp_max(math.log(len(share)))
    return torch.where(positive, entropy.exp(), 0)


def _lost_entropy(share: Tensor) -> Tensor:
    """Σ_ij p_i p_j / (logarithmic mean of p_i and p_j)."""
    p, q, ratio = share[:, None], share, share.log()[:, None] - share.log()
    gap = p - q
    equal = gap.abs() <= 1e-6 * (p + q)
    return (p * q * torch.where(equal, 2 / (p + q), ratio / torch.where(equal, 1, gap))).sum()
