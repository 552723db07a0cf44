"""Maximum likelihood through the filter: closed forms, EM, another optimiser, what cannot be learnt."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from cumulant.filters import (
    Cubature,
    NonlinearMode,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    em,
    gpb,
    imm,
    kalman,
    maximum_likelihood,
)
from cumulant.solve import Status
from tests.compare import close
from tests.filters.oracle import t

EYE = torch.eye(1, dtype=torch.float64)


def independent(p):
    """States without memory, so that y is independent N(m, Q + 1)."""
    law = {"initial_mean": p["m"], "initial_covariance": p["log_q"].exp() * EYE, "state_offset": p["m"]}
    return SwitchingLinearGaussian(EYE, 0 * EYE, p["log_q"].exp() * EYE, EYE, EYE, **law)


def test_the_closed_form_of_independent_normals():
    y = t(np.random.default_rng(0).normal(2.0, 3.0, (400, 1, 1)))
    fit = maximum_likelihood(independent, {"m": t([0.0]), "log_q": t(0.0)}, y, run=kalman)
    variance = y.var(correction=0)
    assert fit.status is Status.CONVERGED
    close(fit.parameters["m"], y.mean((0, 1)), 1e-5)
    close(fit.parameters["log_q"], (variance - 1).log(), 1e-5)
    close(fit.standard_errors["m"], (variance / 400).sqrt()[None], 1e-4)
    # the variance has the information n/(2 v²), and its derivative in log Q is Q
    close(fit.standard_errors["log_q"], variance * (2 / 400) ** 0.5 / (variance - 1), 1e-4)
    close(fit.covariance[0, 1], 0, 1e-6)


def walk(p):
    noises = p["log_q"].exp() * EYE, p["log_r"].exp() * EYE
    return SwitchingLinearGaussian(EYE, EYE, noises[0], EYE, noises[1], initial_mean=0 * EYE[0], initial_covariance=EYE)


@pytest.mark.long
def test_em_ends_at_the_same_maximum():
    y = walk({"log_q": t(0.0), "log_r": t(0.5)}).simulate(
        20, batch_shape=(50,), generator=torch.Generator().manual_seed(0)
    )
    start = {"log_q": t(2.0), "log_r": t(2.0)}
    fit = maximum_likelihood(walk, start, y.observations, run=kalman)
    keep = ("dynamics", "state_offset", "observation", "observation_offset", "initial_mean", "initial_covariance")
    other = em(walk(start), y.observations, fixed=keep, steps=1000, tol=1e-11)
    close(fit.log_likelihoods[-1], other.log_likelihood, 1e-6)
    close(fit.parameters["log_q"].exp(), other.model.process_noise.squeeze(), 1e-3)
    close(fit.parameters["log_r"].exp(), other.model.observation_noise.squeeze(), 1e-3)


def swinging(p):
    """A pendulum of unknown length with two levels of disturbance."""

    def f(x, step):
        return torch.stack([x[..., 0] + 0.1 * x[..., 1], x[..., 1] - 0.1 * p["log_k"].exp() * torch.sin(x[..., 0])], -1)

    two = torch.eye(2, dtype=torch.float64)
    noise = p["log_r"].exp() * EYE
    modes = [
        NonlinearMode(f, level * two, lambda x, step: torch.sin(x[..., :1]), noise, rule=Cubature())
        for level in (1e-5, 1e-2)
    ]
    stay = torch.sigmoid(p["stay"])
    rows = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])])
    return SwitchingNonlinear(rows, modes, initial_mean=t([1.0, 0.0]), initial_covariance=0.1 * two)


TRUTH = {"log_k": t(1.0), "log_r": t(-4.0), "stay": t(2.0)}
START = {"log_k": t(0.5), "log_r": t(-2.0), "stay": t(1.0)}


@pytest.fixture(scope="module")
def swings():
    return swinging(TRUTH).simulate(12, batch_shape=(60,), generator=torch.Generator().manual_seed(0)).observations


@pytest.mark.long
def test_a_nonlinear_model_is_learnt_and_another_optimiser_finds_the_same(swings):
    fit = maximum_likelihood(swinging, START, swings[:40], held_out=swings[40:])
    assert fit.status is Status.CONVERGED
    assert (fit.log_likelihoods.diff() >= 0).all()
    for name, value in TRUTH.items():
        assert (fit.parameters[name] - value).abs() < 3 * fit.standard_errors[name]
    assert fit.standard_errors["log_k"] < 0.1
    assert fit.held_out is not None
    assert fit.held_out[1] > fit.held_out[0] + 10
    with torch.no_grad():
        close(imm(fit.model, swings[:40]).log_likelihood.sum(), fit.log_likelihoods[-1], 1e-9)
        close(imm(fit.model, swings[40:]).log_likelihood.sum(), fit.held_out[1], 1e-9)

    def loss(theta):
        with torch.no_grad():
            model = swinging(dict(zip(TRUTH, t(theta), strict=True)))
            return -imm(model, swings[:40]).log_likelihood.sum().item()

    best = minimize(loss, [v.item() for v in fit.parameters.values()], method="Nelder-Mead", options={"maxiter": 25})
    assert -best.fun < fit.log_likelihoods[-1] + 1e-4


def test_what_is_fixed_stays(swings):
    fit = maximum_likelihood(swinging, START, swings[:20], fixed=("log_r", "stay"), run=partial(gpb, order=2), steps=3)
    assert fit.parameters["log_r"] == START["log_r"]
    assert list(fit.standard_errors) == ["log_k"]
    assert fit.covariance.shape == (1, 1)
    nothing = maximum_likelihood(swinging, START, swings[:1], fixed=tuple(START))
    assert len(nothing.log_likelihoods) == 1
    assert nothing.covariance.shape == (0, 0)


def test_the_result_is_never_worse_than_the_start(swings):
    best = maximum_likelihood(swinging, START, swings[:20], fixed=("stay",), steps=6)
    again = maximum_likelihood(swinging, best.parameters, swings[:20], steps=2)
    assert again.log_likelihoods[-1] >= best.log_likelihoods[-1]

    def forbidden(p):  # beyond the start lie models that are refused
        if p["log_k"] > 0.6:
            raise ValueError("no such model")
        return swinging(p)

    fit = maximum_likelihood(forbidden, START, swings[:20], fixed=("log_r", "stay"), steps=10)
    assert fit.log_likelihoods[-1] > fit.log_likelihoods[0]
    assert fit.parameters["log_k"] <= 0.6


def test_a_parameter_without_effect_has_no_standard_error(swings):
    def with_idle(p):
        return swinging({name: p[name] for name in START})

    fit = maximum_likelihood(with_idle, START | {"idle": t(3.0)}, swings[:10], fixed=("log_r", "stay"), steps=20)
    assert fit.parameters["idle"] == 3.0
    assert fit.standard_errors["idle"].isnan()


def test_calls_that_cannot_be_answered(swings):
    with pytest.raises(ValueError, match="expected names among log_k, log_r, stay, got length"):
        maximum_likelihood(swinging, START, swings, fixed=("length",))
    with pytest.raises(TypeError, match=r"expected dtype torch.float64 as y"):
        maximum_likelihood(swinging, START | {"log_k": torch.tensor(1.0)}, swings)
    with pytest.raises(ValueError, match="expected finite values"):
        maximum_likelihood(swinging, START | {"log_k": t(float("nan"))}, swings)
    with pytest.raises(ValueError, match=r"expected shape \(\*batch, T, m=1\)"):
        maximum_likelihood(swinging, START, swings.expand(-1, -1, 2))
