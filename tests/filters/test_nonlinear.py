"""Non-linear modes: linear functions against the linear engine, angles, iterations, refusals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from cumulant.filters import (
    Cubature,
    Extended,
    GaussHermite,
    GaussianMode,
    NonlinearMode,
    PropagatedMoments,
    SwitchingNonlinear,
    Unscented,
    exact,
    forecast,
    gpb,
    imm,
    kalman,
    smooth,
)
from tests.compare import close
from tests.filters.oracle import NAN, model_of, parameters, same, series, t

RULES = [Extended(), Unscented(), Unscented(1e-2, 2.0, 1.0), Cubature(), GaussHermite(3)]
GAPPY = series(6, batch=(3,)).clone()
GAPPY[0, 0, 1], GAPPY[1, 2], GAPPY[2, 3, 0], GAPPY[2, 1] = NAN, NAN, NAN, NAN


def affine(matrix, offset, x, step):
    return x @ matrix.mT + offset


def as_functions(p, rule, start="prior", linear=()):
    """The linear model of NumPy parameters with maps given as functions; those in ``linear`` keep matrices."""
    transition, f, q, h, r, b, c, mean, covariance, first = map(t, p)
    modes = []
    for k in range(len(f)):
        maps = partial(affine, f[k], b[k]), partial(affine, h[k], c[k])
        modes.append(NonlinearMode(maps[0], q[k], maps[1], r[k], rule=rule))
        if k in linear:
            modes[-1] = NonlinearMode(f[k], q[k], h[k], r[k])
    law = {"initial_mean": mean, "initial_covariance": covariance, "initial_modes": first}
    return SwitchingNonlinear(transition, modes, **law, start=start)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_linear_functions_are_the_linear_engine(rule, start):
    p = parameters(modes=2)
    functions, matrices = as_functions(p, rule, start), model_of(p, start)
    for run in (imm, gpb, partial(gpb, order=1), partial(gpb, order=3), partial(exact)):
        same(run(functions, GAPPY), run(matrices, GAPPY), 1e-10)


@pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
@pytest.mark.parametrize("rule", [Extended(), Unscented(), Cubature(), GaussHermite(3)], ids=str)
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_linear_functions_are_smoothed_like_matrices(rule, start):
    p, mask = parameters(modes=2), torch.arange(6) < torch.tensor([[6], [2], [4]])
    functions, matrices = as_functions(p, rule, start), model_of(p, start)
    fields = ("mean", "covariance", "mode_probabilities", "mode_means", "mode_covariances")
    for options in ({}, *({"method": name} for name in ("kim", "correction", "exact")), {"order": 3}, {"mask": mask}):
        same(smooth(functions, GAPPY, **options), smooth(matrices, GAPPY, **options), 1e-9, fields)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
@pytest.mark.parametrize("rule", [Extended(), Unscented()], ids=str)
def test_a_radar_track_is_smoothed_to_less_than_the_error_of_its_filter(rule):
    """Straight or turning, seen in range and bearing from 1 to 5 km away."""

    def turn(x, step):
        (a, b), rate = x[..., 2:].unbind(-1), 0.05
        sin, cos = np.sin(rate), np.cos(rate)
        moved = x[..., 0] + (sin * a - (1 - cos) * b) / rate, x[..., 1] + ((1 - cos) * a + sin * b) / rate
        return torch.stack([*moved, cos * a - sin * b, sin * a + cos * b], -1)

    straight = torch.eye(4, dtype=torch.float64) + torch.eye(4, dtype=torch.float64).roll(2, 1).triu()
    noise, seen = torch.diag(t([0.01, 0.01, 0.1, 0.1])), torch.diag(t([100.0, 2.7e-5]))
    modes = [NonlinearMode(move, noise, polar, seen, rule=rule, angles=(1,)) for move in (straight, turn)]
    start = {"initial_mean": t([2e3, 1e3, -30, 0]), "initial_covariance": torch.diag(t([1e4, 1e4, 100, 100]))}
    model = SwitchingNonlinear(t([[0.95, 0.05], [0.05, 0.95]]), modes, **start)
    drawn = model.simulate(60, batch_shape=(20,), generator=torch.Generator().manual_seed(0))
    found, before = smooth(model, drawn.observations), gpb(model, drawn.observations)
    errors = [(r.mean - drawn.states)[..., :2].square().sum(-1).mean().sqrt() for r in (found, before)]
    assert errors[0] < 0.7 * errors[1]
    apart = (found.mean - drawn.states)[..., None]
    nees = (apart.mT @ torch.linalg.solve(found.covariance, apart)).mean() / 4
    assert 0.8 < nees < 1.3


def test_matrices_and_functions_stand_side_by_side():
    p = list(parameters(modes=3, d=3))
    p[5][1], p[6][1] = 0, 0
    same(imm(as_functions(p, Cubature(), linear=(1,)), GAPPY), imm(model_of(p), GAPPY), 1e-11)


def test_tracks_end_at_their_own_step():
    p = parameters(modes=2)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    same(imm(as_functions(p, Extended()), GAPPY, mask=mask), imm(model_of(p), GAPPY, mask=mask), 1e-11)


# ---------------------------------------------------------------------- what functions may be


def polar(x, step):
    return torch.stack([torch.sqrt(x[..., 0] ** 2 + x[..., 1] ** 2), torch.atan2(x[..., 1], x[..., 0])], -1)


EYE = torch.eye(2, dtype=torch.float64)


def radar(rule=None, mean=(-3.0, 0.05), turn=0.0, **options):
    """A point that hardly moves, seen in range and bearing where the bearing jumps from π to −π."""

    def observe(x, step):
        y = polar(x, step)
        return torch.stack([y[..., 0], y[..., 1] + turn], -1)

    mode = NonlinearMode(EYE, 0.01 * EYE, observe, 0.01 * EYE, rule=rule or Extended(), angles=(1,), **options)
    return SwitchingNonlinear(t([[1.0]]), [mode], initial_mean=t(mean), initial_covariance=0.1 * EYE)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_bearing_is_known_up_to_whole_turns(rule):
    y = t([[3.0, 3.1], [3.0, -3.1], [3.1, 3.13], [3.0, -3.14]])
    found = kalman(radar(rule), y)
    same(kalman(radar(rule), y + t([0, 2 * torch.pi])), found, 1e-10)
    same(kalman(radar(rule, turn=-4 * torch.pi), y), found, 1e-10)
    assert (found.mean[:, 0] < -2.5).all()  # without wrapping the first step is pulled to the other side
    close(found.mean[-1], t([-3.0, 0.0]), 0.1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_answer_does_not_depend_on_where_angles_begin(rule):
    """A problem and the same turned by a half circle, so that the bearing no longer jumps."""
    y = t([[3.0, 3.1], [3.0, -3.1], [3.1, NAN], [NAN, -3.14], [NAN, NAN], [3.0, 3.0]])
    half = kalman(radar(rule), y)
    whole = kalman(radar(rule, mean=(3.0, -0.05)), y - t([0, torch.pi]))
    close(half.mean, -whole.mean, 1e-10)
    close(half.covariance, whole.covariance, 1e-10)
    close(half.log_likelihood, whole.log_likelihood, 1e-10)


def heading_model(rule, cut):
    """A heading that grows by 0.5 a step, cut to (−π, π] by the function or not; seen through its sine and cosine."""

    def turn(speed, x, step):
        moved = x + speed
        return torch.atan2(moved.sin(), moved.cos()) if cut else moved

    def observe(x, step):
        return torch.cat([x.sin(), x.cos()], -1)

    one = EYE[:1, :1]
    modes = [
        NonlinearMode(partial(turn, speed), 0.01 * one, observe, 0.05 * EYE, rule=rule, state_angles=(0,))
        for speed in (0.5, 0.2)
    ]
    rows = t([[0.9, 0.1], [0.2, 0.8]])
    return SwitchingNonlinear(rows, modes, initial_mean=t([3.0]), initial_covariance=0.1 * one)


@pytest.mark.parametrize("rule", [Extended(), Unscented(), Cubature(), GaussHermite(3)], ids=str)
def test_a_heading_goes_on_beyond_a_half_circle(rule):
    angle = 3.0 + 0.5 * torch.arange(12, dtype=torch.float64)
    y = torch.stack([angle.sin(), angle.cos()], -1)
    cut, free = imm(heading_model(rule, True), y), imm(heading_model(rule, False), y)
    same(cut, free, 1e-9)
    close(free.mean[:, 0], angle, 0.1)


def test_modes_on_two_sides_of_the_half_circle_are_mixed_across_it():
    model = heading_model(Extended(), cut=False)
    law = {"initial_mean": t([[3.1], [-3.1]]), "initial_covariance": 1e-4 * EYE[:1, :1]}
    split = SwitchingNonlinear(model.transition, model.mode_models, **law)
    found = imm(split, t([[NAN, NAN]]))
    close(found.mean[0, 0].cos(), -1, 1e-12)
    close(found.covariance[0, 0, 0], 1e-4 + (torch.pi - 3.1) ** 2, 1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_noise_that_enters_linearly_inside_is_additive_noise(rule):
    """f(x, w) = g(x) + B w is g with noise B Q Bᵀ, for rules that are exact in w."""
    b, q, c, r = t([[1.0], [0.5]]), t([[0.3]]), t([[1.0, 0.2], [0.0, 1.0]]), 0.1 * EYE

    def f(x, step):
        return x + 0.1 * torch.sin(x.flip(-1))

    def inside(x, w, step):
        return f(x, step) + w @ b.mT

    def seen(x, v, step):
        return polar(x, step) + v @ c.mT

    law = {"initial_mean": t([3.0, 1.0]), "initial_covariance": 0.1 * EYE}
    general = NonlinearMode(
        inside, q, seen, r, rule=rule, angles=(1,), additive_process_noise=False, additive_observation_noise=False
    )
    plain = NonlinearMode(f, b @ q @ b.mT, polar, c @ r @ c.mT, rule=rule, angles=(1,))
    y = t([[3.1, 0.3], [3.3, NAN], [3.2, 0.4]])
    a, e = (kalman(SwitchingNonlinear(t([[1.0]]), [mode], **law), y) for mode in (general, plain))
    exact_in_noise = isinstance(rule, Extended | GaussHermite)  # others choose points by the size of (x, w)
    same(a, e, 1e-9 if exact_in_noise else 0.02)


def test_iterations_of_an_extended_update_end_at_the_mode_of_the_posterior():
    mean, y = t([1.0, 0.5]), t([[4.0, 0.9]])

    def loss(x):
        away = y[0] - polar(x, 0)
        return ((x - mean) ** 2).sum() / 0.1 / 2 + (away**2).sum() / 0.01 / 2

    found = kalman(radar(mean=mean, iterations=30), y).mean[0]
    close(torch.func.grad(loss)(found), 0, 1e-8)
    once = kalman(radar(mean=mean), y).mean[0]
    assert loss(found) < loss(once) - 0.1


def test_iterations_change_nothing_for_linear_functions_or_missing_rows():
    p = parameters(modes=2)
    linear = as_functions(p, Cubature())
    modes = [replace(m, iterations=3) for m in linear.mode_models if isinstance(m, NonlinearMode)]
    law = {name: getattr(linear, name) for name in ("initial_mean", "initial_covariance", "initial_modes")}
    same(imm(SwitchingNonlinear(linear.transition, modes, **law), GAPPY), imm(linear, GAPPY), 1e-10)


def test_posterior_linearisation_is_nearer_to_the_exact_posterior():
    """A point known to 0.3 seen by a sharp radar: the mean by quadrature over a fine grid."""
    y = t([[1.6, 0.9]])
    axis = torch.linspace(-2, 4, 1201, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    log_weight = -((grid - t([1.0, 0.5])) ** 2).sum(-1) / 0.2 - ((y - polar(grid, 0)) ** 2).sum(-1) / 0.02
    truth = torch.softmax(log_weight, 0) @ grid
    errors = [
        (kalman(radar(rule, (1.0, 0.5), iterations=count), y).mean[0] - truth).norm()
        for rule in (Extended(), Cubature())
        for count in (1, 5)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[3] < 0.5 * errors[2]


# ---------------------------------------------------------------------- times, inputs, tracks


def drift(x, u):
    """Constant velocity over a gap u."""
    return torch.stack([x[..., 0] + u[..., 0] * x[..., 1], x[..., 1]], -1)


def drift_noise(u):
    gap = u[..., 0]
    return torch.stack([torch.stack([gap**3 / 3, gap**2 / 2], -1), torch.stack([gap**2 / 2, gap], -1)], -2)


def drifting(inputs, rule):
    modes = [
        NonlinearMode(drift, lambda u, k=k: k * drift_noise(u), lambda x, u: x[..., :1], t([[0.5]]), rule=rule)
        for k in (1.0, 9.0)
    ]
    law = {"initial_mean": t([0.0, 1.0]), "initial_covariance": EYE, "inputs": inputs, "start": "belief"}
    return SwitchingNonlinear(t([[0.9, 0.1], [0.2, 0.8]]), modes, **law)


@pytest.mark.parametrize("rule", [Extended(), Unscented(), Cubature()], ids=str)
def test_tracks_with_times_of_their_own_are_filtered_as_alone(rule):
    gaps = t(np.random.default_rng(0).uniform(0.1, 2, (2, 3, 7, 1)))
    y = series(7, 1, batch=(2, 3))
    together = gpb(drifting(gaps, rule), y, order=3)
    for index in np.ndindex(2, 3):
        alone = gpb(drifting(gaps[index], rule), y[index], order=3)
        close(together.mean[index], alone.mean, 1e-11)
        close(together.log_likelihood[index], alone.log_likelihood, 1e-11)


def test_functions_get_the_number_of_the_step_without_inputs():
    seen = []

    def f(x, step):
        seen.append(step)
        return x

    mode = NonlinearMode(f, EYE, EYE, EYE)
    kalman(SwitchingNonlinear(t([[1.0]]), [mode], initial_mean=t([0.0, 0.0]), initial_covariance=EYE), series(4))
    assert seen == [0, 1, 2, 3]  # once at construction


def test_forecasts_are_steps_without_observations():
    model = heading_model(Cubature(), cut=False)
    y = t([[0.1, -1.0], [-0.4, -0.9]])
    ahead = forecast(model, imm(model, y), 3)
    on = imm(model, torch.cat([y, torch.full((3, 2), NAN).double()]))
    close(ahead.mean, on.mean[2:], 1e-12)
    close(ahead.covariance, on.covariance[2:], 1e-12)
    close(ahead.mode_probabilities, on.mode_probabilities[2:], 1e-12)
    points = on.mean[2:, 0] + on.covariance[2:, 0, 0].sqrt() * torch.linspace(-6, 6, 401)[:, None].double()
    weights = torch.softmax(-(torch.linspace(-6, 6, 401).double() ** 2) / 2, 0)
    close(ahead.observation_mean[:, 0], weights @ points.sin(), 0.02)


@pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
@pytest.mark.parametrize("rule", [Extended(), Cubature()], ids=str)
def test_smoothing_has_inputs_lengths_and_gradients_too(rule):
    gaps = t(np.random.default_rng(0).uniform(0.1, 2, (3, 6, 1)))
    y = series(6, 1, batch=(3,))
    mask = torch.arange(6) < torch.tensor([[6], [3], [5]])
    together = smooth(drifting(gaps, rule), y, mask=mask)
    for k, length in enumerate((6, 3, 5)):
        alone = smooth(drifting(gaps[k], rule), y[k, :length])
        close(together.mean[k, :length], alone.mean, 1e-9)
        close(together.covariance[k, :length], alone.covariance, 1e-9)
    data = t([[2.1, 0.4], [2.4, NAN], [2.0, 0.6]])
    theta = THETA.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: smooth(turning(x, rule), data).mean.square().sum(), theta, atol=1e-5)


# ---------------------------------------------------------------------- derivatives


def turning(theta, rule):
    """A model with a parameter in every part, all captured by functions or made from it."""

    def f(x, step):
        return torch.stack([x[..., 0] + theta[0] * torch.sin(x[..., 1]), theta[1] * x[..., 1]], -1)

    def h(x, step):
        return polar(x + theta[2], step)

    modes = [
        NonlinearMode(f, theta[3].exp() * EYE, h, theta[4].exp() * EYE, rule=rule, angles=(1,)),
        NonlinearMode(lambda x, step: x * theta[1], EYE, h, EYE, rule=rule, angles=(1,), iterations=2),
    ]
    stay = torch.sigmoid(theta[5])
    rows = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])])
    return SwitchingNonlinear(rows, modes, initial_mean=theta[6:8], initial_covariance=EYE * theta[8].exp())


THETA = t([0.3, 0.9, 0.1, -1.0, -2.0, 1.0, 2.0, 1.0, -0.5])


@pytest.mark.parametrize("rule", [Extended(), Unscented(), Cubature(), GaussHermite(3)], ids=str)
def test_gradients_reach_what_functions_capture(rule):
    y = t([[[2.1, 0.4], [2.4, NAN], [2.0, 0.6]], [[2.0, 0.5], [NAN, NAN], [2.2, 0.1]]])

    def loss(theta):
        return gpb(turning(theta, rule), y).log_likelihood.sum()

    theta = THETA.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, theta, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss(theta), theta)
    assert (gradient.abs() > 1e-3).all()
    with torch.no_grad():  # the same value by the path that keeps no derivatives
        close(loss(THETA), loss(theta).detach(), 1e-12)


@pytest.mark.parametrize("rule", [Extended(), Cubature()], ids=str)
def test_every_way_of_differentiating_gives_one_gradient(rule):
    y = t([[2.1, 0.4], [2.4, NAN], [2.0, 0.6]])

    def loss(theta):
        return imm(turning(theta, rule), y).log_likelihood.sum()

    theta = THETA.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(theta), theta)
    close(torch.func.grad(loss)(THETA), gradient, 1e-10)
    along = t(np.random.default_rng(0).normal(size=9))
    with dual_level():
        close(unpack_dual(loss(make_dual(THETA, along))).tangent, gradient @ along, 1e-10)
    close(torch.func.jvp(loss, (THETA,), (along,))[1], gradient @ along, 1e-10)


def test_nothing_keeps_a_graph_that_nobody_asked_for():
    found = imm(turning(THETA, Extended()), t([[2.1, 0.4], [2.4, NAN]]))
    assert not any(part.requires_grad for part in found if isinstance(part, torch.Tensor))


def test_second_derivatives_exist():
    y = t([[2.1, 0.4], [2.4, NAN], [2.0, 0.6]])
    theta = THETA.clone().requires_grad_()
    for rule in (Extended(), Cubature()):
        assert torch.autograd.gradgradcheck(lambda x, r=rule: imm(turning(x, r), y).log_likelihood.sum(), theta)


# ---------------------------------------------------------------------- own modes and numbers at their limits


class OwnLinear(GaussianMode):
    """A linear mode by hand, without the unexplained part."""

    def __init__(self, f, q, h, r):
        self.f, self.q, self.h, self.r = f, q, h, r

    def predict(self, mean, covariance, t):
        cross = covariance @ self.f.mT
        return PropagatedMoments(mean @ self.f.mT, self.f @ cross + self.q, cross)

    def observe(self, mean, covariance, t):
        cross = covariance @ self.h.mT
        return PropagatedMoments(mean @ self.h.mT, self.h @ cross + self.r, cross)


def test_a_mode_of_your_own_needs_two_methods():
    p = list(parameters(modes=3))
    p[5][:], p[6][:] = 0, 0
    transition, f, q, h, r, _, _, mean, covariance, first = map(t, p)
    modes = [OwnLinear(f[0], q[0], h[0], r[0]), NonlinearMode(f[1], q[1], h[1], r[1])]
    modes.append(NonlinearMode(partial(affine, f[2], 0), q[2], partial(affine, h[2], 0), r[2], rule=Cubature()))
    law = {"initial_mean": mean, "initial_covariance": covariance, "initial_modes": first}
    same(gpb(SwitchingNonlinear(transition, modes, **law), GAPPY, order=3), gpb(model_of(p), GAPPY, order=3), 1e-10)


@pytest.mark.parametrize("rule", [Extended(), Cubature()], ids=str)
def test_a_vague_prior_and_a_sharp_sensor_keep_their_digits(rule):
    mode = NonlinearMode(lambda x, step: x, 1e-4 * EYE, lambda x, step: x, 1e-4 * EYE, rule=rule)
    law = {"initial_mean": t([0.0, 0.0]), "initial_covariance": 1e20 * EYE}
    found = kalman(SwitchingNonlinear(t([[1.0]]), [mode], **law), t([[1.0, 2.0]]))
    tolerance = 1e-10 if isinstance(rule, Cubature) else 1e-14  # points 1e10 away have so many digits
    close(found.mean[0], t([1.0, 2.0]), 1e-6 if isinstance(rule, Cubature) else 1e-14)
    close(found.covariance[0], 1e-4 * EYE, tolerance)


@pytest.mark.parametrize("rule", [Extended(), Cubature()], ids=str)
def test_a_state_without_variance_stays_where_the_function_puts_it(rule):
    mode = NonlinearMode(lambda x, step: x + torch.sin(x), 0 * EYE, polar, EYE, rule=rule)
    law = {"initial_mean": t([1.0, 2.0]), "initial_covariance": 0 * EYE}
    found = kalman(SwitchingNonlinear(t([[1.0]]), [mode], **law), series(3))
    x = t([1.0, 2.0])
    for k in range(3):
        close(found.mean[k], x, 1e-13)
        x = x + torch.sin(x)
    close(found.covariance, 0, 1e-13)


def test_simulated_sequences_have_the_moments_of_the_model():
    model = radar(mean=(3.0, 1.0))
    drawn = model.simulate(3, batch_shape=(20000,), generator=torch.Generator().manual_seed(0))
    assert drawn.observations.shape == (20000, 3, 2)
    close(drawn.states[:, 2].mean(0), t([3.0, 1.0]), 0.01)
    close(torch.cov(drawn.states[:, 2].mT), (0.1 + 2 * 0.01) * EYE, 0.005)
    close(torch.cov((drawn.observations[:, 2] - polar(drawn.states[:, 2], 0)).mT), 0.01 * EYE, 0.001)


# ---------------------------------------------------------------------- refusals


def one_mode(**change):
    arguments = {"dynamics": EYE, "process_noise": EYE, "observation": polar, "observation_noise": EYE} | change
    law = {"initial_mean": t([0.0, 1.0]), "initial_covariance": EYE}
    return SwitchingNonlinear(t([[1.0]]), [NonlinearMode(**arguments)], **law)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamics": lambda x, s: x[..., 0]}, r"mode_models\[0\].dynamics, step 0: expected shape \(2, 1, 2\)"),
        ({"dynamics": lambda x, s: x[..., :1]}, r"dynamics, step 0: expected shape .* got \(2, 1, 1\)"),
        ({"dynamics": lambda x, s: 3.0}, "dynamics, step 0: expected a tensor, got float"),
        ({"dynamics": lambda x, s: x.float()}, r"dynamics, step 0: expected dtype torch.float64, got torch.float32"),
        ({"observation_noise": lambda s: torch.ones(2)}, "expected a square matrix"),
        ({"observation": t([[1.0, 0.0]])}, r"expected a covariance \(…, 1, 1\), got \(1, 2, 2\)"),
        ({"process_noise": -EYE}, "expected positive semidefinite matrices"),
        ({"observation_noise": 0 * EYE}, "expected positive definite matrices"),
        ({"angles": (2,)}, "expected angles below 2"),
        ({"angles": (-1,)}, "expected indices of entries"),
        ({"iterations": 0}, "at least 1"),
        ({"dynamics": EYE, "additive_process_noise": False}, "expected a function where additive_process_noise"),
        ({"dynamics": EYE[None]}, "expected a matrix or a function"),
    ],
)
def test_modes_that_cannot_be_are_refused_in_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        one_mode(**change)


def test_a_function_without_a_value_is_refused_with_mode_step_and_sequence():
    def f(x, step):
        return torch.where(x > 50, NAN, x) if step == 2 else x

    calm, wild = NonlinearMode(EYE, EYE, EYE, EYE), NonlinearMode(f, EYE, EYE, EYE)
    law = {"initial_mean": t([0.0, 1.0]), "initial_covariance": EYE}
    model = SwitchingNonlinear(0.5 * torch.ones(2, 2).double(), [calm, wild], **law)
    y = torch.zeros(4, 5, 2).double()
    assert imm(model, y).mean.isfinite().all()
    y[3, :, 0] = 200.0
    with pytest.raises(
        ValueError, match=r"mode_models\[1\].dynamics, step 2, sequence 3: expected finite numbers, got a value"
    ):
        imm(model, y)
    corner = SwitchingNonlinear(
        t([[1.0]]), [NonlinearMode(EYE, EYE, polar, EYE)], initial_mean=t([0.0, 0.0]), initial_covariance=EYE
    )
    with pytest.raises(ValueError, match=r"observation, step 0, sequence 0: expected finite numbers, got a derivative"):
        kalman(corner, torch.ones(1, 2).double())


def test_models_that_do_not_fit_together_are_refused():
    mode, law = NonlinearMode(EYE, EYE, EYE, EYE), {"initial_mean": t([0.0, 1.0]), "initial_covariance": EYE}
    bearing = NonlinearMode(EYE, EYE, polar, EYE, angles=(1,))
    rows = 0.5 * torch.ones(2, 2).double()
    with pytest.raises(ValueError, match="expected a sequence of M=2 modes, got 1"):
        SwitchingNonlinear(rows, [mode], **law)
    with pytest.raises(TypeError, match="Use NonlinearMode, or subclass GaussianMode"):
        SwitchingNonlinear(rows, [mode, polar], **law)
    with pytest.raises(ValueError, match="expected the same angles in all modes"):
        SwitchingNonlinear(rows, [mode, bearing], **law)
    with pytest.raises(ValueError, match=r"expected matrices \(d=2, d=2\)"):
        SwitchingNonlinear(rows, [mode, mode], **law | {"initial_covariance": EYE[:1, :1]})
    with pytest.raises(ValueError, match=r"expected shape \(T, k\)"):
        SwitchingNonlinear(rows, [mode, mode], **law, inputs=torch.ones(3).double())
    short = SwitchingNonlinear(rows, [mode, mode], **law, inputs=torch.ones(3, 1).double())
    with pytest.raises(ValueError, match="expected at most T=3 steps, got 4"):
        imm(short, series(4))
    tracks = SwitchingNonlinear(rows, [mode, mode], **law, inputs=torch.ones(3, 4, 1).double())
    with pytest.raises(ValueError, match=r"filters\.y: expected batch axes \(3,\), .*, got \(2,\)\."):
        imm(tracks, series(4, batch=(2,)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unscented(alpha=0.0), "Unscented.alpha"),
        (lambda: Unscented(kappa=-2.0).unit_points(2), "Unscented.kappa: expected more than −d = −2"),
        (lambda: GaussHermite(1), "GaussHermite.order: expected at least 2"),
        (lambda: GaussHermite(10).unit_points(6), r"expected at most 65536 points, got 10\^6"),
    ],
)
def test_rules_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
