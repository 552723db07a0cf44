"""Transformer layers as dynamics of particles: an attention step, then a normaliser, iterated.

attention_step   Ascend: one step up or down the log-normalizer for every particle
renormalize      norms of each token and of the ensemble
layer, run       Layer = norm ∘ step; run iterates it and records readouts
flow             the same in continuous time; integrate and time_change are its solvers
closure          GaussianFlow: the law of infinitely many particles; finite_sample: corrections for few
equilibrium      fixed points on the sphere;   stability: which perturbations of an equilibrium grow
readouts         distance to a Gaussian, clusters, rank, energy of a cloud
"""

from cumulant.dynamics.attention_step import Ascend
from cumulant.dynamics.closure import GaussianFlow
from cumulant.dynamics.equilibrium import sphere_equilibrium
from cumulant.dynamics.flow import Flow, flow, orthogonal_cosine
from cumulant.dynamics.layer import Dynamics, Layer
from cumulant.dynamics.readouts import (
    clusters,
    effective_keys,
    effective_rank,
    gaussian_band,
    kurtosis,
    log_interaction_energy,
    mean_cosine,
    mean_norm,
    skewness,
    w2_to_gaussian,
)
from cumulant.dynamics.renormalize import (
    BatchNorm,
    LayerNorm,
    NormalizationError,
    Renormalize,
    RMSNorm,
    SphereNorm,
    Unchanged,
    Whiten,
)
from cumulant.dynamics.run import Halt, Trajectory, run
from cumulant.dynamics.stability import attracting, cumulant_multiplier

__all__ = [
    "Ascend",
    "BatchNorm",
    "Dynamics",
    "Flow",
    "GaussianFlow",
    "Halt",
    "Layer",
    "LayerNorm",
    "NormalizationError",
    "RMSNorm",
    "Renormalize",
    "SphereNorm",
    "Trajectory",
    "Unchanged",
    "Whiten",
    "attracting",
    "clusters",
    "cumulant_multiplier",
    "effective_keys",
    "effective_rank",
    "flow",
    "gaussian_band",
    "kurtosis",
    "log_interaction_energy",
    "mean_cosine",
    "mean_norm",
    "orthogonal_cosine",
    "run",
    "skewness",
    "sphere_equilibrium",
    "w2_to_gaussian",
]
