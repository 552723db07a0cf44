"""Extended and unscented filters against filterpy's, step by step, on three models; the bank of two against its IMM."""

from dataclasses import dataclass
from math import cos, pi, sin

import numpy as np
import pytest
import torch

from cumulant.filters import Extended, NonlinearMode, SwitchingNonlinear, Unscented, imm, kalman
from tests.compare import close
from tests.filters.oracle import t

filterpy = pytest.importorskip("filterpy.kalman", reason="filterpy is in the extra dev")


@dataclass
class Problem:
    """One model twice: as functions of tensors, and as NumPy functions of one vector with their Jacobians."""

    f: object
    h: object
    plain_f: object
    plain_h: object
    jacobian_f: object
    jacobian_h: object
    q: np.ndarray
    r: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    angles: tuple[int, ...] = ()

    def mode(self, rule):
        return NonlinearMode(self.f, t(self.q), self.h, t(self.r), rule=rule, angles=self.angles)

    def model(self, rule):
        law = {"initial_mean": t(self.mean), "initial_covariance": t(self.covariance), "start": "belief"}
        return SwitchingNonlinear(torch.ones(1, 1).double(), [self.mode(rule)], **law)

    def away(self, a, b):
        apart = np.subtract(a, b)
        for k in self.angles:
            apart[k] = (apart[k] + pi) % (2 * pi) - pi
        return apart

    def observations(self, steps=40):
        """Of a simulated path, from a generator of its own."""
        rng, x, seen = np.random.default_rng(0), self.mean, []
        for _ in range(steps):
            x = rng.multivariate_normal(self.plain_f(x), self.q)
            y = rng.multivariate_normal(self.plain_h(x), self.r)
            seen.append([(v + pi) % (2 * pi) - pi if k in self.angles else v for k, v in enumerate(y)])
        return np.array(seen)


def pendulum():
    dt = 0.1
    return Problem(
        f=lambda x, step: torch.stack([x[..., 0] + dt * x[..., 1], x[..., 1] - dt * torch.sin(x[..., 0])], -1),
        h=lambda x, step: torch.sin(x[..., :1]),
        plain_f=lambda x: np.array([x[0] + dt * x[1], x[1] - dt * sin(x[0])]),
        plain_h=lambda x: np.array([sin(x[0])]),
        jacobian_f=lambda x: np.array([[1, dt], [-dt * cos(x[0]), 1]]),
        jacobian_h=lambda x: np.array([[cos(x[0]), 0]]),
        q=np.array([[1e-4, 5e-5], [5e-5, 1e-3]]),
        r=np.array([[0.01]]),
        mean=np.array([1.2, 0.0]),
        covariance=np.diag([0.1, 0.2]),
    )


def falling_body():
    """Height, speed and drag of a falling body, seen by a radar that stands aside."""
    dt, drag = 0.05, 0.4

    def f(x, step):
        height, speed, c = x.unbind(-1)
        fall = speed + dt * (c * torch.exp(-drag * height) * speed**2 - 1)
        return torch.stack([height + dt * speed, fall, c], -1)

    def jacobian(x):
        e = np.exp(-drag * x[0])
        slope = [-dt * drag * x[2] * e * x[1] ** 2, 1 + 2 * dt * x[2] * e * x[1], dt * e * x[1] ** 2]
        return np.array([[1, dt, 0], slope, [0, 0, 1]])

    return Problem(
        f=f,
        h=lambda x, step: torch.sqrt(1 + x[..., :1] ** 2),
        plain_f=lambda x: np.array([x[0] + dt * x[1], x[1] + dt * (x[2] * np.exp(-drag * x[0]) * x[1] ** 2 - 1), x[2]]),
        plain_h=lambda x: np.array([np.sqrt(1 + x[0] ** 2)]),
        jacobian_f=jacobian,
        jacobian_h=lambda x: np.array([[x[0] / np.sqrt(1 + x[0] ** 2), 0, 0]]),
        q=np.diag([1e-6, 1e-5, 1e-5]),
        r=np.array([[1e-4]]),
        mean=np.array([4.0, -1.0, 0.5]),
        covariance=np.diag([0.1, 0.1, 0.05]),
    )


def turn(x, step):
    px, vx, py, vy, w = x.unbind(-1)
    s, c = torch.sin(w), torch.cos(w)
    a, b = s / w, (1 - c) / w
    return torch.stack([px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy, w], -1)


def range_bearing(x, step):
    return torch.stack([torch.hypot(x[..., 0], x[..., 2]), torch.atan2(x[..., 2], x[..., 0])], -1)


def plain_turn(x):
    px, vx, py, vy, w = x
    s, c = sin(w), cos(w)
    a, b = s / w, (1 - c) / w
    return np.array([px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy, w])


