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
    potentials,
    regression,
    residual,
    samplers,
    solve,
)
from cumulant.attention import Attended, attend, attention
from cumulant.kernels import Moments, fisher_product, moments
from cumulant.measures import (
    Box,
    Empirical,
    Gaussian,
    Measure,
    Sphere,
    convolve,
    from_distribution,
    independent,
    per_query,
    product,
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
    "Solution",
    "Sphere",
    "Status",
    "attend",
    "attention",
    "boltzmann",
    "contrastive",
    "convolve",
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
    "per_query",
    "potentials",
    "product",
    "regression",
    "residual",
    "samplers",
    "solve",
]
