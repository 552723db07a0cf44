"""Attention is the mean of an exponential family: its log-normalizer as an object to compute with.

G(η) = log ∫ e^⟨x,η⟩ h(dx)
"""

from cumulant import (
    boltzmann,
    contrastive,
    duality,
    dynamics,
    filters,
    geometry,
    hopfield,
    link,
    nn,
    potentials,
    regression,
    residual,
    samplers,
    solve,
)
from cumulant.attention import Attended, attend, attention
from cumulant.kernels import Moments, Ranks, deal, fisher_product, moments, sharded_moments
from cumulant.measures import (
    Box,
    Empirical,
    Gaussian,
    Measure,
    Sharded,
    Sphere,
    convolve,
    from_distribution,
    independent,
    per_query,
    product,
    shard,
)
from cumulant.solve import Anderson, Damped, Picard, Solution, Status, fixed_point

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Attended",
    "Box",
    "Damped",
    "Empirical",
    "Gaussian",
    "Measure",
    "Moments",
    "Picard",
    "Ranks",
    "Sharded",
    "Solution",
    "Sphere",
    "Status",
    "attend",
    "attention",
    "boltzmann",
    "contrastive",
    "convolve",
    "deal",
    "duality",
    "dynamics",
    "filters",
    "fisher_product",
    "fixed_point",
    "from_distribution",
    "geometry",
    "hopfield",
    "independent",
    "link",
    "moments",
    "nn",
    "per_query",
    "potentials",
    "product",
    "regression",
    "residual",
    "samplers",
    "shard",
    "sharded_moments",
    "solve",
]
