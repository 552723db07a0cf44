"""What the normalised innovations of one entry of y look like: size, mean, memory, and whether it comes in stretches.

| number          | of the normalised innovations w of an entry               | tells                                |
|-----------------|-----------------------------------------------------------|--------------------------------------|
| NIS             | mean w²                                                   | too sure, or not sure enough         |
| mean            | mean w                                                    | a bias, or a contradiction           |
| autocorrelation | ρ_k = Σ w_t w_{t+k} / Σ w_t², k = 1 … 10 measurements     | lag above 0, noise followed below    |
| persistence     | mean of ρ_3 … ρ_8                                         | a lag that lasts                     |
| constant        | share of the memory that a mean of each track explains    | near 1: the same throughout a track  |
| typical         | median l² / mean l², l = Σ w/√n over stretches of 10 rows | 0.45 if alike, near 0: in a few      |
| together        | correlation of the l of two entries                       | below 0: they pull in two directions |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filters.diagnostics.banded import BandedValue, chi_square_band, normal_band

LAGS = 10
LASTING = range(3, 9)  # lags over which memory counts as persistent
MIN_SCORES = 20  # numbers from which there is a verdict
STRETCH = 10  # rows of a stretch
LEAST_IN_STRETCH = 4  # measurements of an entry, from which a stretch counts
LEAST_STRETCHES = 8  # of them, from which their sizes are compared
LEAST_FOR_CONSTANT = 4  # of them, from which a mean of each track is told from memory


class EntryInnovations(NamedTuple):
    """The numbers of the table above for one entry of so many tracks; None where rows are too few."""

    nis: BandedValue
    mean: BandedValue
    autocorrelation: tuple[BandedValue, ...]
    persistence: BandedValue
    constant: float | None
    typical: float | None
    tracks: int = 1

    @property
    def memory(self) -> BandedValue:
        """The autocorrelation at lag 1."""
        return self.autocorrelation[0] if self.autocorrelation else BandedValue(0.0, -1.0, 1.0, 0)


def entry_innovations(series: Sequence[Tensor]) -> EntryInnovations:
    """Of one entry in several tracks, each (T,) with NaN where it was not measured or not used.

    >>> import torch
    >>> w = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    >>> found = entry_innovations([w, w + 3])
    >>> round(found.mean.value, 1), found.memory.inside, round(found.constant, 1)
    (1.6, False, 1.0)
    """
    known = torch.cat([w[~w.isnan()] for w in series])
    nis = mean_square(known)
    mean = normal_band(float(known.mean()) if len(known) else 0.0, len(known))
    correlations = autocorrelation(series)
    lasting = [correlations[k - 1] for k in LASTING if k <= len(correlations)]
    count = sum(r.count for r in lasting)
    persistence = normal_band(sum(r.value * r.count for r in lasting) / count if count else 0.0, count)
    sums = [s[~s.isnan()] for s in map(stretches, series)]
    squares = torch.cat(sums).square()
    constant = _constant(sums, nis.value) if len(squares) >= LEAST_FOR_CONSTANT else None
    alike = len(squares) < LEAST_STRETCHES or not float(squares.mean()) > 0
    typical = None if alike else float(squares.median() / squares.mean())
    return EntryInnovations(nis, mean, correlations, persistence, constant, typical, sum(len(s) > 0 for s in sums))


def mean_square(numbers: Tensor) -> BandedValue:
    """NIS for each number, NaN left out."""
    z = numbers[~numbers.isnan()]
    return chi_square_band(float(z.square().mean()) if len(z) else 1.0, len(z))


def autocorrelation(series: Sequence[Tensor]) -> tuple[BandedValue, ...]:
    """ρ_1, ρ_2, … over all series together, each (T,); rows in which nothing was measured are left out.

    >>> import torch
    >>> round(autocorrelation([torch.tensor([1.0, -1.0]).repeat(50)])[0].value, 6)
    -1.0
    """
    measured = [z[~z.isnan()] for z in series]
    out = []
    for lag in range(1, LAGS + 1):
        pairs = [(z[:-lag], z[lag:]) for z in measured if len(z) > lag]
        count = sum(len(a) for a, _ in pairs)
        if count < MIN_SCORES:
            break
        power = sum(float(a.square().sum() + b.square().sum()) for a, b in pairs) / 2
        out.append(normal_band(sum(float(a @ b) for a, b in pairs) / power if power > 0 else 0.0, count))
    return tuple(out)


def stretches(w: Tensor) -> Tensor:
    """Σ w/√n over each ten rows of a track: standard normal if the model is right; NaN where few were measured."""
    count = len(w) // STRETCH
    rows = w[: count * STRETCH].reshape(count, STRETCH)
    measured = (~rows.isnan()).sum(-1)
    return torch.where(measured < LEAST_IN_STRETCH, torch.nan, rows.nansum(-1) / measured.clamp_min(1).sqrt())


def together(one: Sequence[Tensor], other: Sequence[Tensor]) -> BandedValue | None:
    """The correlation, about 0, of two entries over stretches of the same rows; None where rows are too few.

    >>> import torch
    >>> w = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    >>> round(together([w], [-2 * w]).value, 6)
    -1.0
    """
    a, b = (torch.cat([stretches(w) for w in series]) for series in (one, other))
    both = ~(a.isnan() | b.isnan())
    a, b = a[both], b[both]
    size = float(a.norm() * b.norm())
    return normal_band(float(a @ b) / size, len(a)) if len(a) >= LEAST_STRETCHES and size > 0 else None


def _constant(sums: Sequence[Tensor], power: float) -> float:
    """Of what Σ w over stretches is larger than it should be, the share that the mean of each track explains."""
    total = sum(len(s) for s in sums)
    excess = sum(float(s.square().sum()) for s in sums) / total - power
    explained = sum(len(s) * float(s.mean()) ** 2 - power for s in sums if len(s)) / total
    return max(0.0, min(1.0, explained / excess)) if excess > 0 else 0.0
