"""`cumulant track --init my.csv`: a first model from the names and values of columns, with what each guess rests on."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import degrees, pi
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cumulant.checks import sentence
from cumulant.filters.sensors import ANGLES, ENTRIES, VERTICAL
from cumulant.filters.tracking.column_names import ColumnName, read_name
from cumulant.filters.tracking.first_modes import modes_text, rounded
from cumulant.filters.tracking.section import read_text
from cumulant.filters.tracking.turn_guess import guess_turns
from cumulant.filters.tracking.units import ANGULAR, ISO, TIMES, units_of

ROWS_READ = 20_000
DELIMITERS = ",;\t|"
GUESS = "a guess"
SEEN_FROM = {"range", "bearing", "elevation", "range_rate"}  # what depends on where the sensor stands
COMMON_SPEEDS = ("m/s", "kn", "km/h")
EARTH = 6_371_000.0  # metres: fine for a guess of speed
DEGREES_FROM = 2 * pi * 1.01  # an angle beyond this is in degrees
FEET_FROM = 15_000.0  # a height beyond this is in feet
MILLISECONDS_FROM, MICROSECONDS_FROM = 1e11, 1e14  # times since 1970 beyond this are in them


class FirstModel(NamedTuple):
    """The text of a model file, and what was noticed on the way."""

    text: str
    notes: list[str]


class NumberColumn(NamedTuple):
    """A column that a sensor may have filled: its name, what that says, numbers with NaN, unit, why that unit."""

    name: str
    said: ColumnName
    numbers: np.ndarray
    unit: str
    why: str

    @property
    def factor(self) -> float:
        return units_of(self.said.kind)[self.unit]

    @property
    def values(self) -> np.ndarray:
        """In SI units."""
        return self.numbers * self.factor


class RawTable(NamedTuple):
    """Cells by column, and what lies between them."""

    columns: dict[str, list[str]]
    delimiter: str


class TableRoles(NamedTuple):
    """What the columns of a table seem to be."""

    time: str
    time_unit: str
    seconds: np.ndarray
    track: str | None
    sensor: str | None
    measured: list[NumberColumn]
    truth: dict[str, str]
    others: list[str]


def first_model(path: Path) -> FirstModel:
    """Look at a table and write a model for it, or say what is missing.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     file = Path(directory) / "radar.csv"
    ...     _ = file.write_text("t,range_km,az\\n" + "".join(f"{k},{5 + 0.1 * k},{30 + k}\\n" for k in range(9)))
    ...     [line for line in first_model(file).text.splitlines() if line.startswith("range")][0][:42]
    'range = { column = "range_km", unit = "km"'
    """
    raw = _read(path)
    notes: list[str] = []
    roles = _roles(path, raw, notes)
    groups = _track_groups(raw, roles)
    roles = roles._replace(measured=[_with_speed_unit(c, roles, groups) for c in roles.measured])
    listed = "; ".join(f"{c.name}: {c.said.kind}, {c.unit}" for c in roles.measured)
    notes.insert(0, f"time {roles.time} ({roles.time_unit}); track {roles.track or 'only one'}; {listed}")
    sensors = _sensors(raw, roles, notes)
    standing = [s.name for s in sensors if {c.said.kind for c in s.columns} & SEEN_FROM]
    if standing:
        notes.append(f"position of {', '.join(standing)}: 0, a guess; write in the model where they stand")
    if all(_positions(s.columns) is None for s in sensors):
        notes.append("nothing says how far away targets are: put mean and covariance of the state under [initial]")
    speed, gap = _speed(roles, sensors, groups), _median_gap(roles, groups)
    turns = guess_turns([part for s in sensors for part in _flown(s, roles, groups)])
    if turns is not None:
        rate = (
            f"positions show turns of about {degrees(turns.rate):.2g} degrees per second, {turns.share:.0%} of the time"
        )
        notes.append(f"{rate}; the model has modes for them as comments")
    text = "".join(
        [
            f"# A first model of {path.name}, guessed from its columns by cumulant track --init;\n",
            "# docs/tracking.md has every key. Positions are in m, times in s, angles in rad.\n",
            _table_text(raw, roles, groups),
            *(_sensor_text(name, columns, roles, groups, rows) for name, columns, rows in sensors),
            modes_text(speed, gap, turns),
            _initial_text(speed),
            _truth_text(roles),
        ]
    )
    return FirstModel(text, notes)


def _read(path: Path) -> RawTable:
    text = read_text(path)
    header = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=header.count)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row][: ROWS_READ + 1]
    if len(rows) < 3:
        raise ValueError(sentence(str(path), "a header and at least two rows", f"{len(rows)} rows", "Add some."))
    names = [name.strip() for name in rows[0]]
    rows = [row for row in rows[1:] if len(row) == len(names)]
    return RawTable({name: [row[k].strip() for row in rows] for k, name in enumerate(names)}, delimiter)


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Numbers with NaN for empty cells; None where a cell is none, or all are empty."""
    out = np.full(len(texts), np.nan)
    for k, text in enumerate(texts):
        if text:
            try:
                out[k] = float(text)
            except ValueError:
                return None
    return None if np.isnan(out).all() or np.isinf(out).any() else out


