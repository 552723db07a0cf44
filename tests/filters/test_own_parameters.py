"""Sequences with parameters of their own in one batch: the same numbers as one at a time."""

import pytest
import torch

from cumulant.filters import (
    Extended,
    NonlinearMode,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    Unscented,
    em,
    exact,
    forecast,
    gpb,
    imm,
    innovations,
    kim,
    smooth,
)
from cumulant.samplers import particle_filter, sample_smooth
from tests.compare import close

pytestmark = pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
N, T, M, D = 5, 7, 2, 3
LENGTHS = torch.tensor([7, 7, 7, 4, 1])
MASK = torch.arange(T) < LENGTHS[:, None]


def normal(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)), dtype=torch.float64)


def covariance(*sizes, seed=0):
    root = normal(*sizes, sizes[-1], seed=seed)
    return root @ root.mT + 0.1 * torch.eye(sizes[-1], dtype=torch.float64)


def own_values(m=2) -> dict:
    return {
        "transition": torch.softmax(normal(N, T, M, M), -1),
        "dynamics": 0.5 * normal(N, T, M, D, D, seed=1),
        "process_noise": covariance(N, T, M, D, seed=2),
        "observation": normal(N, T, M, m, D, seed=3),
        "observation_noise": covariance(N, T, M, m, seed=4),
        "state_offset": normal(N, T, M, D, seed=5),
        "observation_offset": normal(N, T, M, m, seed=6),
        "initial_mean": normal(N, M, D, seed=7),
        "initial_covariance": covariance(N, M, D, seed=8),
    }


def observations(model) -> torch.Tensor:
    y = model.simulate(T, batch_shape=(N,), generator=torch.Generator().manual_seed(0)).observations.clone()
    y[1, 2, 0] = y[2, 3] = torch.nan
    return y


def same(batch, alone, tolerance=1e-10):
    """Every field of a record against records of one sequence each."""
    for name, value in zip(batch._fields, batch, strict=True):
        if isinstance(value, torch.Tensor):
            expected = torch.stack([getattr(record, name) for record in alone])
            assert torch.equal(value.isnan(), expected.isnan()), name
            close(value.to(torch.float64).nan_to_num(), expected.to(torch.float64).nan_to_num(), tolerance)


FILTERS = {
    "imm": imm,
    "gpb1": lambda model, y, **options: gpb(model, y, order=1, **options),
    "gpb3": lambda model, y, **options: gpb(model, y, order=3, **options),
    "exact": exact,
}


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("name", FILTERS)
def test_linear_sequences_with_everything_their_own(name, start):
    values, run = own_values(), FILTERS[name]
    model = SwitchingLinearGaussian(**values, start=start)
    assert model.batch_shape == (N,)
    assert model.steps == T
    y = observations(model)
    alone = [SwitchingLinearGaussian(**{key: value[k] for key, value in values.items()}, start=start) for k in range(N)]
    same(run(model, y, mask=MASK), [run(one, y[k], mask=MASK[k]) for k, one in enumerate(alone)])


@pytest.mark.parametrize("name", ["dynamics", "observation_noise", "transition", "initial_mean", "initial_covariance"])
def test_one_parameter_of_their_own_is_enough(name):
    values = own_values()
    rest = {key: value[0] for key, value in values.items() if key != name}
    model, y = SwitchingLinearGaussian(**rest, **{name: values[name]}), observations(SwitchingLinearGaussian(**values))
    alone = [SwitchingLinearGaussian(**rest, **{name: values[name][k]}) for k in range(N)]
    same(imm(model, y), [imm(one, y[k]) for k, one in enumerate(alone)])
    same(smooth(model, y), [smooth(one, y[k]) for k, one in enumerate(alone)])


@pytest.mark.parametrize("method", ["propagation", "correction", "kim", "exact"])
def test_linear_sequences_are_smoothed_scored_and_forecast(method):
    values = own_values()
    model = SwitchingLinearGaussian(**values)
    y = observations(model)
    alone = [SwitchingLinearGaussian(**{key: value[k] for key, value in values.items()}) for k in range(N)]
    pairs = list(zip(alone, y, MASK, strict=True))
    same(
        smooth(model, y, method=method, mask=MASK),
        [smooth(one, rows, method=method, mask=mask) for one, rows, mask in pairs],
    )
    same(kim(model, imm(model, y)), [kim(one, imm(one, rows)) for one, rows, _ in pairs])
    same(innovations(model, y, gate=0.9), [innovations(one, rows, gate=0.9) for one, rows, _ in pairs])
    early = [forecast(one, imm(one, rows[:5]), 2) for one, rows, _ in pairs]
    same(forecast(model, imm(model, y[:, :5]), 2), early)


def test_batch_axes_of_any_number_and_a_vague_start():
    """Axes (2, 2), and priors so vague that the update is Joseph's, at 1e-16 of their variance."""
    values = {key: value[:4] for key, value in own_values().items()}
    values["initial_covariance"] = 1e9 * values["initial_covariance"]
    square = {key: value.unflatten(0, (2, 2)) for key, value in values.items()}
    y = observations(SwitchingLinearGaussian(**own_values()))[:4]
    alone = [
        imm(SwitchingLinearGaussian(**{key: value[k] for key, value in values.items()}), y[k]).mean for k in range(4)
    ]
    close(imm(SwitchingLinearGaussian(**square), y.unflatten(0, (2, 2))).mean.flatten(0, 1), torch.stack(alone), 1e-6)


