"""Filters for models that switch between modes: GPB-k, IMM and exact enumeration are one engine with two settings."""

from cumulant.filters.conjugate import (
    BetaBernoulli,
    DirichletCategorical,
    GammaPoisson,
    NormalGamma,
    NormalNormal,
    SwitchingConjugate,
)
from cumulant.filters.linear_gaussian import Simulation, SwitchingLinearGaussian
from cumulant.filters.projection import Projected, m_projection, m_projection_in
from cumulant.filters.protocol import Propagator, SwitchingModel
from cumulant.filters.records import Filtered, StepRecord
from cumulant.filters.switching import EXACT, IMM, FilterState, Slots, exact, gpb, imm, init, kalman, run, step

__all__ = [
    "EXACT",
    "IMM",
    "BetaBernoulli",
    "DirichletCategorical",
    "FilterState",
    "Filtered",
    "GammaPoisson",
    "NormalGamma",
    "NormalNormal",
    "Projected",
    "Propagator",
    "Simulation",
    "Slots",
    "StepRecord",
    "SwitchingConjugate",
    "SwitchingLinearGaussian",
    "SwitchingModel",
    "exact",
    "gpb",
    "imm",
    "init",
    "kalman",
    "m_projection",
    "m_projection_in",
    "run",
    "step",
]
