"""A run against the one that it replaces: whether what was changed in the model made it better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cumulant.filters.tracking.directory import SUMMARY

CLEAR = 5.0  # log-likelihood that two models must differ by; of a right one, a superfluous number gains 2 in 20 runs


class RunChange(NamedTuple):
    """Sentences for the terminal, numbers for summary.json."""

    words: str
    numbers: dict[str, Any]


def previous_summary(directory: Path) -> dict[str, Any] | None:
    """The summary.json of a run that is there, None where there is none that can be read."""
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def change_against(before: dict[str, Any] | None, now: dict[str, Any]) -> RunChange | None:
    """What changed since the run before, of the same table; None where there is none of it.

    Log-likelihoods are compared where both runs are of the same columns: a density of other numbers is no measure.

    >>> tracks = [{"track": "A", "rows": 100, "log_likelihood": -250.0, "rejected_rows": 0}]
    >>> now = {"file": "a.csv", "measured": ["x"], "tracks": tracks}
    >>> before = now | {"tracks": [tracks[0] | {"log_likelihood": -260.0}]}
    >>> change_against(before, now).words
    'Against the run that this one replaces: log-likelihood 10.00 higher, 0.1000 a row.'
    """
    if before is None or before.get("file") != now["file"] or not isinstance(before.get("tracks"), list):
        return None
    try:
        counts = [[(t["track"], t["rows"]) for t in run["tracks"]] for run in (before, now)]
        old, new = (sum(float(t["log_likelihood"]) for t in run["tracks"]) for run in (before, now))
        rejected = [sum(int(t.get("rejected_rows", 0)) for t in run["tracks"]) for run in (before, now)]
    except (KeyError, TypeError, ValueError):
        return None
    if counts[0] != counts[1] or before.get("measured", now["measured"]) != now["measured"]:
        words = "The run that this one replaces had other rows or columns: log-likelihoods do not compare."
        return RunChange(words, {"comparable": False})
    gain, rows = new - old, sum(count for _, count in counts[1])
    how = "higher" if gain >= 0 else "lower"
    words = (
        f"Against the run that this one replaces: log-likelihood {abs(gain):.2f} {how}, {abs(gain) / rows:.4f} a row"
    )
    words += "." if abs(gain) >= CLEAR else f"; a difference below {CLEAR:g} says little."
    if rejected[0] != rejected[1]:
        words += f" The gate rejected {rejected[1]:,} rows, {rejected[0]:,} before, which changes it too."
    return RunChange(words, {"comparable": True, "log_likelihood_gain": gain, "rejected_rows_before": rejected[0]})