def _roles(path: Path, raw: RawTable, notes: list[str]) -> TableRoles:
    said = {name: read_name(name) for name in raw.columns}
    time = _first(said, "time")
    if time is None:
        advice = "Name the column of times “time”, or write the model by hand: docs/tracking.md."
        raise ValueError(sentence(str(path), "a column of times", f"only {', '.join(said)}", advice))
    seconds, time_unit = _times(path, time, said[time], raw.columns[time])
    measured: list[NumberColumn] = []
    for name, meaning in said.items():
        numbers = _numbers(raw.columns[name])
        if numbers is None or name == time or meaning.truth:
            continue
        if meaning.kind == "track" and _is_course(numbers) and _first(said, "latitude"):
            meaning = meaning._replace(kind="course")
        if meaning.kind in (*ENTRIES, "latitude", "longitude"):
            measured.append(NumberColumn(name, meaning, numbers, *_unit(meaning, numbers)))
    measured = _different(measured, notes)
    kinds = [c.said.kind for c in measured]
    if not any(kind in ("x", "latitude", "range", "bearing") for kind in kinds):
        advice = "Rename columns to x and y, range and bearing, or lat and lon; or see docs/tracking.md."
        raise ValueError(sentence(str(path), "columns that say where a target is", f"{', '.join(said)}", advice))
    used = {c.name for c in measured}
    track = next((n for n, s in said.items() if s.kind == "track" and n not in used and not s.truth), None)
    sensor = next(
        (n for n, s in said.items() if s.kind == "sensor" and n not in used and len(set(raw.columns[n])) <= 20), None
    )
    truth = {
        s.kind: n
        for n, s in said.items()
        if s.truth and s.kind in ("x", "y", "z", "x_velocity", "y_velocity", "z_velocity")
    }
    roles = {time, track, sensor, *used, *truth.values()}
    others = [name for name in said if name not in roles]
    if others:
        notes.append(f"not used: {', '.join(others)}")
    return TableRoles(time, time_unit, seconds, track, sensor, measured, truth, others)


def _first(said: dict[str, ColumnName], kind: str) -> str | None:
    return next((name for name, meaning in said.items() if meaning.kind == kind and not meaning.truth), None)


def _is_course(numbers: np.ndarray) -> bool:
    """A column named track is an angle where it has fractions within a turn."""
    known = numbers[~np.isnan(numbers)]
    return bool((known % 1 != 0).any() and known.min() >= 0 and known.max() <= 360)


def _different(measured: list[NumberColumn], notes: list[str]) -> list[NumberColumn]:
    """One column for each entry of each sensor; positions rather than places on the earth."""
    kept: list[NumberColumn] = []
    cartesian = any(c.said.kind == "x" for c in measured)
    for c in measured:
        if c.said.kind in ("latitude", "longitude") and cartesian:
            notes.append(f"{c.name}: left out, because there are x and y")
        elif any(k.said.kind == c.said.kind and k.said.before == c.said.before for k in kept):
            notes.append(f"{c.name}: left out, because another column is the {c.said.kind} already")
        else:
            kept.append(c)
    return kept


def _times(path: Path, name: str, said: ColumnName, texts: list[str]) -> tuple[np.ndarray, str]:
    numbers = _numbers(texts)
    if numbers is None:
        try:
            moments = [datetime.fromisoformat(text) for text in texts]
        except ValueError:
            advice = "Write seconds, or dates and times as 2024-05-01T12:30:00."
            got = repr(next(iter(texts)))
            raise ValueError(sentence(f"{path}, column {name}", "numbers or ISO 8601", got, advice)) from None
        return np.array([(m if m.tzinfo else m.replace(tzinfo=UTC)).timestamp() for m in moments]), ISO
    size = float(np.nanmax(np.abs(numbers)))
    unit = "us" if size > MICROSECONDS_FROM else "ms" if size > MILLISECONDS_FROM else "s"
    unit = said.unit if said.unit in TIMES else unit
    return numbers * float(TIMES[unit]), unit


