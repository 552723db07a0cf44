"""A model file, TOML: what the columns are, which sensors filled them, how modes move and switch, where a track starts.

    [table]                         what the columns of the file mean: `TableColumns`
    time = "time"
    measured = ["x", "y"]           positions as they are, in any unit; or tables [[sensor]] with units and noise

    [[sensor]]                      what a sensor measures, in which columns and units, and how noisy that is
    range = { column = "rng", unit = "km", std = 0.02 }
    bearing = { column = "az", unit = "deg", std = 0.3 }

    [[mode]]                        at least one
    motion = "constant-velocity"
    q = 0.01

    [switching]                     not needed for one mode
    rates = [[-0.2, 0.2], [0.2, -0.2]]            per unit of time, or transition, per step

    [initial]
    velocity_std = 100              around where the track is first seen; or mean and covariance of the whole state

docs/tracking.md has every key, written from schema.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.filters.motion import ORDERS, Chain, Drift, EstimatedTurn, Fixed, Motion, Singer, Turn
from cumulant.filters.sensors import POSITIONS, VELOCITIES
from cumulant.filters.tracking.geodesy import Origin
from cumulant.filters.tracking.headings import headings
from cumulant.filters.tracking.model import RULE, Initial, Mode, Switching, TrackModel, common_states
from cumulant.filters.tracking.schema import TABLES, keys_of
from cumulant.filters.tracking.section import Section, load_toml, section, suggestion
from cumulant.filters.tracking.sensor_section import measured_names, read_sensors
from cumulant.filters.tracking.table import TableColumns, TruthColumn
from cumulant.filters.tracking.units import LENGTHS, RATES, SPEEDS, TIMES, unit

MATRICES = "matrices"
KEYS_OF_MOTIONS = {  # what each motion needs, besides name, motion and noise
    **dict.fromkeys(ORDERS, ("q",)),
    "singer": ("deviation", "time_constant"),
    "turn": ("rate", "rate_unit", "q"),
    "estimated-turn": ("q", "rate_q", "rule"),
    "estimated-turn-3d": ("q", "rate_q", "rule"),
    MATRICES: ("state", "observation", "drift", "diffusion", "dynamics", "process_noise"),
}
RULES = (RULE, "unscented", "cubature", "gauss-hermite")
SIZES = {
    "": "position",
    "_velocity": "velocity",
    "_acceleration": "acceleration",
    "_jerk": "jerk",
    "turn_rate": "turn_rate",
}
ROUNDED = 1e-6  # how far a row may be from its sum
CONVENTION = "Rows are from, columns are to: entry i, j is for going from mode i to mode j."


def read_model(path: Path) -> TrackModel:
    """The model that a TOML file describes; docs/tracking.md has its keys.

    >>> from tempfile import TemporaryDirectory
    >>> from cumulant.filters.tracking.example import write_example
    >>> with TemporaryDirectory() as directory:
    ...     model = read_model(write_example(Path(directory) / "demo")[1])
    >>> model.states
    ('x', 'y', 'x_velocity', 'y_velocity', 'x_acceleration', 'y_acceleration')
    """
    whole = section(f"{path},", load_toml(path), tuple(table for table in TABLES if table != "entry"))
    table = section(f"{path}, [table]", whole.need("table", "Say what the columns are."), keys_of("table"))
    columns = _columns(path, table, whole)
    measurement = section(f"{path}, [measurement]", whole.values.get("measurement", {}), keys_of("measurement"))
    modes = _modes(path, whole.need("mode", "Write a table [[mode]] for each mode."), columns, measurement)
    switching = _switching(path, whole, columns, modes)
    names = common_states(modes)
    _check_names(path, names, modes, columns)
    _check_velocities(path, columns, modes)
    advice = "Say how sure the state at the first row is: covariance, or velocity_std and others."
    initial = section(f"{path}, [initial]", whole.need("initial", advice), keys_of("initial"))
    gate = measurement.number("gate", "0.999, say.", positive=True) if measurement.has("gate") else None
    if gate is not None and gate >= 1:
        raise ValueError(sentence(measurement.at("gate"), "a probability below 1", f"{gate:g}", "0.999, say."))
    return TrackModel(columns, modes, switching, _initial(initial, names, modes, columns), gate)


def _columns(path: Path, table: Section, whole: Section) -> TableColumns:
    sensors, sensor = (), table.text("sensor") if table.has("sensor") else None
    if whole.has("sensor"):
        sensors = read_sensors(path, whole.values["sensor"], sensor is not None)
        if table.has("measured"):
            advice = "Leave measured out, or the tables [[sensor]]."
            raise ValueError(sentence(table.at("measured"), "none beside [[sensor]]", "both", advice))
        measured = measured_names(sensors)
    else:
        advice = 'List the columns of numbers, ["x", "y"], or write tables [[sensor]].'
        measured = table.texts("measured", advice)
        if sensor is not None:
            raise ValueError(sentence(table.at("sensor"), "tables [[sensor]] for its values", "none", "Write them."))
    time = table.text("time", "Name the column of times.")
    track = table.text("track") if table.has("track") else None
    ignore: tuple[str, ...] | str = ()
    if table.has("ignore"):
        ignore = table.values["ignore"]
        if ignore != "others":
            ignore = table.texts("ignore", 'List columns, or write "others".')
    delimiter = table.text("delimiter") if table.has("delimiter") else ","
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError(sentence(table.at("delimiter"), "one character", repr(delimiter), '";" or "\\t", say.'))
    step = None
    if table.has("step"):
        step = Decimal(str(table.number("step", "It is the time between two rows.", positive=True)))
    time_unit = table.text("time_unit") if table.has("time_unit") else "s"
    if time_unit not in TIMES:
        advice = suggestion(time_unit, list(TIMES), "Choose one.")
        raise ValueError(sentence(table.at("time_unit"), f"one of {', '.join(TIMES)}", repr(time_unit), advice))
    sort = table.values.get("sort", False)
    if not isinstance(sort, bool):
        raise TypeError(sentence(table.at("sort"), "true or false", repr(sort), "true sorts rows by time."))
    origin = None
    if table.has("origin"):
        origin = Origin(*table.array("origin", (2,), "Latitude and longitude in degrees.").tolist())
    truth = _truth(path, whole)
    data = dict.fromkeys(c.column for s in sensors for c in s.columns) if sensors else measured
    roles = [time, *([track] if track else []), *([sensor] if sensor else []), *data]
    if len(set(roles)) < len(roles):
        raise ValueError(sentence(table.where, "a column for each role", f"{roles}", "Name each column once."))
    return TableColumns(time, measured, track, step, ignore, delimiter, time_unit, sensors, sensor, truth, sort, origin)


def _truth(path: Path, whole: Section) -> tuple[TruthColumn, ...]:
    """Columns of the truth, for NEES."""
    table = section(f"{path}, [truth]", whole.values.get("truth", {}), keys_of("truth"))
    length = unit(table, "unit", LENGTHS, "m")
    speed = unit(table, "velocity_unit", SPEEDS, "m/s")
    names = [n for n in (*POSITIONS, *VELOCITIES) if table.has(n)]
    found = [TruthColumn(n, table.text(n), length if n in POSITIONS else speed) for n in names]
    if table.has("states"):
        listed = section(f"{path}, [truth] states", table.values["states"], tuple(table.values["states"]))
        found += [TruthColumn(n, listed.text(n), 1.0) for n in listed.values]
    return tuple(found)


def _modes(path: Path, tables: object, columns: TableColumns, measurement: Section) -> tuple[Mode, ...]:
    if not isinstance(tables, list) or not tables:
        raise TypeError(sentence(f"{path}, mode", "tables [[mode]]", type(tables).__name__, "Use double brackets."))
    modes = tuple(_mode(f"{path}, [[mode]] {k + 1}", values, columns, measurement) for k, values in enumerate(tables))
    names = [mode.name for mode in modes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(sentence(f"{path}, [[mode]]", "different names", f"{name} twice", "Set name in each."))
    return modes


def _mode(where: str, values: object, columns: TableColumns, measurement: Section) -> Mode:
    mode = section(where, values, keys_of("mode"))
    motions = tuple(KEYS_OF_MOTIONS)
    motion = mode.text("motion", f"Write one of {', '.join(motions)}.")
    if motion not in motions:
        advice = suggestion(motion, motions, "Choose one, or write matrices.")
        raise ValueError(sentence(mode.at("motion"), f"one of {', '.join(motions)}", repr(motion), advice))
    name = mode.text("name") if mode.has("name") else motion
    shared = ("name", "motion", "noise", *(("rule",) if not all(s.sensor.is_linear for s in columns.sensors) else ()))
    wrong = [key for key in mode.values if key not in (*shared, *KEYS_OF_MOTIONS[motion])]
    if wrong:
        advice = (
            f'Remove it, or write motion = "{MATRICES}".' if wrong[0] in KEYS_OF_MOTIONS[MATRICES] else "Remove it."
        )
        raise ValueError(sentence(mode.at(wrong[0]), f"none for motion {motion}", "one", advice))
    noise = _noise(mode, columns, measurement)
    if motion == MATRICES:
        if columns.sensors:
            advice = "Use measured under [table], or another motion."
            raise ValueError(sentence(mode.at("motion"), "a motion of the library with [[sensor]]", motion, advice))
        states = mode.texts("state", "Name the entries of the state.")
        observation = mode.array("observation", (len(columns.measured), len(states)), "A row for each measured column.")
        return Mode(name, states, _explicit(mode, len(states), columns), observation, noise, kind=motion)
    axes = POSITIONS[: columns.sensors[0].sensor.axes] if columns.sensors else columns.measured
    states, moves = _library_motion(mode, motion, axes)
    observation = torch.eye(len(axes), len(states), dtype=torch.float64)
    if columns.sensors:
        linear = all(s.sensor.is_linear for s in columns.sensors)
        observation = torch.cat([s.sensor.matrix(len(states)) for s in columns.sensors]) if linear else None
    rule = mode.text("rule") if mode.has("rule") else RULE
    if rule not in RULES:
        advice = suggestion(rule, RULES, "Choose one.")
        raise ValueError(sentence(mode.at("rule"), f"one of {', '.join(RULES)}", repr(rule), advice))
    return Mode(name, states, moves, observation, noise, rule, motion)


def _noise(mode: Section, columns: TableColumns, measurement: Section) -> Tensor:
    """R (m, m): of the sensors, or what the file says."""
    if columns.sensors:
        for table in (mode, measurement):
            if table.has("noise"):
                advice = "Sensors have a std for each entry; remove it."
                raise ValueError(sentence(table.at("noise"), "none beside [[sensor]]", "one", advice))
        return torch.block_diag(*(s.sensor.noise for s in columns.sensors))
    noisy = mode if mode.has("noise") else measurement
    advice = f"A variance, or one for each of {', '.join(columns.measured)}."
    return noisy.covariance("noise", len(columns.measured), advice, definite=True)


class NamedMotion(NamedTuple):
    """The names of the state of a motion, and the motion."""

    states: tuple[str, ...]
    motion: Motion | EstimatedTurn


def _library_motion(mode: Section, name: str, axes: tuple[str, ...]) -> NamedMotion:
    k = len(axes)
    if "turn" in name and (k not in (2, 3) or (name.endswith("3d") and k == 2)):
        expected = "3 axes" if name.endswith("3d") else "2 or 3 axes"
        raise ValueError(sentence(mode.at("motion"), f"{expected} for {name}", k, "Choose another motion."))
    if name in ORDERS:
        order = ORDERS[name]
        advice = "The spectral density of the noise, or one for each measured column."
        return NamedMotion(Chain.states(order, axes), Chain(order, _densities(mode, "q", k, advice)))
    if name == "singer":
        deviation = mode.diagonal("deviation", k, "The standard deviation of the acceleration, or one for each axis.")
        advice = "The time over which the acceleration is correlated, or one for each axis."
        tau = mode.diagonal("time_constant", k, advice)
        if not bool((tau > 0).all()) or bool((deviation < 0).any()):
            raise ValueError(sentence(mode.at("time_constant"), "times > 0 and a deviation ≥ 0", "others", advice))
        return NamedMotion(Singer.states(axes), Singer(deviation, tau))
    if name == "turn":
        rate = mode.number("rate", "How fast it turns, counter-clockwise.") * unit(mode, "rate_unit", RATES, "rad/s")
        density = _densities(mode, "q", 1, "The spectral density of the noise, the same in all directions.")[0]
        return NamedMotion(Turn.states(axes), Turn(torch.tensor(rate, dtype=torch.float64), density, k))
    density = _densities(mode, "q", k, "The spectral density of the acceleration, or one for each axis.")
    of_rate = _densities(mode, "rate_q", 1, "The spectral density of the turn rate, rad²/s³.")[0]
    motion = EstimatedTurn(density, of_rate, k, name.endswith("3d"))
    return NamedMotion(motion.states(axes), motion)


def _densities(mode: Section, key: str, size: int, advice: str) -> Tensor:
    density = mode.diagonal(key, size, advice)
    if bool((density < 0).any()):
        raise ValueError(sentence(mode.at(key), "numbers ≥ 0", density.tolist(), "0 is motion without noise."))
    return density


def _explicit(mode: Section, d: int, columns: TableColumns) -> Motion:
    pairs = (("drift", "diffusion"), ("dynamics", "process_noise"))
    present = [pair for pair in pairs if any(mode.has(key) for key in pair)]
    if len(present) != 1:
        expected = "drift and diffusion, or dynamics and process_noise"
        raise ValueError(sentence(mode.where, expected, "both" if present else "neither", "Give one of the pairs."))
    matrix_key, noise_key = present[0]
    matrix = mode.array(matrix_key, (d, d), "A row and a column for each name in state.")
    noise = mode.covariance(noise_key, d, "A variance, one for each entry of the state, or a matrix.")
    if matrix_key == "drift":
        return Drift(matrix, noise)
    if columns.step is None:
        advice = "Set step under [table], or give drift and diffusion."
        raise ValueError(sentence(mode.at(matrix_key), "a regular grid for what is per step", "no step", advice))
    return Fixed(matrix, noise)


def _switching(path: Path, whole: Section, columns: TableColumns, modes: Sequence[Mode]) -> Switching:
    table = section(f"{path}, [switching]", whole.values.get("switching", {}), keys_of("switching"))
    if table.has("transition") == table.has("rates"):
        if len(modes) == 1 and not table.values:
            return Switching(torch.ones(1, 1, dtype=torch.float64), timed=False)
        got = "both" if table.values else "neither"
        raise ValueError(sentence(table.where, "transition or rates", got, "Per step, or per unit of time."))
    key = next(iter(table.values))
    matrix = table.array(key, (len(modes), len(modes)), f"A row and a column for each mode. {CONVENTION}")
    target = 1.0 if key == "transition" else 0.0
    sums = matrix.sum(-1)
    size = max(1.0, float(matrix.abs().max()))
    for k, mode in enumerate(modes):
        if abs(float(sums[k]) - target) > ROUNDED * size:
            got = f"row {k + 1}, from {mode.name}, with sum {float(sums[k]):.6g}"
            raise ValueError(sentence(table.at(key), f"rows with sum {target:g}", got, CONVENTION))
    off = matrix if key == "transition" else matrix - torch.diag(matrix.diagonal())
    if bool((off < 0).any()):
        expected = "probabilities" if key == "transition" else "rates ≥ 0 off the diagonal"
        raise ValueError(sentence(table.at(key), expected, f"{float(off.min()):.3g}", CONVENTION))
    if key == "transition" and columns.step is None and len(modes) > 1:
        advice = "Set step under [table], or give rates, which are per unit of time."
        raise ValueError(sentence(table.at(key), "a regular grid for what is per step", "no step", advice))
    return Switching(matrix, timed=key == "rates")


def _initial(initial: Section, names: Sequence[str], modes: Sequence[Mode], columns: TableColumns) -> Initial:
    d, listed = len(names), ", ".join(names)
    mean = torch.zeros(d, dtype=torch.float64)
    if initial.has("mean"):
        mean = initial.array("mean", (d,), f"The state is {listed}.")
    sizes = [key for key in keys_of("initial") if key.endswith("_std") and initial.has(key)]
    if sizes and initial.has("covariance"):
        raise ValueError(sentence(initial.at(sizes[0]), "none beside covariance", "both", "Leave one of them out."))
    located = bool(sizes) and not initial.has("mean")
    if sizes:
        covariance = _covariance_of_sizes(initial, names, modes, columns)
    else:
        advice = f"A variance, or one for each of {listed}; or velocity_std and others."
        covariance = initial.covariance("covariance", d, advice)
    if located and any(mode.motion.__class__ in (Drift, Fixed) for mode in modes):
        raise ValueError(sentence(initial.at("mean"), "a value for motion matrices", "none", f"The state is {listed}."))
    weights = torch.full((len(modes),), 1 / len(modes), dtype=torch.float64)
    if initial.has("modes"):
        weights = initial.array("modes", (len(modes),), "A probability for each mode.")
        if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > ROUNDED:
            raise ValueError(sentence(initial.at("modes"), "probabilities with sum 1", weights.tolist(), "Divide."))
    start = initial.text("start") if initial.has("start") else "prior"
    if start not in ("prior", "belief"):
        advice = '"prior" is the distribution at the first row, "belief" one step before it.'
        raise ValueError(sentence(initial.at("start"), '"prior" or "belief"', repr(start), advice))
    if start == "belief" and columns.step is None:
        raise ValueError(sentence(initial.at("start"), '"prior" where times are irregular', repr(start), "Set step."))
    size = initial.number("position_std", "In m.", positive=True) if initial.has("position_std") else None
    return Initial(mean, covariance, weights, start, located, size)


def _covariance_of_sizes(
    initial: Section, names: Sequence[str], modes: Sequence[Mode], columns: TableColumns
) -> Tensor:
    """A diagonal covariance from position_std, velocity_std, …; positions may be left to the sensor."""
    axes = POSITIONS[: columns.sensors[0].sensor.axes] if columns.sensors else columns.measured
    variances = []
    for name in names:
        ending = next((e for e in reversed(SIZES) if e and name.endswith(e)), "")
        key = f"{SIZES[ending]}_std"
        if name in axes and not initial.has(key) and not initial.has("mean"):
            variances.append(1.0)  # set by the sensor that sees the track first
            continue
        size = initial.number(key, f"The standard deviation of {name} at the first row.", positive=True)
        variances.append(size**2)
    return torch.diag(torch.tensor(variances, dtype=torch.float64))


def _check_velocities(path: Path, columns: TableColumns, modes: Sequence[Mode]) -> None:
    """A sensor of velocities needs modes that have them."""
    for s in columns.sensors:
        for mode in modes:
            if s.sensor.needs_velocity and not any(name.endswith("_velocity") for name in mode.states):
                where, got = f"{path}, [[mode]] {mode.name}", f"{s.name} with {', '.join(s.sensor.entries)}"
                advice = "Use constant-velocity, or leave that entry out."
                raise ValueError(sentence(where, "a velocity for what the sensors measure", got, advice))


def _check_names(path: Path, names: Sequence[str], modes: Sequence[Mode], columns: TableColumns) -> None:
    """The table of estimates must have a column of its own for everything."""
    names_out = headings(
        names, [mode.name for mode in modes], columns.measured, geographic=columns.is_geographic, scored=True
    )
    for name in names_out:
        if names_out.count(name) > 1:
            expected = "names that give every column of the estimates its own"
            raise ValueError(sentence(str(path), expected, f"two columns {name}", "Rename a state, mode or column."))
