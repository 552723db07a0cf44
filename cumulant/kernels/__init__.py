"""How sums of exponentials are computed."""

from cumulant.kernels.dense import dense_moments
from cumulant.kernels.moments import STATISTICS, Moments
from cumulant.kernels.operator import fisher_product, moments

__all__ = ["STATISTICS", "Moments", "dense_moments", "fisher_product", "moments"]