def _unit(said: ColumnName, numbers: np.ndarray) -> tuple[str, str]:
    """A unit, and why."""
    known = units_of(said.kind)
    if said.unit in known:
        return said.unit, "by its name"
    size = float(np.nanmax(np.abs(numbers)))
    if known is ANGULAR:
        if said.kind in ("latitude", "longitude") or size > DEGREES_FROM:
            return "deg", f"up to {size:.4g}"
        return "rad", f"a guess: up to {size:.4g}"
    if said.kind == "z" and size > FEET_FROM:
        return "ft", f"a guess: up to {size:.5g}"
    return next(iter(known)), GUESS


def _with_speed_unit(column: NumberColumn, roles: TableRoles, groups: Sequence[np.ndarray]) -> NumberColumn:
    """A speed without a unit in its name has the one that fits how fast positions move."""
    positions = _positions([c for c in roles.measured if c.said.before == column.said.before])
    if column.said.kind != "speed" or column.why != GUESS or positions is None:
        return column
    every = np.ones(len(roles.seconds), dtype=bool)
    moved, said = _speeds(positions, roles, groups, every), np.abs(column.numbers[~np.isnan(column.numbers)])
    if not len(moved) or not len(said) or not np.median(said) > 0 or not np.median(moved) > 0:
        return column
    ratio = float(np.median(moved) / np.median(said))
    unit = min(COMMON_SPEEDS, key=lambda name: abs(np.log(ratio / units_of("speed")[name])))
    return column._replace(unit=unit, why="by how fast positions move")


class SensorGuess(NamedTuple):
    """A name, the columns that the sensor fills, and the rows (rows,) that are its own."""

    name: str
    columns: list[NumberColumn]
    rows: np.ndarray


def _sensors(raw: RawTable, roles: TableRoles, notes: list[str]) -> list[SensorGuess]:
    every = np.ones(len(roles.seconds), dtype=bool)
    if roles.sensor is not None:
        texts = np.array(raw.columns[roles.sensor])
        found = []
        for value in dict.fromkeys(raw.columns[roles.sensor]):
            here = texts == value
            filled = [c for c in roles.measured if not np.isnan(c.numbers[here]).all()]
            found += [SensorGuess(value, filled, here)] if filled else []
        return found
    by_name: dict[str, list[NumberColumn]] = {}
    for c in roles.measured:
        by_name.setdefault(c.said.before, []).append(c)
    if len(by_name) > 1:
        notes.append(f"sensors by the names of columns: {', '.join(name or 'others' for name in by_name)}")
    return [SensorGuess(name or f"sensor{k + 1}", columns, every) for k, (name, columns) in enumerate(by_name.items())]


def _track_groups(raw: RawTable, roles: TableRoles) -> list[np.ndarray]:
    """Rows of each track, in time."""
    names = np.array(raw.columns[roles.track]) if roles.track else np.zeros(len(roles.seconds))
    groups = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]
    return [rows[np.argsort(roles.seconds[rows], kind="stable")] for rows in groups]


def _median_gap(roles: TableRoles, groups: Sequence[np.ndarray]) -> float:
    gaps = np.concatenate([np.diff(roles.seconds[rows]) for rows in groups])
    gaps = gaps[gaps > 0]
    return float(np.median(gaps)) if len(gaps) else 1.0


def _positions(columns: Sequence[NumberColumn]) -> np.ndarray | None:
    """(rows, 2) in m, roughly, from what a sensor has."""
    by_kind = {c.said.kind: c.values for c in columns}
    if "x" in by_kind:
        return np.stack([by_kind["x"], by_kind.get("y", 0 * by_kind["x"])], 1)
    if "latitude" in by_kind and "longitude" in by_kind:
        scale = np.cos(np.nanmedian(by_kind["latitude"]))
        return EARTH * np.stack([by_kind["longitude"] * scale, by_kind["latitude"]], 1)
    if "range" in by_kind and "bearing" in by_kind:
        return by_kind["range"][:, None] * np.stack([np.sin(by_kind["bearing"]), np.cos(by_kind["bearing"])], 1)
    return None


def _speed(roles: TableRoles, sensors: Sequence[SensorGuess], groups: Sequence[np.ndarray]) -> float:
    """A high speed of targets: distances over a tenth of a track, so that noise hardly counts."""
    speeds = [np.array([])]
    for sensor in sensors:
        positions = _positions(sensor.columns)
        if positions is not None:
            speeds.append(_speeds(positions, roles, groups, sensor.rows))
    every = np.concatenate(speeds)
    return max(float(np.quantile(every, 0.9)), 1e-3) if len(every) else 10.0


