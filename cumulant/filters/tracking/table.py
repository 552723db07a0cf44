"""Measurements in a CSV file, read as tracks: sorted in time, gaps distinct from numbers, nothing guessed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.tracking.section import LARGEST, read_text, suggestion

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
ONLY = "1"  # the name of the track in a file that has one
OFF_GRID = Decimal("0.01")  # of a step: how far rounded times may lie from the grid
MAX_ROWS = 1_000_000  # rows, with those that the grid adds


class TableColumns(NamedTuple):
    """What the columns of a file mean.

    time       the column of times, in any unit
    measured   the columns of numbers; an empty cell was not measured
    track      the column that says to which track a row belongs, or None: one track
    step       the grid: rows are multiples of it apart, and those that are missing become gaps; None: any times
    ignore     columns that the file may have besides; "others": whatever they are
    delimiter  between two cells
    """

    time: str
    measured: tuple[str, ...]
    track: str | None = None
    step: Decimal | None = None
    ignore: tuple[str, ...] | str = ()
    delimiter: str = ","


class Track(NamedTuple):
    """One track: name, times of T rows, the T−1 gaps between them, and y (T, m), NaN where nothing was measured."""

    name: str
    times: tuple[float, ...]
    gaps: tuple[float, ...]
    y: Tensor


class Cells(NamedTuple):
    """A row as it stands in the file, numbered as in a spreadsheet: the header is row 1."""

    number: int
    values: dict[str, str]


class Measurement(NamedTuple):
    row: int
    time: Decimal
    y: list[float]


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
        track = measurements.setdefault(name, [])
        track.append(_measurement(path, cells, columns, track[-1] if track else None))
    if not measurements:
        raise ValueError(sentence(str(path), "rows of measurements", "a header only", "Add a row."))
    counts = [_count(path, columns, track) for track in measurements.values()]
    if sum(counts) > MAX_ROWS:
        longest = list(measurements)[counts.index(max(counts))]
        got = f"{sum(counts):,} with those that the grid adds, {max(counts):,} of them in track {longest}"
        raise ValueError(sentence(str(path), f"at most {MAX_ROWS:,} rows", got, "Look at the times and at step."))
    return [_track(path, name, track, columns) for name, track in measurements.items()]


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
    declared = [columns.time, *([columns.track] if columns.track else []), *columns.measured]
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


def _measurement(path: Path, cells: Cells, columns: TableColumns, before: Measurement | None) -> Measurement:
    time = _number(path, cells, columns.time)
    if time is None:
        raise _wrong(path, cells.number, columns.time, "a time", "an empty cell", "Each row needs one.")
    if before is not None and time <= before.time:
        text = cells.values[columns.time].strip()
        if time == before.time:
            got, advice = f"{text} again, as in row {before.row}", "Keep one row for each time of a track."
        else:
            got, advice = f"{text} after {before.time} of row {before.row}", "Sort the rows by time."
        raise _wrong(path, cells.number, columns.time, "times that increase within a track", got, advice)
    values = [_number(path, cells, name) for name in columns.measured]
    return Measurement(cells.number, time, [float("nan") if v is None else float(v) for v in values])


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
        expected = f"a multiple of step {columns.step} after the first time {start}"
        advice = "Leave step out of the model where times are irregular."
        raise _wrong(path, measurement.row, columns.time, expected, measurement.time, advice)
    return nearest


def _track(path: Path, name: str, measurements: list[Measurement], columns: TableColumns) -> Track:
    start = measurements[0].time
    if columns.step is None:
        times = [s.time for s in measurements]
        gaps = tuple(float(b - a) for a, b in pairwise(times))
        return Track(name, tuple(map(float, times)), gaps, _tensor([s.y for s in measurements], len(columns.measured)))
    indices = [int(_index(path, columns, start, s)) for s in measurements]
    for (before, index), measurement in zip(pairwise(indices), measurements[1:], strict=True):
        if index == before:
            expected, advice = f"times a step of {columns.step} apart", "Keep one row for each time of a track."
            got = f"{measurement.time} next to another row"
            raise _wrong(path, measurement.row, columns.time, expected, got, advice)
    y = torch.full((indices[-1] + 1, len(columns.measured)), torch.nan, dtype=torch.float64)
    y[indices] = _tensor([s.y for s in measurements], len(columns.measured))
    times = tuple(float(start + k * columns.step) for k in range(len(y)))
    return Track(name, times, (float(columns.step),) * (len(y) - 1), y)


def _tensor(rows: list[list[float]], m: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), m)


def _wrong(path: Path, row: int, column: str, expected: str, got: object, advice: str) -> ValueError:
    return ValueError(sentence(f"{path}, row {row}, column {column}", expected, got, advice))
