"""Whatever advances in steps has one protocol: step returns the next state first, and a record of the step."""

import pytest
import torch

from cumulant import Gaussian, dynamics, filters, from_distribution
from cumulant.filters import NonlinearMode, SwitchingLinearGaussian, SwitchingNonlinear
from cumulant.samplers import ConjugatePrior, bootstrap, gibbs, particles, redraw, smc
from cumulant.solve import Anderson, Damped, Picard
from cumulant.typing import Stepper

EYE = torch.eye(1, dtype=torch.float64)
WALK = SwitchingLinearGaussian(EYE, EYE, EYE, EYE, EYE, initial_mean=EYE[0], initial_covariance=EYE)
DOUBLING = SwitchingNonlinear(
    EYE, [NonlinearMode(lambda x, t: 2 * x, EYE, EYE, EYE)], initial_mean=EYE[0], initial_covariance=EYE
)
COUNTS = ConjugatePrior(from_distribution(torch.distributions.Poisson(EYE[0, 0])), 3 * EYE[0], 2.0)
H = Gaussian(0 * EYE[0], EYE)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# stepper, arguments of init, arguments of step after the state, keywords of both
STEPPERS = {
    "Picard": (Picard(), (EYE,), (EYE, 2 * EYE), {}),
    "Damped": (Damped(0.5), (EYE,), (EYE, 2 * EYE), {}),
    "Anderson": (Anderson(), (EYE,), (EYE, 2 * EYE), {}),
    "layer": (dynamics.Layer(ascend=dynamics.Ascend()), (torch.eye(3),), (), {}),
    "filter": (filters, (WALK,), (EYE[0],), {}),
    "gibbs": (gibbs, (COUNTS,), (COUNTS,), {"generator": generator()}),
    "smc": (smc, (H, 0 * EYE[0], 5), (EYE[0], redraw(H, 0 * EYE[0])), {"generator": generator()}),
    "particles": (particles, (WALK, 5), (EYE[0],), {"generator": generator()}),
    "bootstrap": (bootstrap, (DOUBLING, 5), (EYE[0],), {"generator": generator()}),
}


@pytest.mark.parametrize("name", STEPPERS)
def test_a_step_returns_the_next_state_and_a_record(name):
    stepper, begin, more, options = STEPPERS[name]
    assert isinstance(stepper, Stepper)
    state = stepper.init(*begin, **options)
    pair = stepper.step(state, *more, **options)
    assert type(pair) is tuple
    after, info = pair
    assert type(after) is type(state)
    assert info is not None
    assert type(stepper.step(after, *more, **options)[0]) is type(state)  # what a step returned can be stepped again
