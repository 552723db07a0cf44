"""docs/tracking.md, from the keys that `cumulant track` accepts."""

from importlib import import_module
from importlib.resources import files
from types import ModuleType

from cumulant.filters import motion, sensors
from cumulant.filters.tracking.schema import KEYS, TABLES
from docs.generate.write import markdown_table

ABOUT = """<!-- written by `python -m docs.generate` from cumulant/filters/tracking/schema.py -->

# The model file of `cumulant track`

`cumulant track FILE.csv --model MODEL.toml` filters a table of measurements by a switching model. The TOML file says
what the columns are, which sensors filled them, how the modes move and switch, and where a track starts. This page has
every key; a key that is not here is refused with the nearest one that is.

## From a table to a track

    cumulant track --init radar.csv                             # looks at the columns, writes radar.toml, asks nothing
    cumulant track radar.csv --model radar.toml --check         # says what was understood, runs nothing
    cumulant track radar.csv --model radar.toml --smooth        # tracked/radar: estimates, figures, summary.json

`--init` knows times, tracks, sensors, x, y, z, latitude and longitude, range, bearing (azimuth), elevation, Doppler,
speed, course and velocities by the names of columns, their units by names and values, and guesses noise from how far
numbers lie from their neighbours. Every guess has a comment: what a person must look at is where sensors stand
(`position`), which way bearings turn (`bearings`), and units that no name gives away. Two modes that turn are in the
file as comments, with the rate that positions show if they do. `--check` prints the ranges of
values in metres and degrees, what each mode may do between two rows, and where each track starts. The last lines of a
run are a verdict on consistency, with what to change:

    The filter is overconfident and lags behind: raise process noise (q). NIS is 2.31 for each number measured, …

Change that, run again with `--force`, and read whether the log-likelihood is higher than that of the run before.
[Consistency](#consistency) has the rules. A file to play with:

    cumulant track --example demo
    cumulant track demo/manoeuvre.csv --model demo/manoeuvre.toml --smooth

m is the number of measured columns, d of the entries of the state, M of the modes. A variance may be one number for
all, one for each, or a matrix. [Filters](filters.md) has methods, accuracy and cost.
"""


CONSISTENCY = """## Consistency

A filter says how sure it is; the measurements say whether it may be. The command prints a table, draws
`figures/consistency.svg`, and writes both into summary.json under `consistency`.

{table}

A *normalised innovation* is what was measured against what was predicted, as a standard normal number: the predicted
distribution of a switching filter is a mixture, and z = Φ⁻¹(F(y | past)) is its probability transform, entry by entry,
each given the entries before it. With one mode that is the innovation divided by its standard deviation, and NIS is the
usual one, divided by its dimension. Numbers *of X* use the normalised innovation of the entry X by itself, which does
not depend on the order of entries. In the terminal "high" and "low" are outside of the band and the verdict is on
them; in brackets they are outside by chance (1 in 20 is) or by too little to matter.

| number | counts where it is outside of its 95 % band made wider by | and at least this far from what is expected |
|---|---|---|
| NIS, autocorrelation of all numbers | 1.3 (1 right model in 100 is there) | 0.1; 0.15 |
| NIS, mean, autocorrelation of X | 1.7 (1 in 1000) | 0.2; 0.2; 0.15 |
| autocorrelation of X over lags 3 to 8 | 1.7 | 0.1 |
| share of a mode | 1.3 | 0.02 |
| NEES | 1 | 0 |

The verdict is that of the first of these rules that fits, and says what to change:

{rules}

What is left to NIS and autocorrelation of all numbers:

| NIS | autocorrelation | what to change |
|---|---|---|
| above its band | above | process noise is too small: raise q |
| above | inside | both are too small |
| above | below | measurement noise is too small: raise std or noise |
| inside | above | raise q and lower std, so that NIS stays |
| inside | inside | nothing: consistent |
| inside | below | lower q and raise std |
| below its band | above | measurement noise is too large |
| below | inside | both are too large |
| below | below | process noise is too large: lower q |

How often the rules are right, on simulated radars of range, bearing and Doppler that were not used to choose the
limits: 60 tables of four tracks of 200 rows (in brackets 240 of one track). A right model is called consistent in 98 to
100 % (97 to 99 %; of 60 rows 97 to 98 %). What is wrong is named: a turn that no mode has in 100 % (92 to 93 %), a bias
of Doppler in 97 to 100 % (99 %), Doppler half a step ahead of range in turns in 98 % with turn modes and 95 % without
(93 and 63 %; else a turn is named), a wrong std of one entry in 98 to 100 % (89 to 99 %), q 30 times too small or large
in 100 % (81 to 100 %). Positions alone say less: a turn under two straight modes is named in about half of tables or
fewer, and many are called consistent; a manoeuvre whose q is too small is often taken for a turn, and the sentence says
both. Under 80 rows manoeuvres are not looked for.

Whether a change was one for the better is measured: with `--force`, a run prints the log-likelihood against that of the
run it replaces. It compares models of the same columns; with a column left out, compare NIS and mean of the others.

A few normalised innovations beyond 4 are outliers: `--gate 0.999`, or gate under [measurement], rejects them; in how
many rows is printed for each track. Where it rejects more than a tenth of the rows, the verdict says how often each
entry is far off by itself in those rows, because the gate rejects the entries of a sensor together. In Python:
`cumulant.filters.innovations`, `consistency`, `nees`.
"""

