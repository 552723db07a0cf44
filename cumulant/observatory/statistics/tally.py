"""Statistics of a stream of numbers: a record of fixed size that can be merged.

Every cell (a head, a layer) keeps count, mean, sum of squared deviations, extremes, a histogram with logarithmic bins,
and means by position. Merging is exact for all but the quantiles, which the bins give to 5 % of the value, and does not
depend on order or partition beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

GROWTH = 1.1  # ratio of neighbouring bin edges: quantiles to 5 %
SMALLEST, LARGEST = 1e-6, 1e6  # magnitudes that have bins of their own
STEPS = 290  # log(LARGEST / SMALLEST) / log(GROWTH)
BINS = 2 * STEPS + 3  # negative, around zero, positive, and the two ends
POSITIONS = 64  # bins of positions: 0 … 15 each, then in growing groups


@dataclass(frozen=True, eq=False)
class Tally:
    """Statistics of numbers per cell.

    count     (cells,)             how many numbers were finite
    mean      (cells,)
    square    (cells,)             Σ (x − mean)²
    low, high (cells,)             extremes; +inf and −inf of nothing
    histogram (cells, BINS)        counts by magnitude
    position_count, position_sum  (cells, POSITIONS)   counts and sums by position in the sequence
    """

    count: Tensor
    mean: Tensor
    square: Tensor
    low: Tensor
    high: Tensor
    histogram: Tensor
    position_count: Tensor
    position_sum: Tensor

    @classmethod
    def empty(cls, cells: int) -> Tally:
        zero = torch.zeros(cells, dtype=torch.float64)
        return cls(
            torch.zeros(cells, dtype=torch.int64),
            zero,
            zero.clone(),
            zero + torch.inf,
            zero - torch.inf,
            torch.zeros(cells, BINS, dtype=torch.int64),
            torch.zeros(cells, POSITIONS, dtype=torch.int64),
            torch.zeros(cells, POSITIONS, dtype=torch.float64),
        )

    @classmethod
    def of(cls, values: Tensor, positions: Tensor | None = None) -> Tally:
        """values (cells, n); positions (n,) or (cells, n). Numbers that are not finite are left out.

        >>> import torch
        >>> t = Tally.of(torch.tensor([[1.0, 2.0, 3.0, float("nan")]]))
        >>> t.count.item(), t.mean.item(), round(t.spread.item(), 4), round(t.quantile(0.5).item(), 1)
        (3, 2.0, 0.8165, 2.0)
        """
        x = values.detach().to("cpu", torch.float64)
        here = x.isfinite()
        count = here.sum(1)
        x0 = torch.where(here, x, 0)
        mean = x0.sum(1) / count.clamp_min(1)
        square = torch.where(here, x - mean[:, None], 0).square().sum(1)
        low = torch.where(here, x, torch.inf).amin(1) if x.shape[1] else mean + torch.inf
        high = torch.where(here, x, -torch.inf).amax(1) if x.shape[1] else mean - torch.inf
        histogram = _count(_bin(x0), here, BINS)
        if positions is None:
            empty = torch.zeros(len(x), POSITIONS, dtype=torch.int64)
            return cls(count, mean, square, low, high, histogram, empty, empty.double())
        bins = position_bin(positions.detach().cpu()).expand_as(x)
        sums = torch.zeros(len(x), POSITIONS, dtype=torch.float64).scatter_add_(1, bins, x0)
        return cls(count, mean, square, low, high, histogram, _count(bins, here, POSITIONS), sums)

    def merge(self, other: Tally) -> Tally:
        """The tally of both streams; `empty` is the identity."""
        count = self.count + other.count
        share = other.count.double() / count.clamp_min(1)
        gap = other.mean - self.mean
        return Tally(
            count,
            self.mean + share * gap,
            self.square + other.square + gap.square() * self.count * share,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            self.histogram + other.histogram,
            self.position_count + other.position_count,
            self.position_sum + other.position_sum,
        )

    @property
    def spread(self) -> Tensor:
        """Standard deviation; 0 of nothing."""
        return (self.square / self.count.clamp_min(1)).sqrt()

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, as if the numbers were independent; NaN below two."""
        return torch.where(self.count > 1, self.spread / (self.count - 1).clamp_min(1).sqrt(), torch.nan)

    def quantile(self, q: float) -> Tensor:
        """(cells,), to 5 % of the value, within the extremes; NaN of nothing."""
        below = self.histogram.cumsum(1)
        index = (below < q * self.count[:, None]).sum(1).clamp_max(BINS - 1)
        value = _centre(index).clamp(self.low.nan_to_num(posinf=0), self.high.nan_to_num(neginf=0))
        return torch.where(self.count > 0, value, torch.nan)

    @property
    def by_position(self) -> Tensor:
        """Means by position, (cells, POSITIONS); NaN where nothing was seen."""
        return torch.where(self.position_count > 0, self.position_sum / self.position_count.clamp_min(1), torch.nan)

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def position_bin(position: Tensor) -> Tensor:
    """The bin of a position: 0 … 15 alone, then four bins per doubling, the last one open.

    >>> import torch
    >>> position_bin(torch.tensor([0, 15, 16, 19, 20, 31, 32, 10**6])).tolist()
    [0, 15, 16, 16, 17, 19, 20, 63]
    """
    position = position.clamp_min(0)
    octave = torch.log2(position.clamp_min(1).double()).floor().long()
    within = ((position - 2**octave) * 4) // 2**octave
    return torch.where(position < 16, position, 16 + 4 * (octave - 4) + within).clamp_max(POSITIONS - 1)


def first_positions() -> list[int]:
    """The first position of every bin.

    >>> first_positions()[14:22]
    [14, 15, 16, 20, 24, 28, 32, 40]
    """
    return [i if i < 16 else (4 + (i - 16) % 4) * 2 ** (2 + (i - 16) // 4) for i in range(POSITIONS)]


def _bin(x: Tensor) -> Tensor:
    size = (x.abs().clamp(SMALLEST, LARGEST) / SMALLEST).log() / torch.log(torch.tensor(GROWTH))
    step = size.round().long().clamp(0, STEPS) + 1
    return STEPS + 1 + torch.where(x.abs() < SMALLEST, 0, x.sign().long() * step)


def _centre(index: Tensor) -> Tensor:
    step = index - (STEPS + 1)
    return torch.where(step == 0, 0.0, step.sign() * SMALLEST * GROWTH ** (step.abs() - 1).double())


def bin_edges(index: int) -> tuple[float, float]:
    """The numbers that a bin of the histogram holds.

    >>> bin_edges(STEPS + 1)
    (-1e-06, 1e-06)
    """
    step = index - (STEPS + 1)
    if step == 0:
        return -SMALLEST, SMALLEST
    middle, half = SMALLEST * GROWTH ** (abs(step) - 1), GROWTH**0.5
    return (middle / half, middle * half) if step > 0 else (-middle * half, -middle / half)


def _count(index: Tensor, here: Tensor, size: int) -> Tensor:
    out = torch.zeros(len(index), size, dtype=torch.int64)
    return out.scatter_add_(1, index, here.long())
