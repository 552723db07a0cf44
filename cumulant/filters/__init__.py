"""Filters for models that switch between modes: GPB-k, IMM and exact enumeration are one engine with two settings."""

from cumulant.filters.conjugate import SwitchingConjugate
from cumulant.filters.diagnostics.banded import BandedValue
from cumulant.filters.diagnostics.consistency import Consistency, consistency, nees
from cumulant.filters.diagnostics.innovations import Innovations, innovations
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
from cumulant.filters.motion import (
    Chain,
    Drift,
    EstimatedTurn,
    Fixed,
    Motion,
    Singer,
    Turn,
    constant_acceleration,
    constant_jerk,
    constant_velocity,
    estimated_turn,
    random_walk,
    singer,
    turn,
)
from cumulant.filters.nonlinear import SwitchingNonlinear
from cumulant.filters.nonlinear_modes import GaussianMode, NonlinearMode
from cumulant.filters.pairs import BetaBernoulli, DirichletCategorical, GammaPoisson, NormalGamma, NormalNormal
from cumulant.filters.projection import ProjectedNormal, m_projection, m_projection_in
from cumulant.filters.protocol import Propagator, SwitchingModel
from cumulant.filters.records import Filtered, StepRecord
from cumulant.filters.sensors import (
    Sensor,
    bearing_only,
    position_sensor,
    range_bearing,
    range_bearing_elevation,
    range_bearing_rate,
)
from cumulant.filters.smoother import Smoothed, kim, smooth
from cumulant.filters.switching import EXACT, IMM, FilterState, Slots, exact, gpb, imm, init, kalman, run, step
from cumulant.filters.variance_excess import SmootherWarning

__all__ = [
    "EXACT",
    "IMM",
    "AttentionFilter",
    "BandedValue",
    "BetaBernoulli",
    "Chain",
    "Consistency",
    "Cubature",
    "DirichletCategorical",
    "Drift",
    "EstimatedTurn",
    "Extended",
    "FilterState",
    "Filtered",
    "Fixed",
    "Forecast",
    "GammaPoisson",
    "GaussHermite",
    "GaussianMode",
    "Innovations",
    "Learned",
    "MaximumLikelihood",
    "MomentRule",
    "Motion",
    "NonlinearMode",
    "NormalGamma",
    "NormalNormal",
    "ProjectedNormal",
    "PropagatedMoments",
    "Propagator",
    "Sensor",
    "SigmaPointRule",
    "SigmaPoints",
    "Simulation",
    "Singer",
    "SinkhornAttention",
    "Slots",
    "Smoothed",
    "SmootherWarning",
    "StepRecord",
    "SwitchingConjugate",
    "SwitchingLinearGaussian",
    "SwitchingModel",
    "SwitchingNonlinear",
    "Turn",
    "Unscented",
    "attention_as_filter",
    "bearing_only",
    "consistency",
    "constant_acceleration",
    "constant_jerk",
    "constant_velocity",
    "em",
    "estimated_turn",
    "exact",
    "forecast",
    "gpb",
    "imm",
    "implied_source",
    "init",
    "innovations",
    "kalman",
    "kim",
    "m_projection",
    "m_projection_in",
    "maximum_likelihood",
    "nees",
    "position_sensor",
    "random_walk",
    "range_bearing",
    "range_bearing_elevation",
    "range_bearing_rate",
    "run",
    "singer",
    "sinkhorn_attention",
    "smooth",
    "step",
    "turn",
]
