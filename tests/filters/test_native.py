"""Filters on the native kernel and in torch are the same filters, and each is used where it is meant to be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cumulant.filters import (
    NonlinearMode,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    constant_velocity,
    exact,
    gpb,
    imm,
    innovations,
    kalman,
    smooth,
)
from cumulant.filters import records as filter_records
from cumulant.kernels.native import normals
from tests.compare import close
from tests.filters.radar import process_noise, range_bearing, straight, turning
from tests.kernels.native.problems import native

pytestmark = [native, pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")]
TRACKS, STEPS = 19, 12
RUNS = {
    "imm": imm,
    "gpb1": lambda model, y, **rest: gpb(model, y, order=1, **rest),
    "gpb2": gpb,
    "gpb3": lambda model, y, **rest: gpb(model, y, order=3, **rest),
}


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def turns(modes: int = 3, **changes) -> SwitchingLinearGaussian:
    """Nearly constant velocity with accelerations of every mode, positions seen."""
    motions = [constant_velocity(q, axes=2).over(torch.ones(1).double()) for q in (1e-3, 0.3, 5.0)[:modes]]
    transition = 0.85 * torch.eye(modes).double() + 0.15 / modes
    values = {
        "transition": transition,
        "dynamics": torch.stack([motion[0][0] for motion in motions]),
        "process_noise": torch.stack([motion[1][0] for motion in motions]),
        "observation": torch.eye(2, 4).double(),
        "observation_noise": torch.eye(2).double(),
        "initial_mean": torch.zeros(4).double(),
        "initial_covariance": 10 * torch.eye(4).double(),
    } | changes
    return SwitchingLinearGaussian(**values)


def walks() -> torch.Tensor:
    return normal(TRACKS, STEPS, 2).cumsum(1)


def with_gaps() -> torch.Tensor:
    y = walks()
    y[3, 5] = torch.nan
    y[4, 6, 1] = torch.nan
    y[:, 9] = torch.nan
    return y


def in_torch(monkeypatch) -> None:
    monkeypatch.setattr(normals, "entry_points", lambda: None)


def agree(ours, theirs, tolerance: float) -> None:
    """Tolerance relative to the largest entry of a field."""
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            close(a, b, tolerance * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("method", RUNS)
@pytest.mark.parametrize("data", [walks, with_gaps], ids=lambda data: data.__name__)
@pytest.mark.parametrize("batch", [1, TRACKS])
def test_filters_are_the_same_in_torch(method, data, batch, monkeypatch):
    model, y = turns(), data()[:batch]
    mask = torch.arange(STEPS) < torch.linspace(4, STEPS, batch).long()[:, None]
    found = RUNS[method](model, y), RUNS[method](model, y, mask=mask)
    in_torch(monkeypatch)
    agree(found[0], RUNS[method](model, y), 1e-13)
    agree(found[1], RUNS[method](model, y, mask=mask), 1e-13)


def test_one_mode_and_all_paths(monkeypatch):
    y = with_gaps()
    found = kalman(turns(1), y), exact(turns(), y[:, :4])
    in_torch(monkeypatch)
    agree(found[0], kalman(turns(1), y), 1e-13)
    agree(found[1], exact(turns(), y[:, :4]), 1e-13)


def test_single_precision(monkeypatch):
    model, y = turns().to(torch.float32), walks().float()
    found = imm(model, y)
    assert found.mean.dtype == torch.float32
    in_torch(monkeypatch)
    agree(found, imm(model, y), 1e-5)


def test_parameters_of_every_sequence(monkeypatch):
    noise = normal(TRACKS, STEPS, 3, 1, 1).exp() * torch.eye(2).double()
    model, y = turns(observation_noise=noise), with_gaps()
    found = imm(model, y)
    in_torch(monkeypatch)
    agree(found, imm(model, y), 1e-13)


def test_a_vague_prior_is_still_done_in_josephs_form(monkeypatch):
    model = turns(initial_covariance=1e15 * torch.eye(4).double(), observation_noise=1e-4 * torch.eye(2).double())
    found = imm(model, with_gaps())
    in_torch(monkeypatch)
    expected = imm(model, with_gaps())
    close(found.mean, expected.mean, 1e-9)
    close(found.log_likelihood, expected.log_likelihood, 1e-9)
    close(found.covariance, expected.covariance, 1e-9, rtol=1e-9)


def test_smoothers_and_innovations(monkeypatch):
    model, y = turns(), with_gaps()
    found = smooth(model, y).mean, innovations(model, y).scores
    in_torch(monkeypatch)
    close(found[0], smooth(model, y).mean, 1e-11)
    torch.testing.assert_close(found[1], innovations(model, y).scores, rtol=1e-11, atol=1e-11, equal_nan=True)


def test_functions_as_modes(monkeypatch):
    noise = torch.diag(torch.tensor([4.0, 1e-4])).double()
    modes = [
        NonlinearMode(motion, process_noise(acceleration, 0.1), range_bearing, noise, angles=(1,))
        for motion, acceleration in ((straight, 0.1), (turning, 1.0))
    ]
    mean = torch.tensor([300.0, 2.0, 400.0, -1.0, 0.05]).double()
    model = SwitchingNonlinear(
        turns(2).transition, modes, initial_mean=mean, initial_covariance=torch.diag(mean.square() / 100)
    )
    y = torch.tensor([500.0, 0.93]).double() + normal(TRACKS, STEPS, 2) * torch.tensor([2.0, 0.01]).double()
    y[2, 5, 1] = torch.nan
    with torch.no_grad():
        found = imm(model, y)
        in_torch(monkeypatch)
        agree(found, imm(model, y), 1e-12)


def test_gradients_and_values_beside_them(monkeypatch):
    y = with_gaps()
    noise = torch.eye(2).double().requires_grad_()
    recorded = imm(turns(observation_noise=noise), y)
    agree(type(recorded)(*(field if field is None else field.detach() for field in recorded)), imm(turns(), y), 1e-13)
    recorded.total_log_likelihood.sum().backward()
    native_gradient, noise.grad = noise.grad, None
    in_torch(monkeypatch)
    imm(turns(observation_noise=noise), y).total_log_likelihood.sum().backward()
    close(native_gradient, noise.grad, 0.0)  # torch both times


def test_the_kernel_serves_whole_runs_and_nothing_that_is_differentiated(monkeypatch):
    calls = Counter()
    enter = normals.enter
    monkeypatch.setattr(normals, "enter", lambda name, *rest: calls.update([name]) or enter(name, *rest))
    imm(turns(), walks())
    # mixing at every step but the first, and the records of all steps together, before and after the observation
    assert calls == {"normalize": 2 * STEPS - 1, "collapse": STEPS - 1 + 2, "eliminate": STEPS}
    calls.clear()
    imm(turns(observation_noise=torch.eye(2).double().requires_grad_()), walks())
    assert not calls


def test_large_results_lie_in_large_pages(monkeypatch):
    monkeypatch.setattr(filter_records, "LARGE_PAGE", 1 << 13)  # so that results of a test are large
    with torch.no_grad():
        found = imm(turns(), walks())
    large = [field for field in found[:-1] if field.numel() * field.element_size() >= 1 << 12]
    assert 3 <= len(large) < len(found) - 1
    assert all(field.data_ptr() % (1 << 13) == 0 for field in large)
    agree(found, imm(turns(), walks()), 0.0)
