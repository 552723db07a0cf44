"""Sensors: equations against NumPy, conventions of angles, inverses, derivatives at odd places, refusals."""

import numpy as np
import pytest
import torch

from cumulant.filters.sensors import (
    ENTRIES,
    Sensor,
    all_angles,
    bearing_only,
    position_sensor,
    range_bearing,
    range_bearing_elevation,
    range_bearing_rate,
)
from tests.compare import close


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


STATE = t([30.0, -40.0, 20.0, 3.0, 5.0, -1.0])
AT = t([10.0, 20.0, 5.0])


def every(compass: bool) -> Sensor:
    return Sensor(ENTRIES, torch.ones(len(ENTRIES)).double(), 3, AT, compass)


@pytest.mark.parametrize("compass", [False, True])
def test_entries_are_their_equations(compass):
    r, v = (STATE[:3] - AT).numpy(), STATE[3:].numpy()
    angle = (lambda a: np.arctan2(a[0], a[1])) if compass else (lambda a: np.arctan2(a[1], a[0]))
    norm = np.linalg.norm
    expected = [*r, *v, norm(r), angle(r), np.arcsin(r[2] / norm(r)), r @ v / norm(r), norm(v[:2]), angle(v)]
    sensor = every(compass)
    np.testing.assert_allclose(sensor(STATE), expected, rtol=1e-14)
    assert sensor.angles == (7, 8, 11)
    close(sensor(torch.stack([STATE, 2 * STATE]))[1], sensor(2 * STATE), 1e-15)


def test_a_range_rate_is_the_slope_of_the_range_and_a_compass_turns_the_other_way():
    sensor = Sensor(("range", "range_rate", "bearing"), t([1, 1, 1]), position=t([3.0, 1.0]))
    x, step = t([10.0, 7.0, 2.0, -1.0]), 1e-6
    moved = x + t([2.0, -1.0, 0, 0]) * step
    close((sensor(moved)[0] - sensor(x)[0]) / step, sensor(x)[1], 1e-6)
    north_east = t([1.0, 1.0, 0, 0])
    close(bearing_only(0.1)(north_east), bearing_only(0.1, compass=True)(north_east))
    close(bearing_only(0.1, compass=True)(t([1.0, 0.0, 0, 0])), t([np.pi / 2]))  # east is a quarter


LOCATING = {
    "position": position_sensor(1.0, position=t([4.0, 5.0])),
    "position in space": position_sensor(1.0, 3),
    "radar": range_bearing(1.0, 0.1, t([4.0, 5.0])),
    "compass": range_bearing(1.0, 0.1, t([4.0, 5.0]), compass=True),
    "radar in space": range_bearing_elevation(1.0, 0.1, 0.1, t([4.0, 5.0, 6.0]), compass=True),
    "doppler": range_bearing_rate(1.0, 0.1, 1.0),
}


@pytest.mark.parametrize("name", LOCATING)
def test_what_is_located_measures_the_same(name):
    sensor = LOCATING[name]
    x = STATE if sensor.axes == 3 else t([30.0, -40.0, 3.0, 5.0])
    position = sensor.locate(sensor(x))
    assert position is not None
    close(position, x[: sensor.axes], 1e-13)
    assert bearing_only(0.1).locate(t([0.3])) is None


def test_how_far_a_located_position_may_be_off():
    assert range_bearing(10.0, 0.01).spread(5000.0) == 50.0
    assert range_bearing(10.0, 0.001).spread(5000.0) == 10.0
    assert position_sensor(3.0).spread(1e6) == 3.0


def test_linear_sensors_are_matrices():
    sensor = Sensor(("x", "y", "y_velocity"), t([1, 2, 3]), position=t([7.0, 8.0]))
    x = t([1.0, 2.0, 3.0, 4.0, 9.0, 9.0])
    assert sensor.is_linear
    assert sensor.needs_velocity
    close(sensor.matrix(6) @ x - sensor.matrix(6)[:, :2] @ t([7.0, 8.0]), sensor(x))
    close(sensor.noise, torch.diag(t([1, 4, 9])))
    assert not position_sensor(1.0).needs_velocity
    with pytest.raises(ValueError, match=r"Sensor.matrix: expected positions and velocities, got range, bearing"):
        range_bearing(1.0, 0.1).matrix(4)


def test_derivatives_are_finite_at_the_sensor_itself_and_without_speed():
    sensor = Sensor(("range", "bearing", "elevation", "range_rate", "speed", "course"), torch.ones(6).double(), 3)
    for x in (torch.zeros(6).double(), STATE):
        assert sensor(x).isfinite().all()
        assert torch.func.jacrev(sensor)(x).isfinite().all()
    assert torch.autograd.gradcheck(sensor, STATE.clone().requires_grad_())


def test_angles_of_sensors_side_by_side():
    assert all_angles([range_bearing_elevation(1, 1, 1), position_sensor(1.0), bearing_only(1)]) == (1, 2, 5)


def test_sensors_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"Sensor.entries: expected some of x, y, .* got azimuth"):
        Sensor(("azimuth",), t([1.0]))
    with pytest.raises(
        ValueError, match=r"Sensor.deviations: expected a number > 0 for each of x, y, got \[1.0, 0.0\]"
    ):
        Sensor(("x", "y"), t([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"Sensor.position: expected shape \(2\), got \(3\)"):
        Sensor(("x", "y"), t([1.0, 1.0]), position=t([0.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"Sensor.axes: expected at least 3, got 2 for range, elevation"):
        Sensor(("range", "elevation"), t([1.0, 1.0]))