def test_gradients_reach_the_parameters_of_each_sequence():
    values = own_values()
    y = observations(SwitchingLinearGaussian(**values))
    dynamics = values.pop("dynamics").requires_grad_()
    imm(SwitchingLinearGaussian(dynamics=dynamics, **values), y).total_log_likelihood[1].backward()
    assert dynamics.grad is not None
    assert float(dynamics.grad[1].abs().sum()) > 0
    assert float(dynamics.grad[[0, 2, 3, 4]].abs().sum()) == 0


def swing_over(x, u):
    """A pendulum over the gap u[..., 0], with a length u[..., 1] of its own."""
    angle, speed = x[..., 0], x[..., 1]
    return torch.stack([angle + u[..., 0] * speed, speed - u[..., 0] * torch.sin(angle) / u[..., 1]], -1)


def pendulum(rule, inputs, transition, mean, spread, start="prior") -> SwitchingNonlinear:
    def noise(scale):
        return lambda u: scale * u[..., :1, None] * torch.eye(2, dtype=torch.float64)

    modes = [
        NonlinearMode(swing_over, noise(q), lambda x, u: torch.sin(x[..., :1]), 0.01 * torch.eye(1).double(), rule=rule)
        for q in (1e-3, 1e-1)
    ]
    return SwitchingNonlinear(
        transition, modes, initial_mean=mean, initial_covariance=spread, inputs=inputs, start=start
    )


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("rule", [Extended(), Unscented()], ids=["extended", "unscented"])
def test_nonlinear_sequences_with_times_starts_and_switching_of_their_own(rule, start):
    inputs = 0.1 + torch.rand(N, T, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transition, mean = torch.softmax(normal(N, T, M, M), -1), normal(N, M, 2, seed=1)
    spread = 0.1 * covariance(N, M, 2, seed=2)
    values = inputs, transition, mean, spread
    model = pendulum(rule, *values, start)
    y = observations(model)
    alone = [pendulum(rule, *(value[k] for value in values), start) for k in range(N)]
    pairs = list(zip(alone, y, MASK, strict=True))
    same(imm(model, y, mask=MASK), [imm(one, rows, mask=mask) for one, rows, mask in pairs])
    same(smooth(model, y, mask=MASK), [smooth(one, rows, mask=mask) for one, rows, mask in pairs])
    same(innovations(model, y, gate=0.99), [innovations(one, rows, gate=0.99) for one, rows, _ in pairs])


@pytest.mark.parametrize("start", ["prior", "belief"])
def test_particles_of_sequences_with_parameters_of_their_own(start):
    model = SwitchingLinearGaussian(**own_values(), start=start)
    y = observations(model)
    expected = exact(model, y)
    found = particle_filter(model, y, particles=4000, generator=torch.Generator().manual_seed(1))
    deviation = expected.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert float(((found.mean - expected.mean) / deviation).abs().max()) < 0.1
    assert float((found.mode_probabilities - expected.mode_probabilities).abs().max()) < 0.05


def test_bootstrap_particles_have_starts_of_their_own():
    inputs = torch.full((2, 3, 2), 0.1, dtype=torch.float64)
    mean = torch.tensor([[0.5, 0.0], [-0.5, 0.0]], dtype=torch.float64)[:, None].expand(2, M, 2)
    spread = (1e-6 * torch.eye(2).double()).expand(2, M, 2, 2)
    model = pendulum(Extended(), inputs, torch.full((2, 3, M, M), 0.5).double(), mean, spread)
    y = torch.full((2, 3, 1), torch.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    found = particle_filter(model, y, method="bootstrap", particles=2000, generator=generator)
    close(found.mean[:, 0], mean[:, 0], 1e-3)
    assert model.simulate(3, batch_shape=(2,), generator=generator).states[:, 0, 0].sign().tolist() == [1, -1]


def test_what_needs_shared_parameters_and_batches_that_differ_are_refused():
    values = own_values()
    model = SwitchingLinearGaussian(**values)
    y = observations(model)
    assert "batch=(5,)" in repr(model)
    with pytest.raises(
        ValueError, match=r"filters\.y: expected batch axes \(5,\), .* got \(4,\)\. One sequence for each"
    ):
        imm(model, y[:4])
    with pytest.raises(
        ValueError, match=r"em\.model: expected parameters that all sequences share, got \(5,\) of them"
    ):
        em(model, y)
    with pytest.raises(ValueError, match=r"sample_smooth\.model: expected parameters that all sequences share"):
        sample_smooth(model, y, generator=torch.Generator())
    with pytest.raises(ValueError, match=r"simulate: expected batch axes \(5,\)"):
        model.simulate(3)
    with pytest.raises(ValueError, match=r"init\.batch_shape: expected batch axes \(5,\)"):
        particle_filter(model, y[0], generator=torch.Generator())
    with pytest.raises(ValueError, match=r"one \*batch for all parameters that have it, got .*initial_mean \(4,\)"):
        SwitchingLinearGaussian(**(values | {"initial_mean": values["initial_mean"][:4]}))
    inputs, transition = torch.ones(N, T, 2).double(), torch.full((4, T, M, M), 0.5).double()
    with pytest.raises(
        ValueError, match=r"inputs: expected the batch axes of transition and the initial law, got \(5,\)"
    ):
        pendulum(Extended(), inputs, transition, torch.zeros(2).double(), torch.eye(2).double())
