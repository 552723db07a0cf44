"""`cumulant track`: tables and models from files, the engine behind them, what it writes, and what it refuses."""

import csv
import json
import re
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
import typer
from scipy.linalg import expm
from scipy.stats import chi2
from typer.testing import CliRunner

from cumulant.commands.track import track
from cumulant.filters import SmootherWarning, SwitchingLinearGaussian, gpb, imm, kalman
from cumulant.filters.motion import Chain, Drift, Fixed
from cumulant.filters.smoother import smooth
from cumulant.filters.tracking import TableColumns, Track, filter_tracks, measured_moments, read_model, read_tracks
from cumulant.filters.tracking.directory import file_names
from cumulant.filters.tracking.estimates import table_of
from cumulant.filters.tracking.example import FLIGHTS, MODEL, STEPS, along, fly, modes, write_example
from cumulant.filters.tracking.figure import _axes_of, draw_track  # pyright: ignore[reportPrivateUsage]
from cumulant.filters.tracking.headings import headings
from cumulant.filters.tracking.model import Switching
from tests.compare import close

# the smoother of order 2 gives it on short tracks; where it is due is tested by itself
pytestmark = pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")

app = typer.Typer()
app.command()(track)
STATE = ("x", "y", "x_velocity", "y_velocity", "x_acceleration", "y_acceleration")

ONE_MODE = """
[table]
time = "t"
measured = ["z"]
{step}
[measurement]
noise = 0.5
[[mode]]
motion = "constant-velocity"
q = 2.0
[initial]
covariance = [4.0, 1.0]
"""

TWO_MODES = """
[table]
time = "t"
measured = ["z"]
{step}
[measurement]
noise = 0.5
[[mode]]
name = "slow"
motion = "random-walk"
q = 0.2
[[mode]]
name = "fast"
motion = "constant-velocity"
q = 2.0
noise = 0.7
[switching]
{switching}
[initial]
covariance = [4.0, 1.0]
"""
PER_STEP = "transition = [[0.9, 0.1], [0.3, 0.7]]"
PER_TIME = "rates = [[-0.3, 0.3], [0.8, -0.8]]"


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def same(a, b, atol=1e-12):
    for ours, theirs in zip(a, b, strict=True):
        if ours is not None:
            close(ours, theirs, atol)


@pytest.fixture
def model_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "model.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def table_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "table.csv"
        path.write_bytes(text.encode("utf-8"))
        return path

    return write


def invoke(*arguments, code=0):
    run = CliRunner().invoke(app, [str(a) for a in arguments])
    assert run.exit_code == code, run.output
    return run


def kronecker(n, q, gap):
    """F and Q of n integrators for x and y by scipy's matrix exponential and Van Loan's block."""
    a = np.kron(np.eye(n, k=1), np.eye(2))
    noise = np.zeros((2 * n, 2 * n))
    noise[-2:, -2:] = q * np.eye(2)
    whole = expm(np.block([[-a, noise], [np.zeros_like(a), a.T]]) * gap)
    f = whole[2 * n :, 2 * n :].T
    return f, f @ whole[: 2 * n, 2 * n :]


def manoeuvre_by_hand(gap=0.1) -> SwitchingLinearGaussian:
    """The model of the example without files, embeddings or motions: a cruise has no acceleration."""
    f, q = np.zeros((2, 6, 6)), np.zeros((2, 6, 6))
    f[0, :4, :4], q[0, :4, :4] = kronecker(2, 0.01, gap)
    f[1], q[1] = kronecker(3, 1.0, gap)
    start = np.diag([0.1, 0.1, 0.1, 0.1, 0.5, 0.5])
    return SwitchingLinearGaussian(
        t([[0.98, 0.02], [0.02, 0.98]]),
        t(f),
        t(q),
        torch.eye(2, 6, dtype=torch.float64),
        0.1 * torch.eye(2, dtype=torch.float64),
        initial_mean=t([0, 0, 0, -1, 0, 0]),
        initial_covariance=t(np.stack([np.diag([0.1, 0.1, 0.1, 0.1, 0, 0]), start])),
        initial_modes=t([0.9, 0.1]),
    )


# ------------------------------------------------------------------------------------------------------------ motions


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("gap", [0.1, 1.0, 7.0])
def test_chains_are_the_exponential_of_their_drift(order, gap):
    f, q = kronecker(order, 1.7, gap)
    moved = Chain(order, t([1.7, 1.7])).over(t([gap]))
    np.testing.assert_allclose(moved.dynamics[0], f, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moved.process_noise[0], q, rtol=1e-10, atol=1e-12)


def test_a_drift_that_is_a_chain_moves_as_the_chain():
    drift = Drift(t([[0, 1], [0, 0]]), t([[0, 0], [0, 3]]))
    same(drift.over(t([0.1, 2.0, 0.0])), Chain(2, t([3])).over(t([0.1, 2.0, 0.0])))


def test_a_drift_that_damps_reaches_its_stationary_law_over_any_gap():
    """dx = −A x dt + noise L: Q solves A Q + Q Aᵀ = L; gaps of a thousand time constants overflow Van Loan's block."""
    a, noise = np.array([[2.0, 0.5], [0.0, 1.0]]), np.array([[1.0, 0.2], [0.2, 3.0]])
    q = Drift(t(-a), t(noise)).over(t([1000.0])).process_noise[0].numpy()
    np.testing.assert_allclose(a @ q + q @ a.T, noise, atol=1e-12)


@pytest.mark.parametrize("motion", [Chain(3, t([0.5])), Drift(t([[-1, 2], [-2, -1]]), t([[1, 0], [0, 0]]))])
def test_two_gaps_in_a_row_are_one_of_their_sum(motion):
    f, q = motion.over(t([0.3, 0.9, 1.2]))
    close(f[1] @ f[0], f[2])
    close(f[1] @ q[0] @ f[1].mT + q[1], q[2])


@pytest.mark.parametrize("long", [1e3, 1e9, 1e50])
def test_a_long_gap_beside_it_does_not_round_a_short_one(long):
    """Gaps are halved until they are short, each as often as it needs."""
    drift = Drift(t([[-1, 2], [-2, -1]]), t([[1, 0], [0, 0]]))
    alone, beside = drift.over(t([0.1])), drift.over(t([0.1, long]))
    close(beside.dynamics[0], alone.dynamics[0], 1e-15)
    close(beside.process_noise[0], alone.process_noise[0], 1e-15)
    close(beside.dynamics[1], torch.zeros(2, 2).double(), 1e-15)
    switching = Switching(t([[-0.3, 0.3], [0.8, -0.8]]), timed=True)
    close(switching.over(t([0.1, long]))[0], t(expm(0.1 * switching.matrix.numpy())), 1e-15)
    close(switching.over(t([0.1, long]))[1], t([[8 / 11, 3 / 11]] * 2), 1e-14)  # the stationary law


