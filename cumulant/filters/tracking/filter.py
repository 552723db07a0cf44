"""The engine of `cumulant.filters` over tracks of different lengths and times."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import Filtered, Innovations, ProjectedNormal, SmootherWarning, innovations, m_projection
from cumulant.filters.nonlinear_propagator import NotFiniteError
from cumulant.filters.smoother import Smoothed, filter_and_smooth, is_exact
from cumulant.filters.tracking.batches import batches, cut, padded, padded_gaps
from cumulant.filters.tracking.methods import (
    DEFAULT_PARTICLES,
    PARTICLES,
    check_method,
    method_of,
    slots_of,
    smoother_order,
)
from cumulant.filters.tracking.model import Located, TrackModel
from cumulant.filters.tracking.table import Track
from cumulant.filters.tracking.units import time_text
from cumulant.filters.variance_excess import exceeds, variance_excess
from cumulant.samplers import particle_filter
from cumulant.samplers.particles import ParticleFiltered

TRACKS_NAMED = 5  # tracks in a sentence


class Estimate(NamedTuple):
    """A track, what a filter knew after each of its T rows, and what a smoother knew in the end.

    filtered     a `Filtered`, or `ParticleFiltered`, without batch axes
    smoothed     a `Smoothed` without batch axes, or None
    excess       by which factor the smoothed variances exceed those of a filter of the same order, on the average
                 over the rows and for the entry of the state where it is largest (`variance_excess`); None if not
                 smoothed
    innovations  an `Innovations` without batch axes, with what a gate rejected, or None; the row that located the
                 track has no score
    """

    track: Track
    filtered: Filtered | ParticleFiltered
    smoothed: Smoothed | None = None
    excess: float | None = None
    innovations: Innovations | None = None


def filter_tracks(
    model: TrackModel,
    tracks: Sequence[Track],
    *,
    method: str = "imm",
    smoother: str | None = None,
    order: int | None = None,
    gate: float | None = None,
    score: bool = False,
    particles: int | None = None,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Estimate]:
    """Filter every track: "imm", "kalman" (one mode), "gpb1", "gpb2", …, "exact" for a few rows, or "particles".

        p(x_t, s_t | y_1 … y_t)        after each row of a track, by a filter of `cumulant.filters` (S2-C4, S2-E5)

    Tracks of any times, lengths and starts run as one batch, shorter ones masked after their end; an answer does not
    depend on the tracks that run beside it. ``smoother`` is None or a method of `smooth` ("propagation" is the best),
    of this ``order``: by default k with "gpbk", 2 with "imm", "kalman" and "gpb1". Where it is less certain than its
    filter a `SmootherWarning` names the tracks. ``score`` adds `innovations`, for `consistency`; a ``gate``, by default
    that of the model, rejects outliers. ``particles`` (500) modes are drawn for each track with "particles", states
    given them filtered as by the other methods; numbers depend on ``seed`` (0) and the name of a track alone, and
    gate and scores are those of "imm". ``progress`` is told how many tracks are done.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from cumulant.filters.tracking import read_model, read_tracks
    >>> from cumulant.filters.tracking.example import write_example
    >>> with TemporaryDirectory() as directory:
    ...     table, path = write_example(Path(directory) / "demo")
    ...     model = read_model(path)
    ...     tracks = read_tracks(table, model.columns)
    >>> filter_tracks(model, tracks[:1])[0].filtered.mean.shape                  # (T, d)
    torch.Size([200, 6])
    """
    check_method(method, smoother, particles, seed)
    order = order or smoother_order(method)
    gate = model.gate if gate is None else gate
    starts = [model.locate(track) for track in tracks] if model.initial.located else None
    estimates: dict[int, Estimate] = {}
    less_certain: list[int] = []
    for group in batches(tracks) if method != PARTICLES else [[k] for k in range(len(tracks))]:
        batch = _Batch(model, [tracks[k] for k in group], None if starts is None else [starts[k] for k in group])
        with _tracks_named(model, batch.tracks):
            found = batch.innovations(method, gate) if gate is not None or score else None
            y = batch.y if found is None else found.observations
            if method == PARTICLES:
                filtered = batch.by_particles(y, particles or DEFAULT_PARTICLES, seed or 0)
            else:
                filtered = batch.moved_back(method_of(method)(batch.built, y, batch.mask))
            _check_finite(model, batch.tracks, filtered)
            smoothed, ratios = batch.smoothed(y, smoother, order)
        for index, (k, track) in enumerate(zip(group, batch.tracks, strict=True)):
            length, ratio = len(track.times), ratios[index]
            scored = cut(found, index, length)
            if scored is not None and starts is not None:
                scored = _unlocated(scored, starts[k].row)
            estimates[k] = Estimate(track, cut(filtered, index, length), cut(smoothed, index, length), ratio, scored)
            sure = smoother in (None, "exact") or is_exact(batch.built, order, length)
            if ratio is not None and exceeds(ratio) and not sure:
                less_certain.append(k)
        if progress is not None:
            progress(len(estimates))
    if less_certain and smoother is not None:
        message = _excess_sentence([estimates[k] for k in sorted(less_certain)], smoother, order)
        warnings.warn(message, SmootherWarning, stacklevel=2)
    return [estimates[k] for k in range(len(tracks))]


class _Batch:
    """Tracks that run together: their model of discrete steps, y (tracks, T, m), and the mask that ends each.

    Where tracks start as they are seen, positions are from the origin of each.
    """

    def __init__(self, model: TrackModel, tracks: Sequence[Track], starts: Sequence[Located] | None):
        self.tracks = tracks
        self.model = model.starting(starts or ())
        self.origins = None if starts is None else torch.stack([start.position for start in starts])
        self.built = self.model.at(padded_gaps(tracks), self.origins)
        y, self.mask = padded(tracks)
        self.y = self._seen_from_origins(y)

    def innovations(self, method: str, gate: float | None) -> Innovations:
        groups = _sensor_groups(self.model)
        return innovations(self.built, self.y, slots=slots_of(method), gate=gate, groups=groups)

    def by_particles(self, y: Tensor, particles: int, seed: int) -> ParticleFiltered:
        """One track, its draws independent of the others."""
        (track,) = self.tracks
        mixed = crc32(f"{seed} {track.name}".encode())  # torch uses 32 bits of a seed
        generator = torch.Generator().manual_seed(mixed)
        return self.moved_back(particle_filter(self.built, y, particles=particles, generator=generator))

    def smoothed(self, y: Tensor, smoother: str | None, order: int) -> tuple[Smoothed | None, list[float | None]]:
        """What a smoother says, and by how much its variances exceed those of its filter (`Estimate.excess`)."""
        if smoother is None:
            return None, [None] * len(self.tracks)
        before, smoothed = filter_and_smooth(self.built, y, order=order, method=smoother, mask=self.mask)
        ratios = variance_excess(before, smoothed.covariance, self.mask.sum(-1)).amax(-1).tolist()
        return self.moved_back(smoothed), ratios

    def moved_back(self, record: Any) -> Any:
        """A record with positions from the origin of the model rather than of each track."""
        if self.origins is None:
            return record
        where = torch.nn.functional.pad(self.origins, (0, len(self.model.states) - self.origins.shape[1]))
        names = [name for name in ("prior_mean", "mean") if hasattr(record, name)]
        moved = {name: getattr(record, name) + where[:, None] for name in names}
        return record._replace(**moved, mode_means=record.mode_means + where[:, None, None])

    def _seen_from_origins(self, y: Tensor) -> Tensor:
        """What is measured, from the origin of each track, where it is linear in the state."""
        if self.origins is None or self.model.modes[0].observation is None:
            return y
        return y - (self.origins @ self.model.shifts().mT)[:, None]


def _sensor_groups(model: TrackModel) -> list[range]:
    """Entries that one sensor measures: they pass a gate together."""
    if not model.columns.sensors:
        return [range(len(model.columns.measured))]
    ends = [0]
    for s in model.columns.sensors:
        ends.append(ends[-1] + len(s.columns))
    return [range(a, b) for a, b in pairwise(ends)]


def _unlocated(found: Innovations, row: int) -> Innovations:
    """Scores without those of the row that said where the track is: it was predicted from itself."""
    scores, nis, measured = found.scores.clone(), found.nis.clone(), found.measured.clone()
    scores[row], nis[row], measured[row] = torch.nan, 0, 0
    return found._replace(scores=scores, nis=nis, measured=measured)


def _excess_sentence(estimates: Sequence[Estimate], smoother: str, order: int) -> str:
    """The tracks of which the smoother knows less than its filter."""
    worst = max(estimates, key=lambda e: e.excess or 0.0)
    names = ", ".join(e.track.name for e in estimates[:TRACKS_NAMED])
    names += f" and {len(estimates) - TRACKS_NAMED} more" if len(estimates) > TRACKS_NAMED else ""
    expected = "smoothed variances at most the filtered ones, on the average over rows"
    plural = "s" if len(estimates) > 1 else ""
    got = f"more in track{plural} {names}, {worst.excess:.3g} times as much in {worst.track.name}"
    better = "--method gpb3, gpb4, …" if smoother == "propagation" else "--smoother propagation"
    advice = f"The filtered columns may be nearer the truth there; {better} is better."
    return sentence(f"smoother {smoother} of order {order}", expected, got, advice)


@contextmanager
def _tracks_named(model: TrackModel, tracks: Sequence[Track]) -> Iterator[None]:
    """What the engine refuses, by the names of track and mode and by the time of the row."""
    try:
        yield
    except NotFiniteError as error:
        track = tracks[error.sequence if len(tracks) > 1 else 0]  # of particles, one track at a time
        time = time_text(track.times[min(error.step, len(track.times) - 1)], model.columns.time_unit)
        mode = model.modes[error.mode].name
        where = f"track {track.name}, {model.columns.time} {time}, {error.part} in mode {mode}"
        advice = "Numbers are too large or a target is at a sensor: see [initial], gaps, sensors, units."
        raise ValueError(sentence(where, "finite numbers", error.got, advice)) from error


def _check_finite(model: TrackModel, tracks: Sequence[Track], filtered: Filtered | ParticleFiltered) -> None:
    """A model may run away from any data: refuse with the first row where it has."""
    parts = (
        filtered.mean,
        filtered.covariance.flatten(-2),
        filtered.mode_probabilities,
        filtered.log_likelihood[..., None],
    )
    sound = torch.cat(parts, -1).isfinite().all(-1)
    for index, track in enumerate(tracks):
        finite = sound[index, : len(track.times)]
        if not bool(finite.all()):
            time = track.times[int((~finite).long().argmax())]
            where = f"track {track.name}, {model.columns.time} {time_text(time, model.columns.time_unit)}"
            advice = "The model runs away: look at dynamics, drift and noise, or use other units."
            raise ValueError(sentence(where, "an estimate of finite size", "an overflow", advice))


def measured_moments(model: TrackModel, record: Filtered | ParticleFiltered | Smoothed) -> ProjectedNormal:
    """Mean (T, m) and covariance (T, m, m) of H_s x, what is measured without its noise, under the mixture of modes.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from cumulant.filters.tracking import read_model, read_tracks
    >>> from cumulant.filters.tracking.example import write_example
    >>> with TemporaryDirectory() as directory:
    ...     table, path = write_example(Path(directory) / "demo")
    ...     model = read_model(path)
    ...     tracks = read_tracks(table, model.columns)
    >>> measured_moments(model, filter_tracks(model, tracks[:1])[0].filtered).mean.shape
    torch.Size([200, 2])
    """
    if any(mode.observation is None for mode in model.modes):
        expected, advice = "sensors that are linear in the state", "Use the mean of the state."
        raise ValueError(sentence("measured_moments.model", expected, "others", advice))
    observation = torch.stack([_on_common(model, k) for k in range(len(model.modes))])  # (M, m, d)
    means = (observation @ record.mode_means[..., None])[..., 0]
    covariances = observation @ record.mode_covariances @ observation.mT
    return m_projection(record.mode_probabilities, means, covariances)


def _on_common(model: TrackModel, k: int) -> Tensor:
    """H (m, d) of a mode on the common state."""
    observation = model.modes[k].observation
    assert observation is not None
    return observation @ torch.eye(len(model.states), dtype=torch.float64)[model.indices[k]]


def position_moments(model: TrackModel, record: Filtered | ParticleFiltered | Smoothed) -> ProjectedNormal:
    """Mean (T, axes) and covariance (T, axes, axes) of where a target is; of matrices, of what is measured."""
    if not model.axes:
        return measured_moments(model, record)
    k = len(model.axes)
    return ProjectedNormal(record.mean[..., :k], record.covariance[..., :k, :k])


def located_rows(model: TrackModel, track: Track) -> dict[str, Tensor]:
    """Of each sensor that locates, the positions (T, axes) that it alone would say, NaN where it does not."""
    if not model.columns.sensors:
        return {"measured": track.y}
    found, first = {}, 0
    for s in model.columns.sensors:
        position = s.sensor.locate(track.y[:, first : first + len(s.columns)])
        first += len(s.columns)
        if position is not None:
            found[s.name if len(model.columns.sensors) > 1 else "measured"] = position
    return found
