"""Columns that do not look like what a model takes them for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filters.motion import Turn
from cumulant.filters.tracking.column_names import read_name
from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.table import Track
from cumulant.filters.tracking.units import TIMES, units_of

POLAR = {
    "an angle": re.compile(
        r"(^|[_\W])(bearing|brg|azimuth|az|elevation|elev|theta|phi|psi|angle|heading|hdg|course|cog|lat(itude)?|lon(gitude)?|lng)([_\W]|$)",
        re.I,
    ),
    "a range": re.compile(r"(^|[_\W])((slant_?)?range|rng|distance|dist|slant|rho|radius)([_\W]|$)", re.I),
    "a range rate": re.compile(r"(^|[_\W])(doppler|range_?rate|rdot|radial_?velocity)([_\W]|$)", re.I),
}  # fmt: skip
FAR_ANGLE = 2 * torch.pi * 1.01
FAST_TURN = 0.5  # radians per second
LEAST_ROWS = 10  # of a column, from which its spread is known
JUMP = 0.75  # of a turn between two rows, where all other rows are within a quarter of one


class ColumnWarning(UserWarning):
    """A column does not look like what the model takes it for."""


class Suspicion(NamedTuple):
    """A column and what it looks like."""

    column: str
    looks: str


def suspicious_columns(model: TrackModel, tracks: Sequence[Track]) -> list[str]:
    """One sentence for each thing that is odd: polar columns under a Cartesian model, units, stds, rates of turns."""
    found = _odd_units(model) + _odd_deviations(model, tracks) + _odd_rates(model)
    if not model.columns.sensors:
        polar = [
            Suspicion(name, kind)
            for name in model.columns.measured
            for kind, words in POLAR.items()
            if words.search(_words_apart(name))
        ]
        named = {s.column for s in polar}
        polar += [
            Suspicion(name, "an angle: it jumps by a whole turn")
            for k, name in enumerate(model.columns.measured)
            if name not in named and _jumps_by_a_turn([track.y[:, k] for track in tracks])
        ]
        if polar:
            listed = ", ".join(f"{s.column} (like {s.looks})" for s in polar)
            found.append(
                f"{listed}: taken as Cartesian positions, because they stand under measured. If they are not, write a "
                f"table [[sensor]] with range, bearing, elevation, …; cumulant track --init writes one."
            )
        return found
    values = torch.cat([track.y for track in tracks])
    for k, (name, entry) in enumerate(zip(model.columns.measured, model.columns.entries, strict=True)):
        column = values[:, k][~values[:, k].isnan()]
        if len(column) and k in model.angles and float(column.abs().max()) > FAR_ANGLE:
            most = float(column.abs().max())
            found.append(f"{name}: up to {most:.4g} radians, more than a whole turn: look at its unit.")
        elif len(column) and entry == "range" and float(column.min()) < 0:
            found.append(f"{name}: {_lowest(tracks, k)}, and a range is not negative. Correct the row or leave it out.")
    return found


def _lowest(tracks: Sequence[Track], k: int) -> str:
    """The lowest number of a column, and where it stands."""
    worst = min(tracks, key=lambda track: float(track.y[:, k].nan_to_num(torch.inf).min()))
    row = int(worst.y[:, k].nan_to_num(torch.inf).argmin())
    count = sum(int((track.y[:, k] < 0).sum()) for track in tracks)
    where = f"row {worst.rows[row]} of the file" if worst.rows else f"track {worst.name}"
    many = f" and {count - 1} more below 0" if count > 1 else ""
    return f"{float(worst.y[row, k]):.4g} m in {where}{many}"


def _odd_units(model: TrackModel) -> list[str]:
    """Columns whose names end in another unit than the model says."""
    found = []
    for sensor in model.columns.sensors:
        for c in sensor.columns:
            said = read_name(c.column).unit
            entry = {"x": "longitude", "y": "latitude"}.get(c.entry, c.entry) if sensor.geographic else c.entry
            known = units_of(entry)
            written = next((name for name, factor in known.items() if factor == c.factor), "another unit")
            if said and said not in TIMES and said != written:
                fits = f'write unit = "{said}"' if said in known else f"a {entry} is in {', '.join(known)}"
                found.append(
                    f"{c.column}: the model says {written}, the name of the column {said}: {fits}, or ignore this."
                )
    return found


def _odd_deviations(model: TrackModel, tracks: Sequence[Track]) -> list[str]:
    """A std that exceeds the whole spread of its column: of a right one the spread is at least 3.3 times as large."""
    found = []
    values = torch.cat([track.y for track in tracks])
    noise = model.modes[0].noise.diagonal().sqrt().tolist()
    factors = [c.factor for s in model.columns.sensors for c in s.columns] or [1.0] * len(noise)
    for k, name in enumerate(model.columns.measured):
        column = values[:, k][~values[:, k].isnan()]
        if len(column) < LEAST_ROWS:
            continue
        spread = float(column.quantile(0.95) - column.quantile(0.05))
        if 0 < spread < noise[k]:
            sizes = (
                f"std {noise[k] / factors[k]:.4g}, but nine tenths of the column lie within {spread / factors[k]:.4g}"
            )
            found.append(f"{name}: {sizes}: is std in the unit of the column?")
    return found


def _odd_rates(model: TrackModel) -> list[str]:
    """Turns so fast that their rate is rather in degrees."""
    found = []
    for mode in model.modes:
        if isinstance(mode.motion, Turn) and float(mode.motion.rate.abs().max()) > FAST_TURN:
            rate = float(mode.motion.rate.abs().max())
            round_ = f"{rate:.3g} rad/s, a whole turn every {2 * torch.pi / rate:.2g} s"
            found.append(f'mode {mode.name}: turns by {round_}: did you mean rate_unit = "deg/s"?')
    return found


def _words_apart(name: str) -> str:
    """
    >>> _words_apart("targetBearing2")
    'target_Bearing_2'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", name)


def _jumps_by_a_turn(columns: Sequence[Tensor]) -> bool:
    """Whether numbers stay within a turn, in degrees or radians, and somewhere leave at one end to enter at the other.

    >>> _jumps_by_a_turn([torch.tensor([350.0, 357.0, 4.0])]), _jumps_by_a_turn([torch.tensor([0.0, 90.0, 350.0])])
    (True, False)
    """
    kept = [column[~column.isnan()] for column in columns]
    values = torch.cat(kept)
    for turn in (360.0, 2 * torch.pi):
        within = len(values) > 0 and any(
            bool(((values >= low) & (values <= low + turn)).all()) for low in (0.0, -turn / 2)
        )
        steps = torch.cat([column.diff().abs() for column in kept])
        if within and bool((steps > JUMP * turn).any()) and bool((steps[steps <= JUMP * turn] < turn / 4).all()):
            return True
    return False


def distance_warning(model: TrackModel, tracks: Sequence[Track], farthest: float) -> list[str]:
    """Positions so far from the origin that a plane is a poor map of the earth."""
    if not model.columns.is_geographic:
        return []
    shifts = model.shifts()[:, :2].bool().any(1)
    sizes = torch.cat([track.y[:, shifts] for track in tracks]).abs()
    most = float(sizes[~sizes.isnan()].max()) if bool((~sizes.isnan()).any()) else 0.0
    if most < farthest:
        return []
    far = f"positions lie up to {most / 1000:.0f} km from the origin"
    return [f"{far}: a plane is a poor map there. Set origin, or split the file."]
