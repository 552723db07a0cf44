"""Switching filters: ours on all tracks at once, and filterpy's interacting multiple models on one of them."""

from __future__ import annotations

import torch

from benchmarks.case import Prepare, Run, ours, peer
from benchmarks.inputs import Tracked


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
