"""Units of columns, and what they are in metres, seconds and radians, in which everything is computed."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from math import pi

from cumulant.checks import sentence
from cumulant.filters.sensors import ANGLES, POSITIONS
from cumulant.filters.tracking.section import Section, suggestion

LENGTHS = {"m": 1.0, "km": 1000.0, "ft": 0.3048, "nm": 1852.0, "mi": 1609.344}
ANGULAR = {"rad": 1.0, "deg": pi / 180}
SPEEDS = {
    "m/s": 1.0,
    "km/h": 1 / 3.6,
    "kn": 1852 / 3600,
    "ft/s": 0.3048,
    "ft/min": 0.3048 / 60,
    "km/s": 1000.0,
    "mph": 0.44704,
}
RATES = {"rad/s": 1.0, "deg/s": pi / 180}
ISO = "iso"
TIMES = {
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
    "min": Decimal(60),
    "h": Decimal(3600),
    ISO: Decimal(1),
}


def units_of(entry: str) -> dict[str, float]:
    """The units that a column of this entry may have.

    >>> units_of("bearing")["rad"], units_of("range")["nm"]
    (1.0, 1852.0)
    """
    if entry in (*ANGLES, "latitude", "longitude"):
        return ANGULAR
    return LENGTHS if entry in (*POSITIONS, "range") else SPEEDS


def unit(table: Section, key: str, known: dict[str, float], default: str | None) -> float:
    """The factor of the unit under a key; a default of None must be written."""
    listed = ", ".join(known)
    if default is not None and not table.has(key):
        return known[default]
    name = table.text(key, f"Write one of {listed}.")
    if name not in known:
        raise ValueError(
            sentence(table.at(key), f"one of {listed}", repr(name), suggestion(name, list(known), "Choose one."))
        )
    return known[name]


def time_text(time: float, unit: str) -> str:
    """A time of a table as a person reads it.

    >>> time_text(1714564860.0, "iso"), time_text(0.5, "s")
    ('2024-05-01T12:01:00', '0.5')
    """
    if unit != ISO:
        return f"{time:.10g}"
    text = datetime.fromtimestamp(time, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text.removesuffix(".000")
