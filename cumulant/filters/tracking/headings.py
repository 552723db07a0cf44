"""The names of the columns of the estimates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

GEOGRAPHIC = ("latitude", "longitude")


def headings(
    states: Sequence[str],
    modes: Sequence[str],
    measured: Sequence[str],
    smoothed: bool = True,
    geographic: bool = False,
    scored: bool = False,
) -> tuple[str, ...]:
    """Track and time, what was measured, the state with its standard deviations, the modes, and the covariances.

    >>> headings(["x"], ["drift"], ["x"])
    ('track', 'time', 'x_measured', 'x', 'x_std', 'p_drift', 'log_likelihood', 'x_smoothed', 'x_smoothed_std',
     'p_drift_smoothed')
    """
    after = [f"{s}{end}" for s in states for end in ("_smoothed", "_smoothed_std")]
    after += [f"p_{mode}_smoothed" for mode in modes]
    return (
        "track",
        "time",
        *(f"{name}_measured" for name in measured),
        *(f"{s}{end}" for s in states for end in ("", "_std")),
        *(f"p_{mode}" for mode in modes),
        "log_likelihood",
        *(("nis", "rejected") if scored else ()),
        *(after if smoothed else ()),
        *(f"{a}_{b}_cov" for a, b in combinations(states, 2)),
        *(f"{name}{end}" for end in (("", "_smoothed") if smoothed else ("",)) for name in GEOGRAPHIC if geographic),
    )
