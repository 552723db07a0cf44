"""Tracks whose sensors or turns are not linear, as a `SwitchingNonlinear`.

Its inputs are, for each row of each track, the number of the row, the gap before it, and the point from which
positions in the state are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cumulant.filters import Cubature, Extended, GaussHermite, NonlinearMode, SwitchingNonlinear, Unscented
from cumulant.filters.motion import EstimatedTurn
from cumulant.filters.tracking.model import Mode, TrackModel, discretized

RULES = {"extended": Extended, "unscented": Unscented, "cubature": Cubature, "gauss-hermite": GaussHermite}


def switching_nonlinear(model: TrackModel, gaps: Tensor, origins: Tensor | None) -> SwitchingNonlinear:
    """The model over gaps (T,), each before its row, of tracks seen from origins (tracks, axes)."""
    axes, steps, d = len(model.axes), len(gaps), len(model.states)
    origins = torch.zeros(1, axes, dtype=torch.float64) if origins is None else origins
    rows = torch.stack([torch.arange(steps, dtype=torch.float64), gaps], -1).expand(len(origins), -1, -1)
    own = torch.eye(d, dtype=torch.float64)
    keeps = [own[index] for index in model.indices]
    return SwitchingNonlinear(
        model.switching.over(gaps),
        [_mode(model, mode, keep, gaps) for mode, keep in zip(model.modes, keeps, strict=True)],
        initial_mean=torch.stack([keep.mT @ keep @ model.initial.mean for keep in keeps]),
        initial_covariance=torch.stack([_within(keep, model.initial.covariance) for keep in keeps]),
        initial_modes=model.initial.modes,
        start=model.initial.start,
        inputs=torch.cat([rows, origins[:, None].expand(-1, steps, -1)], -1),
    )


def _within(keep: Tensor, matrix: Tensor) -> Tensor:
    """A matrix (d, d) with zeros where a mode has no state."""
    return keep.mT @ (keep @ matrix @ keep.mT) @ keep


def _mode(model: TrackModel, mode: Mode, keep: Tensor, gaps: Tensor) -> NonlinearMode:
    """One mode on the common state, of which ``keep`` (d_k, d) is its own: what it lacks is 0 as it begins."""
    motion = mode.motion
    if isinstance(motion, EstimatedTurn):
        dynamics = partial(_turned, motion, keep)
        noise = keep.mT @ motion.noise(gaps) @ keep
    else:
        steps = discretized(mode, gaps)
        dynamics, noise = _by_row(keep.mT @ steps.dynamics @ keep), keep.mT @ steps.process_noise @ keep
    observation = _observation(model) if mode.observation is None else mode.observation @ keep
    rule, angles = RULES[mode.rule](), model.angles
    return NonlinearMode(dynamics, lambda u: noise[_row(u)], observation, mode.noise, rule=rule, angles=angles)


def _turned(motion: EstimatedTurn, keep: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return motion.flow(x @ keep.mT, u[..., 1]) @ keep


def _row(u: Tensor) -> int:
    """The number of the row, the same for all tracks that run together."""
    return int(u[..., 0].flatten()[0])


def _by_row(matrices: Tensor) -> Callable[[Tensor, Tensor], Tensor] | Tensor:
    """x ↦ F x with the F of the row, or one F where all are equal."""
    if bool((matrices == matrices[0]).all()):
        return matrices[0]
    return lambda x, u: x @ matrices[_row(u)].mT


def _observation(model: TrackModel) -> Callable[[Tensor, Tensor], Tensor]:
    sensors, axes = [s.sensor for s in model.columns.sensors], len(model.axes)

    def observation(x: Tensor, u: Tensor) -> Tensor:
        absolute = torch.cat([x[..., :axes] + u[..., 2:], x[..., axes:]], -1)
        return torch.cat([sensor(absolute) for sensor in sensors], -1)

    return observation
