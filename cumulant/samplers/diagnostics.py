"""Convergence diagnostics of Markov chains: R̂ and the effective sample size.

    R̂ = √(var⁺/W),      var⁺ = (n−1)/n W + B/n
    ESS = m n / τ,       τ = 1 + 2 Σ_{t≥1} ρ_t,    ρ_t = 1 − (W − mean autocovariance at lag t)/var⁺

over m chains of n draws, W the mean variance within chains and B/n the variance of their means. Chains are split in
two halves first, so that a drift inside one chain counts as disagreement; the sum over lags stops where the sums of
adjacent pairs ρ_{2k} + ρ_{2k+1} cease to be positive and is made monotone before that (Geyer 1992).

`rhat` and the rank-normalised forms follow Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021): draws are replaced
by normal scores of their ranks, which makes the statistic valid without a variance, and R̂ is the larger of those of
the draws and of their distances from the median.

Draws are (chains, n, *event); everything is computed per event entry, in float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import require_finite, require_float, sentence, shape

MIN_DRAWS = 4  # draws per chain: two halves with a variance each


class Diagnosis(NamedTuple):
    """Summary of a set of chains for each quantity, all of shape (*event).

    mean       over all chains and draws
    deviation  standard deviation over all chains and draws
    error      Monte Carlo standard error of the mean, deviation/√ESS
    ess        effective sample size of the mean
    ess_bulk   the same for the normal scores of the ranks
    rhat       rank-normalised split R̂; above 1.01 the chains still depend on where they started
    """

    mean: Tensor
    deviation: Tensor
    error: Tensor
    ess: Tensor
    ess_bulk: Tensor
    rhat: Tensor


def diagnose(draws: Tensor) -> Diagnosis:
    """All diagnostics at once:  (chains, n, *event) → `Diagnosis`.

    >>> import torch
    >>> x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> report = diagnose(x)
    >>> bool(report.rhat < 1.01), bool((report.ess - 4000).abs() < 500)
    (True, True)
    """
    x = _draws("diagnose.draws", draws)
    flat, halves = x.flatten(0, 1), _split(x)
    ess, deviation = _effective(halves), flat.std(0)
    return Diagnosis(flat.mean(0), deviation, deviation / ess.sqrt(), ess, _effective(_scores(halves)), rhat(x))


def effective_sample_size(draws: Tensor) -> Tensor:
    """m n / τ over split chains (module docstring):  (chains, n, *event) → (*event).

    Draws that are all equal count in full. Antithetic chains may be worth more than their number; the result is capped
    at m n log₁₀(m n), beyond which τ is noise.

    >>> import torch
    >>> x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]])                 # one jump: hardly two draws
    >>> bool(effective_sample_size(x) < 3)
    True
    """
    return _effective(_split(_draws("effective_sample_size.draws", draws)))


def split_rhat(draws: Tensor) -> Tensor:
    """√(var⁺/W) over split chains, on the draws themselves:  (chains, n, *event) → (*event).

    1 where all draws are equal, +inf where chains stand still at different places.

    >>> import torch
    >>> split_rhat(torch.tensor([[0.0, 1.0, 0.0, 1.0], [2.0, 3.0, 2.0, 3.0]]))       # W = 1/2, B/n = 4/3
    tensor(1.7795, dtype=torch.float64)
    """
    return _ratio(_split(_draws("split_rhat.draws", draws)))


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalised split R̂, the larger of location and scale:  (chains, n, *event) → (*event).

        max( R̂(z(x)), R̂(z(|x − median|)) ),     z normal scores of ranks

    >>> import torch
    >>> x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> wide = x * torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None]                       # same location, other scale
    >>> bool(split_rhat(wide) < 1.02), bool(rhat(wide) > 1.05)
    (True, True)
    """
    x = _split(_draws("rhat.draws", draws))
    flat = x.flatten(0, 1)
    middle = len(flat) // 2  # an even number of draws, two in the middle
    median = (flat.kthvalue(middle, dim=0).values + flat.kthvalue(middle + 1, dim=0).values) / 2
    return torch.maximum(_ratio(_scores(x)), _ratio(_scores((x - median).abs())))


