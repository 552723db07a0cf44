"""What `cumulant track --check` says: how a table and a model were understood, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import degrees
from statistics import median

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.filters.motion import Motion, Turn
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.table import Track
from cumulant.filters.tracking.units import ISO, time_text

TRACKS_LISTED = 10


def print_explanation(
    screen: Console, model: TrackModel, tracks: Sequence[Track], method: str, smoother: str | None, gate: float | None
) -> None:
    """Tables of tracks, measurements and modes, and sentences on times, start and gate."""
    for sentence_ in _times(model, tracks):
        screen.print(sentence_, highlight=False, markup=False, soft_wrap=True)
    screen.print(_track_table(model, tracks))
    screen.print(_measured_table(model, tracks))
    screen.print(_mode_table(model, tracks))
    for sentence_ in (*_start(model, tracks), *_rest(model, method, smoother, gate)):
        screen.print(sentence_, highlight=False, markup=False, soft_wrap=True)


def _times(model: TrackModel, tracks: Sequence[Track]) -> Iterator[str]:
    columns = model.columns
    rows = sum(len(track.times) for track in tracks)
    unit = "dates and times" if columns.time_unit == ISO else f"unit {columns.time_unit}"
    gaps = [gap for track in tracks for gap in track.gaps]
    spread = f"gaps from {min(gaps):.4g} to {max(gaps):.4g} s, median {median(gaps):.4g} s" if gaps else "no gaps"
    grid = f", on a grid of {columns.step_seconds:g} s" if columns.step is not None else ", any times"
    many = f"{len(tracks):,} track{'s' if len(tracks) > 1 else ''}"
    yield f"Rows: {rows:,} in {many}. Time: column {columns.time}, {unit}; {spread}{grid}."
    if columns.is_geographic:
        origin = tracks[0].origin
        assert origin is not None
        where = f"{origin.latitude:g}, {origin.longitude:g} degrees"
        yield f"Latitudes and longitudes become metres east (x) and north (y) of {where} (origin in [table])."


def _track_table(model: TrackModel, tracks: Sequence[Track]) -> Table:
    table = Table("track", "rows", "from", "to", "longest gap, s")
    for track in tracks[:TRACKS_LISTED]:
        ends = [time_text(t, model.columns.time_unit) for t in (track.times[0], track.times[-1])]
        table.add_row(escape(track.name), f"{len(track.times):,}", *ends, f"{max(track.gaps, default=0):.4g}")
    if len(tracks) > TRACKS_LISTED:
        table.add_row("…", f"and {len(tracks) - TRACKS_LISTED:,} more", "", "", "")
    return table


def _measured_table(model: TrackModel, tracks: Sequence[Track]) -> Table:
    """What each column is, in metres, seconds and degrees where it has a unit, with the range of its values."""
    table = Table("measured", "column", "what", "std", "numbers", "from", "to")
    values = torch.cat([track.y for track in tracks])
    columns = [c.column for s in model.columns.sensors for c in s.columns] or list(model.columns.measured)
    noise = model.modes[0].noise.diagonal().sqrt().tolist()
    for k, name in enumerate(model.columns.measured):
        entry = model.columns.entries[k] if model.columns.sensors else "position"
        unit = "" if not model.columns.sensors else " deg" if k in model.angles else _unit_of(entry)
        scale = degrees(1.0) if k in model.angles else 1.0
        column = scale * values[:, k][~values[:, k].isnan()]
        ends = [f"{float(v):.5g}{unit}" for v in (column.min(), column.max())] if len(column) else ["", ""]
        table.add_row(
            escape(name), escape(columns[k]), entry, f"{scale * noise[k]:.4g}{unit}", f"{len(column):,}", *ends
        )
    return table


def _unit_of(name: str) -> str:
    return " m/s" if "velocity" in name or name in ("range_rate", "speed") else " m"


def _mode_table(model: TrackModel, tracks: Sequence[Track]) -> Table:
    """What a mode adds over the median gap says more than a density."""
    gaps = [gap for track in tracks for gap in track.gaps] or [1.0]
    gap = torch.tensor([median(gaps)], dtype=torch.float64)
    table = Table("mode", "motion", "state", f"noise added over {float(gap):.4g} s", "lasts about")
    for k, mode in enumerate(model.modes):
        noise = mode.motion.over(gap).process_noise if isinstance(mode.motion, Motion) else mode.motion.noise(gap)
        sizes = noise[0].diagonal().clamp_min(0).sqrt().tolist()
        added = ", ".join(f"{name} ±{size:.3g}" for name, size in zip(mode.states, sizes, strict=True))
        if isinstance(mode.motion, Turn):
            added = f"{added}; turns by {degrees(float(mode.motion.rate)):.3g} deg/s"
        kind = mode.kind + (f" ({mode.rule})" if not model.is_linear else "")
        table.add_row(
            escape(mode.name), kind, escape(", ".join(mode.states)), escape(added), _lasts(model, k, float(gap))
        )
    return table


def _lasts(model: TrackModel, k: int, gap: float) -> str:
    """The mean time until a mode ends: 1/rate, or by the probability of a step."""
    stays = float(model.switching.matrix[k, k])
    ends = -stays if model.switching.timed else (1 - stays) / gap
    return f"{1 / ends:.4g} s" if ends > 0 else "for ever"


def _start(model: TrackModel, tracks: Sequence[Track]) -> Iterator[str]:
    sizes = model.initial.covariance.diagonal().sqrt().tolist()
    if model.initial.located:
        starts = [model.locate(track) for track in tracks]
        covariances = model.starting(starts).initial.covariance
        sizes = covariances.diagonal(dim1=-2, dim2=-1).amax(0).sqrt().tolist()
        late = [track.name for track, start in zip(tracks, starts, strict=True) if start.row > 0]
        first = ", ".join(f"{axis} {float(v):.5g}" for axis, v in zip(model.axes, starts[0].position, strict=True))
        yield f"Each track starts where it is first seen; {tracks[0].name} at {first}."
        if late:
            yield f"The first rows of {', '.join(late[:5])} do not say where they are; a later row does."
    else:
        mean = ", ".join(f"{n} {v:.5g}" for n, v in zip(model.states, model.initial.mean.tolist(), strict=True))
        yield f"Each track starts at {mean}."
    yield f"Standard deviations there: {', '.join(f'{n} {v:.4g}' for n, v in zip(model.states, sizes, strict=True))}."


def _rest(model: TrackModel, method: str, smoother: str | None, gate: float | None) -> Iterator[str]:
    passes = "none; outliers move the estimate (--gate 0.999)" if gate is None else f"{gate:g}"
    smoothed = "none (--smooth)" if smoother is None else smoother
    yield f"Gate: {passes}. Method: {method}. Smoother: {smoothed}."
    if model.columns.truth:
        yield f"Truth: {', '.join(f'{c.state} in {c.column}' for c in model.columns.truth)}; NEES is reported."
