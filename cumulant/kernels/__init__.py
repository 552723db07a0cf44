"""How sums of exponentials are computed."""

from cumulant.kernels.dense import dense_moments
from cumulant.kernels.moments import STATISTICS, Moments

__all__ = ["STATISTICS", "Moments", "dense_moments"]