def test_fixed_steps_do_not_know_time():
    moved = Fixed(t([[2]]), t([[3]])).over(t([0.1, 5.0]))
    assert moved.dynamics.flatten().tolist() == [2, 2]
    assert not Fixed(t([[2]]), t([[3]])).timed
    assert Chain(1, t([1])).timed


# ------------------------------------------------------------------------------------------------------------- models


def test_the_example_model_is_the_one_written_by_hand():
    ours, by_hand = read_model(MODEL).at(()), manoeuvre_by_hand()
    assert read_model(MODEL).states == STATE
    for name in ("transition", "dynamics", "process_noise", "observation", "observation_noise"):
        close(getattr(ours, name), getattr(by_hand, name))
    for name in ("initial_mean", "initial_covariance", "initial_modes"):
        close(getattr(ours, name), getattr(by_hand, name))


def test_irregular_gaps_make_a_model_that_varies_in_time(model_file):
    model = read_model(model_file(TWO_MODES.format(step="", switching=PER_TIME)))
    built = model.at((0.5, 2.0))
    assert built.steps == 3
    rates = np.array([[-0.3, 0.3], [0.8, -0.8]])
    np.testing.assert_allclose(built.transition[1:], [expm(0.5 * rates), expm(2.0 * rates)], rtol=1e-12)
    for k, gap in ((1, 0.5), (2, 2.0)):
        close(built.dynamics[k, 1], t([[1, gap], [0, 1]]))
        close(built.dynamics[k, 0], t([[1, 0], [0, 0]]))  # a random walk has no velocity: it is 0 as the mode begins
        close(built.process_noise[k, 0], t([[0.2 * gap, 0], [0, 0]]))
    assert model.at((0.5, 0.5)).steps is None


def test_noise_of_one_mode_and_of_each_column(model_file):
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP)
    assert read_model(model_file(text)).at(()).observation_noise.flatten().tolist() == [0.5, 0.7]
    both = text.replace('["z"]', '["z", "w"]').replace("noise = 0.5", "noise = [0.5, 2.0]")
    both = both.replace("q = 0.2", "q = [0.2, 0.0]").replace("noise = 0.7", "noise = [[1.0, 0.5], [0.5, 1.0]]")
    built = read_model(model_file(both.replace("[4.0, 1.0]", "4.0"))).at(())
    close(built.observation_noise, t([[[0.5, 0], [0, 2]], [[1, 0.5], [0.5, 1]]]))
    close(built.process_noise[0].diagonal(), t([0.2, 0, 0, 0]))


def test_explicit_matrices_share_states_by_name(model_file):
    text = """
[table]
time = "t"
measured = ["a"]
step = 2
[measurement]
noise = 1.0
[[mode]]
name = "turn"
motion = "matrices"
state = ["p", "q"]
dynamics = [[0, 1], [-1, 0]]
process_noise = [0.5, 0.25]
observation = [[1, 0]]
[[mode]]
name = "decay"
motion = "matrices"
state = ["q", "r"]
drift = [[-1, 0], [0, 0]]
diffusion = [[2, 0], [0, 0]]
observation = [[1, 1]]
[switching]
transition = [[0.5, 0.5], [0.0, 1.0]]
[initial]
covariance = 1
mean = [1, 2, 3]
start = "belief"
"""
    model = read_model(model_file(text))
    built = model.at((2.0,))
    assert model.states == ("p", "q", "r")
    close(built.dynamics[0], t([[0, 1, 0], [-1, 0, 0], [0, 0, 0]]))
    close(built.dynamics[1].diagonal(), t([0, np.exp(-2), 1]))
    close(built.process_noise[1, 1, 1], t(1 - np.exp(-4)))
    close(built.observation[:, 0], t([[1, 0, 0], [0, 1, 1]]))
    close(built.initial_mean, t([[1, 2, 0], [0, 2, 3]]))
    assert built.start == "belief"
    with pytest.raises(ValueError, match=r"TrackModel.at: expected gaps of one step 2, got others"):
        model.at((2.0, 4.0))


