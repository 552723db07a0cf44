"""Measurements in a CSV file, read as tracks: sorted in time, gaps distinct from numbers, nothing guessed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from math import pi
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.tracking.geodesy import Origin, to_plane
from cumulant.filters.tracking.section import LARGEST, read_text, suggestion
from cumulant.filters.tracking.sensor_section import TableSensor
from cumulant.filters.tracking.units import ISO, TIMES, time_text

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ONLY = "1"  # the name of the track in a file that has one
OFF_GRID = Decimal("0.01")  # of a step: how far rounded times may lie from the grid
MAX_ROWS = 1_000_000  # rows, with those that the grid adds


class TruthColumn(NamedTuple):
    """A column with the true value of an entry of the state, and what one of its units is in SI units."""

    state: str
    column: str
    factor: float


class TableColumns(NamedTuple):
    """What the columns of a file mean.

    time       the column of times, in any unit
    measured   the columns of numbers; an empty cell was not measured
    track      the column that says to which track a row belongs, or None: one track
    step       the grid: rows are multiples of it apart, and those that are missing become gaps; None: any times
    ignore     columns that the file may have besides; "others": whatever they are
    delimiter  between two cells
    time_unit  "s", "ms", …, or "iso" for dates and times of day; step is in it, gaps are in seconds
    sensors    which columns each sensor fills; () where ``measured`` are columns of positions as they are
    sensor     the column that says from which sensor a row is, or None: by the cells that are filled
    truth      columns with the true state
    sort       whether rows may come in any order
    origin     where latitudes and longitudes are projected from; None: the first row that has them
    """

    time: str
    measured: tuple[str, ...]
    track: str | None = None
    step: Decimal | None = None
    ignore: tuple[str, ...] | str = ()
    delimiter: str = ","
    time_unit: str = "s"
    sensors: tuple[TableSensor, ...] = ()
    sensor: str | None = None
    truth: tuple[TruthColumn, ...] = ()
    sort: bool = False
    origin: Origin | None = None

    @property
    def step_seconds(self) -> float | None:
        return None if self.step is None else float(self.step * TIMES[self.time_unit])

    @property
    def entries(self) -> tuple[str, ...]:
        """What each entry of y is: the name of an axis, or of an entry of a sensor."""
        return tuple(e for s in self.sensors for e in s.sensor.entries) if self.sensors else self.measured

    @property
    def is_geographic(self) -> bool:
        return any(s.geographic for s in self.sensors)

    @property
    def names(self) -> list[str]:
        """Every column that is read."""
        data = dict.fromkeys(c.column for s in self.sensors for c in s.columns) if self.sensors else self.measured
        roles = [self.time, *([self.track] if self.track else []), *([self.sensor] if self.sensor else [])]
        return [*roles, *data, *dict.fromkeys(c.column for c in self.truth)]


class Track(NamedTuple):
    """One track: name, times of T rows, the T−1 gaps between them, and y (T, m), NaN where nothing was measured.

    times are as in the file, seconds since 1970 for "iso"; gaps are in seconds,
    y in m, rad and m/s where columns have units.
    truth (T, number of truth columns), NaN where unknown, or None. origin is where x = y = 0 lies on the earth, or
    None. rows are the T rows of the file, 0 for those that the grid adds, or ().
    """

    name: str
    times: tuple[float, ...]
    gaps: tuple[float, ...]
    y: Tensor
    truth: Tensor | None = None
    origin: Origin | None = None
    rows: tuple[int, ...] = ()


class Cells(NamedTuple):
    """A row as it stands in the file, numbered as in a spreadsheet: the header is row 1."""

    number: int
    values: dict[str, str]


class Measurement(NamedTuple):
    """A row, or several of one time joined: where it stands, when, y and truth."""

    row: int
    time: Decimal
    y: list[float]
    truth: list[float]


def read_tracks(path: Path, columns: TableColumns) -> list[Track]:
    """The tracks of a file in the order of their first rows; rows of different tracks may alternate.

    Times are read as decimals, so that 1.1 − 1.0 and 0.1 are the same gap however late it is.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     file = Path(directory) / "a.csv"
    ...     _ = file.write_text("t,x\\n0.0,1\\n0.1,\\n0.3,4\\n")
    ...     read_tracks(file, TableColumns("t", ("x",), step=Decimal("0.1")))[0].y[:, 0]
    tensor([1., nan, nan, 4.], dtype=torch.float64)
    """
    measurements: dict[str, list[Measurement]] = {}
    for cells in _rows(path, columns):
        name = ONLY if columns.track is None else cells.values[columns.track].strip()
        if not name:
            raise _wrong(path, cells.number, str(columns.track), "the name of a track", "an empty cell", "Name it.")
        measurements.setdefault(name, []).append(_measurement(path, cells, columns))
    measurements = {name: _in_order(path, track, columns) for name, track in measurements.items()}
    if not measurements:
        raise ValueError(sentence(str(path), "rows of measurements", "a header only", "Add a row."))
    counts = [_count(path, columns, track) for track in measurements.values()]
    if sum(counts) > MAX_ROWS:
        longest = list(measurements)[counts.index(max(counts))]
        got = f"{sum(counts):,} with those that the grid adds, {max(counts):,} of them in track {longest}"
        raise ValueError(sentence(str(path), f"at most {MAX_ROWS:,} rows", got, "Look at the times and at step."))
    tracks = [_track(path, name, track, columns) for name, track in measurements.items()]
    return project(tracks, columns) if columns.is_geographic else tracks


def _rows(path: Path, columns: TableColumns) -> Iterator[Cells]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=columns.delimiter, strict=True)
    try:
        header = next((cells for cells in reader if cells), None)
        if header is None:
            raise ValueError(sentence(str(path), "a header and rows", "an empty file", "The first row names columns."))
        names = [name.strip() for name in header]
        _check_header(path, names, columns)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                where, expected = f"{path}, row {reader.line_num}", f"{len(names)} cells as in the header"
                raise ValueError(sentence(where, expected, len(cells), "Leave a cell empty where nothing is known."))
            yield Cells(reader.line_num, dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        where = f"{path}, row {reader.line_num}"
        raise ValueError(sentence(where, "CSV", f"“{error}”", "Look at its quotes.")) from None


def _check_header(path: Path, names: Sequence[str], columns: TableColumns) -> None:
    """Every declared column once, and no column that nobody declared."""
    declared = columns.names
    where = f"{path}, row 1"
    for name in declared:
        if name not in names:
            advice = suggestion(name, names, "The model's [table] says which columns there are.")
            if len(names) == 1 and re.search(r"[;,\t|]", names[0]):
                advice = "Say what lies between cells: delimiter in the model's [table]."
            raise ValueError(sentence(f"{where}, column {name}", "this column", f"only {', '.join(names)}", advice))
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            advice = "Give each column a name of its own."
            raise ValueError(sentence(f"{where}, column {name or '(no name)'}", "one such column", "two", advice))
        if columns.ignore != "others" and name not in declared and name not in columns.ignore:
            expected = f"one of {', '.join([*declared, *columns.ignore])}"
            advice = 'List it under ignore in the model\'s [table], or write ignore = "others" there.'
            where = f"{where}, column {name or '(no name)'}"
            raise ValueError(sentence(where, expected, "an unknown column", advice))


def _measurement(path: Path, cells: Cells, columns: TableColumns) -> Measurement:
    time = _time(path, cells, columns)
    if columns.sensors:
        y = [value for s in columns.sensors for value in _sensed(path, cells, columns, s)]
    else:
        y = [_float(_number(path, cells, name)) for name in columns.measured]
    truth = [c.factor * _float(_number(path, cells, c.column)) for c in columns.truth]
    return Measurement(cells.number, time, y, truth)


def _time(path: Path, cells: Cells, columns: TableColumns) -> Decimal:
    text = cells.values[columns.time].strip()
    if columns.time_unit == ISO and text:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            expected, advice = "a date and time in ISO 8601", "Write 2024-05-01T12:30:00.5Z, or set time_unit."
            raise _wrong(path, cells.number, columns.time, expected, repr(text), advice) from None
        since = (when if when.tzinfo else when.replace(tzinfo=UTC)) - EPOCH
        return Decimal(since.days * 86400 + since.seconds) + Decimal(since.microseconds) / 1_000_000
    time = _number(path, cells, columns.time)
    if time is None:
        raise _wrong(path, cells.number, columns.time, "a time", "an empty cell", "Each row needs one.")
    return time


def _time_as_written(time: Decimal, columns: TableColumns) -> str:
    """A number as it stands, or a date and time."""
    return time_text(float(time), ISO) if columns.time_unit == ISO else str(time)


def _sensed(path: Path, cells: Cells, columns: TableColumns, sensor: TableSensor) -> list[float]:
    """The entries of one sensor in a row, in SI units; NaN where it has none."""
    if columns.sensor is not None:
        name = cells.values[columns.sensor].strip()
        known = [s.name for s in columns.sensors]
        if name not in known:
            advice = suggestion(name, known, "Write a table [[sensor]] with this name.")
            raise _wrong(path, cells.number, columns.sensor, f"one of {', '.join(known)}", repr(name), advice)
        if name != sensor.name:
            return [float("nan")] * len(sensor.columns)
    values = [c.factor * _float(_number(path, cells, c.column)) for c in sensor.columns]
    if sensor.geographic and values[1] == values[1] and abs(values[1]) > pi / 2:
        column = next(c.column for c in sensor.columns if c.entry == "y")
        expected, got = "a latitude of at most 90 degrees", cells.values[column].strip()
        raise _wrong(path, cells.number, column, expected, got, "Look at the columns of latitude and longitude.")
    if sensor.geographic:
        return values  # radians; `project` makes metres of them
    return [value + float(moved) for value, moved in zip(values, sensor.shift, strict=True)]


def _in_order(path: Path, rows: list[Measurement], columns: TableColumns) -> list[Measurement]:
    """The rows of one track in time; those of different sensors at one time become one."""
    rows = sorted(rows, key=lambda row: row.time) if columns.sort else rows
    ordered: list[Measurement] = []
    for row in rows:
        before = ordered[-1] if ordered else None
        if before is None or row.time > before.time:
            ordered.append(row)
        elif row.time < before.time:
            now, last = (_time_as_written(t, columns) for t in (row.time, before.time))
            got = f"{now} after {last} of row {before.row}"
            advice = "Sort the rows by time, or write sort = true in the model's [table]."
            raise _wrong(path, row.row, columns.time, "times that increase within a track", got, advice)
        else:
            ordered[-1] = _joined(path, before, row, columns)
    return ordered


def _joined(path: Path, before: Measurement, row: Measurement, columns: TableColumns) -> Measurement:
    """Two rows of one time: welcome from different sensors, refused where both have an entry."""
    twice = [n for n, a, b in zip(columns.measured, before.y, row.y, strict=True) if a == a and b == b]
    if not columns.sensors or twice:
        got = f"{_time_as_written(row.time, columns)} again, as in row {before.row}" + (
            f", with {twice[0]} in both" if columns.sensors else ""
        )
        advice = (
            "Keep one row for each time of a track."
            if not columns.sensors
            else ("Keep one row for each time of a track and sensor; two sensors of one kind need sensor in [table].")
        )
        raise _wrong(path, row.row, columns.time, "times that increase within a track", got, advice)
    y = [a if a == a else b for a, b in zip(before.y, row.y, strict=True)]
    truth = [a if a == a else b for a, b in zip(before.truth, row.truth, strict=True)]
    return Measurement(before.row, before.time, y, truth)


def project(tracks: list[Track], columns: TableColumns) -> list[Track]:
    """Tracks whose longitudes and latitudes, x and y in radians, are metres east and north of the origin."""
    origin = origin_of(tracks, columns)
    first, out = 0, [track._replace(origin=origin) for track in tracks]
    for s in columns.sensors:
        if s.geographic:
            x, y = (first + s.sensor.entries.index(name) for name in ("x", "y"))
            for k, track in enumerate(out):
                plane = to_plane(track.y[:, y], track.y[:, x], origin)
                values = track.y.clone()
                values[:, [x, y]] = plane + s.shift[:2]
                out[k] = track._replace(y=values)
        first += len(s.columns)
    return out


def origin_of(tracks: Sequence[Track], columns: TableColumns) -> Origin:
    """Where the plane touches the earth: the model's origin, or the first position, to a hundredth of a degree."""
    if columns.origin is not None:
        return columns.origin
    first = 0
    for s in columns.sensors:
        if s.geographic:
            x, y = (first + s.sensor.entries.index(name) for name in ("x", "y"))
            for track in tracks:
                seen = track.y[~track.y[:, [x, y]].isnan().any(1)]
                if len(seen):
                    longitude, latitude = torch.rad2deg(seen[0, [x, y]]).tolist()
                    return Origin(round(latitude, 2), round(longitude, 2))
        first += len(s.columns)
    raise ValueError(sentence("table", "a row with latitude and longitude", "none", "Set origin in [table]."))


