"""The motion library: exact over any gap, against scipy's exponential and integration and mpmath's digits."""

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from cumulant.filters.motion import (
    Chain,
    EstimatedTurn,
    Motion,
    constant_acceleration,
    constant_jerk,
    constant_velocity,
    estimated_turn,
    random_walk,
    singer,
    turn,
)
from cumulant.special import stumpff
from tests.compare import close


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def van_loan(drift, diffusion, gap):
    """F and Q of dx = A x dt + noise by one exponential of twice the size."""
    d = len(drift)
    whole = expm(np.block([[-drift, diffusion], [np.zeros((d, d)), drift.T]]) * gap)
    f = whole[d:, d:].T
    return f, f @ whole[:d, d:]


def drift_of(name, axes=2):
    """A and L of each linear motion, written by hand: (drift, diffusion), positions first."""
    eye = np.eye(axes)
    if name == "singer":
        a = np.kron(np.diag([1.0, 1.0], 1), eye) + np.kron(np.diag([0, 0, -1 / 4.0]), eye)
        return a, np.kron(np.diag([0, 0, 2 * 1.5**2 / 4.0]), eye)
    if name.startswith("turn"):
        w = np.zeros((axes, axes))
        w[0, 1], w[1, 0] = -0.7, 0.7
        if name == "turn about a vector":
            w = np.array([[0, -0.7, 0.3], [0.7, 0, -0.2], [-0.3, 0.2, 0]])
        zero = np.zeros((axes, axes))
        return np.block([[zero, eye], [zero, w]]), np.block([[zero, zero], [zero, 1.7 * eye]])
    n = {"walk": 1, "velocity": 2, "acceleration": 3, "jerk": 4}[name]
    noise = np.zeros((n, n))
    noise[-1, -1] = 1.7
    return np.kron(np.eye(n, k=1), eye), np.kron(noise, eye)


LINEAR = {
    "walk": random_walk(1.7),
    "velocity": constant_velocity(1.7),
    "acceleration": constant_acceleration(1.7),
    "jerk": constant_jerk(1.7),
    "singer": singer(1.5, 4.0),
    "turn": turn(0.7, 1.7),
    "turn in space": turn(0.7, 1.7, axes=3),
    "turn about a vector": turn(t([0.2, 0.3, 0.7]), 1.7, axes=3),
}


def axes_of(name) -> int:
    return 3 if name.startswith("turn ") else 2


