"""The engine of `cumulant.filters` over tracks of different lengths and times."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters import (
    EXACT,
    IMM,
    Filtered,
    Innovations,
    ProjectedNormal,
    Slots,
    SmootherWarning,
    SwitchingModel,
    exact,
    gpb,
    imm,
    innovations,
    kalman,
    m_projection,
)
from cumulant.filters.smoother import METHODS, Smoothed, filter_and_smooth, is_exact
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.table import Track
from cumulant.filters.tracking.units import time_text
from cumulant.filters.variance_excess import exceeds, variance_excess

GPB = re.compile(r"gpb([1-9]\d{0,2})", re.ASCII)
NAMED = {"imm": imm, "kalman": kalman, "exact": exact}
BATCH_ROWS = 1 << 16  # rows, padding included, that run as one batch
TRACKS_NAMED = 5  # tracks in a sentence


class Estimate(NamedTuple):
    """A track, what a filter knew after each of its T rows, and what a smoother knew in the end.

    filtered     a `Filtered` without batch axes
    smoothed     a `Smoothed` without batch axes, or None
    excess       by which factor the smoothed variances exceed those of a filter of the same order, on the average
                 over the rows and for the entry of the state where it is largest (`variance_excess`); None if not
                 smoothed
    innovations  an `Innovations` without batch axes, with what a gate rejected, or None; the row that located the
                 track has no score
    """

    track: Track
    filtered: Filtered
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
) -> list[Estimate]:
    """Filter every track: "imm", "kalman" (one mode), "gpb1", "gpb2", …, or "exact" for a few rows (S2-C4, S2-E5).

    Tracks whose rows lie equally far apart run as one batch, shorter ones masked after their end; an answer does not
    depend on the tracks that run beside it. ``smoother`` is None or a method of `smooth` ("propagation" is the best),
    of this ``order``: by default k with "gpbk", 2 with "imm", "kalman" and "gpb1". Where it is less certain than its
    filter a `SmootherWarning` names the tracks. ``score`` adds `innovations`, for `consistency`; a ``gate``, by default
    that of the model, rejects outliers.

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
    check_method(method, smoother)
    run, order = method_of(method), order or smoother_order(method)
    gate = model.gate if gate is None else gate
    starts = [model.locate(track) for track in tracks] if model.initial.located else None
    moving = starts is not None and any(start.velocity is not None for start in starts)
    shared = model.starting(starts or ())
    estimates: dict[int, Estimate] = {}
    less_certain: list[int] = []
    for group in [[k] for k in range(len(tracks))] if moving else _groups(tracks):
        batch = [tracks[k] for k in group]
        model = shared if starts is None or not moving else shared.starting([starts[group[0]]])
        origins = None if starts is None else torch.stack([starts[k].position for k in group])
        built = model.at(batch[0].gaps, origins)
        y, mask = _padded(batch)
        y = _seen_from(model, origins, y)
        found = None
        if gate is not None or score:
            found = innovations(built, y, slots=slots_of(method), gate=gate, groups=_sensor_groups(model))
            y = found.observations
        filtered = _moved_back(model, origins, run(built, y, mask))
        _check_finite(model, batch, filtered)
        smoothed, ratios = None, [None] * len(batch)
        if smoother is not None:
            before, smoothed = filter_and_smooth(built, y, order=order, method=smoother, mask=mask)
            ratios = variance_excess(before, smoothed.covariance, mask.sum(-1)).amax(-1).tolist()
            smoothed = _moved_back(model, origins, smoothed)
        for index, (k, track) in enumerate(zip(group, batch, strict=True)):
            length, ratio = len(track.times), ratios[index]
            scored = (
                None if found is None else _unlocated(_cut(found, index, length), starts[k].row if starts else None)
            )
            parts = _cut(filtered, index, length), _cut(smoothed, index, length)
            estimates[k] = Estimate(track, *parts, ratio, scored)
            if ratio is not None and exceeds(ratio) and smoother != "exact" and not is_exact(built, order, length):
                less_certain.append(k)
    if less_certain and smoother is not None:
        message = _excess_sentence([estimates[k] for k in sorted(less_certain)], smoother, order)
        warnings.warn(message, SmootherWarning, stacklevel=2)
    return [estimates[k] for k in range(len(tracks))]


def _seen_from(model: TrackModel, origins: Tensor | None, y: Tensor) -> Tensor:
    """What is measured, from the origin of each track, where it is linear in the state."""
    if origins is None or model.modes[0].observation is None:
        return y
    return y - (origins @ model.shifts().mT)[:, None]


