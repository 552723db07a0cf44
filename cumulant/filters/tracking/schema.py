"""Every key of the TOML file that `cumulant track` reads, as plain data: what `read_model` accepts, and docs/tracking.md.

`section` refuses every key that is not listed here.
"""

from __future__ import annotations

from typing import NamedTuple

REQUIRED = "required"
TABLES = {
    "table": "What the columns of the CSV file mean.",
    "measurement": "How noisy the measured columns are.",
    "mode": "One table [[mode]] for each way in which a target moves; at least one.",
    "switching": "How modes follow one another; not needed for one mode. Rows are from, columns are to: entry i, j is "
    "for going from mode i to mode j. Exactly one of the two keys.",
    "initial": "The law of the state and of the mode where a track begins. The state has every name of every mode, those "
    "of the largest mode first; a mode that lacks one sets it to 0 as it begins.",
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


KEYS = (
    TomlKey("table", "time", "text", REQUIRED, "The column of times, in any unit; q and rates are in the same."),
    TomlKey("table", "measured", "list of texts", REQUIRED, "The columns of numbers; an empty cell was not measured."),
    TomlKey("table", "track", "text", "one track", "The column that says to which track a row belongs."),
    TomlKey("table", "step", "number > 0", "any times", "The grid: rows are multiples of it apart, and missing rows are gaps."),
    TomlKey("table", "ignore", 'list of texts, or "others"', "none", 'Columns that the file may have besides; "others": whatever they are.'),
    TomlKey("table", "delimiter", "one character", '","', "Between two cells."),
    TomlKey("measurement", "noise", "variance, m variances, or m × m", "required unless every mode has its own", "Variance of the measurement noise of all modes."),
    TomlKey("mode", "name", "text", "its motion", "Names the column p_NAME of the estimates."),
    TomlKey("mode", "motion", "random-walk, constant-velocity, constant-acceleration or matrices", REQUIRED, "How the state moves between two rows."),
    TomlKey("mode", "q", "number ≥ 0, or m of them", "required, but not with matrices", "Spectral density of the white noise that drives velocity, acceleration or jerk, per unit of time."),
    TomlKey("mode", "noise", "variance, m variances, or m × m", "that of [measurement]", "Variance of the measurement noise of this mode alone."),
    TomlKey("mode", "state", "list of texts", "required with matrices", "Names of the d entries of the state of this mode; equal names tie modes together."),
    TomlKey("mode", "observation", "m × d", "required with matrices", "What is measured of the state: a row for each measured column."),
    TomlKey("mode", "drift", "d × d", "with diffusion, or dynamics and process_noise", "A of dx = A x dt + noise, for any times."),
    TomlKey("mode", "diffusion", "variance, d variances, or d × d", "with drift", "Spectral density of that noise, per unit of time."),
    TomlKey("mode", "dynamics", "d × d", "with process_noise, or drift and diffusion", "F of a step, x → F x + noise; needs step."),
    TomlKey("mode", "process_noise", "variance, d variances, or d × d", "with dynamics", "Covariance of that noise."),
    TomlKey("switching", "transition", "M × M, rows with sum 1", "required unless rates, or one mode", "Probabilities of a step; needs step."),
    TomlKey("switching", "rates", "M × M, rows with sum 0", "required unless transition, or one mode", "Rates per unit of time, for any times: e^{rates Δ} over a gap Δ."),
    TomlKey("initial", "mean", "d numbers", "0", "Mean of the state."),
    TomlKey("initial", "covariance", "variance, d variances, or d × d", REQUIRED, "Covariance of the state."),
    TomlKey("initial", "modes", "M probabilities", "equal", "Probabilities of the modes."),
    TomlKey("initial", "start", '"prior" or "belief"', '"prior"', 'What they are the law of: the state at the first row, or one step before it ("belief"; needs step).'),
)  # fmt: skip


def keys_of(table: str) -> tuple[str, ...]:
    """The keys that a table may have.

    >>> keys_of("switching")
    ('transition', 'rates')
    """
    return tuple(key.name for key in KEYS if key.table == table)
