"""Switching filters: ours on all tracks at once, and filterpy's interacting multiple models on one of them."""

from __future__ import annotations

from math import cos, pi, sin

import numpy as np
import torch
from torch import Tensor

from benchmarks.case import Prepare, Run, ours, peer
from benchmarks.inputs import RadarTracked, Tracked


def filtered(method: str) -> Prepare:
    """`cumulant.filters.imm` or `gpb`, without gradients."""

    def prepare(x: Tracked) -> Run:
        run_filter = ours("cumulant.filters", method)
        model = ours("cumulant.filters", "SwitchingLinearGaussian")(
            *x[1:6], initial_mean=x.mean, initial_covariance=x.covariance, start="belief"
        )

        def run():
            with torch.no_grad():
                belief = run_filter(model, x.observed)
            return {f"{method}, last mean": belief.mean[0, -1]}

        return run

    return prepare


def filterpy(x: Tracked) -> Run:
    """Its IMMEstimator on the first track, a step at a time, as it works."""
    kalman = peer("filterpy.kalman")
    modes, y = len(x.transition), x.observed[0].numpy()

    def run():
        bank = []
        for k in range(modes):
            one = kalman.KalmanFilter(4, 2)
            one.F, one.Q = x.dynamics[k].numpy(), x.process_noise[k].numpy()
            one.H, one.R = x.observation.numpy(), x.observation_noise.numpy()
            one.x, one.P = x.mean.numpy()[:, None].copy(), x.covariance.numpy().copy()
            bank.append(one)
        estimator = kalman.IMMEstimator(bank, torch.full((modes,), 1 / modes).double().numpy(), x.transition.numpy())
        for seen in y:
            estimator.predict()
            estimator.update(seen[:, None])
        return {"imm, last mean": torch.from_numpy(estimator.x[:, 0].copy())}

    return run


def extended_bank(x: RadarTracked) -> Run:
    """`cumulant.filters.imm` of two extended modes on all tracks, Jacobians by automatic differentiation."""
    imm, mode, model = (ours("cumulant.filters", name) for name in ("imm", "NonlinearMode", "SwitchingNonlinear"))
    modes = [
        mode(motion, noise, _range_bearing, x.observation_noise, angles=(1,))
        for motion, noise in zip((x.straight, _turn), x.process_noise, strict=True)
    ]
    bank = model(x.transition, modes, initial_mean=x.mean, initial_covariance=x.covariance, start="belief")

    def run():
        with torch.no_grad():
            found = imm(bank, x.observed)
        return {"imm of extended filters, last mean": found.mean[0, -1]}

    return run


def _turn(x: Tensor, step: int) -> Tensor:
    px, vx, py, vy, w = x.unbind(-1)
    s, c = torch.sin(w), torch.cos(w)
    a, b = s / w, (1 - c) / w
    return torch.stack([px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy, w], -1)


def _range_bearing(x: Tensor, step: int) -> Tensor:
    return torch.stack([(x[..., 0] ** 2 + x[..., 2] ** 2).sqrt(), torch.atan2(x[..., 2], x[..., 0])], -1)


def filterpy_extended_bank(x: RadarTracked) -> Run:
    """Its IMMEstimator of two ExtendedKalmanFilters on the first track, with Jacobians written by hand."""
    kalman = peer("filterpy.kalman")
    straight, y = x.straight.numpy(), x.observed[0].numpy()

    def turned(state):
        px, vx, py, vy, w = state
        s, c = sin(w), cos(w)
        a, b = s / w, (1 - c) / w
        return np.array([px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy, w])

    def turned_jacobian(state):
        _, vx, _, vy, w = state
        s, c = sin(w), cos(w)
        a, b, da, db = s / w, (1 - c) / w, (w * c - s) / w**2, (w * s - 1 + c) / w**2
        last = [da * vx - db * vy, -s * vx - c * vy, db * vx + da * vy, c * vx - s * vy, 1.0]
        rows = [[1, a, 0, -b], [0, c, 0, -s], [0, b, 1, a], [0, s, 0, c], [0, 0, 0, 0]]
        return np.column_stack([rows, last])

    def seen(state):
        return np.array([np.hypot(state[0], state[2]), np.arctan2(state[2], state[0])])

    def seen_jacobian(state):
        rr = state[0] ** 2 + state[2] ** 2
        r = rr**0.5
        return np.array([[state[0] / r, 0, state[2] / r, 0, 0], [-state[2] / rr, 0, state[0] / rr, 0, 0]])

    def away(a, b):
        apart = a - b
        apart[1] = (apart[1] + pi) % (2 * pi) - pi
        return apart

    class Extended(kalman.ExtendedKalmanFilter):
        def predict(self, u=0):
            self.F = turned_jacobian(self.x) if self.turns else straight
            super().predict(u)

        def predict_x(self, u=0):
            self.x = turned(self.x) if self.turns else straight @ self.x

        def update(self, z):
            super().update(z, seen_jacobian, seen, residual=away)

    def run():
        bank = []
        for turns, noise in zip((False, True), x.process_noise, strict=True):
            one = Extended(5, 2)
            one.turns, one.Q, one.R = turns, noise.numpy(), x.observation_noise.numpy()
            one.x, one.P = x.mean.numpy().copy(), x.covariance.numpy().copy()
            bank.append(one)
        estimator = kalman.IMMEstimator(bank, np.array([0.5, 0.5]), x.transition.numpy())
        for row in y:
            estimator.predict()
            estimator.update(row)
        return {"imm of extended filters, last mean": torch.from_numpy(estimator.x.copy())}

    return run