def _float(value: Decimal | None) -> float:
    return float("nan") if value is None else float(value)


def _number(path: Path, cells: Cells, column: str) -> Decimal | None:
    """None where the cell is empty."""
    text = cells.values[column].strip()
    if not text:
        return None
    if not NUMBER.fullmatch(text):
        advice = "Leave the cell empty where nothing was measured."
        if re.fullmatch(r"[+-]?\d+,\d+", text):
            advice = "Write a point before the decimals."
        raise _wrong(path, cells.number, column, "a finite number or an empty cell", repr(text), advice)
    value = Decimal(text)
    if abs(value) > Decimal(f"{LARGEST:g}"):
        raise _wrong(path, cells.number, column, f"a number of size at most {LARGEST:g}", text, "Use other units.")
    return value


def _count(path: Path, columns: TableColumns, measurements: list[Measurement]) -> int:
    """How many rows a track will have."""
    if columns.step is None:
        return len(measurements)
    return int(_index(path, columns, measurements[0].time, measurements[-1])) + 1


def _index(path: Path, columns: TableColumns, start: Decimal, measurement: Measurement) -> Decimal:
    """The index of a measurement on the grid of its track."""
    assert columns.step is not None
    steps = (measurement.time - start) / columns.step
    nearest = steps.to_integral_value()
    if abs(steps - nearest) > OFF_GRID:
        expected = f"a multiple of step {columns.step} after the first time {_time_as_written(start, columns)}"
        advice = "Leave step out of the model where times are irregular."
        got = _time_as_written(measurement.time, columns)
        raise _wrong(path, measurement.row, columns.time, expected, got, advice)
    return nearest