def _speeds(positions: np.ndarray, roles: TableRoles, groups: Sequence[np.ndarray], own: np.ndarray) -> np.ndarray:
    found = [np.array([])]
    for rows in groups:
        rows = rows[own[rows] & ~np.isnan(positions[rows]).any(1)]
        lag = max(1, len(rows) // 10)
        elapsed = roles.seconds[rows][lag:] - roles.seconds[rows][:-lag]
        far = np.linalg.norm(positions[rows][lag:] - positions[rows][:-lag], axis=1)
        found.append(far[elapsed > 0] / elapsed[elapsed > 0])
    return np.concatenate(found)


def _flown(sensor: SensorGuess, roles: TableRoles, groups: Sequence[np.ndarray]) -> Iterator[tuple]:
    """Times and positions of each track, as far as the sensor says them."""
    positions = _positions(sensor.columns)
    if positions is None:
        return
    for rows in groups:
        rows = rows[sensor.rows[rows] & ~np.isnan(positions[rows]).any(1)]
        yield roles.seconds[rows], positions[rows]


def _deviation(column: NumberColumn, roles: TableRoles, groups: Sequence[np.ndarray], own: np.ndarray) -> float:
    """How far numbers lie from the line through their neighbours, in their unit: the median, as a deviation."""
    period = {"deg": 360.0, "rad": 2 * pi}[column.unit] if column.said.kind in ANGLES else None
    found = []
    for rows in groups:
        rows = rows[own[rows] & ~np.isnan(column.numbers[rows])]
        times, values = roles.seconds[rows], column.numbers[rows]
        values = np.unwrap(values, period=period) if period and len(values) else values
        if len(values) < 3:
            continue
        span = times[2:] - times[:-2]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (times[1:-1] - times[:-2]) / span
        apart = values[1:-1] - (1 - share) * values[:-2] - share * values[2:]
        found.append(np.abs(apart / np.sqrt(1 + share**2 + (1 - share) ** 2))[span > 0])
    every = np.concatenate(found) if found else np.array([])
    size = 1.4826 * float(np.median(every)) if len(every) else 0.0
    known = column.numbers[~np.isnan(column.numbers)]
    steps = np.diff(np.unique(known))
    digit = float(steps.min()) / 12**0.5 if len(steps) else 0.0
    return max(size, digit) or 1.0


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _table_text(raw: RawTable, roles: TableRoles, groups: Sequence[np.ndarray]) -> str:
    lines = ["\n[table]", f"time = {_text(roles.time)}", f"time_unit = {_text(roles.time_unit)}"]
    lines += [f"track = {_text(roles.track)}"] if roles.track else []
    lines += [f"sensor = {_text(roles.sensor)}"] if roles.sensor else []
    unsorted = any((np.diff(roles.seconds[np.sort(rows)]) < 0).any() for rows in groups)
    lines += ["sort = true                     # rows of a track are not in the order of time"] if unsorted else []
    lines += [f"delimiter = {_text(raw.delimiter)}"] if raw.delimiter != "," else []
    lines += [f"ignore = {json.dumps(roles.others, ensure_ascii=False)}"] if roles.others else []
    return "\n".join(lines) + "\n"


def _sensor_text(
    name: str, columns: list[NumberColumn], roles: TableRoles, groups: Sequence[np.ndarray], own: np.ndarray
) -> str:
    lines = ["\n[[sensor]]", f"name = {_text(name)}"]
    order = (*ENTRIES, "latitude", "longitude")
    for c in sorted(columns, key=lambda c: order.index(c.said.kind)):
        size = _deviation(c, roles, groups, own)
        why = "std guessed from neighbouring rows"
        if c.said.kind in ("latitude", "longitude"):
            north = next(k.values for k in columns if k.said.kind == "latitude")
            shrink = np.cos(np.nanmedian(north)) if c.said.kind == "longitude" else 1.0
            size, why = size * c.factor * EARTH * float(shrink), f"{why}, in m"
        entry = f"{c.said.kind} = {{ column = {_text(c.name)}, unit = {_text(c.unit)}, std = {rounded(size)} }}"
        lines.append(f"{entry:<66} # unit {c.why}; {why}")
    kinds = {c.said.kind for c in columns}
    if kinds & {"bearing", "course"}:
        lines.append(
            'bearings = "compass"              # clockwise from north (y); "mathematical": counter-clockwise from x'
        )
    if kinds & SEEN_FROM:
        axes = 3 if any(c.said.kind in VERTICAL for c in roles.measured) else 2
        lines.append(f"position = {json.dumps([0] * axes)}                 # where the sensor stands, in m: a guess")
    return "\n".join(lines) + "\n"


def _initial_text(speed: float) -> str:
    return f"""
[initial]                         # each track starts where it is first seen, with any velocity up to about this
velocity_std = {rounded(speed):<18} # m/s, nine tenths of what is in the table are slower
"""


def _truth_text(roles: TableRoles) -> str:
    if not roles.truth:
        return ""
    return "\n[truth]                           # for NEES; units m and m/s are guesses\n" + "".join(
        f"{kind} = {_text(name)}\n" for kind, name in roles.truth.items()
    )
