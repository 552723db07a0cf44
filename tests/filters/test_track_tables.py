"""`cumulant track` from a table to a verdict: three tables from the field, units, sensors, gates, and what is refused."""

import json
import re
from decimal import Decimal

import numpy as np
import polars
import pytest
import torch
import typer
from typer.testing import CliRunner

from cumulant.commands.track import track
from cumulant.filters import SwitchingLinearGaussian, SwitchingNonlinear, kalman
from cumulant.filters.tracking import Track, filter_tracks, first_model, read_model, read_tracks
from cumulant.filters.tracking.column_names import read_name
from cumulant.filters.tracking.column_warnings import suspicious_columns
from cumulant.filters.tracking.geodesy import Origin, to_degrees, to_plane
from cumulant.filters.tracking.turn_guess import guess_turns
from tests.compare import close
from tests.filters.flights import flown
from tests.filters.tables import flight, radar, ships, two_sensors

pytestmark = pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
app = typer.Typer()
app.command()(track)


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def invoke(*arguments, code=0):
    run = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert run.exit_code == code, run.output
    return run


MODEL = """
[table]
time = "t"
{table}
[[sensor]]
name = "radar"
{sensor}
[[mode]]
motion = "constant-velocity"
q = 1.0
[initial]
velocity_std = 50
"""
RADAR = """range = { column = "r", unit = "km", std = 0.01 }
bearing = { column = "a", unit = "deg", std = 0.5 }"""
POSITION = """x = { column = "r", unit = "ft", std = 10 }
y = { column = "a", unit = "nm", std = 0.01 }"""


@pytest.fixture
def model_of(tmp_path):
    def write(table="", sensor=RADAR, replace=()):
        text = MODEL.format(table=table, sensor=sensor)
        for old, new in replace:
            assert old in text
            text = text.replace(old, new, 1)
        path = tmp_path / "model.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def table_of(tmp_path):
    def write(text):
        path = tmp_path / "table.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---------------------------------------------------------------------------------------------- from a table to a verdict


