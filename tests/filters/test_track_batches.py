"""Tracks of different times, lengths, starts and sensors run as one batch: the numbers of one track at a time."""

import numpy as np
import pytest
import torch

from cumulant.filters.tracking import Track, filter_tracks, read_model, read_tracks
from cumulant.filters.tracking.batches import MANY_ALIKE, batches, padded_gaps
from tests.compare import close
from tests.filters.tables import flight

pytestmark = pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")
HEAD = """
[table]
time = "t"
track = "track"
{table}
[measurement]
gate = 0.99
{sensors}
[[mode]]
name = "straight"
motion = "constant-velocity"
q = 0.3
[[mode]]
name = "turn"
{turn}
[switching]
rates = [[-0.02, 0.02], [0.05, -0.05]]
[initial]
velocity_std = 30
{start}
"""
MOVING = """[[sensor]]
x = { column = "a", std = 10 }
y = { column = "b", std = 10 }
x_velocity = { column = "c", std = 1 }
y_velocity = { column = "d", std = 1 }"""
POLAR = """[[sensor]]
name = "radar"
range = { column = "a", std = 10 }
bearing = { column = "b", unit = "deg", std = 0.3 }
[[sensor]]
name = "camera"
position = [500, 0]
bearing = { column = "c", unit = "deg", std = 0.1 }"""
FIXED = 'motion = "turn"\nq = 0.5\nrate = 0.05'
ESTIMATED = 'motion = "estimated-turn"\nq = 0.5\nrate_q = 1e-4'
CASES = {
    "velocities measured": ("", MOVING, FIXED, ""),
    "velocities measured, estimated turns": ("", MOVING, ESTIMATED, "turn_rate_std = 0.05"),
    "two sensors": ('ignore = ["d"]', POLAR, ESTIMATED, "turn_rate_std = 0.05"),
}
RUNS = [(case, "") for case in CASES] + [("two sensors", '\nrule = "unscented"')]


def rows_of(name: str, polar: bool, rng: np.random.Generator) -> list[str]:
    """One track: 5 to 25 rows at irregular times, some cells empty, some wild."""
    count = int(rng.integers(5, 25))
    times = np.cumsum(rng.uniform(0.5, 4.0, count)).round(2)
    states = flight(times, rng.uniform(1000, 3000, 2), rng.uniform(-30, 30, 2), [(20, 50, 0.05)], rng, 0.3)
    lines = []
    for k, (t, x) in enumerate(zip(times, states, strict=True)):
        numbers = [*(x[:2] + 10 * rng.normal(size=2)), *(x[2:] + rng.normal(size=2))]
        if polar:
            sight = np.degrees(np.arctan2(x[0] - 500, x[1])) + 0.1 * rng.normal()
            numbers = [np.hypot(*x[:2]) + 10 * rng.normal(), np.degrees(np.arctan2(*x[:2])) + 0.3 * rng.normal(), sight]
            hidden = (2,) if k % 2 == 0 else (0, 1)  # one sensor after the other
        else:
            hidden = (2, 3) if k % 3 == 1 else ()
            numbers[0] += 400 if k == 4 else 0
        cells = ["" if i in hidden else f"{v:.3f}" for i, v in enumerate(numbers)]
        lines.append(",".join([f"{t:.2f}", name, *cells, *[""] * (4 - len(cells))]))
    return lines


def tracked(case: str, tmp_path, rule: str = ""):
    table, sensors, turn, start = CASES[case]
    model, file = tmp_path / "model.toml", tmp_path / "table.csv"
    model.write_text(HEAD.format(table=table, sensors=sensors, turn=turn + rule, start=start), encoding="utf-8")
    rng = np.random.default_rng(0)
    lines = [line for k in range(7) for line in rows_of(f"T{k}", case == "two sensors", rng)]
    file.write_text("\n".join(["t,track,a,b,c,d", *lines]) + "\n", encoding="utf-8")
    built = read_model(model)
    return built, read_tracks(file, built.columns)


def same(ours, alone, tolerance=1e-9):
    for name, value in zip(ours._fields, ours, strict=True):
        if isinstance(value, torch.Tensor):
            expected = getattr(alone, name)
            assert torch.equal(value.isnan(), expected.isnan()), name
            numbers, expected = (part.to(torch.float64).nan_to_num() for part in (value, expected))
            size = max(1.0, float(expected.abs().max()))
            close(numbers / size, expected / size, tolerance)


@pytest.mark.parametrize(("case", "rule"), RUNS)
def test_a_batch_has_the_numbers_of_one_track_at_a_time(case, rule, tmp_path):
    model, tracks = tracked(case, tmp_path, rule)
    assert len(batches(tracks)) == 1
    together = filter_tracks(model, tracks, smoother="propagation", score=True)
    rejected = 0
    for track, ours in zip(tracks, together, strict=True):
        (alone,) = filter_tracks(model, [track], smoother="propagation", score=True)
        same(ours.filtered, alone.filtered)
        same(ours.smoothed, alone.smoothed)
        same(ours.innovations, alone.innovations)
        close(ours.excess, alone.excess, 1e-9)
        rejected += int(ours.innovations.rejected.sum())
    assert rejected > 0 or case == "two sensors"


@pytest.mark.parametrize("method", ["gpb1", "gpb3"])
def test_other_methods_run_as_a_batch_too(method, tmp_path):
    model, tracks = tracked("velocities measured", tmp_path)
    for track, ours in zip(tracks, filter_tracks(model, tracks, method=method), strict=True):
        (alone,) = filter_tracks(model, [track], method=method)
        same(ours.filtered, alone.filtered)


def track_of(gaps) -> Track:
    times = tuple(np.cumsum([0.0, *gaps]).tolist())
    return Track("a", times, tuple(gaps), torch.zeros(len(times), 1, dtype=torch.float64))


def test_many_tracks_with_the_same_gaps_are_a_batch_of_their_own():
    regular, odd = track_of([1.0, 1.0]), [track_of([0.5]), track_of([2.0, 3.0, 4.0])]
    assert batches([regular, regular, *odd]) == [[3, 0, 1, 2]]
    many = [*[regular] * MANY_ALIKE, *odd]
    assert [len(group) for group in batches(many)] == [MANY_ALIKE, 2]
    assert batches([track_of([1.0]), regular]) == [[1, 0]]  # the beginning of the other
    assert padded_gaps([regular, track_of([1.0])]).tolist() == [1.0, 1.0]
    assert padded_gaps(odd).tolist() == [[0.5, 0.0, 0.0], [2.0, 3.0, 4.0]]


def test_a_track_that_has_ended_does_not_run_away(tmp_path):
    """The short track of an unstable motion stays where it is while the long one goes on."""
    text = """
[table]
time = "t"
track = "track"
measured = ["x"]
[measurement]
noise = 1.0
[[mode]]
motion = "matrices"
state = ["x"]
observation = [[1]]
drift = [[3]]
diffusion = 1.0
[initial]
mean = [0]
covariance = 1.0
"""
    path = tmp_path / "model.toml"
    path.write_text(text, encoding="utf-8")
    model = read_model(path)
    long = track_of([1.5] * 200)._replace(y=torch.zeros(201, 1).double())
    for short in (track_of([1.0]), track_of([1.5])):
        estimates = filter_tracks(model, [long, short], method="kalman", score=True)
        assert bool(estimates[1].filtered.mean.isfinite().all())
