"""Tracks whose sensors or turns are not linear, as a `SwitchingNonlinear`.

Its inputs are, for each row of each track, which of the distinct gaps lies before it, that gap, and the point from
which positions in the state are measured.
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
    """The model over gaps (T,) or (tracks, T), each before its row, of tracks seen from origins (tracks, axes)."""
    axes, d = len(model.axes), len(model.states)
    distinct, which = gaps.unique(return_inverse=True)
    origins = torch.zeros(1, axes, dtype=torch.float64) if origins is None else origins
    count = max(len(origins), len(gaps) if gaps.ndim > 1 else 1)
    rows = torch.stack([which.to(torch.float64), gaps], -1).expand(count, -1, -1)
    own = torch.eye(d, dtype=torch.float64)
    keeps = [own[index] for index in model.indices]
    return SwitchingNonlinear(
        model.switching.over(distinct)[which],
        [_mode(model, mode, keep, distinct) for mode, keep in zip(model.modes, keeps, strict=True)],
        initial_mean=torch.stack([model.initial.mean @ (keep.mT @ keep) for keep in keeps], -2),
        initial_covariance=torch.stack([_within(keep, model.initial.covariance) for keep in keeps], -3),
        initial_modes=model.initial.modes,
        start=model.initial.start,
        inputs=torch.cat([rows, origins[:, None].expand(count, rows.shape[1], -1)], -1),
    )


def _within(keep: Tensor, matrix: Tensor) -> Tensor:
    """Matrices (…, d, d) with zeros where a mode has no state."""
    return keep.mT @ (keep @ matrix @ keep.mT) @ keep


def _mode(model: TrackModel, mode: Mode, keep: Tensor, gaps: Tensor) -> NonlinearMode:
    """One mode over distinct gaps, on the common state, of which ``keep`` (d_k, d) is its own.

    What it lacks is 0 as it begins.
    """
    motion = mode.motion
    if isinstance(motion, EstimatedTurn):
        dynamics = partial(_turned, motion, keep)
        noise = keep.mT @ motion.noise(gaps) @ keep
    else:
        steps = discretized(mode, gaps)
        dynamics, noise = _by_gap(keep.mT @ steps.dynamics @ keep), keep.mT @ steps.process_noise @ keep
    added = noise[0] if len(gaps) == 1 else lambda u: noise[_which(u)]
    observation = _observation(model) if mode.observation is None else mode.observation @ keep
    rule, angles = RULES[mode.rule](), model.angles
    return NonlinearMode(dynamics, added, observation, mode.noise, rule=rule, angles=angles)


def _turned(motion: EstimatedTurn, keep: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return motion.flow(x @ keep.mT, u[..., 1]) @ keep


def _which(u: Tensor) -> Tensor:
    """The number of the gap of each track, or one number where it is the same for all that run together."""
    which = u[..., 0].long()
    return which[0] if which.ndim and bool((which == which[0]).all()) else which


def _by_gap(matrices: Tensor) -> Callable[[Tensor, Tensor], Tensor] | Tensor:
    """x ↦ F x with the F of the gap, or one F where all are equal."""
    if bool((matrices == matrices[0]).all()):
        return matrices[0]

    def dynamics(x: Tensor, u: Tensor) -> Tensor:
        f = matrices[_which(u)]
        return x @ f.mT if f.ndim == 2 else (f @ x[..., None])[..., 0]

    return dynamics


def _observation(model: TrackModel) -> Callable[[Tensor, Tensor], Tensor]:
    sensors, axes = [s.sensor for s in model.columns.sensors], len(model.axes)

    def observation(x: Tensor, u: Tensor) -> Tensor:
        absolute = torch.cat([x[..., :axes] + u[..., 2:], x[..., axes:]], -1)
        return torch.cat([sensor(absolute) for sensor in sensors], -1)

    return observation
