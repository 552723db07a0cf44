"""What h is."""

from cumulant.measures.base import Hull, Measure, per_query
from cumulant.measures.box import Box
from cumulant.measures.classical import from_distribution
from cumulant.measures.compose import convolve, product
from cumulant.measures.empirical import Empirical
from cumulant.measures.gaussian import Gaussian
from cumulant.measures.independent import independent
from cumulant.measures.sharded import Sharded, shard
from cumulant.measures.sphere import Sphere

__all__ = [
    "Box",
    "Empirical",
    "Gaussian",
    "Hull",
    "Measure",
    "Sharded",
    "Sphere",
    "convolve",
    "from_distribution",
    "independent",
    "per_query",
    "product",
    "shard",
]
