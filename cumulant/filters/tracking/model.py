"""A switching model of tracks, in continuous time or on a grid: modes, how they switch, where a track starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import SwitchingLinearGaussian
from cumulant.filters.motion import Discretized, EstimatedTurn, Motion, halve
from cumulant.filters.sensors import POSITIONS, all_angles
from cumulant.filters.tracking.table import TableColumns, Track

START_SPREAD = 10.0  # deviations of the sensor that located it, within which a track may start
RULE = "extended"


class Mode(NamedTuple):
    """One mode: names of its state, how that moves, observation (m, d_k), None if not linear, and noise (m, m).

    rule  how laws go through what is not linear: "extended", "unscented", "cubature" or "gauss-hermite"
    kind  the name of the motion in a model file
    """

    name: str
    states: tuple[str, ...]
    motion: Motion | EstimatedTurn
    observation: Tensor | None
    noise: Tensor
    rule: str = RULE
    kind: str = ""


class Switching(NamedTuple):
    """The matrix (M, M), rows from: rates per unit of time if ``timed``, else probabilities of a step."""

    matrix: Tensor
    timed: bool

    def over(self, gaps: Tensor) -> Tensor:
        """Probabilities (T, M, M) of T gaps of time (T,)."""
        if not self.timed:
            return self.matrix.expand(len(gaps), -1, -1)
        halved = halve(self.matrix, gaps)
        p = _rows(torch.matrix_exp(self.matrix * halved.gaps[:, None, None]))
        for again in halved.doublings():
            p = torch.where(again, _rows(p @ p), p)
        return p


class Initial(NamedTuple):
    """mean (d,) and covariance (d, d) of the state, probabilities of the modes (M,), and what they are the law of.

    Tracks that start where they are seen have a mean (tracks, d) and covariance (tracks, d, d) of their own.

    located        whether positions are relative to where each track is first seen
    position_std   the deviation of those positions; None for `START_SPREAD` times that of the sensor
    """

    mean: Tensor
    covariance: Tensor
    modes: Tensor
    start: str
    located: bool = False
    position_std: float | None = None


class Located(NamedTuple):
    """Where a track is first seen: position (axes,), the row that says so, how far off, velocity if known."""

    position: Tensor
    row: int
    deviation: float
    velocity: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TrackModel:
    """A switching model in continuous time, or on a grid; `at` makes it one of discrete steps.

    gate  the probability with which a right measurement passes, or None: every measurement is used
    """

    columns: TableColumns
    modes: tuple[Mode, ...]
    switching: Switching
    initial: Initial
    gate: float | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the common state, those of the largest mode first."""
        return common_states(self.modes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the positions, with which the state begins; () where modes are matrices."""
        if not self.columns.sensors:
            chained = all(mode.states[: len(self.columns.measured)] == self.columns.measured for mode in self.modes)
            return self.columns.measured if chained else ()
        return POSITIONS[: self.columns.sensors[0].sensor.axes]

    @property
    def is_linear(self) -> bool:
        """Whether the model is a `SwitchingLinearGaussian`."""
        return all(isinstance(mode.motion, Motion) and mode.observation is not None for mode in self.modes)

    def at(self, gaps: Sequence[float] | Tensor, origins: Tensor | None = None) -> Any:
        """A `SwitchingLinearGaussian`, or `SwitchingNonlinear`, of tracks whose rows lie these gaps apart.

        gaps     one fewer than rows (none: one row), the same for all tracks, or (tracks, T−1) of every track its own
        origins  (tracks, axes), the points from which positions in the state are measured: needed where a model is
                 located and not linear

        Equal gaps make a linear model without a time axis.
        """
        apart = torch.as_tensor(gaps, dtype=torch.float64)
        if self.columns.step is not None and not bool((apart == self.columns.step_seconds).all()):
            expected = f"gaps of one step {self.columns.step_seconds:g}"
            raise ValueError(sentence("TrackModel.at", expected, "others", "Fill them with NaN."))
        lengths = self._before_each_row(apart)  # ([tracks,] T)
        if not self.is_linear:
            from cumulant.filters.tracking.nonlinear import switching_nonlinear

            return switching_nonlinear(self, lengths, origins)
        distinct, where = lengths.unique(return_inverse=True)
        when = 0 if len(distinct) == 1 else where
        steps = [discretized(mode, distinct) for mode in self.modes]
        return SwitchingLinearGaussian(
            self.switching.over(distinct)[when],
            [s.dynamics[when] for s in steps],
            [s.process_noise[when] for s in steps],
            [mode.observation for mode in self.modes if mode.observation is not None],
            [mode.noise for mode in self.modes],
            initial_mean=[self.initial.mean[..., k] for k in self.indices],
            initial_covariance=[self.initial.covariance[..., k, :][..., k] for k in self.indices],
            initial_modes=self.initial.modes,
            start=self.initial.start,
            embeddings=[torch.eye(len(self.states), dtype=torch.float64)[:, k] for k in self.indices],
        )

    def _before_each_row(self, gaps: Tensor) -> Tensor:
        """The gap before every row, that before the first used by a start from a "belief" alone."""
        first = gaps.new_full((*gaps.shape[:-1], 1), self.columns.step_seconds or 1.0)
        if self.columns.step is None and gaps.shape[-1]:
            first = gaps[..., :1]
        return torch.cat([first, gaps], -1)

    @property
    def indices(self) -> list[list[int]]:
        """Of each mode, where the entries of its state stand in the common one."""
        return [[self.states.index(name) for name in mode.states] for mode in self.modes]

    @property
    def angles(self) -> tuple[int, ...]:
        """Which measured entries are angles."""
        return all_angles([s.sensor for s in self.columns.sensors])

    def shifts(self) -> Tensor:
        """(m, axes): 1 where a measured entry is a position along an axis, and so moves with the origin."""
        names = self.columns.entries
        rows = [[float(name == axis) for axis in self.axes] for name in names]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(names), len(self.axes))

    def locate(self, track: Track) -> Located:
        """Where a track is first seen, by the first row with a sensor that says so."""
        for row, y in enumerate(track.y):
            first = 0
            for s in self.columns.sensors or ():
                part = y[first : first + len(s.columns)]
                first += len(s.columns)
                position = None if bool(part.isnan().all()) else _located(s.sensor, part)
                if position is not None:
                    away = position if s.sensor.position is None else position - s.sensor.position
                    return Located(position, row, s.sensor.spread(float(away.norm())), s.sensor.velocity(part))
            if not self.columns.sensors and not bool(y.isnan().any()):
                return Located(y, row, max(float(mode.noise.diagonal().max()) for mode in self.modes) ** 0.5)
        where = f"track {track.name}"
        advice = "Give mean and covariance under [initial], or leave the track out."
        raise ValueError(sentence(where, "a row that says where the target is", "none", advice))

    def starting(self, tracks: Sequence[Located]) -> TrackModel:
        """The model of these tracks, each with its own start: positions at 0, as far off as its sensor may be.

        A velocity that was measured there is the mean of the velocity.
        """
        if not self.initial.located or not tracks:
            return self
        axes, count = len(self.axes), len(tracks)
        mean, covariance = self.initial.mean.repeat(count, 1), self.initial.covariance.repeat(count, 1, 1)
        for index, located in enumerate(tracks):
            size = self.initial.position_std or START_SPREAD * located.deviation
            covariance[index].diagonal()[:axes] = size**2
            if located.velocity is not None:
                mean[index, axes : axes + len(located.velocity)] = located.velocity
        return replace(self, initial=self.initial._replace(mean=mean, covariance=covariance))


def _located(sensor, y: Tensor) -> Tensor | None:
    """By the entries that are there; where a sensor lacks one, what is left may still say it."""
    if bool(y.isnan().any()):
        kept = [k for k in range(len(y)) if not bool(y[k].isnan())]
        names = tuple(sensor.entries[k] for k in kept)
        sensor = type(sensor)(names, sensor.deviations[kept], sensor.axes, sensor.position, sensor.compass)
        y = y[kept]
    return sensor.locate(y)


def discretized(mode: Mode, gaps: Tensor) -> Discretized:
    """F and Q of a mode over gaps, or a sentence where they overflow."""
    assert isinstance(mode.motion, Motion)
    steps = mode.motion.over(gaps)
    finite = steps.dynamics.isfinite().all(-1).all(-1) & steps.process_noise.isfinite().all(-1).all(-1)
    if not bool(finite.all()):
        got = f"an overflow in mode {mode.name} over a gap of {float(gaps[~finite].min()):g}"
        advice = "Look at the times of the table and at the drift, or use other units."
        raise ValueError(sentence("TrackModel.at", "a motion of finite size over every gap", got, advice))
    return steps


def common_states(modes: Sequence[Mode]) -> tuple[str, ...]:
    """Every name of every mode once, those of the largest mode first."""
    largest_first = sorted(modes, key=lambda mode: -len(mode.states))
    return tuple(dict.fromkeys(name for mode in largest_first for name in mode.states))


def _rows(p: Tensor) -> Tensor:
    """Rows of probabilities again, after rounding."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)
