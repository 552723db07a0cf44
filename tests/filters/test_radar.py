"""A manoeuvring target on a radar: extended and unscented banks against ten thousand particles, and for 1e5 steps."""

from math import radians

import pytest
import torch
from scipy.stats import chi2

from cumulant.filters import Extended, Unscented, imm, kalman, smooth
from cumulant.samplers import particle_filter
from cumulant.samplers.particles import ParticleFiltered
from tests.filters.radar import RATE, radar_model, range_bearing

RUNS = 100


@pytest.fixture(scope="module")
def flown():
    model = radar_model(Extended())
    drawn = model.simulate(100, batch_shape=(RUNS,), generator=torch.Generator().manual_seed(1))
    distance = drawn.states[..., [0, 2]].norm(dim=-1)
    assert distance.quantile(0.02) > 1000
    assert distance.quantile(0.98) < 5000
    return drawn


@pytest.fixture(scope="module")
def reference(flown):
    """By 10 000 particles a track, a few tracks at a time, which stay in the cache."""
    generator, model = torch.Generator().manual_seed(2), radar_model(Extended())
    parts = [
        particle_filter(model, y, method="bootstrap", particles=10_000, generator=generator)
        for y in flown.observations.split(5)
    ]
    return ParticleFiltered(*(torch.cat(part) for part in zip(*parts, strict=True)))


def position_error(found, states) -> float:
    return (found.mean - states)[..., [0, 2]].square().sum(-1).mean().sqrt().item()


@pytest.mark.long
@pytest.mark.parametrize("rule", [Extended(), Unscented()], ids=["extended", "unscented"])
def test_a_bank_is_as_near_as_ten_thousand_particles(rule, flown, reference):
    with torch.no_grad():
        found = imm(radar_model(rule), flown.observations)
    assert position_error(found, flown.states) < 1.05 * position_error(reference, flown.states)
    apart = (found.mode_probabilities - reference.mode_probabilities)[..., 0].square().mean().sqrt()
    assert apart < 0.05


@pytest.mark.long
@pytest.mark.parametrize("rule", [Extended(), Unscented()], ids=["extended", "unscented"])
def test_errors_are_as_large_as_the_filter_says(rule, flown):
    """The average normalised squared error of 100 runs, by the law χ²(5 · 100)/100 at every step."""
    with torch.no_grad():
        found = imm(radar_model(rule), flown.observations)
    error = (found.mean - flown.states)[..., None]
    squared = (error.mT @ torch.linalg.solve(found.covariance, error))[..., 0, 0].mean(0)
    low, high = (chi2.ppf(q, 5 * RUNS) / RUNS for q in (0.025, 0.975))
    assert low < squared.mean() < high
    assert ((low < squared) & (squared < high)).double().mean() > 0.8  # errors of neighbouring steps go together


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
def test_smoothing_a_flight_is_better_than_filtering_it(flown):
    with torch.no_grad():
        filtered, smoothed = (run(radar_model(Extended()), flown.observations) for run in (imm, smooth))
    assert position_error(smoothed, flown.states) < 0.85 * position_error(filtered, flown.states)


@pytest.mark.long
def test_a_hundred_thousand_steps_keep_covariances_symmetric_and_positive():
    model = radar_model(Extended(), modes=1)
    turn = RATE * torch.arange(100_000, dtype=torch.float64)  # on a circle of radius 500 m about (3, 2) km
    x = torch.stack([3000 + 500 * turn.sin(), 0 * turn, 2000 - 500 * turn.cos(), 0 * turn, 0 * turn], -1)
    noise = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = range_bearing(x, 0) + noise * torch.tensor([10.0, radians(0.3)], dtype=torch.float64)
    with torch.no_grad():
        found = kalman(model, y)
    assert found.covariance.equal(found.covariance.mT)
    scale = found.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = found.covariance / (scale[..., None] * scale[..., None, :])
    assert torch.linalg.eigvalsh(correlation).min() > 1e-6
    early, late = found.log_likelihood[100:50_000].mean(), found.log_likelihood[50_000:].mean()
    assert abs(early - late) < 0.2  # it does not wear out


def test_the_particles_of_one_short_track_agree_with_the_bank():
    model = radar_model(Extended())
    y = model.simulate(10, batch_shape=(4,), generator=torch.Generator().manual_seed(3)).observations
    y[0, 4], y[1, 5, 1] = torch.nan, torch.nan
    drawn = particle_filter(model, y, method="bootstrap", particles=50_000, generator=torch.Generator().manual_seed(4))
    found = imm(model, y)
    away = (drawn.mean - found.mean) / found.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert away.abs().max() < 0.25
    assert away.square().mean().sqrt() < 0.05
    assert (drawn.mode_probabilities - found.mode_probabilities).abs().max() < 0.06
    assert (drawn.log_likelihood - found.log_likelihood).sum(-1).abs().max() < 0.2
