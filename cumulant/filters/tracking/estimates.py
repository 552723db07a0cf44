"""Estimates as a table of columns, and what a person wants to know of them first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import combinations
from statistics import median

import numpy as np
import torch
from torch import Tensor

from cumulant.filters import Consistency, Innovations, consistency, nees
from cumulant.filters.sensors import POSITIONS
from cumulant.filters.tracking.filter import Estimate
from cumulant.filters.tracking.geodesy import to_degrees
from cumulant.filters.tracking.headings import headings
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.units import ISO, time_text

LEAD = 5  # gaps
RATE_OF = {"range": "range_rate", **{name: f"{name}_velocity" for name in POSITIONS}}


def table_of(model: TrackModel, estimates: Sequence[Estimate]) -> dict[str, np.ndarray | list[str]]:
    """The columns of the estimates, tracks below one another; their names are `headings`."""
    smoothed = estimates[0].smoothed is not None
    geographic = model.columns.is_geographic
    scored = estimates[0].innovations is not None
    names = headings(model.states, [m.name for m in model.modes], model.columns.measured, smoothed, geographic, scored)
    tracks = [e.track.name for e in estimates for _ in e.track.times]
    times = np.concatenate([np.asarray(e.track.times) for e in estimates])
    if model.columns.time_unit == ISO:
        times = [datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds") for t in times]
    numbers = torch.cat([_numbers(e) for e in estimates]).numpy()
    return dict(zip(names, [tracks, times, *numbers.T], strict=True))


def _numbers(estimate: Estimate) -> Tensor:
    """(T, columns) in the order of `headings`, after track and time."""
    f, s = estimate.filtered, estimate.smoothed
    parts = [estimate.track.y, _with_deviations(f.mean, f.covariance), f.mode_probabilities, f.log_likelihood[:, None]]
    if estimate.innovations is not None:
        rejected = estimate.innovations.rejected.sum(-1, keepdim=True).to(f.mean)
        parts += [
            torch.where(estimate.innovations.measured > 0, estimate.innovations.nis, torch.nan)[:, None],
            rejected,
        ]
    if s is not None:
        parts += [_with_deviations(s.mean, s.covariance), s.mode_probabilities]
    pairs = list(combinations(range(f.mean.shape[-1]), 2))
    parts += [f.covariance[:, a, b][:, None] for a, b in pairs]
    origin = estimate.track.origin
    if origin is not None:
        parts += [to_degrees(record.mean[:, :2].detach(), origin) for record in (f, s) if record is not None]
    return torch.cat([part.detach() for part in parts], 1)


def _with_deviations(mean: Tensor, covariance: Tensor) -> Tensor:
    """(T, 2d): each entry followed by its standard deviation."""
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return torch.stack([mean, deviation], -1).flatten(1)


def summary_of(model: TrackModel, estimate: Estimate) -> dict:
    """One track in a few numbers.

    rows counts the rows of the estimates, complete those with every column measured, empty those with none,
    rejected_rows those of which a gate rejected something, rejected the numbers in them.
    mode_shares is the mean probability of each mode, log_likelihood is log p(y_1 … y_T), and smoothed_excess, of tracks
    that were smoothed, is `Estimate.excess`: above 1 the filtered columns may be nearer the truth.
    effective_particles, of particles, is the smallest 1/Σw² of a row: if it is a few, draw more.
    """
    observed = ~estimate.track.y.isnan()
    shares, effective = estimate.filtered.mode_probabilities.mean(0), getattr(estimate.filtered, "effective", None)
    return {
        "track": estimate.track.name,
        "rows": len(estimate.track.times),
        "complete": int(observed.all(1).sum()),
        "empty": int((~observed.any(1)).sum()),
        "from": _as_in_table(estimate.track.times[0], model),
        "to": _as_in_table(estimate.track.times[-1], model),
        "mode_shares": {mode.name: float(p) for mode, p in zip(model.modes, shares, strict=True)},
        "log_likelihood": float(estimate.filtered.log_likelihood.sum()),
        **({} if estimate.innovations is None else _rejected(estimate.innovations)),
        **({} if effective is None else {"effective_particles": float(effective.min())}),
        **({} if estimate.excess is None else {"smoothed_excess": estimate.excess}),
    }


def _as_in_table(time: float, model: TrackModel) -> float | str:
    """A number, or a date and time where the table has those."""
    return time_text(time, ISO) if model.columns.time_unit == ISO else time


def _rejected(found: Innovations) -> dict[str, int]:
    return {"rejected_rows": int(found.rejected.any(-1).sum()), "rejected": int(found.rejected.sum())}


def judge(model: TrackModel, estimates: Sequence[Estimate]) -> Consistency:
    """The consistency of all tracks together, with NEES where the table has the truth."""
    found = [e.innovations for e in estimates if e.innovations is not None]
    index = [model.states.index(c.state) for c in model.columns.truth if c.state in model.states]
    columns = [k for k, c in enumerate(model.columns.truth) if c.state in model.states]
    errors = None
    if index:
        known = [e for e in estimates if e.track.truth is not None]
        errors = [_errors(e, index, columns) for e in known]
    return consistency(
        found,
        names=model.columns.measured,
        modes=[mode.name for mode in model.modes],
        errors=errors,
        size=len(index),
        pairs=entries_that_agree(model),
        leading=exact_rates(model, [gap for e in estimates for gap in e.track.gaps]),
        tracks=[e.track.name for e in estimates if e.innovations is not None],
    )


def entries_that_agree(model: TrackModel) -> list[tuple[int, int]]:
    """Entries that a lag moves the same way: a range or position and its rate, and one position by two sensors."""
    entries = [(k, entry) for k, s in enumerate(model.columns.sensors) for entry in s.sensor.entries]
    found = []
    for i, (sensor, first) in enumerate(entries):
        for j, (other, second) in enumerate(entries):
            is_rate = sensor == other and RATE_OF.get(first) == second
            if is_rate or (sensor < other and first == second and first in POSITIONS):
                found.append((i, j))
    return found


def exact_rates(model: TrackModel, gaps: Sequence[float]) -> list[tuple[int, int]]:
    """Positions and rates whose rate times five gaps of time is the more exact: a lag shows in it first."""
    std = model.modes[0].noise.diagonal().sqrt().tolist()
    time = LEAD * median(gaps) if gaps else float("inf")
    entries = model.columns.entries
    return [(a, b) for a, b in entries_that_agree(model) if entries[a] != entries[b] and std[b] * time <= std[a]]


def _errors(estimate: Estimate, index: list[int], columns: list[int]) -> Tensor:
    """NEES (T,) over the truth columns; rows where one is unknown are left out."""
    assert estimate.track.truth is not None
    truth = estimate.track.truth[:, columns]
    truth = torch.where(truth.isnan().any(1, keepdim=True), torch.nan, truth)
    f = estimate.filtered
    return nees(f.mean[:, index].detach(), f.covariance[:, index][:, :, index].detach(), truth)
