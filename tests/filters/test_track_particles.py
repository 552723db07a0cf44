"""`cumulant track --method particles`: against all mode paths, beside other tracks, and what is refused."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from cumulant.commands.track import track
from cumulant.filters.tracking import filter_tracks, first_model, read_model, read_tracks
from cumulant.filters.tracking.example import write_example
from tests.filters.tables import radar

app = typer.Typer()
app.command()(track)


def invoke(*arguments, code=0):
    run = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert run.exit_code == code, run.output
    return run


@pytest.fixture
def example(tmp_path):
    table, path = write_example(tmp_path / "demo")
    model = read_model(path)
    return model, [
        whole._replace(times=whole.times[:12], gaps=whole.gaps[:11], y=whole.y[:12], truth=None)
        for whole in read_tracks(table, model.columns)
    ]


def test_particles_are_all_mode_paths_within_their_sampling_error(example):
    model, tracks = example
    (expected,) = filter_tracks(model, tracks[:1], method="exact")
    runs = [filter_tracks(model, tracks[:1], method="particles", particles=400, seed=k)[0] for k in range(20)]
    for name in ("mean", "mode_probabilities", "log_likelihood"):
        drawn = torch.stack([getattr(run.filtered, name) for run in runs])
        error = drawn.mean(0) - getattr(expected.filtered, name)
        bound = 4.5 * drawn.std(0) / 20**0.5 + 1e-9
        assert bool((error.abs() <= bound).all()), name
    spread = torch.stack([run.filtered.covariance for run in runs]).mean(0)
    assert float((spread / expected.filtered.covariance - 1).diagonal(dim1=-2, dim2=-1).abs().max()) < 0.05


def test_a_track_has_its_own_draws_whatever_runs_beside_it(example):
    model, tracks = example
    together = filter_tracks(model, tracks, method="particles", particles=50)
    (alone,) = filter_tracks(model, tracks[1:2], method="particles", particles=50)
    (other,) = filter_tracks(model, tracks[1:2], method="particles", particles=50, seed=7)
    assert torch.equal(together[1].filtered.mean, alone.filtered.mean)
    assert not torch.equal(other.filtered.mean, alone.filtered.mean)


def test_a_radar_is_followed_as_by_imm(tmp_path):
    """Laws given the modes go through the rule of a mode as with imm, so that the two differ by the modes alone."""
    file = radar(tmp_path / "radar.csv")
    (tmp_path / "radar.toml").write_text(first_model(file).text, encoding="utf-8")
    model = read_model(tmp_path / "radar.toml")
    tracks = read_tracks(file, model.columns)
    (by_imm,) = filter_tracks(model, tracks, score=True, gate=0.999)
    (drawn,) = filter_tracks(model, tracks, method="particles", particles=300, score=True, gate=0.999)
    apart = (drawn.filtered.mean - by_imm.filtered.mean)[:, :2].norm(dim=-1)
    assert float(apart.median()) < 10
    assert drawn.innovations is not None
    assert by_imm.innovations is not None
    assert torch.equal(drawn.innovations.rejected, by_imm.innovations.rejected)


def test_the_command_writes_what_was_drawn(tmp_path):
    table, path = write_example(tmp_path / "demo")
    arguments = (table, "--model", path, "--method", "particles", "--particles", "30", "--figures", "1")
    invoke(*arguments, "--seed", "3", "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["method"], summary["particles"], summary["seed"]) == ("particles", 30, 3)
    assert all(1 <= one["effective_particles"] <= 30 for one in summary["tracks"])


DRAWN = ("--method", "particles")
REFUSED = {
    "smoothing": ((*DRAWN, "--smooth"), "--smoother: expected none with --method particles, got 'propagation'."),
    "number": (("--particles", "10"), "--particles: expected --method particles with it, got 'imm'."),
    "seed": (("--seed", "1"), "--seed: expected --method particles with it, got 'imm'. Only particles are drawn."),
    "a large seed": ((*DRAWN, "--seed", str(1 << 40)), "--seed: expected an integer from 0 to 2147483647"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(case, tmp_path):
    table, path = write_example(tmp_path / "demo")
    options, words = REFUSED[case]
    run = invoke(table, "--model", path, *options, "--out", tmp_path / "run", code=2)
    assert words in run.output
    assert not (tmp_path / "run").exists()
