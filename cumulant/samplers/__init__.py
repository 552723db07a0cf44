"""Samplers: Gibbs between conjugate laws, sequential Monte Carlo, particle filters, and convergence diagnostics.

`gibbs`, `smc` (tempering), `particles` and `bootstrap` (switching models) are `cumulant.typing.Stepper`s, with the
generator as an argument: ``init(…) → state`` and ``step(state, …) → (state, info)``.
"""

from cumulant.samplers import bootstrap, gibbs, particles, smc
from cumulant.samplers.diagnostics import (
    Diagnosis,
    autocovariance,
    diagnose,
    effective_sample_size,
    normal_scores,
    rhat,
    split_rhat,
)
from cumulant.samplers.gibbs import mean_iteration
from cumulant.samplers.mode_paths import SampledSmoothed, sample_smooth
from cumulant.samplers.particle_filters import particle_filter
from cumulant.samplers.priors import ConjugatePrior
from cumulant.samplers.resampling import effective_size, multinomial, stratified, systematic
from cumulant.samplers.smc import crank_nicolson, redraw, temper

__all__ = [
    "ConjugatePrior",
    "Diagnosis",
    "SampledSmoothed",
    "autocovariance",
    "bootstrap",
    "crank_nicolson",
    "diagnose",
    "effective_sample_size",
    "effective_size",
    "gibbs",
    "mean_iteration",
    "multinomial",
    "normal_scores",
    "particle_filter",
    "particles",
    "redraw",
    "rhat",
    "sample_smooth",
    "smc",
    "split_rhat",
    "stratified",
    "systematic",
    "temper",
]
