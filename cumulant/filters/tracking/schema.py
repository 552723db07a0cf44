"""Every key of the TOML file that `cumulant track` reads, as plain data: what `read_model` accepts, and docs/tracking.md.

`section` refuses every key that is not listed here.
"""

from __future__ import annotations

from typing import NamedTuple

REQUIRED = "required"
TABLES = {
    "table": "What the columns of the CSV file mean.",
    "measurement": "How noisy the columns under measured are (sensors say it themselves), and what to do with outliers.",
    "sensor": "One table [[sensor]] for each sensor, in place of measured: any of the entries below, each an inline table with "
    "column, unit and std. Everything is then in metres, seconds and radians: q, rates, positions and the estimates. Sensors "
    "may fill different columns, at different times; or the same columns, where [table] sensor names the column that says which.",
    "entry": 'The inline table of an entry, as in `range = { column = "rng_km", unit = "km", std = 0.02 }`.',
    "mode": "One table [[mode]] for each way in which a target moves; at least one.",
    "switching": "How modes follow one another; not needed for one mode. Rows are from, columns are to: entry i, j is "
    "for going from mode i to mode j. Exactly one of the two keys.",
    "initial": "The distribution of the state and of the mode where a track begins. The state has every name of every mode, those "
    "of the largest mode first; a mode that lacks one sets it to 0 as it begins. Either mean and covariance of the whole "
    "state, or standard deviations by kind; with the latter and no mean, each track starts where it is first seen.",
    "truth": "Columns with the true state, where there are any: NEES is reported.",
}


class TomlKey(NamedTuple):
    """One key of a table.

    value    what it may be; m is the number of measured columns, d of the entries of the state, M of the modes
    default  what holds if it is left out: a value, a condition, or "required"
    """

    table: str
    name: str
    value: str
    default: str
    words: str