def jacobian_turn(x):
    _, vx, _, vy, w = x
    s, c = sin(w), cos(w)
    a, b = s / w, (1 - c) / w
    da, db = (w * c - s) / w**2, (w * s - 1 + c) / w**2
    last = [da * vx - db * vy, -s * vx - c * vy, db * vx + da * vy, c * vx - s * vy, 1]
    rows = [[1, a, 0, -b, 0], [0, c, 0, -s, 0], [0, b, 1, a, 0], [0, s, 0, c, 0], [0, 0, 0, 0, 1]]
    jacobian = np.array(rows, dtype=float)
    jacobian[:, 4] = last
    return jacobian


def jacobian_range_bearing(x):
    rr = x[0] ** 2 + x[2] ** 2
    return np.array([[x[0] / rr**0.5, 0, x[2] / rr**0.5, 0, 0], [-x[2] / rr, 0, x[0] / rr, 0, 0]])


def coordinated_turn():
    """Past the half-line on which a bearing jumps by a whole turn."""
    return Problem(
        f=turn,
        h=range_bearing,
        plain_f=plain_turn,
        plain_h=lambda x: np.array([np.hypot(x[0], x[2]), np.arctan2(x[2], x[0])]),
        jacobian_f=jacobian_turn,
        jacobian_h=jacobian_range_bearing,
        q=np.diag([1.0, 0.5, 1.0, 0.5, 1e-4]),
        r=np.diag([100.0, 1e-4]),
        mean=np.array([-1500.0, -10.0, 300.0, -60.0, 0.05]),
        covariance=np.diag([400.0, 100.0, 400.0, 100.0, 1e-3]),
        angles=(1,),
    )


PROBLEMS = [pendulum(), falling_body(), coordinated_turn()]
NAMES = ["pendulum", "falling body", "coordinated turn"]


def extended(problem):
    """filterpy's filter with the dynamics that its predict leaves to a subclass."""

    class Filter(filterpy.ExtendedKalmanFilter):
        def predict_x(self, u=0):
            self.x = problem.plain_f(self.x)

        def predict(self, u=0):
            self.F = problem.jacobian_f(self.x)
            super().predict(u)

        def update(self, z):
            super().update(z, problem.jacobian_h, problem.plain_h, residual=problem.away)

    one = Filter(len(problem.mean), len(problem.r))
    one.x, one.P, one.Q, one.R = problem.mean.copy(), problem.covariance.copy(), problem.q, problem.r
    return one


def unscented(problem, alpha, beta, kappa):
    d, m = len(problem.mean), len(problem.r)
    points = filterpy.MerweScaledSigmaPoints(d, alpha, beta, kappa)

    def mean(values, weights):
        """Of angles: about the first, as all of them are near."""
        return values[0] + weights @ np.array([problem.away(v, values[0]) for v in values])

    one = filterpy.UnscentedKalmanFilter(
        d, m, 1.0, lambda x: problem.plain_h(x), lambda x, dt: problem.plain_f(x), points, z_mean_fn=mean
    )
    one.residual_z = problem.away
    one.x, one.P, one.Q, one.R = problem.mean.copy(), problem.covariance.copy(), problem.q, problem.r
    return one


def by_filterpy(one, y):
    means, covariances, likelihoods = [], [], []
    for seen in y:
        one.predict()
        one.update(seen)
        means.append(one.x.copy())
        covariances.append(one.P.copy())
        likelihoods.append(one.log_likelihood)
    return np.array(means), np.array(covariances), np.array(likelihoods)


@pytest.mark.parametrize("problem", PROBLEMS, ids=NAMES)
@pytest.mark.parametrize("settings", [None, (0.1, 2.0, 0.0), (0.5, 2.0, 1.0)], ids=["extended", "unscented", "wide"])
def test_a_filter_is_that_of_filterpy_at_every_step(problem, settings):
    y = problem.observations()
    if settings is None:
        rule, theirs = Extended(), extended(problem)
    else:
        rule, theirs = Unscented(*settings), unscented(problem, *settings)
    ours = kalman(problem.model(rule), t(y))
    means, covariances, likelihoods = by_filterpy(theirs, y)
    close(ours.mean, means, 1e-9)
    close(ours.covariance, covariances, 1e-9)
    close(ours.log_likelihood, likelihoods, 1e-9)


def test_two_extended_filters_are_the_imm_of_filterpy():
    calm, lively = coordinated_turn(), coordinated_turn()
    lively.q = lively.q * 50
    y, rows = calm.observations(), np.array([[0.95, 0.05], [0.1, 0.9]])
    law = {"initial_mean": t(calm.mean), "initial_covariance": t(calm.covariance), "start": "belief"}
    ours = imm(SwitchingNonlinear(t(rows), [calm.mode(Extended()), lively.mode(Extended())], **law), t(y))
    bank = filterpy.IMMEstimator([extended(calm), extended(lively)], [0.5, 0.5], rows)
    for k, seen in enumerate(y):
        bank.predict()
        bank.update(seen)
        close(ours.mean[k], bank.x, 1e-9)
        close(ours.covariance[k], bank.P, 1e-9)
        close(ours.mode_probabilities[k], bank.mu, 1e-9)
