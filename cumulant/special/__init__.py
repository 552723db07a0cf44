"""Special functions of the families, each in a form whose terms do not cancel, at any size of its argument.

    bessel.py      log ₀F₁ and its derivatives, the log-normalizer of the sphere
    elementary.py  log(sinh y / y) of a uniform law, c e^t and log(1 − t/r) with exact tails, log det(I + F)
    gamma.py       ψ, ψ′ and differences of log Γ
    stumpff.py     (1 − cos θ)/θ², (θ − sin θ)/θ³, … of turns, at rates down to 0

All are plain torch operations: differentiable to any order, batched, traceable. Where two forms meet in `torch.where`,
each gets an argument of its own range, so that the one not selected adds no NaN to a gradient.
"""

from cumulant.special.bessel import Hyp0F1, Radial, bessel_radial, far_from, hyp0f1
from cumulant.special.elementary import (
    effective_rank,
    langevin,
    langevin_slope,
    log_det_plus_identity,
    log_left,
    log_sinhc,
    log_sinhc_gap,
    times_exp,
    times_expm1,
)
from cumulant.special.gamma import (
    digamma,
    digamma_gap,
    log_beta_gap,
    log_gamma_gap,
    standard_gamma,
    trigamma,
    trigamma_gap,
)
from cumulant.special.stumpff import stumpff

__all__ = [
    "Hyp0F1",
    "Radial",
    "bessel_radial",
    "digamma",
    "digamma_gap",
    "effective_rank",
    "far_from",
    "hyp0f1",
    "langevin",
    "langevin_slope",
    "log_beta_gap",
    "log_det_plus_identity",
    "log_gamma_gap",
    "log_left",
    "log_sinhc",
    "log_sinhc_gap",
    "standard_gamma",
    "stumpff",
    "times_exp",
    "times_expm1",
    "trigamma",
    "trigamma_gap",
]