def results(directory):
    frame = polars.read_parquet(directory / "estimates.parquet")
    return frame, json.loads((directory / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.long
def test_a_radar_from_the_table_to_a_track_and_a_verdict(tmp_path):
    table = radar(tmp_path / "radar.csv")
    run = invoke("--init", table)
    assert "range_km: range, km; azimuth_deg: bearing, deg" in run.output
    model = tmp_path / "radar.toml"
    run = invoke(table, "--model", model, "--check")
    assert "Nothing was run" in run.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["radar.csv", "radar.toml"]
    out = tmp_path / "out"
    run = invoke(table, "--model", model, "--out", out, "--figures", 1)
    assert "The gate rejected something in 3 rows." in run.output
    frame, summary = results(out)
    truth = polars.read_csv(table)
    error = np.hypot(frame["x"] - truth["true_x"], frame["y"] - truth["true_y"])
    r, a = 1000 * truth["range_km"].to_numpy(), np.radians(truth["azimuth_deg"].to_numpy())
    measured = np.hypot(r * np.sin(a) - truth["true_x"].to_numpy(), r * np.cos(a) - truth["true_y"].to_numpy())
    kept = frame["rejected"].to_numpy() == 0
    assert np.sqrt((error**2).mean()) < 0.9 * np.sqrt((measured[kept] ** 2).mean())
    assert measured[~kept].min() > 500
    assert summary["tracks"][0]["rejected"] == 6
    assert summary["tracks"][0]["rejected_rows"] == 3
    numbers = {row["number"]: row for row in summary["consistency"]["numbers"]}
    assert numbers["NEES"]["inside"]
    assert 0.5 < numbers["NIS"]["value"] < 1.2
    assert (out / "figures" / "consistency.png").stat().st_size > 10_000
    # what the verdict asks for, less of both noises, done: the filter is consistent
    assert "lower process noise (q) and measurement noise" in run.output
    text = model.read_text(encoding="utf-8").replace("std = 0.29", "std = 0.2").replace("\nq = 1.2 ", "\nq = 0.5 ")
    model.write_text(text, encoding="utf-8")
    run = invoke(table, "--model", model, "--out", out, "--figures", 0, "--force")
    assert "The filter is consistent" in run.output


@pytest.mark.long
def test_two_sensors_at_odd_times_and_three_targets_out_of_order(tmp_path):
    table = two_sensors(tmp_path / "two.csv")
    invoke("--init", table)
    model = tmp_path / "two.toml"
    text = model.read_text(encoding="utf-8")
    assert text.count("[[sensor]]") == 2
    assert "sort = true" in text
    head, camera = text.split('name = "camera"')
    camera = camera.replace("position = [0, 0]", "position = [2000, 0]", 1)
    model.write_text(head + 'name = "camera"' + camera, encoding="utf-8")
    out = tmp_path / "out"
    run = invoke(table, "--model", model, "--out", out, "--figures", 0)
    assert "camera_bearing" in run.output
    _, summary = results(out)
    assert [x["track"] for x in summary["tracks"]] != []
    assert {x["track"] for x in summary["tracks"]} == {"T1", "T2", "T3"}
    numbers = {row["number"]: row["value"] for row in summary["consistency"]["numbers"]}
    assert 0.8 < numbers["NIS"] < 1.2
    assert "NIS of camera_bearing" in numbers
    assert summary["consistency"]["rejected"] < 10


@pytest.mark.long
def test_ships_with_dates_degrees_and_knots(tmp_path):
    table = ships(tmp_path / "ships.csv")
    run = invoke("--init", table)
    assert "SOG: speed, kn; COG: course, deg" in run.output
    model, out = tmp_path / "ships.toml", tmp_path / "out"
    run = invoke(table, "--model", model, "--out", out, "--figures", 0)
    frame, summary = results(out)
    assert {"latitude", "longitude"} <= set(frame.columns)
    anna = frame.filter(polars.col("track") == "244123456")
    assert anna["time"][0].startswith("2024-05-01T12:01:00")
    raw = polars.read_csv(table).filter(polars.col("MMSI") == 244123456)
    north = (anna["latitude"] - raw["LAT"]).to_numpy() * 111_000
    assert np.sqrt((north**2).mean()) < 9  # the noise of the reports is 8 m
    assert anna["x_velocity"][-1] ** 2 + anna["y_velocity"][-1] ** 2 == pytest.approx(6.8**2, rel=0.2)
    assert summary["consistency"]["numbers"][0]["value"] == pytest.approx(0.8, abs=0.2)


# -------------------------------------------------------------------------------------------------- units and projections


def test_units_become_metres_and_radians(model_of, table_of):
    model = read_model(model_of(sensor=POSITION))
    (seen,) = read_tracks(table_of("t,r,a\n0,100,2\n1,200,\n"), model.columns)
    close(seen.y[0], t([30.48, 3704]))
    assert seen.y[1, 1].isnan()
    close(model.modes[0].noise.diagonal().sqrt(), t([3.048, 18.52]))
    model = read_model(model_of())
    (seen,) = read_tracks(table_of("t,r,a\n0,2,180\n"), model.columns)
    close(seen.y[0], t([2000, np.pi]))


@pytest.mark.parametrize(
    ("unit", "times", "gaps"),
    [
        ("ms", ["0", "500", "1500"], (0.5, 1.0)),
        ("min", ["0", "1", "1.5"], (60.0, 30.0)),
        ("iso", ["2024-05-01T12:00:00Z", "2024-05-01T14:00:00.5+02:00", "2024-05-01 12:00:02"], (0.5, 1.5)),
    ],
)
def test_times_in_other_units_have_gaps_in_seconds(unit, times, gaps, model_of, table_of):
    model = read_model(model_of(f'time_unit = "{unit}"'))
    rows = "".join(f"{time},1,2\n" for time in times)
    (seen,) = read_tracks(table_of("t,r,a\n" + rows), model.columns)
    assert seen.gaps == gaps


def test_latitudes_and_longitudes_become_a_plane_and_back():
    generator = torch.Generator().manual_seed(0)
    for origin in (Origin(52.0, 4.0), Origin(-70.0, 179.5), Origin(0.0, 0.0)):
        plane = (torch.rand(50, 2, generator=generator).double() - 0.5) * 200_000
        degrees = to_degrees(plane, origin)
        assert (degrees[:, 1].abs() <= 180).all()
        close(to_plane(*torch.deg2rad(degrees).unbind(-1), origin), plane, 1e-6)
    one_north = to_plane(t(np.radians(52.001)), t(np.radians(4.0)), Origin(52.0, 4.0))
    close(one_north, t([0.0, 111.267]), 1e-2)  # a thousandth of a degree of latitude at 52°


# ----------------------------------------------------------------------------------------------------------------- models


def test_linear_sensors_make_a_linear_model_that_starts_where_a_track_is_seen(model_of, table_of):
    """Against the same filter with a prior by hand, in absolute coordinates."""
    sensor = 'x = { column = "r", std = 2 }\ny = { column = "a", std = 3 }\nposition = [1000, 2000]'
    model = read_model(model_of(sensor=sensor))
    tracks = read_tracks(table_of("t,r,a\n0,5,7\n1,6,9\n3,9,12\n"), model.columns)
    (estimate,) = filter_tracks(model, tracks, method="kalman", score=True)
    assert estimate.innovations is not None
    assert estimate.innovations.measured.tolist() == [0, 2, 2]  # the first row located the track
    f, q = np.zeros((3, 4, 4)), np.zeros((3, 4, 4))
    for k, gap in enumerate((1.0, 1.0, 2.0)):
        f[k] = np.kron([[1, gap], [0, 1]], np.eye(2))
        q[k] = np.kron([[gap**3 / 3, gap**2 / 2], [gap**2 / 2, gap]], np.eye(2))
    by_hand = SwitchingLinearGaussian(
        t([[1.0]]), t(f)[:, None], t(q)[:, None], torch.eye(2, 4).double(), torch.diag(t([4.0, 9.0])),
        initial_mean=t([1005, 2007, 0, 0]), initial_covariance=torch.diag(t([900, 900, 2500, 2500])),
    )  # fmt: skip
    expected = kalman(by_hand, t([[1005, 2007], [1006, 2009], [1009, 2012]]))
    close(estimate.filtered.mean, expected.mean, 1e-9)
    close(estimate.filtered.covariance, expected.covariance, 1e-9)


def test_what_is_not_linear_makes_a_nonlinear_model(model_of):
    radar_model = read_model(model_of())
    assert isinstance(radar_model.at((1.0, 2.0)), SwitchingNonlinear)
    assert radar_model.angles == (1,)
    sensor = 'x = { column = "r", std = 2 }\ny = { column = "a", std = 3 }'
    assert isinstance(read_model(model_of(sensor=sensor)).at((1.0,)), SwitchingLinearGaussian)
    estimated = (
        ("constant-velocity", "estimated-turn"),
        ("q = 1.0", "q = 1.0\nrate_q = 1e-4"),
        ("velocity_std = 50", "velocity_std = 50\nturn_rate_std = 0.1"),
    )
    turning = read_model(model_of(sensor=sensor, replace=estimated))
    assert turning.states[-1] == "turn_rate"
    assert isinstance(turning.at((1.0,)), SwitchingNonlinear)


MOTIONS = {
    "constant-jerk": ("q = 0.1", 8),
    "singer": ("deviation = 2\ntime_constant = 10", 6),
    "turn": ('q = 0.1\nrate = 3\nrate_unit = "deg/s"', 4),
    "estimated-turn": ("q = 0.1\nrate_q = 1e-5", 5),
}


@pytest.mark.parametrize("motion", MOTIONS)
def test_every_motion_of_the_library_filters_a_radar(motion, model_of, table_of):
    """A target that flies straight past, or turns as the model says: the estimate stays with it."""
    keys, size = MOTIONS[motion]
    more = "velocity_std = 50\nacceleration_std = 1\njerk_std = 0.1\nturn_rate_std = 0.05"
    replace = (("constant-velocity", motion), ("q = 1.0", keys), ("velocity_std = 50", more))
    model = read_model(model_of(replace=replace))
    assert len(model.states) == size
    rng = np.random.default_rng(0)
    times = np.arange(0, 20, 1.0)
    turns = [(0, 99, np.radians(3))] if motion == "turn" else []
    x, y = flight(times, (-1000, 3000), (50, 20), turns)[:, :2].T
    r, a = np.hypot(x, y) + 10 * rng.normal(size=20), np.degrees(np.arctan2(x, y)) + 0.5 * rng.normal(size=20)
    text = "t,r,a\n" + "".join(f"{k},{v / 1000:.5f},{w:.4f}\n" for k, v, w in zip(times, r, a, strict=True))
    (estimate,) = filter_tracks(model, read_tracks(table_of(text), model.columns), method="kalman")
    assert float((estimate.filtered.mean[-1, :2] - t([x[-1], y[-1]])).norm()) < 40


def test_a_gate_rejects_one_sensor_and_keeps_the_other(model_of, table_of):
    sensor = 'x = { column = "r", std = 1 }\ny = { column = "a", std = 1 }\n[[sensor]]\nname = "log"\nx_velocity = { column = "v", std = 1 }'
    model = read_model(model_of(sensor=sensor))
    rows = "".join(f"{k},{10 * k},{5 * k},{10 if k != 7 else 500}\n" for k in range(12))
    (estimate,) = filter_tracks(
        model, read_tracks(table_of("t,r,a,v\n" + rows), model.columns), method="kalman", gate=0.999
    )
    assert estimate.innovations is not None
    assert estimate.innovations.rejected.nonzero().tolist() == [[7, 2]]


# ----------------------------------------------------------------------------------------------------------------- tables


def test_rows_of_two_sensors_at_one_time_become_one(model_of, table_of):
    both = POSITION + '\n[[sensor]]\nname = "eye"\nbearing = { column = "b", unit = "rad", std = 0.1 }'
    model = read_model(model_of("sort = true", sensor=both))
    assert model.columns.measured == ("radar_x", "radar_y", "eye_bearing")
    (seen,) = read_tracks(table_of("t,r,a,b\n2,,,1\n0,1,1,\n0,,,0.5\n1,2,2,\n"), model.columns)
    assert seen.times == (0.0, 1.0, 2.0)
    assert (~seen.y.isnan()).sum(1).tolist() == [3, 2, 1]


def test_a_column_says_from_which_sensor_a_row_is(model_of, table_of):
    both = RADAR + '\n[[sensor]]\nname = "eye"\nbearing = { column = "a", unit = "deg", std = 0.1 }\nposition = [5, 5]'
    model = read_model(model_of('sensor = "who"', sensor=both))
    (seen,) = read_tracks(table_of("t,who,r,a\n0,radar,1,90\n1,eye,,45\n"), model.columns)
    assert (~seen.y.isnan()).tolist() == [[True, True, False], [False, False, True]]
    with pytest.raises(
        ValueError, match=r"row 2, column who: expected one of radar, eye, got 'radr'. Did you mean radar\?"
    ):
        read_tracks(table_of("t,who,r,a\n0,radr,1,90\n"), model.columns)


BAD_TABLES = {
    "twice": ("", "t,r,a\n0,1,2\n0,3,4\n", r"row 3, column t: .* got 0 again, as in row 2, with range in both. Keep one row"),
    "order": ("", "t,r,a\n1,1,2\n0,3,4\n", r"row 3, column t: .* Sort the rows by time, or write sort = true"),
    "date": ('time_unit = "iso"', "t,r,a\nnoon,1,2\n", r"row 2, column t: expected a date and time in ISO 8601, got 'noon'"),
    "no date": ('time_unit = "iso"', "t,r,a\n,1,2\n", r"row 2, column t: expected a time, got an empty cell"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_rows_of_sensors_are_refused(case, model_of, table_of):
    table, text, words = BAD_TABLES[case]
    model = read_model(model_of(table))
    with pytest.raises(ValueError, match=words):
        read_tracks(table_of(text), model.columns)


@pytest.mark.parametrize("method", ["imm", "particles"])
def test_what_the_engine_refuses_names_the_track_and_its_time(method, model_of, table_of):
    """Of a track whose rows are a day apart, beside one whose rows are a second apart."""
    path = model_of('track = "id"', replace=[("velocity_std = 50", "velocity_std = 1e45")])
    model = read_model(path)
    rows = [f"{name},{k * gap},{1 + k / 100},{30 + k}" for name, gap in (("a", 1), ("b", 86400)) for k in range(6)]
    tracks = read_tracks(table_of("id,t,r,a\n" + "\n".join(rows) + "\n"), model.columns)
    expected = (
        r"track b, t 259200, dynamics in mode constant-velocity: expected finite numbers, got a value that is NaN"
    )
    with pytest.raises(ValueError, match=expected):
        filter_tracks(model, tracks if method == "imm" else tracks[1:], method=method)


def test_latitudes_beyond_the_pole_are_refused(model_of, table_of):
    sensor = 'latitude = { column = "r", std = 10 }\nlongitude = { column = "a", std = 10 }'
    model = read_model(model_of(sensor=sensor))
    with pytest.raises(ValueError, match=r"row 2, column r: expected a latitude of at most 90 degrees, got 120"):
        read_tracks(table_of("t,r,a\n0,120,4\n"), model.columns)


BAD_MODELS = {
    "no unit of an angle": ((('unit = "deg", ', ""),), r"bearing unit: expected a value, got none. Write one of rad, deg"),
    "a unit of another kind": ((('"deg"', '"km"'),), r"bearing unit: expected one of rad, deg, got 'km'"),
    "no std": (((', std = 0.5', ""),), r"bearing std: expected a value, got none. The standard deviation"),
    "std 0": ((("std = 0.5", "std = 0"),), r"bearing std: expected a finite number > 0, got 0"),
    "unknown entry": ((("bearing =", "bearng ="),), r"\[\[sensor\]\] 1 bearng: .* Did you mean bearing\?"),
    "unknown key": ((("std = 0.5", "sd = 0.5"),), r"bearing sd: expected one of column, unit, std"),
    "nothing": ((('range = { column = "r", unit = "km", std = 0.01 }', ""), ('bearing = { column = "a", unit = "deg", std = 0.5 }', "")), r"\[\[sensor\]\] 1: expected something measured, got none"),
    "position": (((" std = 0.5 }", " std = 0.5 }\nposition = [1, 2, 3]"),), r"position: expected 2 numbers, got \(3\)"),
    "convention": (((" std = 0.5 }", ' std = 0.5 }\nbearings = "north"'),), r"bearings: expected compass or mathematical, got 'north'"),
    "same columns": (((" std = 0.5 }", ' std = 0.5 }\n[[sensor]]\nname = "b"\nbearing = { column = "a", unit = "deg", std = 1 }'),), r"expected columns of its own for each sensor, got column a for both radar and b"),
    "same names": (((" std = 0.5 }", ' std = 0.5 }\n[[sensor]]\nname = "radar"\nx = { column = "x", std = 1 }'),), r"expected different names, got radar twice"),
    "measured too": ((('time = "t"', 'time = "t"\nmeasured = ["x"]'),), r"measured: expected none beside \[\[sensor\]\], got both"),
    "noise too": ((("q = 1.0", "q = 1.0\nnoise = 1"),), r"noise: expected none beside \[\[sensor\]\]"),
    "no velocity": ((("velocity_std = 50", "position_std = 5"),), r"velocity_std: expected a value, got none. The standard deviation of x_velocity"),
    "time unit": ((('time = "t"', 'time = "t"\ntime_unit = "sec"'),), r"time_unit: expected one of s, ms, .* got 'sec'"),
    "a walk": ((("constant-velocity", "random-walk"), ('range = { column = "r", unit = "km", std = 0.01 }', 'range_rate = { column = "r", std = 1 }')), r"expected a velocity for what the sensors measure"),
    "matrices": ((('"constant-velocity"\nq = 1.0', '"matrices"\nstate = ["x"]'),), r"motion: expected a motion of the library with \[\[sensor\]\]"),
    "gate": ((("[[mode]]", "[measurement]\ngate = 1.5\n[[mode]]"),), r"gate: expected a probability below 1, got 1.5"),
    "3d": ((('"constant-velocity"\nq = 1.0', '"estimated-turn-3d"\nq = 1\nrate_q = 1'),), r"expected 3 axes for estimated-turn-3d, got 2"),
    "rule": ((("q = 1.0", 'q = 1.0\nrule = "ukf"'),), r"rule: expected one of extended, unscented"),
    "both starts": ((("velocity_std = 50", "velocity_std = 50\ncovariance = 1"),), r"velocity_std: expected none beside covariance"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_sensor_is_refused_in_a_sentence(case, model_of):
    replace, words = BAD_MODELS[case]
    with pytest.raises((ValueError, TypeError), match=words):
        read_model(model_of(replace=replace))


def test_a_track_that_nothing_locates_is_refused_by_name(model_of, table_of):
    model = read_model(model_of(sensor='bearing = { column = "a", unit = "deg", std = 0.5 }'))
    with pytest.raises(ValueError, match=r"track 1: expected a row that says where the target is, got none. Give mean"):
        filter_tracks(model, read_tracks(table_of("t,a\n0,1\n1,2\n"), model.columns))


# --------------------------------------------------------------------------------------------------------------- warnings


def test_polar_columns_under_a_cartesian_model_are_named(tmp_path, table_of):
    path = tmp_path / "model.toml"
    text = '[table]\ntime = "t"\nmeasured = ["range_km", "az"]\n[measurement]\nnoise = 1\n[[mode]]\nmotion = "random-walk"\nq = 1\n'
    path.write_text(text + "[initial]\ncovariance = 1\n", encoding="utf-8")
    table = table_of("t,range_km,az\n" + "".join(f"{k},{5 + k},{k}\n" for k in range(12)))
    run = invoke(table, "--model", path, "--out", tmp_path / "out", "--figures", 0)
    assert "Warning: range_km (like a range), az (like an angle): taken as Cartesian positions" in run.output
    assert (
        "range_km"
        not in invoke(table_of("t,range_km,az\n0,1,2\n"), "--model", path, "--check").output.split("Warning")[0]
    )


@pytest.mark.parametrize(
    "names", [("rho", "phi"), ("targetRange", "targetBearing"), ("slantrange", "angle1"), ("RNG", "HDG")]
)
def test_polar_names_of_many_kinds_are_known(names, tmp_path, table_of):
    model = read_model(cartesian(tmp_path, names))
    tracks = read_tracks(table_of(f"t,{','.join(names)}\n0,1,2\n1,2,3\n"), model.columns)
    (warning,) = suspicious_columns(model, tracks)
    assert f"{names[0]} (like a range)" in warning
    assert f"{names[1]} (like an angle)" in warning


def cartesian(tmp_path, names):
    path = tmp_path / "cartesian.toml"
    measured = ", ".join(f'"{name}"' for name in names)
    text = f"""[table]
time = "t"
measured = [{measured}]
[measurement]
noise = 1.0
[[mode]]
motion = "constant-velocity"
q = 1.0
[initial]
mean = [0, 0, 0, 0]
covariance = 1.0
"""
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("turn", [360.0, 2 * np.pi], ids=["degrees", "radians"])
def test_numbers_that_jump_by_a_turn_are_named_whatever_the_column_is_called(turn, tmp_path, table_of):
    model = read_model(cartesian(tmp_path, ("a", "b")))
    angles = (0.9 + 0.02 * np.arange(10)) % 1.0 * turn
    rows = "".join(f"{k},{k},{v:.4f}\n" for k, v in enumerate(angles))
    (warning,) = suspicious_columns(model, read_tracks(table_of("t,a,b\n" + rows), model.columns))
    assert warning.startswith("b (like an angle: it jumps by a whole turn): taken as Cartesian")
    straight = "".join(f"{k},{k},{v:.4f}\n" for k, v in enumerate(turn * np.linspace(0, 1, 10)))
    assert not suspicious_columns(model, read_tracks(table_of("t,a,b\n" + straight), model.columns))


def test_angles_beyond_a_turn_are_named(model_of, table_of):
    model = read_model(model_of(replace=(('"deg"', '"rad"'),)))
    (words,) = suspicious_columns(model, read_tracks(table_of("t,r,a\n0,1,270\n"), model.columns))
    assert words == "bearing: up to 270 radians, more than a whole turn: look at its unit."


def test_units_that_names_contradict_wide_stds_and_fast_turns_are_named(tmp_path, model_of, table_of):
    sensor = RADAR.replace('"r"', '"slant_range_km"').replace('"km", std = 0.01', '"m", std = 15')
    model = read_model(model_of(sensor=sensor.replace('"a"', '"az_deg"')))
    rows = "".join(f"{k},{5 + 0.1 * k},{k}\n" for k in range(12))
    units, wide = suspicious_columns(model, read_tracks(table_of("t,slant_range_km,az_deg\n" + rows), model.columns))
    assert units.startswith('slant_range_km: the model says m, the name of the column km: write unit = "km"')
    assert wide == "range: std 15, but nine tenths of the column lie within 0.99: is std in the unit of the column?"
    turn = (('"constant-velocity"\nq = 1.0', '"turn"\nq = 1.0\nrate = 3'),)
    model = read_model(model_of(replace=turn))
    (fast,) = suspicious_columns(model, read_tracks(table_of("t,r,a\n0,1,2\n"), model.columns))
    assert fast == 'mode turn: turns by 3 rad/s, a whole turn every 2.1 s: did you mean rate_unit = "deg/s"?'
    model = read_model(
        model_of(sensor=RADAR.replace('"a"', '"r_deg"').replace("bearing =", "x =").replace('"deg"', '"m"'))
    )
    (kind,) = suspicious_columns(model, read_tracks(table_of("t,r,r_deg\n0,1,2\n"), model.columns))
    assert kind.startswith("r_deg: the model says m, the name of the column deg: a x is in m, km")


@pytest.mark.parametrize("seed", range(5))
def test_tables_as_they_should_be_raise_no_warning(seed, tmp_path):
    for make in (radar, two_sensors, ships):
        table, path = make(tmp_path / "table.csv", seed), tmp_path / "table.toml"
        path.write_text(first_model(table).text, encoding="utf-8")
        model = read_model(path)
        assert suspicious_columns(model, read_tracks(table, model.columns)) == []


def test_a_negative_range_is_named_by_its_row(model_of, table_of):
    model = read_model(model_of())
    (words,) = suspicious_columns(model, read_tracks(table_of("t,r,a\n0,1,2\n1,-0.6,2\n2,1,2\n"), model.columns))
    assert words == "range: -600 m in row 3 of the file, and a range is not negative. Correct the row or leave it out."


def test_dates_are_dates_in_messages_and_in_the_summary(tmp_path, model_of, table_of):
    model = model_of('time_unit = "iso"')
    rows = [f"2024-05-01T12:00:{k:02d}Z,{1 + 0.01 * k},{k}\n" for k in range(12)]
    with pytest.raises(ValueError, match=r"got 2024-05-01T12:00:00 after 2024-05-01T12:00:01 of row 2"):
        read_tracks(table_of("t,r,a\n" + rows[1] + rows[0]), read_model(model).columns)
    out = tmp_path / "out"
    run = invoke(table_of("t,r,a\n" + "".join(rows)), "--model", model, "--out", out, "--figures", 1)
    assert "from, 2024-05-01" in run.output
    assert "12:00:11" in run.output
    _, summary = results(out)
    assert summary["tracks"][0]["from"] == "2024-05-01T12:00:00"
    svg = (out / "figures" / "track-1.svg").read_text(encoding="utf-8")
    assert "e9" not in re.sub(r"<[^>]*>", "", svg)
    model.write_text(model.read_text(encoding="utf-8").replace("q = 1.0", "q = 2.0"), encoding="utf-8")
    run = invoke(tmp_path / "table.csv", "--model", model, "--out", out, "--figures", 0, "--force")
    assert "Against the run that this one replaces: log-likelihood" in run.output
    assert results(out)[1]["replaced"]["comparable"]


# ----------------------------------------------------------------------------------------------------------------- --init


NAMES = {
    "t": ("time", ""), "timestamp_ms": ("time", "ms"), "BaseDateTime": ("time", ""), "MMSI": ("track", ""), "track_id": ("track", ""),
    "Range (km)": ("range", "km"), "slant_range_m": ("range", "m"), "az_deg": ("bearing", "deg"), "azimuth": ("bearing", ""), "elev_rad": ("elevation", "rad"),
    "doppler_mps": ("range_rate", "m/s"), "range_rate": ("range_rate", ""), "LAT": ("latitude", ""), "lon": ("longitude", ""), "SOG": ("speed", ""),
    "cog": ("course", ""), "vx": ("x_velocity", ""), "vel_y (m/s)": ("y_velocity", "m/s"), "altitude_ft": ("z", "ft"), "x": ("x", ""), "northing": ("y", ""),
    "radar1_range": ("range", ""), "remark": ("", ""), "vertical_rate_fpm": ("z_velocity", "ft/min"), "sensor": ("sensor", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_columns_say_what_they_are(name):
    said = read_name(name)
    assert (said.kind, said.unit) == NAMES[name]


@pytest.mark.parametrize("make", [radar, two_sensors, ships])
def test_a_first_model_reads_its_own_table(make, tmp_path):
    table = make(tmp_path / "table.csv")
    path = tmp_path / "table.toml"
    path.write_text(first_model(table).text, encoding="utf-8")
    model = read_model(path)
    tracks = read_tracks(table, model.columns)
    assert all(isinstance(track, Track) for track in tracks)
    run = invoke(table, "--model", path, "--check")
    assert "Each track starts where it is first seen" in run.output
    assert "Nothing was run" in run.output


def with_turns(text: str) -> str:
    """A first model as its comment says: without the rates of two modes, and with the lines that begin with #:."""
    text = re.sub(r"(?ms)^rates = \[ .*?^\]\n", "", text, count=1)
    return re.sub(r"(?m)^#: ", "", text)


@pytest.mark.parametrize("make", [radar, two_sensors, ships])
def test_the_turn_modes_of_a_first_model_are_ready_for_use(make, tmp_path):
    table, path = make(tmp_path / "table.csv"), tmp_path / "table.toml"
    path.write_text(with_turns(first_model(table).text), encoding="utf-8")
    model = read_model(path)
    assert [mode.name for mode in model.modes] == ["cruise", "manoeuvre", "left", "right"]
    track = read_tracks(table, model.columns)[0]
    (estimate,) = filter_tracks(model, [track._replace(times=track.times[:9], gaps=track.gaps[:8], y=track.y[:9])])
    assert estimate.filtered.mean.isfinite().all()


def test_a_first_model_says_what_turns_the_positions_show(tmp_path):
    """Turns of 2.9 and 2.3 degrees a second in the table of a radar, none in straight flights."""
    first = first_model(radar(tmp_path / "radar.csv"))
    (said,) = [note for note in first.notes if "positions show turns" in note]
    rate = float(re.findall(r"about ([\d.]+) degrees", said)[0])
    assert 1.5 < rate < 3.2
    assert f"#: rate = {rate:g} " in first.text
    rng = np.random.default_rng(0)
    x = flown(rng, 40, 200, 1.0)[:, ::2, :2] + 25 * rng.normal(size=(40, 200, 2))
    assert sum(guess_turns([(np.arange(200.0), track)]) is not None for track in x) <= 1
    turns = [guess_turns([(np.arange(200.0), track)]) for track in flown(rng, 40, 200, 0.3, "turns")[:, ::2, :2]]
    found = [guess for guess in turns if guess is not None]
    assert len(found) >= 36
    assert 2.5 < np.degrees(np.median([guess.rate for guess in found])) < 4


def test_a_check_and_the_comment_agree_on_how_long_a_mode_lasts(tmp_path):
    table, path = radar(tmp_path / "radar.csv"), tmp_path / "radar.toml"
    invoke("--init", table)
    said = re.findall(r"lasts about ([\d.]+ s)", path.read_text(encoding="utf-8"))[0]
    assert said in invoke(table, "--model", path, "--check").output
    path.write_text(with_turns(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert re.search(r"turns by -[\d.]+ deg/s", invoke(table, "--model", path, "--check").output)


@pytest.mark.long
def test_a_sensor_that_stands_elsewhere_is_named(tmp_path):
    """Both positions are guessed as the origin, the camera stands 2 km beside it: every bearing of it is rejected."""
    table = two_sensors(tmp_path / "two.csv")
    run = invoke("--init", table)
    assert "position of radar, camera: 0, a guess; write in the model where they stand" in run.output
    run = invoke(table, "--model", tmp_path / "two.toml", "--out", tmp_path / "out", "--figures", 0)
    assert "something in 207 of" in run.output
    assert "Look at position, unit, convention and noise of camera_bearing first" in run.output
    _, summary = results(tmp_path / "out")
    assert summary["consistency"]["status"] == "rejecting"


def test_a_check_says_motions_degrees_and_dates(tmp_path):
    """What the file says, as a person reads it: not classes, radians or seconds since 1970."""
    table = ships(tmp_path / "ships.csv")
    invoke("--init", table)
    run = invoke(table, "--model", tmp_path / "ships.toml", "--check", "--smooth")
    assert "constant-velocity (extended)" in run.output
    assert "2024-05-01T12:01:00" in run.output
    assert "0.85 deg" in run.output
    assert "Smoother: propagation." in run.output


def test_guesses_of_noise_are_near_the_truth(tmp_path):
    """15 m and 0.2 degrees; numbers from neighbouring rows contain a little motion."""
    text = first_model(radar(tmp_path / "radar.csv")).text
    sizes = [float(v) for v in re.findall(r"std = ([\d.]+) }", text)]
    assert 0.010 < sizes[0] < 0.022
    assert 0.15 < sizes[1] < 0.35


def test_tables_that_say_too_little_are_refused_with_advice(table_of, tmp_path):
    with pytest.raises(ValueError, match=r"expected a column of times, got only a, b. Name the column of times"):
        first_model(table_of("a,b\n1,2\n3,4\n"))
    with pytest.raises(ValueError, match=r"expected columns that say where a target is, got t, b. Rename columns"):
        first_model(table_of("t,b\n1,2\n3,4\n"))
    with pytest.raises(ValueError, match=r"expected a header and at least two rows"):
        first_model(table_of("t,x\n1,2\n"))
    with pytest.raises(ValueError, match=r"column t: expected numbers or ISO 8601, got 'noon'"):
        first_model(table_of("t,x\nnoon,2\nlate,3\n"))
    path = table_of("t,x,y\n0,1,2\n1,2,3\n2,3,4\n")
    invoke("--init", path)
    run = invoke("--init", path, code=2)
    assert "--init: expected a new file" in run.output
    invoke("--init", path, "--model", tmp_path / "other.toml")
    assert (tmp_path / "other.toml").exists()


def test_bearings_alone_need_a_start_and_say_so(tmp_path, table_of):
    path = table_of("t,az\n" + "".join(f"{k},{30 + k}\n" for k in range(20)))
    run = invoke("--init", path)
    assert "nothing says how far away targets are: put mean and covariance of the state under [initial]" in run.output
    model = path.with_suffix(".toml")
    run = invoke(path, "--model", model, code=2)
    assert "expected a row that says where the target is, got none. Give mean and covariance" in run.output
    text = re.sub(
        "velocity_std.*", "mean = [500, 800, 0, 0]\ncovariance = [1e5, 1e5, 100, 100]", model.read_text("utf-8")
    )
    model.write_text(text, encoding="utf-8")
    invoke(path, "--model", model, "--out", tmp_path / "out", "--figures", 0)
    assert (tmp_path / "out" / "estimates.csv").exists()


def test_steps_are_in_the_unit_of_time(model_of, table_of):
    model = read_model(model_of('time_unit = "ms"\nstep = 500'))
    assert model.columns.step == Decimal(500)
    (seen,) = read_tracks(table_of("t,r,a\n0,1,2\n1500,1,2\n"), model.columns)
    assert seen.gaps == (0.5, 0.5, 0.5)
    assert seen.times == (0.0, 500.0, 1000.0, 1500.0)
    model.at(seen.gaps)
