"""docs/tracking.md, from the keys that `cumulant track` accepts."""

from importlib.resources import files

from cumulant.filters.tracking import motion
from cumulant.filters.tracking.schema import KEYS, TABLES
from docs.generate.write import markdown_table

ABOUT = """<!-- written by `python -m docs.generate` from cumulant/filters/tracking/schema.py -->

# The model file of `cumulant track`

`cumulant track FILE.csv --model MODEL.toml` filters a table of measurements by a switching model. The TOML file says
what the columns are, how the modes move, how they switch, and where a track starts. This page has every key; a key that
is not here is refused with the nearest one that is. A file to begin with:

    cumulant track --example demo
    cumulant track demo/manoeuvre.csv --model demo/manoeuvre.toml --smooth

m is the number of measured columns, d of the entries of the state, M of the modes. A variance may be one number for
all, one for each, or a matrix. [Filters](filters.md) has methods, accuracy and cost.
"""


CHOICES = """## Which numbers to take

- `noise` is the square of the standard deviation of the sensor, in the square of the unit of its column.
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
| `X_smoothed`, `X_smoothed_std`, `p_MODE_smoothed` | with `--smooth`: given all rows of the track |
| `X_Y_cov` | covariance of two entries of the state |
"""


def pages() -> dict[str, str]:
    """The page under its file name."""
    parts = [ABOUT]
    for table, about in TABLES.items():
        brackets = "[[mode]]" if table == "mode" else f"[{table}]"
        rows = [[f"`{k.name}`", k.value, k.default, k.words] for k in KEYS if k.table == table]
        parts.append(f"## `{brackets}`\n\n{about}\n")
        parts.append(markdown_table(["key", "value", "if left out", "meaning"], rows) + "\n")
    parts += [f"## Motions\n\n{_motions()}\n", CHOICES, WRITES]
    example = files("cumulant.filters.tracking.example").joinpath("manoeuvre.toml").read_text(encoding="utf-8")
    parts.append(f"## The example\n\n```toml\n{example.strip()}\n```\n")
    return {"tracking.md": "\n".join(parts)}


def _motions() -> str:
    """The table and the equations at the top of motion.py; its last row spans two columns in the text."""
    words = (motion.__doc__ or "").split("\n\n", 1)[1].strip()
    lines = [" ".join(line.split()) if line.startswith("|") else line for line in words.splitlines()]
    return "\n".join(line + " |" if line.startswith("| matrices") else line for line in lines)