CHOICES = """## Which numbers to take

- `std` of a sensor is in the unit of its column; `noise`, for columns under measured, is its square.
- `q` of constant-velocity is (change of velocity)² / time: a target whose velocity drifts by about v within a time T
  has q ≈ v² / T. Of constant-acceleration it is the same with the acceleration, of random-walk with the position.
- `covariance` of the start is the square of how far the state may be from `mean`; with large numbers the first rows
  decide.
- A mode that lasts about k rows has 1 − 1/k on the diagonal of `transition`.

`cumulant.filters.em` learns them from tracks; compare `log_likelihood` in summary.json between two files.
"""

WRITES = """## What it writes

`estimates.csv` and `estimates.parquet` have a row for each time of each track; `summary.json` has the totals, and
`figures/` a figure for each track, `track-NAME.svg`, and `consistency.svg`, each of them as a PNG too.

| column | meaning |
|---|---|
| `track`, `time` | as in the file |
| `X_measured` | what was measured of column X; empty where nothing was |
| `X`, `X_std`; `X_velocity`, … | mean and standard deviation of each entry of the state, given the rows so far |
| `p_MODE` | probability of the mode, given the rows so far |
| `log_likelihood` | log-density of the row given those before it |
| `nis`, `rejected` | sum of squared normalised innovations of the row; how many of its numbers the gate rejected |
| `X_smoothed`, `X_smoothed_std`, `p_MODE_smoothed` | with `--smooth`: given all rows of the track |
| `X_Y_cov` | covariance of two entries of the state |
| `latitude`, `longitude`, `…_smoothed` | of sensors with latitude and longitude: the mean in degrees |

With tables [[sensor]] everything is in metres, seconds and radians; X_measured too, `SENSOR_ENTRY_measured` where
there are several sensors.

| key of summary.json | meaning |
|---|---|
| `log_likelihood`, `log_likelihood_per_row` | log p(y) of all tracks, and divided by the rows that are not empty |
| `replaced` | with `--force` over a run of the same table: `log_likelihood_gain` against it, if `comparable` |
| `tracks` | of each track its rows, times as in the table, shares of modes, log-likelihood, `nis`, `autocorrelation` |
| `rejected_rows`, `rejected` | rows in which the gate rejected something, and numbers in them |
| `smoothed_excess` | by which factor smoothed variances exceed filtered ones; above 1 the filtered may be better |
| `consistency` | `status`, `verdict`, `numbers` with their bands, `entries` with mean and autocorrelation at each lag |
"""


def pages() -> dict[str, str]:
    """The page under its file name."""
    parts = [ABOUT]
    for table, about in TABLES.items():
        brackets = f"[[{table}]]" if table in ("mode", "sensor") else f"[{table}]"
        brackets = "{ column = …, unit = …, std = … }" if table == "entry" else brackets
        rows = [[f"`{k.name}`", k.value, k.default, k.words] for k in KEYS if k.table == table]
        parts.append(f"## `{brackets}`\n\n{about}\n")
        parts.append(markdown_table(["key", "value", "if left out", "meaning"], rows) + "\n")
    parts += [f"## Motions\n\n{_motions()}\n", f"## Sensors\n\n{_after_title(sensors)}\n", CHOICES]
    tables = {
        name: _tables(import_module(f"cumulant.filters.diagnostics.{name}")) for name in ("consistency", "verdict")
    }
    parts += [CONSISTENCY.format(table=tables["consistency"], rules=tables["verdict"]), WRITES]
    example = files("cumulant.filters.tracking.example").joinpath("manoeuvre.toml").read_text(encoding="utf-8")
    parts.append(f"## The example\n\n```toml\n{example.strip()}\n```\n")
    return {"tracking.md": "\n".join(parts)}


def _motions() -> str:
    """The table and the equations at the top of the motion library, and the motion of a model file alone."""
    lines = _after_title(motion).splitlines()
    last = max(k for k, line in enumerate(lines) if line.startswith("|"))
    given = "as given: per unit of time (drift, diffusion) or per step (dynamics, process_noise)"
    lines.insert(last + 1, f"| matrices | names under state | {given} |")
    return "\n".join(lines)


def _after_title(module: ModuleType) -> str:
    """The docstring of a module after its first line, tables without padding."""
    words = (module.__doc__ or "").split("\n\n", 1)[1].strip()
    lines = [" ".join(line.split()) if line.startswith("|") else line for line in words.splitlines()]
    return "\n".join(lines)


def _tables(module: ModuleType) -> str:
    return "\n".join(line for line in _after_title(module).splitlines() if line.startswith("|"))
