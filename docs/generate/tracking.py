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


def pages() -> dict[str, str]:
    """The page under its file name."""
    parts = [ABOUT]
    for table, about in TABLES.items():
        brackets = "[[mode]]" if table == "mode" else f"[{table}]"
        rows = [[f"`{k.name}`", k.value, k.default, k.words] for k in KEYS if k.table == table]
        parts.append(f"## `{brackets}`\n\n{about}\n")
        parts.append(markdown_table(["key", "value", "if left out", "meaning"], rows) + "\n")
    parts.append(f"## Motions\n\n{_motions()}\n")
    example = files("cumulant.filters.tracking.example").joinpath("manoeuvre.toml").read_text(encoding="utf-8")
    parts.append(f"## The example\n\n```toml\n{example.strip()}\n```\n")
    return {"tracking.md": "\n".join(parts)}


def _motions() -> str:
    """The table and the equations at the top of motion.py; its last row spans two columns in the text."""
    words = (motion.__doc__ or "").split("\n\n", 1)[1].strip()
    lines = [" ".join(line.split()) if line.startswith("|") else line for line in words.splitlines()]
    return "\n".join(line + " |" if line.startswith("| matrices") else line for line in lines)
