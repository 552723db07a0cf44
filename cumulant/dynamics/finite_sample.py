"""Attention over a finite sample of Gaussian keys: fluctuations about the population value, and condensation (§5.4).

Cov[m_N(η)] ≈ e^{ηᵀΣη}(Σ + Σηηᵀ Σ)/N        N keys of N(·, Σ)                                            (X-8)
½ηᵀΣη < log N                               otherwise softmax condenses on the largest key          (X-9)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cumulant.checks import holds, require_float, sentence
from cumulant.measures import Gaussian
from cumulant.typing import Flags, Matrices, PerQuery, Queries


def fluctuation(eta: Queries, covariance: Tensor, n: int) -> Matrices:
    """Covariance of attention over n keys drawn from N(·, Σ), to first order in 1/n (X-8).

        e^{ηᵀΣη} (Σ + Σηηᵀ Σ) / n;     not valid once the query is `condensed`

    eta (*batch, q, d) or (d,), covariance (*batch, d, d) → (*batch, q, d, d)

    >>> import torch
    >>> fluctuation(torch.tensor([1.0, 0.0]), torch.eye(2), 1000)
    tensor([[0.0054, 0.0000],
            [0.0000, 0.0027]])
    """
    push, square = _push("fluctuation", eta, covariance, n)
    spread = _centred(covariance).fisher(eta) + push[..., :, None] * push[..., None, :]
    # e^{ηᵀΣη} may be infinite where an entry of Σ is 0
    return torch.where(spread == 0, 0, torch.exp(square - math.log(n))[..., None, None] * spread)


def effective_sample_size(eta: Queries, covariance: Tensor, n: int) -> PerQuery:
    """About how many of n keys drawn from N(·, Σ) a query averages: n e^{−ηᵀΣη} (X-8); not valid below 1.

    >>> import torch
    >>> effective_sample_size(torch.tensor([1.0, 0.0], dtype=torch.float64), torch.eye(2, dtype=torch.float64), 1000)
    tensor(367.8794, dtype=torch.float64)
    """
    return torch.exp(math.log(n) - _push("effective_sample_size", eta, covariance, n)[1])


def condensation_scale(n: int) -> float:
    """The length |η|_Σ = √(2 log n) beyond which attention over n Gaussian keys condenses (X-9).

    >>> round(condensation_scale(10_000), 4)
    4.2919
    """
    if not n >= 1:
        raise ValueError(sentence("condensation_scale.n", "at least one key", n, "Count the keys."))
    return math.sqrt(2 * math.log(n))


def condensed(eta: Queries, covariance: Tensor, n: int) -> Flags:
    """Whether ½ηᵀΣη ≥ log n: softmax condenses on the largest of n keys (X-9).

    >>> import torch
    >>> condensed(torch.tensor([[1.0], [4.0]]), torch.eye(1), 1000)
    tensor([False,  True])
    """
    return _push("condensed", eta, covariance, n)[1] / 2 >= math.log(n)


def saturation(r: float | Tensor) -> Tensor:
    """Attention over its population value at |η|_Σ = r √(2 log n), to leading order for large n: 1, then 1/r (X-9).

    Finite n rounds the corner: .6 to 1 at r = 1, about .45 at r = 2.

    >>> import torch
    >>> saturation(torch.tensor([0.5, 1.0, 2.0]))
    tensor([1.0000, 1.0000, 0.5000])
    """
    ratio = torch.as_tensor(r)
    ratio = ratio if ratio.is_floating_point() else ratio.float()
    if not holds(ratio >= 0):
        raise ValueError(sentence("saturation.r", "lengths ≥ 0", r, "Pass |η|_Σ / condensation_scale(n)."))
    return 1 / ratio.clamp_min(1)


def _push(where: str, eta: Tensor, covariance: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Ση and ηᵀΣη."""
    if not n >= 1:
        raise ValueError(sentence(f"{where}.n", "at least one key", n, "Count the keys."))
    push = _centred(covariance).mean(eta)
    return push, (eta * push).sum(-1)


def _centred(covariance: Tensor) -> Gaussian:
    return Gaussian(torch.zeros_like(require_float("covariance", covariance)[..., 0]), covariance)
