"""What a column is called, and what that says: its kind, its unit, the sensor before it."""

from __future__ import annotations

import re
from typing import NamedTuple

UNITS = {  # words in a name of a column → unit
    **dict.fromkeys(("km", "kms", "kilometers", "kilometres"), "km"),
    **dict.fromkeys(("m", "meter", "meters", "metre", "metres"), "m"),
    **dict.fromkeys(("ft", "feet", "foot"), "ft"),
    **dict.fromkeys(("nm", "nmi"), "nm"),
    **dict.fromkeys(("deg", "degs", "degree", "degrees"), "deg"),
    **dict.fromkeys(("rad", "rads", "radian", "radians"), "rad"),
    **dict.fromkeys(("kn", "kt", "kts", "knot", "knots"), "kn"),
    **dict.fromkeys(("kmh", "kph"), "km/h"),
    **dict.fromkeys(("mps",), "m/s"),
    **dict.fromkeys(("fpm",), "ft/min"),
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "usec", "micros", "microseconds"), "us"),
    **dict.fromkeys(("s", "sec", "secs", "seconds"), "s"),
}
KINDS = {  # kind → names, underscores between words
    "time": r"(base_|unix_|utc_|gps_)?(date_?)?time(_?stamp)?|t|epoch|date|utc|time_?(stamp)?_(utc|position)|seconds|sec",
    "track": r"(track|target|object|obj|vehicle|aircraft|vessel|ship)(_(id|no|nr|number|name))?|id|mmsi|icao(_?24)?|hex(_?ident)?|call_?sign|flight",
    "sensor": r"(sensor|station|radar|receiver|site|source)(_(id|no|nr|name))?",
    "latitude": r"lat(itude)?",
    "longitude": r"lon(g|gitude)?|lng",
    "range_rate": r"range_?rate|rng_?rate|doppler(_velocity)?|r_?dot|radial_?(velocity|speed|vel)|vr|rr",
    "range": r"(slant_?)?(range|rng)|dist(ance)?|r|rho",
    "bearing": r"bearing|brg|az|azi|azimuth|theta",
    "elevation": r"elev(ation)?(_?angle)?|el|phi",
    "course": r"cog|course(_over_ground)?|heading|track_angle|true_track",
    "speed": r"sog|(ground_?)?speed(_over_ground)?|gs|velocity",
    "x_velocity": r"v_?x|x_?vel(ocity)?|vel(ocity)?_x|x_?dot|east_vel(ocity)?|v_?east",
    "y_velocity": r"v_?y|y_?vel(ocity)?|vel(ocity)?_y|y_?dot|north_vel(ocity)?|v_?north",
    "z_velocity": r"v_?z|z_?vel(ocity)?|vel(ocity)?_z|z_?dot|vert(ical)?_?(rate|speed)|climb(_rate)?|roc",
    "x": r"x|east(ing)?|pos(ition)?_?x|x_?pos(ition)?|px",
    "y": r"y|north(ing)?|pos(ition)?_?y|y_?pos(ition)?|py",
    "z": r"z|((geo|baro|geometric|barometric)_)?alt(itude)?|height|up|pos(ition)?_?z|z_?pos(ition)?|pz",
}  # fmt: skip
TRUTH = ("true", "truth", "gt", "ref", "reference")


class ColumnName(NamedTuple):
    """What the name of a column says: kind ("" if nothing), unit ("" if nothing), the words before it, whether it is truth."""

    kind: str
    unit: str
    before: str
    truth: bool


def read_name(name: str) -> ColumnName:
    """
    >>> read_name("Range (km)"), read_name("radarAzimuthDeg").kind, read_name("x_true").truth
    (ColumnName(kind='range', unit='km', before='', truth=False), 'bearing', True)
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    truth = any(word in TRUTH for word in words) and len(words) > 1 and "_".join(words) != "true_track"
    words = [word for word in words if not (truth and word in TRUTH)]
    unit = ""
    if len(words) > 1 and words[-2:] in (["m", "s"], ["km", "h"], ["ft", "min"], ["ft", "s"]):
        unit, words = "/".join(words[-2:]), words[:-2]
    elif len(words) > 1 and words[-1] in UNITS:
        unit, words = UNITS[words[-1]], words[:-1]
    for first in range(min(2, len(words))):  # a sensor may stand before: radar_range
        for kind, pattern in KINDS.items():
            if re.fullmatch(pattern, "_".join(words[first:])) and not (first and kind in ("time", "track", "sensor")):
                return ColumnName(kind, unit, "_".join(words[:first]), truth)
    return ColumnName("", unit, "", truth)