@pytest.mark.parametrize("gap", [0.05, 1.0, 7.0])
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_motion_is_the_exponential_of_its_drift(name, gap):
    f, q = van_loan(*drift_of(name, axes_of(name)), gap)
    moved = LINEAR[name].over(t([gap]))
    np.testing.assert_allclose(moved.dynamics[0], f, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(moved.process_noise[0], q, rtol=1e-8, atol=1e-11 * np.abs(q).max())


@pytest.mark.parametrize("name", LINEAR)
def test_two_gaps_in_a_row_are_one_of_their_sum(name):
    f, q = LINEAR[name].over(t([0.3, 5.1, 5.4]))
    scale = float(q[2].abs().max())
    close(f[1] @ f[0], f[2], 1e-12)
    close((f[1] @ q[0] @ f[1].mT + q[1]) / scale, q[2] / scale, 1e-13)


@pytest.mark.parametrize("name", LINEAR)
def test_no_time_does_nothing_and_gaps_do_not_touch_one_another(name):
    motion = LINEAR[name]
    assert isinstance(motion, Motion)
    f, q = motion.over(t([0.0, 0.4, 1e6]))
    close(f[0], torch.eye(len(f[0]), dtype=torch.float64), 0.0)
    close(q[0], 0.0, 0.0)
    alone = motion.over(t([0.4]))
    close(f[1], alone.dynamics[0], 1e-15)
    close(q[1], alone.process_noise[0], 1e-15)


@pytest.mark.parametrize("ratio", ["1e-9", "1e-4", "0.3", "1", "7", "1000"])
def test_singers_noise_has_all_its_digits_at_any_ratio_of_gap_and_time_constant(ratio):
    """Every entry, relative to itself, against the closed form in 60 digits."""
    with mpmath.workdps(60):
        x, tau = mpmath.mpf(ratio), mpmath.mpf(4)
        gap = x * tau
        far = lambda s: tau**2 * (s / tau - 1 + mpmath.exp(-s / tau))  # noqa: E731
        near = lambda s: tau * (1 - mpmath.exp(-s / tau))  # noqa: E731
        kept = lambda s: mpmath.exp(-s / tau)  # noqa: E731
        pieces = [gap * k / 40 for k in range(41)] if x > 1 else [0, gap]
        parts = (far, near, kept)
        exact = [[float(2 / tau * mpmath.quad(lambda s: a(s) * b(s), pieces)) for b in parts] for a in parts]  # noqa: B023
        f = [float(far(gap)), float(near(gap)), float(kept(gap))]
    moved = singer(1.0, 4.0, axes=1).over(t([float(ratio) * 4]))
    np.testing.assert_allclose(moved.dynamics[0, :, 2], f, rtol=1e-13, atol=1e-300)
    np.testing.assert_allclose(moved.process_noise[0], exact, rtol=2e-13)


def test_a_slow_singer_is_an_acceleration_and_a_quick_one_a_velocity():
    gap = t([2.0])
    slow, acceleration = singer(3.0, 1e9, 1).over(gap), constant_acceleration(2 * 9 / 1e9, 1).over(gap)
    close(slow.process_noise / acceleration.process_noise, torch.ones(1, 3, 3).double(), 1e-8)
    quick, velocity = singer(3.0, 1e-6, 1).over(gap), constant_velocity(2 * 9 * 1e-6, 1).over(gap)
    close(quick.process_noise[:, :2, :2] / velocity.process_noise, torch.ones(1, 2, 2).double(), 1e-5)


# -------------------------------------------------------------------------------------------------------------- turns


@pytest.mark.parametrize("k", range(6))
def test_stumpff_functions_have_all_their_digits(k):
    z = [0.0, 1e-300, 1e-12, 0.3, 3.9999, 4.0, 4.0001, 9.0, 200.0]
    with mpmath.workdps(50):
        series = lambda x: mpmath.nsum(lambda j: (-mpmath.mpf(x)) ** int(j) / mpmath.factorial(k + 2 * j), [0, 120])  # noqa: E731
        exact = [float(series(x)) for x in z]
    np.testing.assert_allclose(stumpff(k, t(z)), exact, rtol=2e-13 if k < 2 else 2e-14, atol=1e-15)


@pytest.mark.parametrize("rate", [0.0, 1e-200, 1e-12, 1e-8, -1e-9])
def test_a_turn_that_hardly_turns_is_a_constant_velocity_without_loss(rate):
    """The textbook form divides 1 − cos ωΔ by ω: at 1e-8 it is 0. Here the limit is reached to the last bit."""
    gaps = t([0.1, 3.0])
    straight, moved = constant_velocity(1.3).over(gaps), turn(rate, 1.3).over(gaps)
    close(moved.dynamics[:, :2, :2], straight.dynamics[:, :2, :2], 0.0)
    close(moved.dynamics.diagonal(dim1=1, dim2=2), straight.dynamics.diagonal(dim1=1, dim2=2), 1e-15)
    sideways = moved.dynamics[:, 1, 2]
    np.testing.assert_allclose(sideways, rate * gaps.numpy() ** 2 / 2, rtol=1e-15)  # ω Δ²/2: its own digits
    close(moved.process_noise, straight.process_noise, 1e-15 + 10 * abs(rate))


def estimated(name) -> EstimatedTurn:
    return {
        "plane": estimated_turn(0.3, 0.01),
        "space": estimated_turn(0.3, 0.01, axes=3),
        "vector": estimated_turn(0.3, 0.01, axes=3, free_axis=True),
    }[name]


def state_of(name, rate=0.4) -> torch.Tensor:
    rates = {"plane": [rate], "space": [rate], "vector": [0.5 * rate, -rate, 0.3 * rate]}[name]
    p = [3.0, -1.0, 2.0][: 2 if name == "plane" else 3]
    return t([*p, *[v * 4 - 5 for v in p], *rates])


def derivative(k):
    """dx/dt of an estimated turn, by NumPy."""

    def slope(_, x):
        v, rate = x[k : 2 * k], x[2 * k :]
        omega = np.array([0, 0, rate[0]]) if len(rate) == 1 else rate
        return np.concatenate([v, np.cross(omega, np.append(v, [0] * (3 - k)))[:k], 0 * rate])

    return slope


@pytest.mark.parametrize("gap", [0.2, 3.0, 11.0])
@pytest.mark.parametrize("name", ["plane", "space", "vector"])
def test_an_estimated_turn_is_the_integral_of_its_differential_equation(name, gap):
    motion, x = estimated(name), state_of(name)
    path = solve_ivp(derivative(motion.axes), (0, gap), x.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(motion.flow(x, gap), path.y[:, -1], atol=1e-8)
    assert len(motion.states(("x", "y", "z")[: motion.axes])) == motion.size == len(x)


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.4, -3.0])
@pytest.mark.parametrize("name", ["plane", "space", "vector"])
def test_an_estimated_turn_is_a_flow(name, rate):
    motion, x = estimated(name), state_of(name, rate)
    close(motion.flow(motion.flow(x, 0.7), 2.2), motion.flow(x, 2.9), 1e-13)
    close(motion.flow(x, 0.0), x, 0.0)
    many = x + torch.arange(3.0)[:, None].double()
    close(motion.flow(many, t([0.1, 1.0, 2.0]))[2], motion.flow(many[2], 2.0), 1e-15)