BAD_MODELS = {
    "unknown section": ("[table]", "[tabel]", r"model.toml, tabel: expected one of .* Did you mean table\?"),
    "unknown key": ("step = 1", "stepp = 1", r"\[table\] stepp: expected one of .* Did you mean step\?"),
    "unknown mode key": ("q = 0.2", "qq = 0.2", r"\[\[mode\]\] 1 qq: expected one of .*an unknown key"),
    "unknown motion": ('"random-walk"', '"random-wlak"', r"motion: expected one of .* Did you mean random-walk\?"),
    "no motion": ('motion = "random-walk"', "", r"\[\[mode\]\] 1 motion: expected a value, got none"),
    "no q": ("q = 0.2", "", r"\[\[mode\]\] 1 q: expected a value, got none. The spectral density"),
    "negative q": ("q = 0.2", "q = -0.2", r"q: expected numbers ≥ 0"),
    "text for q": ("q = 0.2", 'q = "0.2"', r"q: expected a number, got '0.2'"),
    "boolean q": ("q = 0.2", "q = true", r"q: expected a number, got True"),
    "infinite q": ("q = 0.2", "q = inf", r"q: expected finite numbers, got inf"),
    "matrices beside q": ("q = 0.2", "q = 0.2\ndrift = [[1]]", r"drift: expected none for motion random-walk"),
    "rows not 1": ("0.9, 0.1]", "0.9, 0.2]", r"expected rows with sum 1, got row 1, from slow, with sum 1.1. Rows"),
    "negative": ("0.9, 0.1]", "1.1, -0.1]", r"transition: expected probabilities, got -0.1. Rows are from"),
    "wrong size": ("[0.3, 0.7]", "[0.3, 0.7], [0, 1]", r"transition: expected 2 × 2 numbers, got \(3, 2\)"),
    "ragged": ("[0.3, 0.7]", "[1]", r"transition: expected 2 × 2 numbers, got \[\["),
    "both": ("[initial]", PER_TIME + "\n[initial]", r"\[switching\]: expected transition or rates, got both"),
    "neither": (PER_STEP, "", r"\[switching\]: expected transition or rates, got neither"),
    "per step without one": ("step = 1", "", r"transition: expected a regular grid for what is per step, got no step"),
    "noise zero": ("noise = 0.5", "noise = 0", r"\[measurement\] noise: expected variances > 0, got 0"),
    "no noise": ("noise = 0.5", "", r"\[measurement\] noise: expected a value, got none. A variance"),
    "indefinite": ("[4.0, 1.0]", "[[1, 2], [2, 1]]", r"covariance: expected variances ≥ 0, got an indefinite"),
    "asymmetric": ("[4.0, 1.0]", "[[1, 0.5], [0, 1]]", r"covariance: expected a symmetric matrix"),
    "initial size": ("[4.0, 1.0]", "[4.0]", r"covariance: expected 2 numbers, got \(1\). .* z, z_velocity"),
    "initial modes": ("[4.0, 1.0]", "1\nmodes = [0.5, 0.6]", r"modes: expected probabilities with sum 1"),
    "start": ("[4.0, 1.0]", '1\nstart = "now"', r'start: expected "prior" or "belief", got \'now\''),
    "no initial": ("[initial]\ncovariance = [4.0, 1.0]", "", r"initial: expected a value, got none. Say how sure"),
    "names": ('"fast"', '"slow"', r"\[\[mode\]\]: expected different names, got slow twice"),
    "roles": ('time = "t"', 'time = "z"', r"\[table\]: expected a column for each role"),
    "measured twice": ('["z"]', '["z", "z"]', r"measured: expected different names"),
    "measured text": ('["z"]', '"z"', r"measured: expected a list of texts, got 'z'"),
    "step zero": ("step = 1", "step = 0", r"step: expected a finite number > 0, got 0"),
    "step text": ("step = 1", 'step = "1"', r"step: expected a number, got '1'"),
    "time number": ('time = "t"', "time = 3", r"time: expected a text, got 3. Name the column"),
    "delimiter": ("step = 1", 'delimiter = ";;"', r"delimiter: expected one character, got ';;'"),
    "clash": ('name = "fast"', 'name = "slow_smoothed"', r"got two columns p_slow_smoothed"),
    "not toml": ("[initial]", "[initial", r"model.toml: expected TOML, got “.*line 19"),
    "mode a table": ("[[mode]]\nname = \"slow\"", "[other]", r"model.toml, other: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_is_refused_in_a_sentence(case, model_file):
    old, new, words = BAD_MODELS[case]
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP)
    assert old in text
    with pytest.raises((ValueError, TypeError), match=words):
        read_model(model_file(text.replace(old, new, 1)))


BAD_MATRICES = {
    "neither": ("", r"\[\[mode\]\] 1: expected drift and diffusion, or dynamics and process_noise, got neither"),
    "both": ("drift = [[1]]\ndynamics = [[1]]", r"got both. Give one of the pairs"),
    "half": ("drift = [[1]]", r"\[\[mode\]\] 1 diffusion: expected a value, got none"),
    "size": ("drift = [[1, 2]]\ndiffusion = 1", r"drift: expected a number, got \(1, 2\)"),
    "indefinite": ("drift = [[1]]\ndiffusion = [[-1]]", r"diffusion: expected variances ≥ 0, got an indefinite"),
    "q": ("q = 1\ndrift = [[1]]\ndiffusion = 1", r"q: expected none for motion matrices"),
    "no step": ("dynamics = [[1]]\nprocess_noise = 1", r"dynamics: expected a regular grid .* Set step"),
}


@pytest.mark.parametrize("case", BAD_MATRICES)
def test_bad_matrices_are_refused_in_a_sentence(case, model_file):
    given, words = BAD_MATRICES[case]
    text = ONE_MODE.format(step="").replace("q = 2.0", given)
    text = text.replace('"constant-velocity"', '"matrices"\nstate = ["p"]\nobservation = [[1]]')
    with pytest.raises(ValueError, match=words):
        read_model(model_file(text))


def test_columns_may_have_units_far_apart(model_file):
    """A correlation of a half between columns of 1e12 and 1e-12, whose eigenvalues in those units are rounding."""
    noise = [[1e24, 0.5], [0.5, 1e-24]]
    text = ONE_MODE.format(step="").replace('["z"]', '["z", "w"]').replace("noise = 0.5", f"noise = {noise}")
    model = read_model(model_file(text.replace("[4.0, 1.0]", "1.0")))
    close(model.at(()).observation_noise[0], t(noise))
    with pytest.raises(ValueError, match=r"noise: expected variances > 0, got an indefinite matrix"):
        read_model(model_file(text.replace("[4.0, 1.0]", "1.0").replace("0.5], [0.5", "1.5], [1.5")))


@pytest.mark.parametrize("noise", [[[1, 1], [1, 1]], [[2, -2], [-2, 2]], [[0.09, 0.03], [0.03, 0.01]]])
def test_singular_noise_is_refused_and_a_singular_start_is_not(noise, model_file):
    """A sensor without noise in some direction has no density; a start that is known in some direction has one."""
    text = ONE_MODE.format(step="").replace('["z"]', '["z", "w"]')
    start = [[*row, 0, 0] for row in noise] + [[0, 0, 1, 0], [0, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"noise: expected variances > 0, got a singular matrix, smallest eigenvalue"):
        read_model(model_file(text.replace("[4.0, 1.0]", "1.0").replace("noise = 0.5", f"noise = {noise}")))
    model = read_model(model_file(text.replace("[4.0, 1.0]", str(start))))
    y = torch.tensor([[1.0, 2.0], [0.5, 1.0], [1.0, 1.5]], dtype=torch.float64)
    (estimate,) = filter_tracks(model, [Track("a", (0.0, 1.0, 2.0), (1.0, 1.0), y)], smoother="propagation")
    assert estimate.smoothed is not None
    assert estimate.smoothed.mean.isfinite().all()
    assert float(torch.linalg.eigvalsh(estimate.smoothed.covariance).min()) > -1e-9


def test_other_refusals_of_models(model_file, tmp_path):
    text = ONE_MODE.format(step="")
    with pytest.raises(ValueError, match=r'start: expected "prior" where times are irregular'):
        read_model(model_file(text + '\nstart = "belief"'))
    with pytest.raises(TypeError, match=r"mode: expected tables \[\[mode\]\], got dict. Use double brackets"):
        read_model(model_file(text.replace("[[mode]]", "[mode]")))
    with pytest.raises(TypeError, match=r"\[table\]: expected a table of keys, got int"):
        read_model(model_file("table = 3"))
    rates = "[switching]\nrates = [[0.1]]\n[initial]"
    with pytest.raises(ValueError, match=r"rates: expected rows with sum 0, got row 1, from constant-velocity"):
        read_model(model_file(text.replace("[initial]", rates)))
    two = TWO_MODES.format(step="", switching="rates = [[0.1, -0.1], [0, 0]]")
    with pytest.raises(ValueError, match=r"rates: expected rates ≥ 0 off the diagonal, got -0.1. Rows are from"):
        read_model(model_file(two))
    with pytest.raises(ValueError, match=r"expected a file, got a directory"):
        read_model(tmp_path)
    with pytest.raises(ValueError, match=r"expected a file, got nothing there"):
        read_model(tmp_path / "absent.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes("[table]\ntime = 'größe'".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.toml, row 2: expected UTF-8"):
        read_model(path)


# what each key is read from: text of the model, and what in it is replaced
NUMBERS = {
    "noise": ("noise = 0.5", "noise = {}"),
    "noises": ("noise = 0.5", "noise = [{}]"),
    "q": ("q = 0.2", "q = {}"),
    "step": ("step = 1", "step = {}"),
    "covariance": ("[4.0, 1.0]", "{}"),
    "covariances": ("[4.0, 1.0]", "[1.0, {}]"),
    "covariance matrix": ("[4.0, 1.0]", "[[{0}, 0], [0, {0}]]"),
    "mean": ("[4.0, 1.0]", "1\nmean = [{}, 0]"),
    "modes": ("[4.0, 1.0]", "1\nmodes = [{}, 0]"),
    "transition": (PER_STEP, "transition = [[{}, 0], [0, 1]]"),
    "rates": (PER_STEP, "rates = [[-{0}, {0}], [0, 0]]"),
    "drift": (
        '"random-walk"\nq = 0.2',
        '"matrices"\nstate = ["z"]\nobservation = [[1]]\ndrift = [[{}]]\ndiffusion = 1',
    ),
    "diffusion": (
        '"random-walk"\nq = 0.2',
        '"matrices"\nstate = ["z"]\nobservation = [[1]]\ndrift = [[1]]\ndiffusion = {}',
    ),
    "observation": (
        '"random-walk"\nq = 0.2',
        '"matrices"\nstate = ["z"]\nobservation = [[{}]]\ndrift = [[1]]\ndiffusion = 1',
    ),
}
TOO_LARGE = ("inf", "nan", "1e51", "1e149", "1e308", "1" + 60 * "0", "1" + 400 * "0")


@pytest.mark.parametrize("value", TOO_LARGE, ids=lambda v: v if len(v) < 9 else f"{len(v)} digits")
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_model_that_are_too_large_are_refused(key, value, model_file):
    old, new = NUMBERS[key]
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP)
    assert old in text
    name = key.removesuffix("s") if key in ("noises", "covariances") else key.split()[0]
    words = rf"model.toml, \[.* {name}: expected (a size of at most 1e\+50|finite numbers|a finite number > 0), got "
    with pytest.raises(ValueError, match=words) as refused:
        read_model(model_file(text.replace(old, new.format(value), 1)))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("key", ["noise", "step"])
def test_numbers_of_a_model_that_divide_are_not_too_small(key, model_file):
    old, new = NUMBERS[key]
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP)
    with pytest.raises(ValueError, match=rf"{key}: expected a size of at least 1e-50, got 1e-320. Use other units\."):
        read_model(model_file(text.replace(old, new.format("1e-320"), 1)))


