r"""Special functions of the families, each in a form whose terms do not cancel, at any size of its argument.

Bessel      F(b, x) = ₀F₁(; b; x) = Σ_k x^k / ((b)_k k!), the log-normalizer of the sphere (b = dim/2)
interval    log(sinh y / y) and its derivatives, the log-normalizer of a uniform law
lines       c e^t, c (e^t − 1) and log(1 − t/r), with exact slopes in their tails
gamma       differences of log Γ, ψ and ψ′, and the second difference of log Γ
volume      log det(I + F)

All are plain torch operations: differentiable to any order, batched, traceable. Where two forms meet in `torch.where`,
each gets an argument of its own range, so that the one not chosen adds no NaN to a gradient.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

# ---------------------------------------------------------------------- Bessel: laws that depend on |η| alone

DEBYE_TERMS = 11
DEBYE_ORDER = 40  # from √(ν²+κ²) = 40 on the expansion is exact to 1e-15, its second derivative to 1e-13


def far_from(dtype: torch.dtype) -> float:
    """κ from which Debye's expansion holds at every order to the precision of a dtype.

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
    u = _polynomial(debye, w)
    first = _polynomial([i * c for i, c in enumerate(debye)], w) / u
    second = _polynomial([i * (i - 1) * c for i, c in enumerate(debye)], w) / u
    return _DebyeSum(u, 0.5 + first, first + second - first.square())


def _debye_log(nu: float, s: Tensor, excess: Tensor) -> Tensor:
    """g = excess − ν log(1 + excess/2ν) − ½log(s/ν) + log(U(w)/U(1)) with excess = s − ν, for ν ≥ 40."""
    slope = _polynomial(_at_order(DEBYE[1], nu), nu / s) / sum(_at_order(DEBYE[0], nu))
    log = excess - nu * torch.log1p(excess / (2 * nu)) - torch.log1p(excess / nu) / 2
    return log + torch.log1p(-(excess / s) * slope)


def _polynomial(coefficients: Sequence[float], p: Tensor) -> Tensor:
    total = torch.full_like(p, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * p + c
    return total


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

# ---------------------------------------------------------------------- interval: log(sinh y / y)

SINH_TERMS = 10  # (sinh y − y)/y³ on |y| ≤ 1 to the last bit
SINH = [1 / math.factorial(2 * k + 3) for k in range(SINH_TERMS)]
COSH = [(2 * k + 2) / math.factorial(2 * k + 3) for k in range(SINH_TERMS)]  # (y cosh y − sinh y)/y³


def log_sinhc(y: Tensor) -> Tensor:
    """log(sinh y / y) by positive terms, for |y| ≤ 1; beyond, `log_sinhc_gap` is measured from |y|.

    >>> import torch
    >>> log_sinhc(torch.tensor([1e-100, 1.0], dtype=torch.float64))
    tensor([1.6667e-201,  1.6144e-01], dtype=torch.float64)
    """
    y2 = y.square()
    return torch.log1p(y2 * _polynomial(SINH, y2))


def langevin(y: Tensor) -> Tensor:
    """L(y) = coth y − 1/y = (y cosh y − sinh y)/(y sinh y), the slope of `log_sinhc`, for |y| ≤ 1.

    >>> import torch
    >>> langevin(torch.tensor([3e-20, 1.0], dtype=torch.float64))
    tensor([1.0000e-20, 3.1304e-01], dtype=torch.float64)
    """
    y2 = y.square()
    return y * _polynomial(COSH, y2) / (1 + y2 * _polynomial(SINH, y2))


def langevin_slope(y: Tensor) -> Tensor:
    """L′(y) = 1/y² − 1/sinh² y = (sinh y − y)(sinh y + y)/(y sinh y)², for |y| ≤ 1.

    >>> import torch
    >>> langevin_slope(torch.tensor([0.0, 1.0], dtype=torch.float64))
    tensor([0.3333, 0.2759], dtype=torch.float64)
    """
    y2 = y.square()
    cubic = _polynomial(SINH, y2)
    return cubic * (2 + y2 * cubic) / (1 + y2 * cubic).square()


def log_sinhc_gap(y: Tensor) -> Tensor:
    """log(sinh y / y) − y = log((1 − e^{−2y})/(2y)) for y ≥ 1.

    >>> import torch
    >>> log_sinhc_gap(torch.tensor([1.0, 1e300], dtype=torch.float64))
    tensor([  -0.8386, -691.4687], dtype=torch.float64)
    """
    return torch.log1p(-torch.exp(-2 * y)) - torch.log(y) - math.log(2)


# ---------------------------------------------------------------------- lines: tails with exact slopes


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
    """log(1 − t/r) for t < r, r > 0: the share of the rate that a query leaves, exact near 0 and near r.

    >>> import torch
    >>> log_left(torch.tensor([1e-30, -1e308], dtype=torch.float64), torch.tensor(1e-3, dtype=torch.float64))
    tensor([-1.0000e-27,  7.1610e+02], dtype=torch.float64)
    """
    near, far = t > rate / 2, -t / 2 > rate  # the last also where t/r overflows
    by_left = torch.where(near, torch.where(near, rate - t, rate) / rate, 1).log()
    by_size = torch.log(torch.where(far, rate - t, rate)) - torch.log(rate)
    by_ratio = torch.log1p(-torch.where(near | far, 0, t) / rate)
    return torch.where(near, by_left, torch.where(far, by_size, by_ratio))


# ---------------------------------------------------------------------- gamma: differences

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


# ---------------------------------------------------------------------- volume


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


def standard_gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(concentration, 1) draws from a given generator, which torch.distributions does not take."""
    return torch.ops.aten._standard_gamma(concentration, generator)


def effective_rank(variance: Tensor, count: int | None = None) -> Tensor:
    """exp of the entropy of the shares of variance, (…, k) → (…); 0 of nothing.

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
    some = total > 0
    share = variance.clamp_min(0) / torch.where(some, total, 1)[..., None]
    entropy = torch.special.entr(share).sum(-1)
    if count is not None and bool(some):
        share = share[share > 1e-12 * share.max()]
        entropy = (entropy + _lost_entropy(share) / (2 * count)).clamp_max(math.log(len(share)))
    return torch.where(some, entropy.exp(), 0)


def _lost_entropy(share: Tensor) -> Tensor:
    """Σ_ij p_i p_j / (logarithmic mean of p_i and p_j)."""
    p, q, ratio = share[:, None], share, share.log()[:, None] - share.log()
    gap = p - q
    equal = gap.abs() <= 1e-6 * (p + q)
    return (p * q * torch.where(equal, 2 / (p + q), ratio / torch.where(equal, 1, gap))).sum()
