"""How sums of exponentials are computed."""

from cumulant.kernels.collectives import Ranks
from cumulant.kernels.dense import dense_moments
from cumulant.kernels.moments import STATISTICS, Moments
from cumulant.kernels.operator import fisher_product, moments
from cumulant.kernels.sharded import deal, sharded_moments

__all__ = ["STATISTICS", "Moments", "Ranks", "deal", "dense_moments", "fisher_product", "moments", "sharded_moments"]