LENGTH, SPEED, ANGLE = (
    "entry; m, km, ft, nm, mi",
    "entry; m/s, km/h, kn, ft/s, ft/min, km/s, mph",
    "entry; deg or rad, to be said",
)
KEYS = (
    TomlKey("table", "time", "text", REQUIRED, "The column of times."),
    TomlKey("table", "time_unit", "s, ms, us, min, h or iso", '"s", or any unit with measured', "Its unit; iso: dates and times as 2024-05-01T12:30:00Z, in UTC unless they say."),
    TomlKey("table", "measured", "list of texts", "required unless [[sensor]]", "Columns of positions, in any unit; an empty cell was not measured."),
    TomlKey("table", "track", "text", "one track", "The column that says to which track a row belongs."),
    TomlKey("table", "sensor", "text", "by the cells that are filled", "The column that says from which sensor a row is: the name of a table [[sensor]]."),
    TomlKey("table", "step", "number > 0", "any times", "The grid, in the unit of time: rows are multiples of it apart, and missing rows are gaps."),
    TomlKey("table", "sort", "true or false", "false", "Sort the rows of a track by time; else times out of order are refused."),
    TomlKey("table", "origin", "2 numbers", "the first row", "Latitude and longitude in degrees of x = y = 0, for sensors with those."),
    TomlKey("table", "ignore", 'list of texts, or "others"', "none", 'Columns that the file may have besides; "others": whatever they are.'),
    TomlKey("table", "delimiter", "one character", '","', "Between two cells."),
    TomlKey("measurement", "noise", "variance, m variances, or m × m", "required with measured, unless every mode has its own", "Variance of the measurement noise of all modes."),
    TomlKey("measurement", "gate", "probability", "no gate", "Reject what a right sensor would measure with less than 1 − gate; 0.999, say. All entries of a sensor together."),
    TomlKey("sensor", "name", "text", "sensor1, …", "Names its columns in the estimates, and its rows under [table] sensor."),
    TomlKey("sensor", "position", "numbers for x, y (, z)", "0", "Where the sensor stands, in m."),
    TomlKey("sensor", "bearings", "compass or mathematical", "compass", "Bearings and courses clockwise from north (y), or counter-clockwise from x."),
    TomlKey("sensor", "x", LENGTH, "not measured", "Position along x, from the sensor."),
    TomlKey("sensor", "y", LENGTH, "not measured", "Position along y."),
    TomlKey("sensor", "z", LENGTH, "not measured", "Height; makes the state three-dimensional."),
    TomlKey("sensor", "latitude", "entry; deg or rad, std in m", "not measured", "With longitude, in place of x and y: metres east and north of origin (WGS 84)."),
    TomlKey("sensor", "longitude", "entry; deg or rad, std in m", "not measured", "See latitude."),
    TomlKey("sensor", "x_velocity", SPEED, "not measured", "Velocity along x."),
    TomlKey("sensor", "y_velocity", SPEED, "not measured", "Velocity along y."),
    TomlKey("sensor", "z_velocity", SPEED, "not measured", "Rate of climb."),
    TomlKey("sensor", "range", LENGTH, "not measured", "Distance from the sensor, in space where there is a height."),
    TomlKey("sensor", "bearing", ANGLE, "not measured", "Direction from the sensor (azimuth)."),
    TomlKey("sensor", "elevation", ANGLE, "not measured", "Angle above the horizontal; makes the state three-dimensional."),
    TomlKey("sensor", "range_rate", SPEED, "not measured", "Doppler: positive where the target goes away."),
    TomlKey("sensor", "speed", SPEED, "not measured", "Speed over ground."),
    TomlKey("sensor", "course", ANGLE, "not measured", "Direction of the velocity over ground."),
    TomlKey("entry", "column", "text", REQUIRED, "The column of the file."),
    TomlKey("entry", "unit", "see the entry", "m, m/s; of angles required", "Its unit."),
    TomlKey("entry", "std", "number > 0", REQUIRED, "Standard deviation of its noise, in the same unit."),
    TomlKey("mode", "name", "text", "its motion", "Names the column p_NAME of the estimates."),
    TomlKey("mode", "motion", "one of [those below](#motions), or matrices", REQUIRED, "How the state moves between two rows."),
    TomlKey("mode", "q", "number ≥ 0, or one for each axis", "required, but not with singer and matrices", "Spectral density of the white noise that drives velocity, acceleration, jerk or its rate."),
    TomlKey("mode", "deviation", "number ≥ 0, or one for each axis", "required with singer", "Standard deviation of the acceleration."),
    TomlKey("mode", "time_constant", "number > 0, or one for each axis", "required with singer", "Time over which the acceleration is correlated."),
    TomlKey("mode", "rate", "number", "required with turn", "Turn rate, counter-clockwise."),
    TomlKey("mode", "rate_unit", "rad/s or deg/s", "rad/s", "Its unit."),
    TomlKey("mode", "rate_q", "number ≥ 0", "required with estimated-turn", "Spectral density of the white noise that drives the turn rate, rad²/s³."),
    TomlKey("mode", "rule", "extended, unscented, cubature or gauss-hermite", "extended", "How a distribution goes through what is not linear: estimated turns, range, bearing, ….",),
    TomlKey("mode", "noise", "variance, m variances, or m × m", "that of [measurement]", "Variance of the measurement noise of this mode alone."),
    TomlKey("mode", "state", "list of texts", "required with matrices", "Names of the d entries of the state of this mode; equal names tie modes together."),
    TomlKey("mode", "observation", "m × d", "required with matrices", "What is measured of the state: a row for each measured column."),
    TomlKey("mode", "drift", "d × d", "with diffusion, or dynamics and process_noise", "A of dx = A x dt + noise, for any times."),
    TomlKey("mode", "diffusion", "variance, d variances, or d × d", "with drift", "Spectral density of that noise, per unit of time."),
    TomlKey("mode", "dynamics", "d × d", "with process_noise, or drift and diffusion", "F of a step, x → F x + noise; needs step."),
    TomlKey("mode", "process_noise", "variance, d variances, or d × d", "with dynamics", "Covariance of that noise."),
    TomlKey("switching", "transition", "M × M, rows with sum 1", "required unless rates, or one mode", "Probabilities of a step; needs step."),
    TomlKey("switching", "rates", "M × M, rows with sum 0", "required unless transition, or one mode", "Rates per unit of time, for any times: e^{rates Δ} over a gap Δ."),
    TomlKey("initial", "mean", "d numbers", "0, or where the track is first seen", "Mean of the state."),
    TomlKey("initial", "covariance", "variance, d variances, or d × d", "required unless the keys below", "Covariance of the state."),
    TomlKey("initial", "position_std", "number > 0", "10 deviations of the sensor", "Standard deviation of positions at the start."),
    TomlKey("initial", "velocity_std", "number > 0", "required if there are velocities", "Of velocities: about as fast as targets are."),
    TomlKey("initial", "acceleration_std", "number > 0", "required if there are accelerations", "Of accelerations."),
    TomlKey("initial", "jerk_std", "number > 0", "required if there are jerks", "Of jerks."),
    TomlKey("initial", "turn_rate_std", "number > 0", "required if there are turn rates", "Of turn rates, rad/s."),
    TomlKey("initial", "modes", "M probabilities", "equal", "Probabilities of the modes."),
    TomlKey("initial", "start", '"prior" or "belief"', '"prior"', 'What they are the distribution of: the state at the first row, or one step before it ("belief"; needs step).'),
    TomlKey("truth", "x", "text", "unknown", "The column of the true position along x; so y, z, x_velocity, y_velocity, z_velocity."),
    TomlKey("truth", "y", "text", "unknown", "See x."),
    TomlKey("truth", "z", "text", "unknown", "See x."),
    TomlKey("truth", "x_velocity", "text", "unknown", "See x."),
    TomlKey("truth", "y_velocity", "text", "unknown", "See x."),
    TomlKey("truth", "z_velocity", "text", "unknown", "See x."),
    TomlKey("truth", "states", "table of texts", "none", 'Columns of other entries of the state: { turn_rate = "true_rate" }, in SI units.'),
    TomlKey("truth", "unit", "m, km, ft, nm or mi", "m", "Unit of true positions."),
    TomlKey("truth", "velocity_unit", "as of speeds", "m/s", "Unit of true velocities."),
)  # fmt: skip


def keys_of(table: str) -> tuple[str, ...]:
    """The keys that a table may have.

    >>> keys_of("switching")
    ('transition', 'rates')
    """
    return tuple(key.name for key in KEYS if key.table == table)
