"""Filters for models that switch between modes: GPB-k, IMM and exact enumeration are one engine with two settings."""

from cumulant.filters.conjugate import SwitchingConjugate
from cumulant.filters.forecast import Forecast, forecast
from cumulant.filters.heads import (
    AttentionFilter,
    SinkhornAttention,
    attention_as_filter,
    implied_source,
    sinkhorn_attention,
)
from cumulant.filters.learning import Learned, em
from cumulant.filters.linear_gaussian import Simulation, SwitchingLinearGaussian
from cumulant.filters.maximum_likelihood import MaximumLikelihood, maximum_likelihood
from cumulant.filters.moment_rules import (
    Cubature,
    Extended,
    GaussHermite,
    MomentRule,
    PropagatedMoments,
    SigmaPointRule,
    SigmaPoints,
    Unscented,
)
from cumulant.filters.nonlinear import SwitchingNonlinear
from cumulant.filters.nonlinear_modes import GaussianMode, NonlinearMode
from cumulant.filters.pairs import BetaBernoulli, DirichletCategorical, GammaPoisson, NormalGamma, NormalNormal
from cumulant.filters.projection import ProjectedNormal, m_projection, m_projection_in
from cumulant.filters.protocol import Propagator, SwitchingModel
from cumulant.filters.records import Filtered, StepRecord
from cumulant.filters.smoother import Smoothed, kim, smooth
from cumulant.filters.switching import EXACT, IMM, FilterState, Slots, exact, gpb, imm, init, kalman, run, step
from cumulant.filters.variance_excess import SmootherWarning

__all__ = [
    "EXACT",
    "IMM",
    "AttentionFilter",
    "BetaBernoulli",
    "Cubature",
    "DirichletCategorical",
    "Extended",
    "FilterState",
    "Filtered",
    "Forecast",
    "GammaPoisson",
    "GaussHermite",
    "GaussianMode",
    "Learned",
    "MaximumLikelihood",
    "MomentRule",
    "NonlinearMode",
    "NormalGamma",
    "NormalNormal",
    "ProjectedNormal",
    "PropagatedMoments",
    "Propagator",
    "SigmaPointRule",
    "SigmaPoints",
    "Simulation",
    "SinkhornAttention",
    "Slots",
    "Smoothed",
    "SmootherWarning",
    "StepRecord",
    "SwitchingConjugate",
    "SwitchingLinearGaussian",
    "SwitchingModel",
    "SwitchingNonlinear",
    "Unscented",
    "attention_as_filter",
    "em",
    "exact",
    "forecast",
    "gpb",
    "imm",
    "implied_source",
    "init",
    "kalman",
    "kim",
    "m_projection",
    "m_projection_in",
    "maximum_likelihood",
    "run",
    "sinkhorn_attention",
    "smooth",
    "step",
]
