"""1e5 steps without loss of symmetry: one linear mode and several, extended modes, the default smoother."""

import pytest
import torch

from cumulant.filters import (
    NonlinearMode,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    constant_velocity,
    gpb,
    imm,
    kalman,
    smooth,
)

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")]
STEPS = 100_000
RUNS = {"kalman": (kalman, 1), "imm": (imm, 2), "gpb2": (gpb, 2), "gpb1": (lambda m, y: gpb(m, y, order=1), 2)}


def manoeuvres(modes: int, axes: int = 2) -> SwitchingLinearGaussian:
    """Nearly constant velocity, and a wild mode, seen sharply: variances from 1e-6 to 1e1 in one matrix."""
    steps = [constant_velocity(q, axes=axes).over(torch.ones(1).double()) for q in (1e-6, 1.0)[:modes]]
    f, q = (torch.stack([step[k][0] for step in steps]) for k in (0, 1))
    transition = torch.tensor([[0.95, 0.05], [0.1, 0.9]]).double() if modes == 2 else torch.ones(1, 1).double()
    return SwitchingLinearGaussian(
        transition,
        f,
        q,
        torch.eye(axes, 2 * axes).double(),
        1e-3 * torch.eye(axes).double(),
        initial_mean=torch.zeros(2 * axes).double(),
        initial_covariance=1e4 * torch.eye(2 * axes).double(),
    )


def observed(model) -> torch.Tensor:
    y = model.simulate(STEPS, generator=torch.Generator().manual_seed(0)).observations.clone()
    y[::17] = torch.nan  # a gap now and then
    return y


def is_sound(record) -> None:
    """Symmetric to the last bit, positive semidefinite up to rounding of the largest entry, and finite."""
    for covariance in (record.covariance, record.mode_covariances):
        assert bool(covariance.isfinite().all())
        assert torch.equal(covariance, covariance.mT)
        size = covariance.abs().amax((-2, -1))
        assert bool((torch.linalg.eigvalsh(covariance)[..., 0] >= -1e-15 * size).all())
    assert bool(record.mean.isfinite().all())
    assert float((record.mode_probabilities.sum(-1) - 1).abs().max()) < 1e-12


@pytest.mark.parametrize("name", RUNS)
def test_linear_modes(name):
    run, modes = RUNS[name]
    model = manoeuvres(modes)
    with torch.no_grad():
        found = run(model, observed(model))
    is_sound(found)
    assert bool(found.log_likelihood.isfinite().all())


def test_imm_of_extended_modes():
    """Straight and curved motion on a circle seen in range and bearing."""

    def swing(x, t):
        px, py, vx, vy = x.unbind(-1)
        s, c = 0.05, (1 - 0.05**2) ** 0.5
        return torch.stack([px + vx, py + vy, c * vx - s * vy, s * vx + c * vy], -1)

    def radar(x, t):
        return torch.stack([torch.hypot(x[..., 0], x[..., 1]), torch.atan2(x[..., 1], x[..., 0])], -1)

    straight = torch.eye(4).double() + torch.diag(torch.ones(2).double(), 2)
    noise = torch.diag(torch.tensor([1e-2, 1e-2, 1e-3, 1e-3])).double()
    seen = torch.diag(torch.tensor([1.0, 1e-6])).double()
    modes = [NonlinearMode(f, noise, radar, seen, angles=(1,)) for f in (straight, swing)]
    transition = torch.tensor([[0.95, 0.05], [0.05, 0.95]]).double()
    start = torch.tensor([3000.0, 2000.0, 10.0, 0.0]).double()
    model = SwitchingNonlinear(transition, modes, initial_mean=start, initial_covariance=1e3 * noise)
    turn = 0.05 * torch.arange(STEPS).double()
    path = torch.stack([3000 + 200 * turn.sin(), 2200 - 200 * turn.cos()], -1)
    y = radar(path, 0) + torch.randn(STEPS, 2, generator=torch.Generator().manual_seed(0)).double() @ seen.sqrt()
    with torch.no_grad():
        found = imm(model, y)
    is_sound(found)
    assert bool(found.log_likelihood.isfinite().all())
    assert float((found.mean[1000:, :2] - path[1000:]).norm(dim=-1).median()) < 5


@pytest.mark.parametrize("modes", [1, 2])
def test_the_default_smoother(modes):
    """Three sweeps with two modes: about six minutes and 3 GB."""
    model = manoeuvres(modes, axes=1)
    with torch.no_grad():
        found = smooth(model, observed(model))
    is_sound(found)
    assert bool(found.variance_ratio.isfinite().all())
    assert float(found.variance_ratio.mean()) < 1