@pytest.mark.parametrize("name", ["plane", "space"])
def test_an_estimated_turn_moves_its_state_as_a_known_one_does(name):
    motion, x = estimated(name), state_of(name)
    known = turn(0.4, 0.3, axes=motion.axes).over(t([1.7]))
    close(motion.flow(x, 1.7)[:-1], known.dynamics[0] @ x[:-1], 1e-13)


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.4])
@pytest.mark.parametrize("name", ["plane", "space", "vector"])
def test_jacobians_of_turns_are_finite_and_right_at_every_rate(name, rate):
    motion, x = estimated(name), state_of(name, rate)
    jacobian = torch.func.jacrev(motion.flow)(x, t(1.3))
    assert jacobian.isfinite().all()
    step = 1e-6
    central = [
        (motion.flow(x + step * e, 1.3) - motion.flow(x - step * e, 1.3)) / (2 * step)
        for e in torch.eye(len(x)).double()
    ]
    close(jacobian, torch.stack(central, -1), 1e-7)
    close(torch.func.jacfwd(motion.flow)(x, t(1.3)), jacobian, 1e-13)


def test_noise_of_an_estimated_turn():
    q = estimated("space").noise(t([0.0, 2.0]))
    close(q[0], 0.0)
    close(q[1, :6, :6], constant_velocity(0.3, 3).over(t([2.0])).process_noise[0])
    close(q[1, 6], t([0, 0, 0, 0, 0, 0, 0.02]))


@pytest.mark.parametrize("name", ["density", "rate", "deviation", "time_constant"])
@pytest.mark.parametrize("value", [1e-9, 0.5])
def test_gradients_of_parameters_are_finite_and_right(name, value):
    def moved(x):
        gaps = t([0.5, 2.0])
        motion = {
            "density": lambda: Chain(3, x.expand(2)),
            "rate": lambda: turn(x, t(0.7)),
            "deviation": lambda: singer(x, 3.0),
            "time_constant": lambda: singer(1.0, x),
        }[name]()
        return torch.cat([part.flatten() for part in motion.over(gaps)])

    if name == "time_constant" and value < 1e-3:
        value = 0.05
    assert torch.autograd.gradcheck(moved, t(value).requires_grad_(), eps=1e-7 * max(value, 1e-2), atol=1e-5)


def test_bad_numbers_of_motions_are_refused():
    with pytest.raises(
        ValueError, match=r"constant_velocity.q: expected a number, or one for each of 2 axes, got \(3\)"
    ):
        constant_velocity(t([1, 2, 3]))
    with pytest.raises(ValueError, match=r"singer.time_constant: expected numbers > 0, got \[0.0, 0.0\]"):
        singer(1.0, 0.0)
    with pytest.raises(
        ValueError, match=r"Turn.rate: expected a rate \(\) for 2 axes, \(\) or \(3\) for 3, got \(3\) for 2"
    ):
        turn(t([0, 0, 1]), 1.0)
    with pytest.raises(ValueError, match=r"EstimatedTurn.axes: expected 2 or 3 axes, 3 with free_axis, got 2"):
        estimated_turn(1.0, 1.0, free_axis=True)
