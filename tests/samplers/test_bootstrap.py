"""The plain particle filter against exact answers of models that have them."""

from functools import partial

import pytest
import torch

from cumulant.filters import NonlinearMode, SwitchingLinearGaussian, SwitchingNonlinear, exact
from cumulant.samplers import particle_filter
from tests.compare import close
from tests.filters.oracle import NAN, model_of, parameters, series, t


def scaled(matrix, offset, x, step):
    return x @ matrix.mT + offset


def as_functions(p, start):
    transition, f, q, h, r, b, c, mean, covariance, first = map(t, p)
    modes = [NonlinearMode(partial(scaled, f[k], b[k]), q[k], partial(scaled, h[k], c[k]), r[k]) for k in range(len(f))]
    law = {"initial_mean": mean, "initial_covariance": covariance, "initial_modes": first, "start": start}
    return SwitchingNonlinear(transition, modes, **law)


@pytest.mark.parametrize("method", ["bootstrap", "rao-blackwellised"])
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_many_particles_are_the_sum_over_mode_paths(method, start):
    p, y = parameters(modes=2), series(4, batch=(2,)).clone()
    y[0, 1], y[1, 2, 0] = NAN, NAN
    count, slack = (40_000, 0.1) if method == "bootstrap" else (3000, 0.05)
    generator = torch.Generator().manual_seed(0)
    found = particle_filter(as_functions(p, start), y, method=method, particles=count, generator=generator)
    wanted = exact(model_of(p, start), y)
    for name in ("mean", "mode_probabilities", "log_likelihood"):
        close(getattr(found, name), getattr(wanted, name), slack)
    close(found.covariance, wanted.covariance, 2 * slack)


def test_the_estimate_of_the_likelihood_is_unbiased():
    p, y = parameters(modes=2, seed=3), series(3)
    many = particle_filter(
        as_functions(p, "prior"),
        y.expand(4000, 3, 2),
        method="bootstrap",
        particles=30,
        generator=torch.Generator().manual_seed(0),
    )
    total = many.log_likelihood.sum(-1).exp()
    wanted = exact(model_of(p), y).total_log_likelihood.exp()
    assert (total.mean() - wanted).abs() < 3 * total.std() / 4000**0.5
    assert total.std() / 4000**0.5 < 0.05 * wanted


def test_every_sequence_gets_its_own_inputs():
    eye = torch.eye(1, dtype=torch.float64)
    mode = NonlinearMode(lambda x, u: x + u, 0.01 * eye, eye, 0.01 * eye)
    inputs = t([[[1.0], [2.0]], [[-1.0], [-2.0]]])
    model = SwitchingNonlinear(eye, [mode], initial_mean=0 * eye[0], initial_covariance=0.01 * eye, inputs=inputs)
    for method in ("bootstrap", "rao-blackwellised"):
        generator = torch.Generator().manual_seed(0)
        found = particle_filter(model, NAN * inputs, method=method, particles=2000, generator=generator)
        close(found.mean, t([[[0.0], [2.0]], [[0.0], [-2.0]]]), 0.02)


def test_calls_that_cannot_be_answered():
    eye, generator = torch.eye(1, dtype=torch.float64), torch.Generator().manual_seed(0)
    linear = SwitchingLinearGaussian(eye, eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye)
    with pytest.raises(
        ValueError, match=r"particle_filter.method: expected 'rao-blackwellised' or 'bootstrap', got 'x'"
    ):
        particle_filter(linear, eye, method="x", generator=generator)
    with pytest.raises(TypeError, match="expected a SwitchingNonlinear, got SwitchingLinearGaussian"):
        particle_filter(linear, eye, method="bootstrap", generator=generator)
