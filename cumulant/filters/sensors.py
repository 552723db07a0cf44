"""What sensors measure of a state, positions first, then velocities: entries by name, noise, which are angles.

| entry                              | equation, with r = p − position of the sensor     | unit              |
|------------------------------------|---------------------------------------------------|-------------------|
| x, y, z                            | r                                                 | length            |
| x_velocity, y_velocity, z_velocity | v                                                 | length/time       |
| range                              | √(r·r)                                            | length            |
| bearing                            | atan2(r_y, r_x); compass: atan2(r_x, r_y)         | radians, an angle |
| elevation                          | atan2(r_z, √(r_x² + r_y²))                        | radians, an angle |
| range_rate                         | r·v / √(r·r)                                      | length/time       |
| speed                              | √(v·v), of x and y                                | length/time       |
| course                             | atan2(v_y, v_x); compass: atan2(v_x, v_y)         | radians, an angle |

A sensor has any of them. Bearings are counter-clockwise from the x axis, or, with ``compass``, clockwise from the y
axis (north, if x is east).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from cumulant.checks import sentence, shape

POSITIONS = ("x", "y", "z")
VELOCITIES = ("x_velocity", "y_velocity", "z_velocity")
ANGLES = ("bearing", "elevation", "course")
MOVING = (*VELOCITIES, "range_rate", "speed", "course")  # entries that a state without velocities does not have
VERTICAL = ("z", "z_velocity", "elevation")  # entries that need three axes
ENTRIES = (*POSITIONS, *VELOCITIES, "range", "bearing", "elevation", "range_rate", "speed", "course")


@final
@dataclass(frozen=True, eq=False)
class Sensor:
    """A measurement y = h(x) + N(0, R), R = diag(deviations²), of states (…, d): positions, then velocities.

    entries     names of what is measured, in the order of y; the table at the top of the module has their equations
    deviations  (m,), standard deviations: length, length/time, radians
    axes        2 or 3 (1 for x alone)
    position    (axes,), where the sensor stands; the origin if None
    compass     bearings and courses clockwise from y rather than counter-clockwise from x

    >>> import torch
    >>> radar = Sensor(("range", "bearing"), torch.tensor([10.0, 0.005]), position=torch.tensor([100.0, 0.0]))
    >>> radar(torch.tensor([100.0, 50.0, 0.0, 0.0])), radar.angles                               # straight along y: π/2
    (tensor([50.0000,  1.5708]), (1,))
    """

    entries: tuple[str, ...]
    deviations: Tensor
    axes: int = 2
    position: Tensor | None = None
    compass: bool = False

    def __post_init__(self) -> None:
        unknown = [e for e in self.entries if e not in ENTRIES]
        if unknown or not self.entries or len(set(self.entries)) < len(self.entries):
            got = unknown[0] if unknown else repr(self.entries)
            advice = "Name each once."
            raise ValueError(sentence("Sensor.entries", f"some of {', '.join(ENTRIES)}", got, advice))
        if self.deviations.shape != (len(self.entries),) or not bool((self.deviations > 0).all()):
            expected = f"a number > 0 for each of {', '.join(self.entries)}"
            got = shape(self.deviations) if self.deviations.ndim != 1 else self.deviations.tolist()
            raise ValueError(sentence("Sensor.deviations", expected, got, "They are standard deviations."))
        if self.position is not None and self.position.shape != (self.axes,):
            raise ValueError(sentence("Sensor.position", f"shape ({self.axes})", shape(self.position), "Set axes."))
        needed = 3 if any(e in VERTICAL for e in self.entries) else 1 if set(self.entries) <= {"x", "x_velocity"} else 2
        if self.axes < needed:
            got = f"{self.axes} for {', '.join(self.entries)}"
            raise ValueError(sentence("Sensor.axes", f"at least {needed}", got, "Set axes."))

    @property
    def angles(self) -> tuple[int, ...]:
        """Which entries of y are angles: their residuals are taken around the circle."""
        return tuple(k for k, e in enumerate(self.entries) if e in ANGLES)

    @property
    def noise(self) -> Tensor:
        """R (m, m)."""
        return torch.diag(self.deviations.square())

    @property
    def is_linear(self) -> bool:
        """Whether y is a linear function of the state, and an offset."""
        return set(self.entries) <= {*POSITIONS, *VELOCITIES}

    @property
    def needs_velocity(self) -> bool:
        """Whether an entry is a function of the velocity."""
        return any(e in MOVING for e in self.entries)

    def __call__(self, x: Tensor) -> Tensor:
        """h(x) (…, m) of states (…, d)."""
        k = self.axes
        r = x[..., :k] if self.position is None else x[..., :k] - self.position
        v = x[..., k : 2 * k]
        return torch.stack([_entry(e, r, v, self.compass) for e in self.entries], -1)

    def matrix(self, size: int) -> Tensor:
        """H (m, d) where the sensor is linear: y = H (x − position) + noise.

        >>> Sensor(("y", "x_velocity"), torch.ones(2)).matrix(4)
        tensor([[0., 1., 0., 0.],
                [0., 0., 1., 0.]])
        """
        if not self.is_linear:
            advice = "Use the sensor as a function."
            raise ValueError(sentence("Sensor.matrix", "positions and velocities", ", ".join(self.entries), advice))
        names = (*POSITIONS[: self.axes], *VELOCITIES[: self.axes])
        return torch.eye(size, dtype=self.deviations.dtype)[[names.index(e) for e in self.entries]]

    def locate(self, y: Tensor) -> Tensor | None:
        """The position (…, axes) at which h is y; None where y does not say. A height not measured is the sensor's.

        >>> radar = Sensor(("range", "bearing"), torch.tensor([10.0, 0.005]), compass=True)
        >>> radar.locate(torch.tensor([50.0, 0.0]))                                              # north
        tensor([ 0., 50.])
        """
        values = dict(zip(self.entries, y.unbind(-1), strict=True))
        r = _inverse(values, self.axes, self.compass)
        return None if r is None else r if self.position is None else r + self.position

    def velocity(self, y: Tensor) -> Tensor | None:
        """The velocity (…, axes) that speed and course in y say; None without them. One that climbs is not in them.

        >>> log = Sensor(("speed", "course"), torch.ones(2), compass=True)
        >>> log.velocity(torch.tensor([5.0, 0.0]))                                               # north
        tensor([0., 5.])
        """
        values = dict(zip(self.entries, y.unbind(-1), strict=True))
        if "speed" not in values or "course" not in values or bool(y.isnan().any()):
            return None
        plane = _inverse({"range": values["speed"], "bearing": values["course"]}, 2, self.compass)
        assert plane is not None
        return torch.nn.functional.pad(plane, (0, self.axes - 2))

    def spread(self, distance: float) -> float:
        """The largest standard deviation of a located position at this distance: that of angles grows with it."""
        sizes = dict(zip(self.entries, self.deviations.tolist(), strict=True))
        across = [sizes[e] * distance for e in ("bearing", "elevation") if e in sizes]
        return max([*(sizes[e] for e in (*POSITIONS, "range") if e in sizes), *across], default=0.0)


def position_sensor(deviation: Tensor | float, axes: int = 2, position: Tensor | None = None) -> Sensor:
    """Positions, y = p − position + N(0, σ²).

    >>> position_sensor(5.0)(torch.tensor([1.0, 2.0, 0.0, 0.0]).double())
    tensor([1., 2.], dtype=torch.float64)
    """
    sizes = torch.as_tensor(deviation, dtype=torch.float64).expand(axes)
    return Sensor(POSITIONS[:axes], sizes, axes, position)


def range_bearing(
    range_deviation: float, bearing_deviation: float, position: Tensor | None = None, *, compass: bool = False
) -> Sensor:
    """Range and bearing in the plane, y = (|r|, atan2(r_y, r_x)) + noise; the deviation of the bearing in radians.

    >>> range_bearing(10.0, 0.005)(torch.tensor([3.0, 4.0, 0.0, 0.0]).double())
    tensor([5.0000, 0.9273], dtype=torch.float64)
    """
    return Sensor(("range", "bearing"), _doubles(range_deviation, bearing_deviation), 2, position, compass)


def range_bearing_elevation(
    range_deviation: float,
    bearing_deviation: float,
    elevation_deviation: float,
    position: Tensor | None = None,
    *,
    compass: bool = False,
) -> Sensor:
    """Range, bearing and elevation in space, y = (|r|, atan2(r_y, r_x), atan2(r_z, √(r_x² + r_y²))) + noise.

    >>> range_bearing_elevation(10.0, 0.005, 0.005)(torch.tensor([3.0, 4.0, 5.0, 0.0, 0.0, 0.0]).double())
    tensor([7.0711, 0.9273, 0.7854], dtype=torch.float64)
    """
    sizes = _doubles(range_deviation, bearing_deviation, elevation_deviation)
    return Sensor(("range", "bearing", "elevation"), sizes, 3, position, compass)


def range_bearing_rate(
    range_deviation: float,
    bearing_deviation: float,
    rate_deviation: float,
    position: Tensor | None = None,
    *,
    compass: bool = False,
) -> Sensor:
    """Range, bearing and range rate (Doppler) in the plane: y = (|r|, atan2(r_y, r_x), r·v/|r|) + noise.

    >>> range_bearing_rate(10.0, 0.005, 1.0)(torch.tensor([3.0, 4.0, 10.0, 0.0]).double())                  # 10 · 3/5
    tensor([5.0000, 0.9273, 6.0000], dtype=torch.float64)
    """
    sizes = _doubles(range_deviation, bearing_deviation, rate_deviation)
    return Sensor(("range", "bearing", "range_rate"), sizes, 2, position, compass)


def bearing_only(deviation: float, position: Tensor | None = None, *, compass: bool = False) -> Sensor:
    """A bearing alone, y = atan2(r_y, r_x) + N(0, σ²), σ in radians: where a target is needs two of them, or a motion.

    >>> bearing_only(0.01)(torch.tensor([0.0, 2.0, 0.0, 0.0]).double())
    tensor([1.5708], dtype=torch.float64)
    """
    return Sensor(("bearing",), _doubles(deviation), 2, position, compass)


def all_angles(sensors: Sequence[Sensor]) -> tuple[int, ...]:
    """Which entries are angles where the y of several sensors stand side by side.

    >>> all_angles([range_bearing(1.0, 0.1), bearing_only(0.1)])
    (1, 2)
    """
    names = [e for sensor in sensors for e in sensor.entries]
    return tuple(k for k, e in enumerate(names) if e in ANGLES)


def _doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _entry(name: str, r: Tensor, v: Tensor, compass: bool) -> Tensor:
    if name in POSITIONS:
        return r[..., POSITIONS.index(name)]
    if name in VELOCITIES:
        return v[..., VELOCITIES.index(name)]
    if name == "range":
        return _length(r)
    if name == "range_rate":
        return (r * v).sum(-1) / _length(r).clamp_min(torch.finfo(r.dtype).tiny)
    if name == "speed":
        return _length(v[..., :2])
    if name == "elevation":
        return torch.atan2(r[..., 2], _length(r[..., :2]))
    plane = r if name == "bearing" else v
    return torch.atan2(plane[..., 0], plane[..., 1]) if compass else torch.atan2(plane[..., 1], plane[..., 0])


def _length(r: Tensor) -> Tensor:
    """√(r·r), with gradient 0 rather than NaN at the sensor itself."""
    squared = r.square().sum(-1)
    here = squared == 0
    return torch.where(here, 0, torch.where(here, 1, squared).sqrt())


def _inverse(values: dict[str, Tensor], axes: int, compass: bool) -> Tensor | None:
    plane = POSITIONS[: min(axes, 2)]
    if all(name in values for name in plane):
        parts = [values[name] for name in plane]
    elif "range" in values and "bearing" in values:
        across, angle = values["range"], values["bearing"]
        across = across * torch.cos(values["elevation"]) if "elevation" in values else across
        parts = [across * torch.cos(angle), across * torch.sin(angle)]
        parts = parts[::-1] if compass else parts
    else:
        return None
    if axes == 3:
        up = values.get("z")
        if up is None and "elevation" in values and "range" in values:
            up = values["range"] * torch.sin(values["elevation"])
        parts.append(torch.zeros_like(parts[0]) if up is None else up)
    return torch.stack(parts, -1)
