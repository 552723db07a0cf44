"""Means over tokens whose errors are those of whole documents: tokens of one text are not independent.

r = Σ_c s_c / Σ_c n_c                                       sums s and counts n of the clusters c = 1 … C
se² = C/(C − 1) Σ_c (s_c − r n_c)² / (Σ_c n_c)²             of a ratio, to first order
r ± t se                                                    t: 97.5 % point of Student's law with C − 1 degrees
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

LEVEL = 0.95


class ClusteredMean(NamedTuple):
    """A mean with its interval of 95 %; NaN for an interval of fewer than two clusters.

    clusters  how many there are
    count     tokens, or windows, in all of them
    """

    value: float
    low: float
    high: float
    clusters: int
    count: int


def clustered_mean(total: Tensor, count: Tensor, cluster: Tensor | None = None) -> ClusteredMean:
    """The mean of what was summed up, with an interval from how much it differs between clusters.

    total, count  (n,) sums and how many numbers are in each
    cluster       (n,) numbers that say which of them belong together; None: each is one

    >>> import torch
    >>> found = clustered_mean(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1, 1, 1]))
    >>> found.value, round(found.low, 3), round(found.high, 3), found.clusters
    (4.0, -0.968, 8.968, 3)
    """
    sums, sizes = total.double().cpu(), count.double().cpu()
    if cluster is not None:
        names, index = cluster.cpu().unique(return_inverse=True)
        sums, sizes = (x.new_zeros(len(names)).index_add_(0, index, x) for x in (sums, sizes))
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    clusters, whole = len(sums), float(sizes.sum())
    if not clusters:
        return ClusteredMean(math.nan, math.nan, math.nan, 0, 0)
    value = float(sums.sum()) / whole
    if clusters < 2:
        return ClusteredMean(value, math.nan, math.nan, clusters, int(whole))
    spread = float((sums - value * sizes).square().sum())
    error = math.sqrt(clusters / (clusters - 1) * spread) / whole
    half = student_quantile(clusters - 1) * error
    return ClusteredMean(value, value - half, value + half, clusters, int(whole))


def student_quantile(degrees: int, level: float = LEVEL) -> float:
    """t with P(|T| ≤ t) = level for Student's law with a whole number of degrees of freedom.

    >>> round(student_quantile(1), 4), round(student_quantile(10), 4)
    (12.7062, 2.2281)
    """
    low, high = 0.0, math.pi / 2  # of the angle θ = atan(t/√degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _inside(angle: float, degrees: int) -> float:
    """P(|T| ≤ √degrees tan θ), a finite sum of powers of cos θ (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    for k in range(3 if odd else 2, degrees, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))
    return sine * total
