"""Columns that do not look like what a model takes them for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cumulant.filters.tracking.model import TrackModel
from cumulant.filters.tracking.table import Track

POLAR = {
    "an angle": re.compile(
        r"(^|[_\W])(bearing|azimuth|az|elevation|elev|theta|angle|heading|course|cog|lat(itude)?|lon(gitude)?|lng)([_\W]|$)",
        re.I,
    ),
    "a range": re.compile(r"(^|[_\W])(range|rng|distance|dist|slant)([_\W]|$)", re.I),
    "a range rate": re.compile(r"(^|[_\W])(doppler|range_?rate|rdot|radial_?velocity)([_\W]|$)", re.I),
}  # fmt: skip
FAR_ANGLE = 2 * torch.pi * 1.01


class ColumnWarning(UserWarning):
    """A column does not look like what the model takes it for."""


class Suspicion(NamedTuple):
    """A column and what it looks like."""

    column: str
    looks: str


def suspicious_columns(model: TrackModel, tracks: Sequence[Track]) -> list[str]:
    """One sentence for each thing that is odd: polar columns under a Cartesian model, units of angles, far places."""
    found = []
    if not model.columns.sensors:
        polar = [
            Suspicion(name, kind)
            for name in model.columns.measured
            for kind, words in POLAR.items()
            if words.search(name)
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
            found.append(f"{name}: as low as {float(column.min()):.4g} m, and a range is not negative.")
    return found


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