# ------------------------------------------------------------------------------------------------------------- tables


def test_rows_of_several_tracks_may_alternate_and_be_quoted(table_file):
    columns = TableColumns("t", ("x", "y"), "id", ignore=("note",), delimiter=";")
    text = '\ufeffid;note;t;x;y\r\n"b 1";"a;b";0;1.5;+2\r\na;;10;.5;\r\n\r\n b 1 ;;0.25; 1e-1 ;-3.\r\n'
    b, a = read_tracks(table_file(text), columns)
    assert (b.name, b.times, b.gaps) == ("b 1", (0.0, 0.25), (0.25,))
    assert b.y.tolist() == [[1.5, 2.0], [0.1, -3.0]]
    assert (a.name, a.times, a.gaps) == ("a", (10.0,), ())
    assert a.y[0, 0] == 0.5
    assert a.y[0, 1].isnan()


def test_gaps_are_those_of_the_decimals_however_late(table_file):
    late = "t,x\n" + "".join(f"1700000000.{k},{k}\n" for k in range(10))
    (track,) = read_tracks(table_file(late), TableColumns("t", ("x",)))
    assert track.gaps == (0.1,) * 9


def test_a_grid_turns_missing_rows_into_gaps_and_forgives_rounding(table_file):
    columns = TableColumns("t", ("x",), step=Decimal("0.1"))
    (track,) = read_tracks(table_file("t,x\n5,1\n5.10000001,2\n5.4,3\n"), columns)
    assert track.times == (5.0, 5.1, 5.2, 5.3, 5.4)
    assert track.y[:, 0].isnan().tolist() == [False, False, True, True, False]
    assert track.gaps == (0.1,) * 4


def test_columns_nobody_declared_may_be_ignored_all_at_once(table_file):
    (track,) = read_tracks(table_file("a,t,b,x\nfoo,1,bar,2\n"), TableColumns("t", ("x",), ignore="others"))
    assert track.y.tolist() == [[2.0]]


