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
(`position`), which way bearings turn (`bearings`), and units that no name gives away. `--check` prints the ranges of
values in metres and degrees, what each mode may do between two rows, and where each track starts. The last lines of a
run are a verdict on consistency, with what to change:

    The filter is overconfident and lags behind: raise process noise (q). NIS is 2.31 for each number measured, …

Change that number, run again with `--force`, and compare. Where the gate rejects more than a tenth, the verdict names
the sensor instead: its position, unit or convention is wrong, or the track is lost. A file to play with:

    cumulant track --example demo
    cumulant track demo/manoeuvre.csv --model demo/manoeuvre.toml --smooth

m is the number of measured columns, d of the entries of the state, M of the modes. A variance may be one number for
all, one for each, or a matrix. [Filters](filters.md) has methods, accuracy and cost.
"""


CONSISTENCY = """## Consistency

A filter says how sure it is; the measurements say whether it may be. The command prints a table, draws
`figures/consistency.svg`, and writes both into summary.json under `consistency`.

{table}

A *score* is what was measured against what was predicted, as a standard normal number: the predicted law of a
switching filter is a mixture, and the score is its probability transform, z = Φ⁻¹(F(y | past)), entry by entry. With
one mode that is the innovation divided by its standard deviation, and NIS is the usual one.

| NIS | autocorrelation | what to change |
|---|---|---|
| above its band | above | process noise is too small: raise q |
| above | inside | both are too small |
| above | below | measurement noise is too small: raise std or noise |
| below its band | above | measurement noise is too large |
| below | inside | both are too large |
| below | below | process noise is too large: lower q |

A few scores beyond 4 are outliers: `--gate 0.999`, or gate under [measurement], rejects them; how many is printed for
each track. In Python: `cumulant.filters.innovations`, `consistency`, `nees`.
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
`figures/` a figure for each track.

| column | meaning |
|---|---|
| `track`, `time` | as in the file |
| `X_measured` | what was measured of column X; empty where nothing was |
| `X`, `X_std`; `X_velocity`, … | mean and standard deviation of each entry of the state, given the rows so far |
| `p_MODE` | probability of the mode, given the rows so far |
| `log_likelihood` | log-density of the row given those before it |
| `nis`, `rejected` | sum of squared scores of the row, and how many of its numbers the gate rejected |
| `X_smoothed`, `X_smoothed_std`, `p_MODE_smoothed` | with `--smooth`: given all rows of the track |
| `X_Y_cov` | covariance of two entries of the state |
| `latitude`, `longitude`, `…_smoothed` | of sensors with latitude and longitude: the mean in degrees |

With tables [[sensor]] everything is in metres, seconds and radians; X_measured too, `SENSOR_ENTRY_measured` where
there are several sensors.
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
    parts += [CONSISTENCY.format(table=_tables(import_module("cumulant.filters.consistency"))), WRITES]
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