def _moved_back(model: TrackModel, origins: Tensor | None, record: Any) -> Any:
    """A record with positions from the origin of the model rather than of each track."""
    if origins is None:
        return record
    where = torch.nn.functional.pad(origins, (0, len(model.states) - origins.shape[1]))
    moved = {name: getattr(record, name) + where[:, None] for name in ("prior_mean", "mean") if hasattr(record, name)}
    return record._replace(**moved, mode_means=record.mode_means + where[:, None, None])


def _sensor_groups(model: TrackModel) -> list[range]:
    """Entries that one sensor measures: they pass a gate together."""
    if not model.columns.sensors:
        return [range(len(model.columns.measured))]
    ends = [0]
    for s in model.columns.sensors:
        ends.append(ends[-1] + len(s.columns))
    return [range(a, b) for a, b in pairwise(ends)]


def _unlocated(found: Innovations, row: int | None) -> Innovations:
    """Scores without those of the row that said where the track is: it was predicted from itself."""
    if row is None:
        return found
    scores, nis, measured = found.scores.clone(), found.nis.clone(), found.measured.clone()
    scores[row], nis[row], measured[row] = torch.nan, 0, 0
    return found._replace(scores=scores, nis=nis, measured=measured)


def smoother_order(method: str) -> int:
    """
    >>> smoother_order("gpb4"), smoother_order("imm"), smoother_order("gpb1")
    (4, 2, 2)
    """
    order = GPB.fullmatch(method)
    return 2 if order is None else max(2, int(order[1]))


def check_method(method: str, smoother: str | None) -> None:
    """Refuse names that are not known.

    >>> check_method("imm", "kims")
    Traceback (most recent call last):
    ValueError: --smoother: expected one of propagation, correction, kim, exact, got 'kims'. Choose one.
    """
    method_of(method)
    if smoother is not None and smoother not in METHODS:
        raise ValueError(sentence("--smoother", f"one of {', '.join(METHODS)}", repr(smoother), "Choose one."))


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


def _check_finite(model: TrackModel, tracks: Sequence[Track], filtered: Filtered) -> None:
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


def method_of(name: str) -> Callable[[SwitchingModel, Tensor, Tensor], Filtered]:
    """The filter of this name as a function of model, y and mask.

    >>> method_of("gbp2")
    Traceback (most recent call last):
    ValueError: --method: expected imm, kalman, exact, or gpb with an order (gpb1, gpb2, …), got 'gbp2'. Choose one of
    them.
    """
    if name in NAMED:
        return lambda model, y, mask: NAMED[name](model, y, mask=mask)
    slots = slots_of(name)
    return lambda model, y, mask: gpb(model, y, order=slots.before, mask=mask)


def slots_of(name: str) -> Slots:
    """When the filter of this name collapses its hypotheses.

    >>> slots_of("gpb3")
    Slots(before=3, after=2)
    """
    if name in NAMED:
        return EXACT if name == "exact" else IMM
    order = GPB.fullmatch(name)
    if order is None:
        expected = "imm, kalman, exact, or gpb with an order (gpb1, gpb2, …)"
        raise ValueError(sentence("--method", expected, repr(name), "Choose one of them."))
    return Slots.gpb(int(order[1]))


def measured_moments(model: TrackModel, record: Filtered | Smoothed) -> ProjectedNormal:
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


def position_moments(model: TrackModel, record: Filtered | Smoothed) -> ProjectedNormal:
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


def _groups(tracks: Sequence[Track]) -> Iterator[list[int]]:
    """Indices of tracks whose gaps begin alike, the longest first, at most `BATCH_ROWS` rows with padding."""
    group: list[int] = []
    for k in sorted(range(len(tracks)), key=lambda k: tracks[k].gaps, reverse=True):
        if group:
            longest = tracks[group[0]]
            alike = tracks[k].gaps == longest.gaps[: len(tracks[k].gaps)]
            if not alike or (len(group) + 1) * len(longest.times) > BATCH_ROWS:
                yield group
                group = []
        group.append(k)
    if group:
        yield group


def _padded(tracks: Sequence[Track]) -> tuple[Tensor, Tensor]:
    """y (tracks, T, m) and the mask (tracks, T) that ends each."""
    lengths = torch.tensor([len(track.times) for track in tracks])
    y = tracks[0].y.new_full((len(tracks), int(lengths.max()), tracks[0].y.shape[-1]), torch.nan)
    for index, track in enumerate(tracks):
        y[index, : len(track.times)] = track.y
    return y, torch.arange(y.shape[1]) < lengths[:, None]


def _cut(record: Any, index: int, steps: int) -> Any:
    """One track of a record, up to its end."""
    if record is None:
        return None
    return type(record)(*(part[index, :steps] if isinstance(part, Tensor) else part for part in record))
