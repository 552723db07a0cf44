"""Tables [[sensor]] of a model file: which columns a sensor fills, in which units, how noisy, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.sensors import ENTRIES, POSITIONS, VERTICAL, Sensor
from cumulant.filters.tracking.schema import keys_of
from cumulant.filters.tracking.section import Section, section
from cumulant.filters.tracking.units import unit, units_of

GEOGRAPHIC = {"longitude": "x", "latitude": "y"}  # what their columns become in the plane
CONVENTIONS = ("compass", "mathematical")


class EntryColumn(NamedTuple):
    """A column of the file: which entry of its sensor it is, its name, and its unit in m, rad or m/s."""

    entry: str
    column: str
    factor: float


class TableSensor(NamedTuple):
    """A sensor as its columns stand in a file.

    columns     in the order of the entries of ``sensor``
    sensor      the function of the state; one that is linear measures from the origin, and ``shift`` is added on
                reading
    geographic  whether x and y come from longitudes and latitudes
    """

    name: str
    columns: tuple[EntryColumn, ...]
    sensor: Sensor
    shift: Tensor
    geographic: bool = False


def read_sensors(path: Path, tables: object, shared: bool) -> tuple[TableSensor, ...]:
    """All tables [[sensor]]; ``shared`` where a column of the file says from which sensor a row is."""
    if not isinstance(tables, list) or not tables:
        raise TypeError(sentence(f"{path}, sensor", "tables [[sensor]]", type(tables).__name__, "Use double brackets."))
    sections = [section(f"{path}, [[sensor]] {k + 1}", values, keys_of("sensor")) for k, values in enumerate(tables)]
    entries = [_entries(table) for table in sections]
    axes = _axes_of([entry for of_sensor in entries for entry in of_sensor])
    sensors = tuple(_sensor(k, *pair, axes) for k, pair in enumerate(zip(sections, entries, strict=True)))
    _check_different(path, sensors, shared)
    return sensors


def measured_names(sensors: Sequence[TableSensor]) -> tuple[str, ...]:
    """Names of all entries side by side: of several sensors with the name of the sensor before them."""
    if len(sensors) == 1:
        return sensors[0].sensor.entries
    return tuple(f"{s.name}_{entry}" for s in sensors for entry in s.sensor.entries)


def _axes_of(names: Sequence[str]) -> int:
    if any(name in VERTICAL for name in names):
        return 3
    return 1 if set(names) <= {"x", "x_velocity"} else 2


def _entries(table: Section) -> dict[str, Section]:
    """The entries that a sensor has, each an inline table."""
    found = {}
    for name in (*ENTRIES, *GEOGRAPHIC):
        if table.has(name):
            found[name] = section(f"{table.where} {name}", table.values[name], keys_of("entry"))
    if not found:
        advice = 'Write range = { column = "…", unit = "m", std = 10 }, say.'
        raise ValueError(sentence(table.where, "something measured", "none", advice))
    for name in GEOGRAPHIC:
        other = next(key for key in GEOGRAPHIC if key != name)
        if name in found and (other not in found or any(p in found for p in ("x", "y"))):
            advice = "They come in a pair, and instead of x and y."
            raise ValueError(sentence(table.where, "latitude and longitude", name, advice))
    return found


def _sensor(index: int, table: Section, entries: dict[str, Section], axes: int) -> TableSensor:
    columns, deviations = [], []
    for name, inside in entries.items():
        known = units_of(name)
        geographic = name in GEOGRAPHIC
        default = "deg" if geographic else None if "rad" in known else next(iter(known))
        factor = unit(inside, "unit", known, default)
        deviation = inside.number("std", "The standard deviation of its noise, in its unit.", positive=True)
        columns.append(EntryColumn(GEOGRAPHIC.get(name, name), inside.text("column", "Name the column."), factor))
        deviations.append(deviation if geographic else deviation * factor)
    order = sorted(range(len(columns)), key=lambda k: ENTRIES.index(columns[k].entry))
    columns = [columns[k] for k in order]
    sizes = torch.tensor([deviations[k] for k in order], dtype=torch.float64)
    where = torch.zeros(axes, dtype=torch.float64)
    if table.has("position"):
        where = table.array("position", (axes,), f"Where it stands, {', '.join(POSITIONS[:axes])}, in m.")
    convention = table.text("bearings") if table.has("bearings") else "compass"
    if convention not in CONVENTIONS:
        advice = '"compass" is clockwise from north (y), "mathematical" counter-clockwise from x.'
        raise ValueError(sentence(table.at("bearings"), " or ".join(CONVENTIONS), repr(convention), advice))
    names = tuple(column.entry for column in columns)
    plain = Sensor(names, sizes, axes, None, convention == "compass")
    moved = plain if plain.is_linear else Sensor(names, sizes, axes, where, convention == "compass")
    shift = [float(where[POSITIONS.index(n)]) if plain.is_linear and n in POSITIONS else 0.0 for n in names]
    name = table.text("name") if table.has("name") else f"sensor{index + 1}"
    geographic = "latitude" in entries
    return TableSensor(name, tuple(columns), moved, torch.tensor(shift, dtype=torch.float64), geographic)


def _check_different(path: Path, sensors: Sequence[TableSensor], shared: bool) -> None:
    where, names = f"{path}, [[sensor]]", [s.name for s in sensors]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(sentence(where, "different names", f"{name} twice", "Set name in each."))
    taken: dict[str, str] = {}
    for s in sensors:
        for column in {c.column for c in s.columns}:
            if column in taken and not shared:
                got = f"column {column} for both {taken[column]} and {s.name}"
                advice = "Where a column says from which sensor a row is, name it: sensor in [table]."
                raise ValueError(sentence(where, "columns of its own for each sensor", got, advice))
            taken[column] = s.name
        if len({c.column for c in s.columns}) < len(s.columns):
            raise ValueError(sentence(f"{where} {s.name}", "a column for each entry", "one twice", "Name each once."))