STEP = TableColumns("t", ("x",), step=Decimal("0.5"))
TRACKS = TableColumns("t", ("x",), "id")
PLAIN = TableColumns("t", ("x",))
BAD_TABLES = {
    "text": ("t,x\n0,1\n1,one\n", PLAIN, r"table.csv, row 3, column x: expected a finite number .* got 'one'"),
    "nan": ("t,x\n0,1\n1,NaN\n", PLAIN, r"row 3, column x: .* got 'NaN'. Leave the cell empty"),
    "inf": ("t,x\n0,-inf\n", PLAIN, r"row 2, column x: .* got '-inf'"),
    "comma": ('t,x\n0,"1,5"\n', PLAIN, r"row 2, column x: .* got '1,5'. Write a point"),
    "underscore": ("t,x\n0,1_000\n", PLAIN, r"row 2, column x: .* got '1_000'"),
    "huge": ("t,x\n0,1e200\n", PLAIN, r"row 2, column x: expected a number of size at most 1e\+50, got 1e200"),
    "time text": ("t,x\nnoon,1\n", PLAIN, r"row 2, column t: expected a finite number"),
    "time empty": ("t,x\n,1\n", PLAIN, r"row 2, column t: expected a time, got an empty cell"),
    "unsorted": ("t,x\n0,1\n2,1\n1.5,1\n", PLAIN, r"row 4, column t: expected times .* got 1.5 after 2 of row 3"),
    "duplicate": ("t,x\n0,1\n1,1\n1.0,1\n", PLAIN, r"row 4, column t: .* got 1.0 again, as in row 3"),
    "duplicate in track": ("id,t,x\na,0,1\nb,0,1\na,0,2\n", TRACKS, r"row 4, column t: .* got 0 again, as in row 2"),
    "no track": ("id,t,x\n,0,1\n", TRACKS, r"row 2, column id: expected the name of a track, got an empty cell"),
    "off grid": ("t,x\n0,1\n0.7,1\n", STEP, r"row 3, column t: expected a multiple of step 0.5 .* got 0.7"),
    "off grid inside": ("t,x\n0,1\n0.7,1\n1,2\n", STEP, r"row 3, column t: expected a multiple of step 0.5"),
    "same place": ("t,x\n0,1\n0.5,1\n0.501,2\n", STEP, r"row 4, column t: expected times a step of 0.5 apart"),
    "too many": ("t,x\n0,1\n1e9,1\n", STEP, r"expected at most 1,000,000 rows, got 2,000,000,001 .* in track 1"),
    "missing": ("t,z\n0,1\n", PLAIN, r"row 1, column x: expected this column, got only t, z"),
    "misspelt": ("t,xx\n0,1\n", PLAIN, r"row 1, column x: .* Did you mean xx\?"),
    "delimiter": ("t;x\n0;1\n", PLAIN, r"row 1, column t: .* delimiter in the model's"),
    "unknown": ("t,x,w\n0,1,2\n", PLAIN, r"row 1, column w: expected one of t, x, got an unknown column. List"),
    "unnamed": ("t,x,\n0,1,2\n", PLAIN, r"row 1, column \(no name\): expected one of"),
    "twice": ("t,x,x\n0,1,2\n", PLAIN, r"row 1, column x: expected one such column, got two"),
    "short row": ("t,x\n0,1\n1\n", PLAIN, r"row 3: expected 2 cells as in the header, got 1"),
    "empty": ("", PLAIN, r"table.csv: expected a header and rows, got an empty file"),
    "header only": ("t,x\n", PLAIN, r"table.csv: expected rows of measurements, got a header only"),
    "quotes": ('t,x\n0,"1\n', PLAIN, r"row 2: expected CSV, got “"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_with_its_row_and_column(case, table_file):
    text, columns, words = BAD_TABLES[case]
    with pytest.raises(ValueError, match=words):
        read_tracks(table_file(text), columns)


@pytest.mark.parametrize(
    "value", ["inf", "-inf", "nan", "NaN", "1e51", "1e149", "-1e149", "1e308", "1e9999", "9" * 400]
)
@pytest.mark.parametrize("columns", [PLAIN, STEP, TRACKS], ids=["plain", "grid", "tracks"])
@pytest.mark.parametrize("column", ["t", "x"])
def test_numbers_that_are_too_large_are_refused_with_row_and_column(column, columns, value, table_file):
    cells = {"id": "a", "t": "1", "x": "2", column: value}
    names = ["id", "t", "x"] if columns.track else ["t", "x"]
    first = {"id": "a", "t": "0", "x": "1"}
    rows = [names, [first[n] for n in names], [cells[n] for n in names]]
    words = rf"table.csv, row 3, column {column}: expected (a finite number|a number of size at most 1e\+50)"
    with pytest.raises(ValueError, match=words):
        read_tracks(table_file("".join(",".join(row) + "\n" for row in rows)), columns)


def test_names_of_tracks_and_ignored_columns_may_look_like_anything(table_file):
    columns = TableColumns("t", ("x",), "id", ignore=("note",))
    (track,) = read_tracks(table_file("id,t,x,note\n1e149,0,1,inf\n"), columns)
    assert (track.name, track.y.tolist()) == ("1e149", [[1.0]])


LARGE_TABLES = {
    "measured": "0,1\n1,1e50\n3,2\n5,-1e50\n",
    "times": "-1e50,1\n1e50,2\n",
    "all": "-1e50,1e50\n0,\n1,\n1e50,-1e50\n",
    "near": "0,1\n1e-60,3\n2e-60,1e50\n",
}
SCALES = {  # noise, q, covariance of the first state
    "plain": ("0.5", "2.0", "4.0"),
    "large": ("1e50", "1e50", "1e50"),
    "small": ("1e-50", "0", "0"),
    "tiny": ("1e-50", "1e-320", "1e-320"),
}


@pytest.mark.parametrize("method", ["imm", "gpb3"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("case", LARGE_TABLES)
def test_whatever_is_read_is_filtered(case, scale, method, model_file, table_file):
    """At the ends of what is accepted: estimates are numbers, and the probabilities of modes have sum 1."""
    noise, q, covariance = SCALES[scale]
    text = TWO_MODES.format(step="", switching=PER_TIME).replace("[4.0, 1.0]", covariance)
    text = re.sub(r"noise = [\d.]+", f"noise = {noise}", re.sub(r"q = [\d.]+", f"q = {q}", text))
    for motion in ("constant-velocity", "constant-acceleration"):
        model = read_model(model_file(text.replace("constant-velocity", motion)))
        tracks = read_tracks(table_file("t,z\n" + LARGE_TABLES[case]), model.columns)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SmootherWarning)
            (estimate,) = filter_tracks(model, tracks, method=method, smoother="propagation")
        for part in (*estimate.filtered[:-1], *estimate.smoothed[:-1]):
            assert part.isfinite().all()
        for record in (estimate.filtered, estimate.smoothed):
            close(record.mode_probabilities.sum(-1), torch.ones(len(tracks[0].times), dtype=torch.float64))


def test_a_model_that_runs_away_is_refused_with_track_and_time(model_file, table_file, tmp_path):
    text = ONE_MODE.format(step="step = 1").replace("[4.0, 1.0]", "4.0")
    steps = '"matrices"\nstate = ["p"]\nobservation = [[1]]\ndynamics = [[10]]\nprocess_noise = 1'
    path = model_file(text.replace('"constant-velocity"\nq = 2.0', steps))
    run = invoke(table_file("t,z\n0,1\n1,2\n900,3\n"), "--model", path, "--out", tmp_path / "o", code=2)
    assert "track 1, t 156: expected an estimate of finite size, got an overflow." in " ".join(run.output.split())
    drift = '"matrices"\nstate = ["p"]\nobservation = [[1]]\ndrift = [[1]]\ndiffusion = 1'
    path = model_file(text.replace("step = 1", "").replace('"constant-velocity"\nq = 2.0', drift))
    run = invoke(table_file("t,z\n0,1\n1,2\n1001,3\n"), "--model", path, "--out", tmp_path / "o", code=2)
    assert "got an overflow in mode matrices over a gap of 1000." in " ".join(run.output.split())


def test_tables_in_another_encoding_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"t,x\n0,1\n1,2 \xb5\n")
    with pytest.raises(ValueError, match=r"table.csv, row 3: expected UTF-8, got bytes that are not"):
        read_tracks(path, PLAIN)


# ------------------------------------------------------------------------------------------------------------ filters


def example_tracks(tmp_path):
    table, path = write_example(tmp_path / "example")
    model = read_model(path)
    return model, read_tracks(table, model.columns)


METHODS = {"imm": imm, "gpb1": lambda m, y: gpb(m, y, order=1), "gpb3": lambda m, y: gpb(m, y, order=3)}


@pytest.mark.parametrize("method", METHODS)
def test_estimates_are_those_of_the_engine(method, tmp_path):
    """A ragged batch with gaps, through files, against each track alone and a model written by hand."""
    model, tracks = example_tracks(tmp_path)
    assert [len(track.times) for track in tracks] == [flight.rows for flight in FLIGHTS]
    for estimate in filter_tracks(model, tracks, method=method):
        alone = METHODS[method](manoeuvre_by_hand(), estimate.track.y)
        same(estimate.filtered, alone)


@pytest.mark.long
@pytest.mark.parametrize(("method", "order"), [("imm", 2), ("gpb1", 2), ("gpb3", 3)])
def test_the_order_of_the_method_is_that_of_the_smoother(method, order, tmp_path):
    model, tracks = example_tracks(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmootherWarning)
        for estimate in filter_tracks(model, tracks[:1], method=method, smoother="propagation"):
            same(estimate.smoothed, smooth(manoeuvre_by_hand(), estimate.track.y, order=order))


@pytest.mark.long
def test_the_order_goes_through_the_command_and_its_warning_names_tracks(tmp_path):
    """Kim's smoother of order 2 is less certain than the filter on all tracks of the example, of order 4 on none."""
    table, path = write_example(tmp_path / "in")
    run = invoke(table, "--model", path, "--out", tmp_path / "two", "--smooth", "--smoother", "kim", "--figures", 0)
    assert "smoother kim of order 2: expected smoothed variances at most the filtered ones" in run.stderr
    assert "got more in tracks A, B, C, 1.35 times as much in C." in run.stderr
    assert "SmootherWarning" not in run.output
    summary = json.loads((tmp_path / "two" / "summary.json").read_text(encoding="utf-8"))
    assert summary["smoother_order"] == 2
    assert [round(x["smoothed_excess"], 2) for x in summary["tracks"]] == [1.19, 1.03, 1.35]
    four = ("--smooth", "--smoother", "kim", "--method", "gpb4")
    run = invoke(table, "--model", path, "--out", tmp_path / "four", *four, "--figures", 0)
    assert "smoother kim" not in run.output
    summary = json.loads((tmp_path / "four" / "summary.json").read_text(encoding="utf-8"))
    assert summary["smoother_order"] == 4
    assert all(x["smoothed_excess"] < 1 for x in summary["tracks"])
    run = invoke(table, "--model", path, "--out", tmp_path / "best", "--smooth", "--figures", 0)
    assert "Warning" not in run.output
    summary = json.loads((tmp_path / "best" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["smoother"], summary["smoother_order"]) == ("propagation", 2)
    assert all(x["smoothed_excess"] < 0.7 for x in summary["tracks"])
    run = invoke(table, "--model", path, "--out", tmp_path / "none", "--figures", 0)
    summary = json.loads((tmp_path / "none" / "summary.json").read_text(encoding="utf-8"))
    assert summary["smoother_order"] is None
    assert "smoothed_excess" not in summary["tracks"][0]


@pytest.mark.parametrize(
    ("options", "smoother", "order"),
    [
        (("--smooth",), "propagation", 2),
        (("--smoother", "kim"), "kim", 2),
        (("--order", 3), "propagation", 3),
        (("--smoother", "correction", "--order", 3, "--method", "gpb2"), "correction", 3),
        (("--method", "exact"), None, None),
    ],
)
def test_how_to_smooth_goes_through_the_command(options, smoother, order, tmp_path):
    """Naming a smoother or an order is asking for it; the columns are those of the engine."""
    table, path = write_example(tmp_path / "in")
    few = table.read_text(encoding="utf-8").splitlines()[:25]
    table.write_text("\n".join(few) + "\n", encoding="utf-8")
    invoke(table, "--model", path, "--out", tmp_path / "out", "--figures", 0, *options)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["smoother"], summary["smoother_order"]) == (smoother, order)
    frame = polars.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert ("x_smoothed" in frame.columns) == (smoother is not None)
    if smoother is not None:
        model = read_model(path)
        track = read_tracks(table, model.columns)[0]
        expected = smooth(model.at(track.gaps), track.y, order=order, method=smoother)
        found = frame.filter(polars.col("track") == track.name)["x_smoothed"]
        close(torch.tensor(found.to_list(), dtype=torch.float64), expected.mean[:, 0], 1e-9)


@pytest.mark.long
def test_smoothed_estimates_are_those_of_the_engine(tmp_path):
    model, tracks = example_tracks(tmp_path)
    for estimate in filter_tracks(model, tracks, smoother="propagation"):
        same(estimate.smoothed, smooth(manoeuvre_by_hand(), estimate.track.y))


def test_regular_times_give_the_same_with_and_without_a_grid(model_file, table_file):
    rng = np.random.default_rng(0)
    text = "t,z\n" + "".join(f"{0.2 * k:.1f},{z:.4f}\n" for k, z in enumerate(rng.normal(size=30)))
    found = []
    for step in ("step = 0.2", ""):
        model = read_model(model_file(TWO_MODES.format(step=step, switching=PER_TIME)))
        found += filter_tracks(model, read_tracks(table_file(text), model.columns))
    same(found[0].filtered, found[1].filtered)


def test_missing_rows_of_a_grid_are_long_gaps_of_irregular_times(model_file, table_file):
    """With one mode F and Q of a long gap are those of its steps: the rows that were measured must agree."""
    text = "t,z\n0,0.1\n1,0.4\n4,2.0\n5,\n6,3.5\n"
    estimates = []
    for step in ("step = 1", ""):
        model = read_model(model_file(ONE_MODE.format(step=step)))
        estimates += filter_tracks(model, read_tracks(table_file(text), model.columns), method="kalman")
    grid, irregular = (e.filtered for e in estimates)
    places = [0, 1, 4, 5, 6]
    assert len(estimates[0].track.times) == 7
    close(grid.mean[places], irregular.mean)
    close(grid.covariance[places], irregular.covariance)
    close(grid.log_likelihood[places], irregular.log_likelihood)


def test_irregular_times_are_the_engine_with_parameters_of_each_gap(model_file):
    model = read_model(model_file(TWO_MODES.format(step="", switching=PER_TIME)))
    gaps, y = (0.5, 0.1, 3.0, 0.7), t([[0.0], [0.3], [float("nan")], [4.0], [4.5]])
    times = (0.0, *np.cumsum(gaps).tolist())
    (estimate,) = filter_tracks(model, [Track("a", times, gaps, y)])
    rates = np.array([[-0.3, 0.3], [0.8, -0.8]])
    f, q, p = np.zeros((5, 2, 2, 2)), np.zeros((5, 2, 2, 2)), np.zeros((5, 2, 2))
    for k, gap in enumerate((1.0, *gaps)):
        f[k] = [[[1, 0], [0, 0]], [[1, gap], [0, 1]]]
        q[k, 0, 0, 0] = 0.2 * gap
        q[k, 1] = 2 * np.array([[gap**3 / 3, gap**2 / 2], [gap**2 / 2, gap]])
        p[k] = expm(rates * gap)
    by_hand = SwitchingLinearGaussian(
        t(p), t(f), t(q), t([[1, 0]]), t([[[0.5]], [[0.7]]]),
        initial_mean=t([0, 0]), initial_covariance=torch.diag_embed(t([[4, 0], [4, 1]])),
    )  # fmt: skip
    same(estimate.filtered, imm(by_hand, y))


def test_tracks_run_together_only_where_their_gaps_begin_alike(model_file):
    """Tracks of every kind at once: each as if alone, in the order given."""
    model = read_model(model_file(TWO_MODES.format(step="", switching=PER_TIME)))
    rng = np.random.default_rng(1)
    every = [(), (1.0,), (1.0, 2.0), (2.0,), (1.0, 2.0, 0.5), (1.0, 1.0), (1.0, 2.0)]
    tracks = [
        Track(str(k), (0.0, *np.cumsum(gaps).tolist()), gaps, t(rng.normal(size=(len(gaps) + 1, 1))))
        for k, gaps in enumerate(every)
    ]
    together = filter_tracks(model, tracks, method="gpb2")
    assert [e.track.name for e in together] == [track.name for track in tracks]
    for estimate in together:
        same(estimate.filtered, gpb(model.at(estimate.track.gaps), estimate.track.y))


def test_kalman_is_for_one_mode_and_a_grid_of_nothing_keeps_the_prediction(model_file):
    model = read_model(model_file(ONE_MODE.format(step="step = 1")))
    y = t([[float("nan")]] * 3)
    (estimate,) = filter_tracks(model, [Track("a", (0.0, 1.0, 2.0), (1.0, 1.0), y)], method="kalman")
    same(estimate.filtered, kalman(model.at((1.0,)), y))
    close(estimate.filtered.covariance[:, 0, 0], t([4, 4 + 1 + 2 / 3, 4 + 4 + 16 / 3]))
    two = read_model(MODEL)
    with pytest.raises(ValueError, match=r"kalman.model: expected a model with one mode, got 2"):
        filter_tracks(two, [Track("a", (0.0,), (), t([[0.0, 0.0]]))], method="kalman")


@pytest.mark.parametrize("method", ["gpb0", "gpb", "IMM", "gpb²", ""])
def test_unknown_methods_are_refused(method):
    with pytest.raises(ValueError, match=r"--method: expected imm, kalman, exact, particles, or gpb with an order"):
        filter_tracks(read_model(MODEL), [], method=method)


def test_measured_moments_are_those_of_the_mixture(model_file):
    """One mode reads x, the other 2x: sampling its mixture gives the moments."""
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP)
    read_twice = 'motion = "matrices"\nstate = ["z"]\nobservation = [[2]]\ndrift = [[0]]\ndiffusion = 0.2\n'
    text = text.replace('motion = "random-walk"\nq = 0.2\n', read_twice)
    model = read_model(model_file(text))
    filtered = imm(model.at(()), t([[0.0], [1.5]]))
    moments = measured_moments(model, filtered)
    p, m = filtered.mode_probabilities[-1].numpy(), filtered.mode_means[-1, :, 0].numpy() * [2, 1]
    v = filtered.mode_covariances[-1, :, 0, 0].numpy() * [4, 1]
    mean = p @ m
    np.testing.assert_allclose(moments.mean[-1, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(moments.covariance[-1, 0, 0], p @ (v + m**2) - mean**2, rtol=1e-12)


def test_accuracy_on_a_manoeuvring_target():
    """Issue: position error of GPB1 at least 2.5 times that of IMM, and IMM within 3 % of GPB2, over 100 runs."""
    model = replace(manoeuvre_by_hand(), initial_covariance=t(np.diag([0.1, 0.1, 0.1, 0.1, 0.5, 0.5])).expand(2, 6, 6))
    truth = along(replace(model, initial_covariance=0 * model.initial_covariance), modes())
    assert modes().nonzero().flatten().tolist() == [*range(50, 70), *range(120, 150)]
    flown = truth.simulate(STEPS, batch_shape=(100,), generator=torch.Generator().manual_seed(0))
    assert (flown.modes == modes()).all()
    close(flown.states[:, 0], t([0, 0, 0, -1, 0, 0]).expand(100, 6))
    filters = {
        "gpb1": lambda y: gpb(model, y, order=1),
        "imm": lambda y: imm(model, y),
        "gpb2": lambda y: gpb(model, y),
    }
    error = {name: (f(flown.observations).mean - flown.states)[..., :2].square().mean() for name, f in filters.items()}
    assert error["gpb1"] / error["imm"] >= 2.5
    assert abs(error["imm"] / error["gpb2"] - 1) <= 0.03


# ------------------------------------------------------------------------------------------------------------ command


def test_from_the_example_to_the_directory(tmp_path):
    run = invoke("--example", tmp_path / "in")
    assert "Now run" in run.output
    table, path = tmp_path / "in" / "manoeuvre.csv", tmp_path / "in" / "manoeuvre.toml"
    assert table.stat().st_size < 12_000
    out = tmp_path / "deep" / "out"
    run = invoke(table, "--model", path, "--out", out, "--smooth", "--figures", 1)
    assert "Tracks: 3, rows: 540" in run.output
    assert {p.name for p in out.iterdir()} == {"estimates.parquet", "estimates.csv", "summary.json", "figures"}
    drawn = {f"{name}.{ending}" for name in ("track-A", "consistency") for ending in ("svg", "png")}
    assert {p.name for p in (out / "figures").iterdir()} == drawn
    assert [p.name for p in out.parent.iterdir()] == ["out"]

    model = read_model(path)
    estimates = filter_tracks(model, read_tracks(table, model.columns), smoother="propagation")
    frame = polars.read_parquet(out / "estimates.parquet")
    assert tuple(frame.columns) == headings(STATE, ["cruise", "manoeuvre"], ["x", "y"], scored=True)
    b = frame.filter(polars.col("track") == "B")
    record, after = estimates[1].filtered, estimates[1].smoothed
    np.testing.assert_array_equal(b["x_velocity"].to_numpy(), record.mean[:, 2])
    np.testing.assert_array_equal(b["x_velocity_std"].to_numpy(), record.covariance[:, 2, 2].sqrt())
    np.testing.assert_array_equal(b["y_x_velocity_cov"].to_numpy(), record.covariance[:, 1, 2])
    np.testing.assert_array_equal(b["p_manoeuvre"].to_numpy(), record.mode_probabilities[:, 1])
    np.testing.assert_array_equal(b["log_likelihood"].to_numpy(), record.log_likelihood)
    np.testing.assert_array_equal(b["y_smoothed"].to_numpy(), after.mean[:, 1])
    np.testing.assert_array_equal(b["p_cruise_smoothed"].to_numpy(), after.mode_probabilities[:, 0])
    assert b["x_measured"].null_count() == 25
    assert b["y_measured"].null_count() == 15

    with (out / "estimates.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 540
    assert float(rows[250]["y"]) == frame["y"][250]
    assert rows[285]["x_measured"] == ""

    told = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert told["method"] == "imm"
    assert told["state"] == list(STATE)
    assert told["figures"] == ["figures/track-A.svg", "figures/consistency.svg"]
    assert told["consistency"]["status"] == "consistent"
    assert told["consistency"]["numbers"][0]["number"] == "NIS"
    assert [(x["track"], x["rows"], x["complete"], x["empty"]) for x in told["tracks"]] == [
        ("A", 200, 200, 0),
        ("B", 200, 175, 15),
        ("C", 140, 140, 0),
    ]
    assert told["tracks"][1]["log_likelihood"] == float(record.log_likelihood.sum())


def test_the_example_is_the_same_every_time_and_is_not_overwritten(tmp_path):
    first = [p.read_bytes() for p in write_example(tmp_path)]
    assert first[1] == MODEL.read_bytes()
    run = invoke("--example", tmp_path, code=2)
    assert "--example: expected a new file, got" in run.output
    assert [p.read_bytes() for p in write_example(tmp_path, force=True)] == first
    run = invoke("--example", tmp_path / "manoeuvre.csv", code=2)
    assert "--example: expected a directory, got the file" in run.output
    assert fly(2).observations.equal(fly(2).observations)


@pytest.fixture
def small(model_file, table_file):
    path = model_file(ONE_MODE.format(step=""))
    return table_file("t,z\n0,1\n1,2\n3,2.5\n"), path


def test_a_finished_run_is_replaced_only_by_force(small, tmp_path):
    table, path = small
    out = tmp_path / "out"
    out.mkdir()
    invoke(table, "--model", path, "--out", out, "--figures", 0)
    assert not (out / "figures").exists()
    before = (out / "estimates.csv").read_bytes()
    run = invoke(table, "--model", path, "--out", out, code=2)
    assert "which holds a finished run. Name a new one, or pass --force" in run.output
    table.write_text("t,z\n0,1\n1,oops\n")
    run = invoke(table, "--model", path, "--out", out, "--force", code=2)
    assert "row 3, column z" in run.output
    assert (out / "estimates.csv").read_bytes() == before
    table.write_text("t,z\n0,1\n")
    invoke(table, "--model", path, "--out", out, "--force", "--figures", 0)
    assert len(polars.read_csv(out / "estimates.csv")) == 1
    (out / "notes.txt").write_text("mine")
    run = invoke(table, "--model", path, "--out", out, "--force", code=2)
    assert "which holds other files" in run.output
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.toml", "out", "table.csv"]


def test_nothing_is_left_where_writing_fails(small, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("cumulant.figures.save", fail)
    run = invoke(small[0], "--model", small[1], "--out", tmp_path / "out", code=2)
    assert "no space left" in run.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.toml", "table.csv"]


def test_the_old_run_comes_back_where_the_last_step_fails(small, tmp_path, monkeypatch):
    out = tmp_path / "out"
    invoke(small[0], "--model", small[1], "--out", out, "--figures", 0)
    before = (out / "summary.json").read_bytes()
    move = Path.replace

    def fail(self, target):
        if Path(target) == out and ".old." not in self.name:
            raise OSError("the disk is gone")
        return move(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    invoke(small[0], "--model", small[1], "--out", out, "--figures", 0, "--force", code=2)
    assert (out / "summary.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.toml", "out", "table.csv"]


def test_arguments_that_do_not_make_a_run(small, tmp_path):
    assert "track: expected FILE.csv, got none. Or see --example" in invoke(code=2).output
    assert "track: expected --model, got none" in invoke(small[0], code=2).output
    run = invoke(small[0], "--model", small[1], "--out", small[0], code=2)
    assert "--out: expected a directory, got the file" in run.output
    run = invoke(small[0], "--model", small[1], "--out", tmp_path / "o", "--method", "gpb99", "--figures", 0)
    assert "Tracks: 1, rows: 3" in run.output
    run = invoke(tmp_path / "absent.csv", "--model", small[1], "--out", tmp_path / "p", code=2)
    assert "absent.csv: expected a file, got nothing there" in run.output
    assert not (tmp_path / "p").exists()


def test_many_tracks_with_names_that_look_like_markup(model_file, table_file, tmp_path):
    path = model_file(ONE_MODE.format(step="").replace('time = "t"', 'time = "t"\ntrack = "id"'))
    table = table_file("id,t,z\n" + "".join(f"[/{k}],0,{k}\n" for k in range(23)))
    run = invoke(table, "--model", path, "--out", tmp_path / "[o]", "--figures", 0)
    assert "[/19]" in run.output
    assert "[/20]" not in run.output
    assert "… and 3 more in" in run.output
    assert polars.read_parquet(tmp_path / "[o]" / "estimates.parquet", glob=False)["track"][22] == "[/22]"


# ------------------------------------------------------------------------------------------------------------ figures


def test_an_ellipse_holds_95_percent():
    covariance = t([[2.0, 0.8], [0.8, 1.0]])
    width, height, angle = _axes_of(covariance)
    turn = np.deg2rad(angle)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    made = rotation @ np.diag([width / 2, height / 2]) ** 2 @ rotation.T
    np.testing.assert_allclose(made, chi2.ppf(0.95, 2) * covariance.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("measured", "rows"), [(1, 1), (1, 9), (2, 1), (2, 2), (2, 9), (6, 2)])
def test_every_kind_of_track_can_be_drawn(measured, rows, model_file, tmp_path):
    names = [f"z${k}" for k in range(measured)]
    text = TWO_MODES.format(step="step = 1", switching=PER_STEP).replace('["z"]', json.dumps(names))
    model = read_model(model_file(text.replace("[4.0, 1.0]", "4.0")))
    y = torch.randn(rows, measured, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y[rows // 2 :] = torch.nan
    track = Track("$\\odd$", tuple(map(float, range(rows))), (1.0,) * (rows - 1), y)
    (estimate,) = filter_tracks(model, [track], smoother="propagation")
    drawn = draw_track(model, estimate)
    assert len(drawn.axes) == (3 if measured == 2 else min(measured, 4) + 1)
    drawn.savefig(tmp_path / "a.png", dpi=20)
    assert (tmp_path / "a.png").stat().st_size > 500


def test_names_of_figures_and_columns():
    assert file_names(["../../etc", "…", "b", "B", ""]) == ["track-etc", "track-2", "track-b", "track-B-4", "track-5"]
    model = read_model(MODEL)
    estimates = filter_tracks(model, [Track("a", (0.0,), (), t([[0.0, float("nan")]]))])
    table = table_of(model, estimates)
    assert tuple(table) == headings(STATE, ["cruise", "manoeuvre"], ["x", "y"], smoothed=False)
    x = table["x"]
    assert isinstance(x, np.ndarray)
    assert x.shape == (1,)
    assert np.isnan(table["y_measured"][0])
