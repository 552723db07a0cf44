"""What causes.json holds, of one head and some chosen at random."""

from __future__ import annotations

TEN = [x / 100 for x in range(1, 11)]  # nine in ten up to 0.09, half below 0.055


def rows_of(kind: str, measure: str, replacement: str, mean: float, half: float | None, random: list[float]) -> dict:
    common = {"name": "a", "replacement": replacement, "measure": measure, "clusters": 8, "count": 8}
    ends = {"low": None, "high": None} if half is None else {"low": mean - half, "high": mean + half}
    rows = [{"layer": 3, "head": 1, "type": kind, "random": False, "effect": mean} | ends | common]
    rows += [
        {"layer": 3, "head": 2 + i, "type": None, "random": True, "effect": x, "low": x, "high": x} | common
        for i, x in enumerate(random)
    ]
    return {
        **{"rows": rows, "baseline": {"loss": 3.0}, "tokens": 256, "clustered_by": "windows"},
        **{"notes": [], "reason": None},
    }