def normal_scores(draws: Tensor) -> Tensor:
    """Φ⁻¹((r − 3/8)/(S + 1/4)), r the rank among all S = m n draws, ties at their average:  same shape as draws.

    >>> import torch
    >>> normal_scores(torch.tensor([[3.0, 1.0, 2.0, 2.0]]))
    tensor([[ 1.0491, -1.0491,  0.0000,  0.0000]], dtype=torch.float64)
    """
    return _scores(_draws("normal_scores.draws", draws))


def autocovariance(draws: Tensor) -> Tensor:
    """(1/n) Σ_s (x_s − x̄)(x_{s+t} − x̄) of every chain at every lag t, by FFT:  (chains, n, *event) → the same.

    >>> import torch
    >>> autocovariance(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[ 1.2500,  0.3125, -0.3750, -0.5625]], dtype=torch.float64)
    """
    return _autocovariance(_draws("autocovariance.draws", draws))


def _effective(x: Tensor) -> Tensor:
    chains, n = x.shape[:2]
    total = chains * n
    covariance = _autocovariance(x).mean(0)  # (n, *event)
    within, plus = _variances(x)
    still = plus <= 0
    rho = 1 - (within - covariance) / torch.where(still, 1, plus)
    rho = torch.cat([torch.ones_like(rho[:1]), rho[1:]])
    pairs = rho[: n - n % 2].unflatten(0, (-1, 2)).sum(1)  # (n // 2, *event)
    positive = (pairs > 0).to(x.dtype).cumprod(0)
    monotone = (pairs * positive).cummin(0).values
    tau = 2 * monotone.sum(0) - 1
    return torch.where(still, float(total), total / tau.clamp_min(1 / math.log10(total)))


def _ratio(x: Tensor) -> Tensor:
    within, plus = _variances(x)
    ratio = torch.where(within > 0, plus, torch.inf) / torch.where(within > 0, within, 1)
    return torch.where(plus > 0, ratio, 1).sqrt()


def _scores(x: Tensor) -> Tensor:
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2:].numel()).mT.contiguous()  # (events, S)
    ordered = rows.sort(-1).values
    below, upto = (torch.searchsorted(ordered, rows, right=side) for side in (False, True))
    rank = (below + upto + 1).to(x.dtype) / 2
    scores = torch.special.ndtri((rank - 0.375) / (rows.shape[-1] + 0.25))
    return scores.mT.reshape(x.shape)


def _autocovariance(x: Tensor) -> Tensor:
    n = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), n=2 * n, dim=1)  # padded: lags must not wrap around
    return torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=1)[:, :n] / n


def _variances(x: Tensor) -> tuple[Tensor, Tensor]:
    """W and var⁺; 0 exactly where all draws of all chains are equal."""
    n = x.shape[1]
    moving = (x != x[:, :1]).any(1)  # a mean that rounds must not turn a constant into noise
    within = torch.where(moving, x.var(1), 0).mean(0)
    apart = torch.where((x != x[:1, :1]).any(0).any(0), x.mean(1).var(0), 0)
    return within, within * (n - 1) / n + apart


def _split(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return torch.cat([x[:, :half], x[:, -half:]])  # an odd draw in the middle is left out


def _draws(where: str, draws: Tensor) -> Tensor:
    x = require_float(where, draws)
    if x.ndim < 2 or x.shape[1] < MIN_DRAWS or not x.numel():
        expected = f"shape (chains ≥ 1, n ≥ {MIN_DRAWS}, *event) with something in it"
        raise ValueError(sentence(where, expected, shape(x), "One chain is draws[None]."))
    require_finite(where, x)
    return x.detach().double()
