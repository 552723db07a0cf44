"""A number beside the band in which it should lie, and whether it is so far outside that something is to be changed."""

from __future__ import annotations

from typing import NamedTuple

from cumulant.filters.diagnostics.chi_square import chi_square_quantile

NORMAL_95 = 1.959963984540054
INSIDE, SLIGHTLY, OUTSIDE = "inside", "slightly outside", "outside"


class BandedValue(NamedTuple):
    """A number, the band in which it lies 95 times in 100 if the model is right, and how many it is the mean of.

        low ≤ value ≤ high

    >>> BandedValue(1.3, 0.8, 1.2, 100).inside
    False
    """

    value: float
    low: float
    high: float
    count: float

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high


class Limit(NamedTuple):
    """How far a number must be off before it counts: beyond its band made ``wider``, and this ``far`` from the middle.

    Of 1.3 times the band of 95 % a right model leaves 1 in 100 numbers, of 1.7 times 1 in 1000.

    >>> number = BandedValue(1.15, 0.9, 1.1, 800)
    >>> Limit(wider=1.3, far=0.1).side(number), Limit(wider=1.3, far=0.2).mark(number)
    (1, 'slightly outside')
    """

    wider: float
    far: float

    def side(self, number: BandedValue) -> int:
        """1 above, −1 below, 0 where it does not count; the middle is that of the band, 1 for NIS."""
        middle = (number.low + number.high) / 2
        half = self.wider * (number.high - number.low) / 2
        apart = number.value - middle
        return 0 if abs(apart) <= max(half, self.far) else 1 if apart > 0 else -1

    def mark(self, number: BandedValue) -> str:
        """One of "inside" the band, "slightly outside" (by chance, or too little to matter) and "outside"."""
        return OUTSIDE if self.side(number) else INSIDE if number.inside else SLIGHTLY


def chi_square_band(mean: float, degrees: float) -> BandedValue:
    """The mean of so many squares of standard normal numbers, and where it should be.

    >>> chi_square_band(1.3, 100).inside
    False
    """
    if degrees <= 0:
        return BandedValue(mean, 0.0, float("inf"), 0)
    low, high = (chi_square_quantile(p, degrees) / degrees for p in (0.025, 0.975))
    return BandedValue(mean, low, high, degrees)


def normal_band(value: float, count: float) -> BandedValue:
    """The mean of so many standard normal numbers, or an autocorrelation of so many pairs.

    >>> normal_band(0.1, 100).inside
    True
    """
    width = NORMAL_95 / count**0.5 if count > 0 else float("inf")
    return BandedValue(value, -width, width, count)
