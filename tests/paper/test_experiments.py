"""Experiments: each run small, numbers beside NumPy, the rule of the open question, the command and what it leaves."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import norm
from typer import testing

from cumulant import cli, figures
from cumulant.dynamics import Halt, RMSNorm
from cumulant.paper.experiments import (
    EXPERIMENTS,
    Experiment,
    Result,
    Setting,
    closure,
    condensation,
    expansion,
    find,
    gaussian,
    normalisers,
    open_question,
    outcomes,
)
from cumulant.paper.experiments.cache import cached
from cumulant.paper.experiments.experiment import Expectation, expect
from cumulant.paper.experiments.tables import column

matplotlib = pytest.importorskip("matplotlib", reason="figures need cumulant[lab]")
polars = pytest.importorskip("polars", reason="tables need cumulant[report]")

# sizes at which an experiment takes a second or two and its expectations still hold
SMALL = {
    "expand": (expansion, {"QUERIES": 30}),
    "expand-causal": (expansion, {"DRAWS": 60}),
    "diverge": (expansion, {"STARTS": 60}),
    "invert": (expansion, {"QUERIES": 20, "KEYS": 16}),
    "eq-gauss": (gaussian, {"KEYS": (500, 5_000, 50_000), "QUERIES": 1_000}),
    "stability": (gaussian, {"CLOUDS": (100, 200), "DRAWN": gaussian.DRAWN[1::2]}),
    "rn-compare": (
        normalisers,
        {"PARTICLES": 150, "EVERY": 20, "CORNERS": (1, 2, 3, 4, 6), "CORNER_PARTICLES": 120, "CORNER_RUNS": 1},
    ),
    "condensation": (condensation, {"KEYS": (100, 1_000, 10_000), "DRAWS": 8}),
    "closure": (closure, {"PARTICLES": 500}),
}


def test_every_experiment_is_tested():
    assert set(SMALL) | {"open-question"} == set(EXPERIMENTS)


SLOW = ("rn-compare", "stability", "invert")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in SMALL])
def test_an_experiment_run_small(name, tmp_path, monkeypatch):
    """All questions of one run in one test, so that each runs once however tests are spread over workers."""
    module, sizes = SMALL[name]
    for constant, value in sizes.items():
        monkeypatch.setattr(module, constant, value)
    result = find(name).run(Setting())
    assert result.expectations
    assert [e for e in result.expectations if not e.holds] == []
    check_tables(result)
    check_verdict(result)
    check_figures(result, tmp_path)


def check_tables(result: Result):
    assert result.tables
    for rows in result.tables.values():
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)
        kinds = {type(value) for row in rows for value in row.values()}
        assert kinds <= {int, float, str, bool, type(None)}
        assert not any(isinstance(v, float) and math.isnan(v) for row in rows for v in row.values())


def check_verdict(result: Result):
    assert "\n" not in result.verdict
    assert "Limits:" in result.verdict
    assert "nan" not in result.verdict
    assert 400 < len(result.verdict) < 1700


def check_figures(result: Result, directory: Path):
    for name, draw in result.figures.items():
        drawn = draw()
        figures.save(drawn, directory / f"{name}.png")
        assert (directory / f"{name}.png").stat().st_size > 5_000
        assert all(ax.has_data() for ax in drawn.axes)
    assert len(list(directory.iterdir())) == len(result.figures) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", list(SMALL))
def test_expectations_hold_at_full_size(name):
    for seed in (0, 1):
        result = find(name).run(Setting(seed=seed))
        assert [e for e in result.expectations if not e.holds] == []


def test_an_expectation_can_fail(monkeypatch):
    for name, value in {"CLOUDS": (100,), "PAIRS": gaussian.PAIRS[:1], "DRAWN": gaussian.DRAWN[::4]}.items():
        monkeypatch.setattr(gaussian, name, value)
    monkeypatch.setattr(gaussian, "cumulant_multiplier", lambda n, v, s: 1 + n * v * s**n)
    found = find("stability").run(Setting())
    assert not found.holds
    assert [e.holds for e in found.expectations] == [False, True, True, True]


def test_progress_ends_at_its_total(monkeypatch):
    monkeypatch.setattr(expansion, "DIMS", (2, 3))
    calls = []
    find("expand").run(Setting(progress=lambda done, total, what: calls.append((done, total, what))))
    assert calls[-1][0] == calls[-1][1]
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)


def test_a_seed_gives_one_answer(monkeypatch):
    monkeypatch.setattr(expansion, "DIMS", (2,))
    first, second, third = (find("expand").run(Setting(seed=seed)).tables for seed in (3, 3, 4))
    assert first == second
    assert first != third


def test_first_log_volume_beside_numpy(monkeypatch):
    monkeypatch.setattr(expansion, "DIMS", (2,))
    rng = np.random.default_rng(0)
    keys, x = rng.standard_normal((expansion.KEYS, 2)), rng.standard_normal((expansion.QUERIES, 2))
    p = softmax(x @ keys.T, 1)
    mean = p @ keys
    fisher = np.einsum("qn,ni,nj->qij", p, keys, keys) - mean[:, :, None] * mean[:, None, :]
    volume = np.linalg.slogdet(np.eye(2) + fisher)[1].mean()
    assert find("expand").run(Setting()).tables["expansion"][0]["log_volume"] == pytest.approx(volume, abs=1e-12)


def test_causal_ratio_beside_numpy():
    x = 1.5 * np.random.default_rng(5).standard_normal((40, 5, 2))
    seen = np.tril(np.ones((5, 5), dtype=bool))
    after = x + softmax(np.where(seen, x @ x.transpose(0, 2, 1), -np.inf), -1) @ x
    pairs = np.triu_indices(5, 1)
    before, then = (np.linalg.norm(y[:, pairs[0]] - y[:, pairs[1]], axis=-1) for y in (x, after))
    row, ratio = expansion._causal_row(torch.from_numpy(x), True)  # pyright: ignore[reportPrivateUsage]
    assert row["least_ratio"] == pytest.approx((then / before).min(), abs=1e-12)
    assert row["pairs_that_shrink"] == pytest.approx((then < before).mean(), abs=1e-12)
    assert ratio.shape == (40, 10)


def test_distances_in_a_metric():
    x, root = torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.diag(torch.tensor([1.0, 2.0]))
    distances = expansion._distances  # pyright: ignore[reportPrivateUsage]
    torch.testing.assert_close(distances(x), torch.tensor([20.0]).sqrt())
    torch.testing.assert_close(distances(x, root), torch.tensor([8.0]).sqrt())  # 2² + (4/2)²


@pytest.mark.parametrize(("n", "v", "s"), [(3, 1.0, 1.0), (4, -0.4, 0.8), (5, 1.0, -0.5), (4, 0.5, 0.25)])
def test_measured_multiplier(n, v, s):
    assert gaussian.measured_multiplier(n, v, s) == pytest.approx(1 + n * v * s ** (n - 1) / (1 + v * s), abs=1e-7)


def test_setup_is_theorem_one():
    found = gaussian.setup(np.random.default_rng(2))
    sigma, inverse = found.sigma.numpy(), np.linalg.inv(found.sigma.numpy())
    step = np.eye(2) + sigma
    np.testing.assert_allclose(found.law.covariance, inverse, atol=1e-12)
    np.testing.assert_allclose(found.law.loc, inverse @ found.mu.numpy(), atol=1e-12)
    np.testing.assert_allclose(found.grown[0], step @ found.law.loc.numpy() + found.mu.numpy(), atol=1e-12)
    np.testing.assert_allclose(found.grown[1], step @ inverse @ step, atol=1e-12)


@pytest.mark.parametrize(
    ("d", "normaliser", "v", "w2", "kurtosis", "rank", "clusters"),
    [
        (4, "full", 0.5, 0.858, 10.9, 4.0, 6),
        (4, "full", -0.5, 0.051, -0.354, 4.0, 61),
        (4, "diag", 0.5, 0.667, -1.61, 1.0, 5),
        (4, "rms", -0.5, 0.161, -1.006, 4.0, 61),
        (4, "ln", -0.5, 0.213, -1.2, 3.0, 61),
    ],
)
@pytest.mark.long
def test_normalisers_reach_what_the_note_printed(d, normaliser, v, w2, kurtosis, rank, clusters):
    last = normalisers._readings(d, normaliser, v, 0)[-1]  # pyright: ignore[reportPrivateUsage]
    assert last["t"] == 100
    assert last["w2"] == pytest.approx(w2, abs=6e-4)
    assert last["kurtosis"] == pytest.approx(kurtosis, abs=6e-3)
    assert last["rank"] == pytest.approx(rank, abs=6e-3)
    assert last["clusters"] == clusters


def test_one_point_has_no_shape():
    last = normalisers._readings(4, "rms", 0.5, 0)[-1]  # pyright: ignore[reportPrivateUsage]
    assert last["clusters"] == 1
    assert (last["w2"], last["kurtosis"], last["rank"]) == (None, None, None)


def test_pre_norm_and_post_norm_reach_what_the_note_printed():
    rows = normalisers._orders(0)  # pyright: ignore[reportPrivateUsage]
    found = {(r["order"], r["t"]): (r["norm"], r["cosine"]) for r in rows}
    assert found["pre", 10] == pytest.approx((19.336, 0.4755), abs=6e-4)
    assert found["pre", 100] == pytest.approx((258.168, 0.9874), abs=6e-4)
    assert found["post", 10] == pytest.approx((math.sqrt(8), 0.9579), abs=6e-4)


def test_break_of_a_curve_that_is_known():
    """m = η (1 + η⁴)^{−¼} has d log m / d log η = 1/(1 + η⁴): ½ at 1."""
    length = np.geomspace(0.2, 4, 60)
    rows = [{"keys": 7, "length": float(r), "ratio": float((1 + r**4) ** -0.25)} for r in length]
    assert condensation._break(rows, 7) == pytest.approx(1, abs=2e-3)  # pyright: ignore[reportPrivateUsage]


def test_sweep_beside_numpy(monkeypatch):
    monkeypatch.setattr(condensation, "DRAWS", 1)
    monkeypatch.setattr(condensation, "DIRECTIONS", 1)
    rng = np.random.default_rng([4, 50])
    keys, along = rng.standard_normal((50, 4)), rng.standard_normal(4)
    along /= np.linalg.norm(along)
    for row in condensation._sweep(50, 4)[::5]:  # pyright: ignore[reportPrivateUsage]
        p = softmax(row["length"] * keys @ along)
        assert row["ratio"] == pytest.approx(p @ keys @ along / row["length"], abs=1e-12)
        assert row["effective_keys"] == pytest.approx(1 / np.square(p).sum(), rel=1e-10)
        assert row["effective_formula"] == pytest.approx(50 * np.exp(-(row["length"] ** 2)), rel=1e-10)


def test_compression_beside_numpy():
    rng = np.random.default_rng(1)
    label, centre = rng.integers(0, 8, 4000), 1.5 * rng.standard_normal((8, 6))
    keys = centre[label] + np.linspace(0.2, 0.9, 6) * rng.standard_normal((4000, 6))
    eta = 0.25 / np.sqrt(6) * rng.standard_normal((400, 6))
    exact = softmax(eta @ keys.T, 1) @ keys
    parts = [keys[label == c] for c in range(8)]
    mean, cov = np.stack([p.mean(0) for p in parts]), np.stack([np.cov(p.T) for p in parts])
    logits = np.log([len(p) for p in parts]) + eta @ mean.T + np.einsum("qi,nij,qj->qn", eta, cov, eta) / 2
    w = np.exp(logits - logsumexp(logits, 1, keepdims=True))
    summary = w @ mean + np.einsum("qn,nij,qj->qi", w, cov, eta)
    error = np.square(summary - exact).sum() / np.square(exact - keys.mean(0)).sum()
    first = closure._compression(np.random.default_rng(1))[0]  # pyright: ignore[reportPrivateUsage]
    assert first["mixture"] == pytest.approx(error, rel=1e-8)


def row(**changes):
    usual = {"n": 600, "clusters": 61, "rank_start": 4.0, "rank_end": 4.0, "w2_start": 0.2, "w2_end": 0.04}
    return usual | {"w2_gaussian": 0.05, "w2_uniform": None, "w2_uniform_end": None} | changes


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "Gaussian"),
        ({"w2_end": 0.0999}, "Gaussian"),
        ({"w2_end": 0.1}, "undecided"),
        ({"w2_end": 0.9, "clusters": 5}, "clusters"),
        ({"w2_end": 0.9, "clusters": 60}, "undecided"),
        ({"w2_end": 0.15, "clusters": 5}, "undecided"),  # few clusters, but nearer to a Gaussian than at the start
        ({"w2_end": 0.9, "clusters": 5, "rank_end": 1.9}, "rank collapse"),
        ({"clusters": 61, "rank_end": 1.9}, "rank collapse"),
        ({"w2_end": 0.9, "clusters": 1, "rank_end": 0.0}, "clusters"),  # a point has no rank to lose
        ({"w2_uniform": 0.06, "w2_uniform_end": 0.11}, "uniform"),
        ({"w2_uniform": 0.06, "w2_uniform_end": 0.12}, "undecided"),  # near a Gaussian does not count on a sphere
    ],
)
def test_the_rule_that_names_an_end(changes, name):
    assert outcomes.outcome(row(**changes)) == name


@pytest.mark.parametrize(
    "cell",
    [outcomes.Cell("full", -0.5, 0.5, 1, 200, steps=40), outcomes.Cell("rms", 0.5, 0.25, 4, 200, steps=40)],
    ids=["full", "rms"],
)
def test_a_tiny_cell(cell):
    rows = open_question.run_cell(cell, 3)
    assert [r["law"] for r in rows] == list(outcomes.LAWS)
    for r in rows:
        assert r["outcome"] == outcomes.outcome(r)
        assert 0 < r["taken"] <= 40
        assert r["halt"] in Halt.__members__
        assert (r["w2_uniform"] is None) == (cell.normaliser == "full")
    if cell.normaliser == "full":
        z = np.sort(outcomes.start("gamma", 200, 1, 3).numpy()[:, 0])
        gap = (z - z.mean()) / z.std() - norm.ppf((np.arange(200) + 0.5) / 200)
        assert rows[3]["w2_start"] == pytest.approx(np.sqrt(np.square(gap).mean()), abs=1e-10)
        assert rows[0]["outcome"] == "Gaussian"


def test_uniform_on_a_sphere_is_called_so():
    cloud = RMSNorm()(torch.from_numpy(np.random.default_rng(9).standard_normal((500, 3))))
    assert float(outcomes.w2_to_uniform(cloud, 3)) < 2 * outcomes.uniform_band(500, 3, 3)
    assert float(outcomes.w2_to_uniform(cloud.abs(), 3)) > 2 * outcomes.uniform_band(500, 3, 3)


def test_grids_leave_out_what_cannot_move():
    cells = open_question.grid()
    assert all(c.d >= 3 for c in cells if c.normaliser == "ln")
    assert all(c.d >= 2 for c in cells if c.normaliser in ("rms", "diag"))
    assert len(set(cells)) == len(cells)


@pytest.mark.long
def test_the_open_question_has_its_answer(tmp_path):
    result = find("open-question").run(Setting(cache_dir=tmp_path))
    assert [e for e in result.expectations if not e.holds] == []
    assert len(result.tables["phase"]) == len(open_question.phase_grid())


def test_a_part_is_computed_once(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"x": [len(calls), 0.1]}

    assert cached(tmp_path / "cells", {"a": 1}, compute) == {"x": [1, 0.1]}
    assert cached(tmp_path / "cells", {"a": 1}, compute) == {"x": [1, 0.1]}
    assert cached(tmp_path / "cells", {"a": 2}, compute) == {"x": [2, 0.1]}
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert cached(None, {"a": 1}, compute) == {"x": [3, 0.1]}


@pytest.mark.parametrize("damage", ["", "{", '{"setting": {"a": 2}, "result": 9}', '{"result": 9}', "[]"])
def test_a_damaged_part_is_computed_anew(tmp_path, damage):
    cached(tmp_path, {"a": 1}, lambda: 5)
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    assert cached(tmp_path, {"a": 1}, lambda: 6) == 6
    assert cached(tmp_path, {"a": 1}, lambda: 7) == 6


def toy_run(setting: Setting) -> Result:
    values = [cached(setting.cache_dir, {"part": i, "seed": setting.seed}, lambda i=i: part(i)) for i in range(3)]
    setting.progress(3, 3, "parts")
    rows = [{"part": i, "value": v} for i, v in enumerate(values)]

    def draw():
        drawn = figures.figure(3, 2)
        drawn.subplots().plot(values)
        return drawn

    return Result({"parts": rows}, {"toy": draw}, "Three parts.", (expect("a sum of 3", sum(values) == 3, "see"),))


def part(i: int) -> int:
    return i


@pytest.fixture
def command(monkeypatch):
    """Run `cumulant experiment` with an experiment called toy that takes no time."""
    toy = Experiment("toy", "How much is it?", "X-0", "no time", toy_run, "a moment", lambda: 90.0)
    monkeypatch.setitem(EXPERIMENTS, "toy", toy)
    monkeypatch.setitem(EXPERIMENTS, "short", Experiment("short", "Same?", "X-0", "no time", toy_run))
    runner = testing.CliRunner(env={"COLUMNS": "240"})
    return lambda *words: runner.invoke(cli.application(), ["experiment", *map(str, words)])


def test_command_leaves_tables_figures_and_an_account(command, tmp_path):
    found = command("toy", "--out", tmp_path / "run", "--seed", 4)
    assert found.exit_code == 0, found.output
    assert "Three parts." in found.output
    assert "as expected" in found.output
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"experiment.json", "parts.parquet", "toy.png", "toy.svg"}
    told = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert (told["experiment"], told["seed"], told["full"], told["verdict"]) == ("toy", 4, False, "Three parts.")
    assert told["expectations"] == [{"words": "a sum of 3", "measured": "see", "holds": True}]
    assert polars.read_parquet(tmp_path / "run" / "parts.parquet")["value"].to_list() == [0, 1, 2]


def test_command_refuses_what_is_not_its_own(command, tmp_path):
    place = tmp_path / "run"
    assert command("toy", "--out", place).exit_code == 0
    found = command("toy", "--out", place)
    assert found.exit_code == 2
    assert "which holds a finished run. Name a new one, or pass --force to run again." in found.output
    assert command("toy", "--out", place, "--force").exit_code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    found = command("toy", "--out", tmp_path / "other")
    assert found.exit_code == 2
    assert "which holds other files" in found.output
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"
    found = command("toy", "--out", tmp_path / "other" / "letter.txt")
    assert found.exit_code == 2
    assert "expected a directory, got the file" in found.output


@pytest.mark.long
def test_interrupted_run_goes_on(command, tmp_path, monkeypatch):
    done = []

    def until_interrupted(i):
        if i == 2 and len(done) == 2:
            raise KeyboardInterrupt
        done.append(i)
        return i

    monkeypatch.setitem(globals(), "part", until_interrupted)
    found = command("toy", "--out", tmp_path / "run")
    assert found.exit_code == 130
    assert "Interrupted: the same command goes on from here." in found.output
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"begun.json", "cache"}
    found = command("short", "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "which holds another" in found.output
    done.append("again")
    found = command("toy", "--out", tmp_path / "run")
    assert found.exit_code == 0, found.output
    assert done == [0, 1, "again", 2]
    assert not (tmp_path / "run" / "cache").exists()


def test_command_tells_what_was_not_seen(command, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "part", lambda i: 7)
    found = command("toy", "--out", tmp_path / "run")
    assert found.exit_code == 1
    assert "not confirmed" in found.output
    assert (tmp_path / "run" / "experiment.json").exists()


def test_command_names_what_there_is(command):
    found = command("--list")
    assert found.exit_code == 0
    assert all(name in found.output for name in (*SMALL, "open-question"))
    found = command("nothing")
    assert found.exit_code == 2
    assert "experiment: expected one of closure, condensation, expand" in found.output
    assert "got 'nothing'. Use --list." in found.output


def test_full_says_how_long_it_takes(command, tmp_path):
    found = command("toy", "--full", "--out", tmp_path / "run")
    assert "The full run takes at most about 2 minutes here." in found.output
    found = command("short", "--full", "--out", tmp_path / "short")
    assert found.exit_code == 2
    assert "--full: expected an experiment with a long version, got short. Leave it out." in found.output
    assert not (tmp_path / "short").exists()


def test_a_run_that_cannot_be_written_is_not_called_finished(command, tmp_path, monkeypatch):
    def refuse(drawn, path: Path):
        raise OSError("no space left")

    monkeypatch.setattr("cumulant.paper.output.save", refuse)
    found = command("toy", "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "OSError: no space left" in found.output
    assert not (tmp_path / "run" / "experiment.json").exists()
    monkeypatch.setattr("cumulant.paper.output.save", figures.save)
    found = command("toy", "--out", tmp_path / "run")
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "run" / "begun.json").exists()


def test_a_figure_is_replaced_in_one_step(tmp_path, monkeypatch):
    drawn, path = figures.figure(2, 2), tmp_path / "one.svg"
    figures.save(drawn, path)
    before = path.read_bytes()
    figures.save(drawn, path)
    assert path.read_bytes() == before  # no dates and no random ids
    monkeypatch.setattr(type(drawn), "savefig", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        figures.save(drawn, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["one.svg"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"A figure needs matplotlib: run pip install .*\[lab\]"):
        figures.figure()


def test_result_holds_when_all_do():
    good, bad = Expectation("a", "1", True), Expectation("b", "2", False)
    assert Result({}, {}, "", (good,)).holds
    assert not Result({}, {}, "", (good, bad)).holds
    assert column([{"a": 1, "b": None}, {"a": 2, "b": 3}], "b") == [3.0]