def _track(path: Path, name: str, measurements: list[Measurement], columns: TableColumns) -> Track:
    start = measurements[0].time
    if columns.step is None:
        times = [s.time for s in measurements]
        gaps = tuple(float((b - a) * TIMES[columns.time_unit]) for a, b in pairwise(times))
        y, truth = _tensor([s.y for s in measurements], len(columns.measured)), _truth(measurements, columns)
        return Track(name, tuple(map(float, times)), gaps, y, truth, rows=tuple(s.row for s in measurements))
    indices = [int(_index(path, columns, start, s)) for s in measurements]
    for (before, index), measurement in zip(pairwise(indices), measurements[1:], strict=True):
        if index == before:
            expected, advice = f"times a step of {columns.step} apart", "Keep one row for each time of a track."
            got = f"{_time_as_written(measurement.time, columns)} next to another row"
            raise _wrong(path, measurement.row, columns.time, expected, got, advice)
    y = torch.full((indices[-1] + 1, len(columns.measured)), torch.nan, dtype=torch.float64)
    y[indices] = _tensor([s.y for s in measurements], len(columns.measured))
    times = tuple(float(start + k * columns.step) for k in range(len(y)))
    known, truth = _truth(measurements, columns), None
    if known is not None:
        truth = torch.full((len(y), known.shape[1]), torch.nan, dtype=torch.float64)
        truth[indices] = known
    assert columns.step_seconds is not None
    rows = [0] * len(y)
    for index, measurement in zip(indices, measurements, strict=True):
        rows[index] = measurement.row
    return Track(name, times, (columns.step_seconds,) * (len(y) - 1), y, truth, rows=tuple(rows))


def _truth(measurements: list[Measurement], columns: TableColumns) -> Tensor | None:
    return _tensor([s.truth for s in measurements], len(columns.truth)) if columns.truth else None


def _tensor(rows: list[list[float]], m: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), m)


def _wrong(path: Path, row: int, column: str, expected: str, got: object, advice: str) -> ValueError:
    return ValueError(sentence(f"{path}, row {row}, column {column}", expected, got, advice))
