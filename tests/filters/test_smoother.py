"""The smoother against joint Gaussian laws and sums over mode paths; the forecast against filters of missing rows."""

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cumulant.filters import (
    GammaPoisson,
    SmootherWarning,
    SwitchingConjugate,
    SwitchingLinearGaussian,
    exact,
    gpb,
    imm,
    kalman,
)
from cumulant.filters.forecast import Forecast, forecast
from cumulant.filters.linear_laws import linear_law, regression
from cumulant.filters.smoother import Smoothed, kim, smooth
from cumulant.filters.variance_excess import variance_excess
from tests.compare import close

# sequences of a few steps give it by chance; where it is due is tested by pytest.warns
pytestmark = pytest.mark.filterwarnings("ignore::cumulant.filters.SmootherWarning")

NAN = float("nan")
REFERENCE_RUNS = Path(__file__).parents[1] / "data" / "filters"
METHODS = ("propagation", "correction", "kim")
FIELDS = ("state_offset", "observation_offset", "initial_mean", "initial_covariance", "initial_modes")


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def parameters(modes=2, d=2, m=2, seed=0):
    """NumPy arrays in the order of the model's arguments; every parameter depends on the mode."""
    rng = np.random.default_rng(seed)

    def covariances(n):
        half = rng.normal(size=(modes, n, n))
        return half @ half.transpose(0, 2, 1) / n + 0.1 * np.eye(n)

    transition, start = rng.dirichlet(np.ones(modes), size=modes), rng.dirichlet(np.ones(modes))
    f, h = 0.7 * rng.normal(size=(modes, d, d)), rng.normal(size=(modes, m, d))
    b, c, m0 = rng.normal(size=(modes, d)), rng.normal(size=(modes, m)), rng.normal(size=(modes, d))
    return [transition, f, covariances(d), h, covariances(m), b, c, m0, covariances(d), start]


def model_of(p, start="prior") -> SwitchingLinearGaussian:
    return SwitchingLinearGaussian(*map(t, p[:5]), **dict(zip(FIELDS, map(t, p[5:]), strict=True)), start=start)


def series(steps=4, m=2, seed=1, batch=()):
    return t(np.random.default_rng(seed).normal(size=(*batch, steps, m), scale=2))


class Reference(NamedTuple):
    """The fields of a `Smoothed` that an oracle has."""

    mean: np.ndarray
    covariance: np.ndarray
    mode_probabilities: np.ndarray
    mode_means: np.ndarray
    mode_covariances: np.ndarray


class Given(NamedTuple):
    """The states of all steps given a mode path and the observations."""

    mean: np.ndarray  # (T, d)
    covariance: np.ndarray  # (T, d, d)
    log_joint: float  # log p(path, y)


def given_path(p, y, path) -> Given:
    """One Gaussian law of all states and observations, conditioned at once; path has T modes, or T+1 for a belief."""
    transition, f, q, h, r, b, c, m0, p0, pi = p
    d, n = m0.shape[1], len(path)
    mean, cov = np.zeros((n, d)), np.zeros((n, d, n, d))
    mean[0], cov[0, :, 0] = m0[path[0]], p0[path[0]]
    log_joint = np.log(pi[path[0]])
    for k, s in enumerate(path[1:], 1):
        mean[k] = f[s] @ mean[k - 1] + b[s]
        for j in range(k):
            cov[k, :, j] = f[s] @ cov[k - 1, :, j]
            cov[j, :, k] = cov[k, :, j].T
        cov[k, :, k] = f[s] @ cov[k - 1, :, k - 1] @ f[s].T + q[s]
        log_joint += np.log(transition[path[k - 1], s])
    skip = n - len(y)
    m = y.shape[1]
    maps, noise, shift = np.zeros((len(y) * m, n * d)), np.zeros((len(y) * m, len(y) * m)), np.zeros(len(y) * m)
    for k in range(len(y)):
        s, rows = path[k + skip], slice(k * m, (k + 1) * m)
        maps[rows, (k + skip) * d : (k + skip + 1) * d] = h[s]
        noise[rows, rows], shift[rows] = r[s], c[s]
    seen = ~np.isnan(y.ravel())
    maps, noise, error = maps[seen], noise[np.ix_(seen, seen)], (y.ravel() - shift)[seen]
    flat, mean = cov.reshape(n * d, n * d), mean.ravel()
    error = error - maps @ mean
    s = maps @ flat @ maps.T + noise
    gain = np.linalg.solve(s, maps @ flat).T if seen.any() else np.zeros((n * d, 0))
    if seen.any():
        log_joint -= 0.5 * (error @ np.linalg.solve(s, error) + np.linalg.slogdet(2 * np.pi * s)[1])
    whole = (flat - gain @ maps @ flat).reshape(n, d, n, d)
    kept = range(skip, n)
    return Given((mean + gain @ error).reshape(n, d)[skip:], np.array([whole[k, :, k] for k in kept]), log_joint)


def mixture(weights, means, covariances):
    mean = np.tensordot(weights, means, 1)
    gaps = means - mean
    return mean, np.tensordot(weights, covariances, 1) + np.einsum("i,ia,ib->ab", weights, gaps, gaps)


def enumerated(p, y, start, paths=None) -> Reference:
    """The sum over all mode paths."""
    modes, length = range(len(p[0])), len(y) + (start == "belief")
    paths = np.array(list(itertools.product(modes, repeat=length) if paths is None else paths))
    given = [given_path(p, y, path) for path in paths]
    weights = np.exp(np.array([g.log_joint for g in given]) - max(g.log_joint for g in given))
    weights /= weights.sum()
    out = []
    for k in range(len(y)):
        means, covs = np.array([g.mean[k] for g in given]), np.array([g.covariance[k] for g in given])
        mode = paths[:, k + (start == "belief")]
        share = np.array([weights[mode == s].sum() for s in modes])
        each = [mixture(weights[mode == s] / share[s], means[mode == s], covs[mode == s]) for s in modes]
        out.append((*mixture(weights, means, covs), share, *map(np.array, zip(*each, strict=True))))
    return Reference(*map(np.array, zip(*out, strict=True)))


def textbook(p, y, start) -> Reference:
    """Kim's smoother in loops, from the filter's record."""
    transition, f, q, b = p[0], p[1], p[2], p[5]
    filtered = gpb(model_of(p, start), t(y))
    modes, steps = range(len(transition)), len(y)
    w, x, v = (part.numpy() for part in (filtered.mode_probabilities, filtered.mode_means, filtered.mode_covariances))
    later, out = (w[-1], x[-1], v[-1]), []
    out.append(later)
    for k in reversed(range(steps - 1)):
        pair = np.zeros((len(modes), len(modes)))
        means, covs = np.zeros((*pair.shape, x.shape[-1])), np.zeros((*pair.shape, x.shape[-1], x.shape[-1]))
        for i, j in itertools.product(modes, modes):
            pair[i, j] = later[0][j] * w[k, i] * transition[i, j] / (w[k] @ transition[:, j])
            predicted = f[j] @ v[k, i] @ f[j].T + q[j]
            gain = v[k, i] @ f[j].T @ np.linalg.inv(predicted)
            means[i, j] = x[k, i] + gain @ (later[1][j] - f[j] @ x[k, i] - b[j])
            covs[i, j] = v[k, i] + gain @ (later[2][j] - predicted) @ gain.T
        share = pair.sum(1)
        each = [mixture(pair[i] / share[i], means[i], covs[i]) for i in modes]
        later = (share, *map(np.array, zip(*each, strict=True)))
        out.append(later)
    w, x, v = map(np.array, zip(*out[::-1], strict=True))
    whole = [mixture(*step) for step in zip(w, x, v, strict=True)]
    return Reference(*map(np.array, zip(*whole, strict=True)), w, x, v)


def agrees(ours, theirs, atol=1e-10):
    for name in theirs._fields:
        value = getattr(theirs, name)
        value = value if isinstance(value, torch.Tensor) else t(value)
        torch.testing.assert_close(getattr(ours, name), value, rtol=atol, atol=atol, msg=lambda m, n=name: n + m)


GAPS = series(5)
GAPS[1], GAPS[3, 0], GAPS[4, 1] = NAN, NAN, NAN


# ---------------------------------------------------------------------- where it is exact


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("y", [series(7), GAPS, series(1), GAPS * NAN], ids=["full", "gaps", "one", "nothing"])
def test_one_mode_is_the_joint_gaussian_law(start, y, method):
    p = parameters(modes=1, d=3)
    path = np.zeros(len(y) + (start == "belief"), dtype=int)
    reference = given_path(p, y.numpy(), path)
    found = smooth(model_of(p, start), y, method=method)
    close(found.mean, reference.mean, 1e-10)
    close(found.covariance, reference.covariance, 1e-10)
    assert (found.mode_probabilities == 1).all()


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("modes", [2, 3])
def test_an_order_above_the_length_is_the_sum_over_mode_paths(start, modes):
    p, y = parameters(modes=modes), GAPS[: 6 - modes]
    truth = enumerated(p, y.numpy(), start)
    for method in METHODS:
        agrees(smooth(model_of(p, start), y, order=len(y) + 1 + (start == "belief"), method=method), truth)
    agrees(smooth(model_of(p, start), y, method="exact"), truth)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [2, 3])
def test_a_mode_that_never_changes_is_exact(order, method):
    p, y = parameters(modes=3), series(5)
    p[0] = np.eye(3)
    found = smooth(model_of(p), y, order=order, method=method)
    with np.errstate(divide="ignore"):
        agrees(found, enumerated(p, y.numpy(), "prior", [[s] * 5 for s in range(3)]))


def test_states_known_for_certain():
    """Predicted covariances without full rank: no noise, and two entries that are copies of each other."""
    p = parameters(modes=1, d=3)
    copy = np.array([[1.0, 0, 0], [1, 0, 0], [0, 0, 1]])
    p[1], p[2] = copy[None], np.zeros((1, 3, 3))
    p[8] = np.diag([2.0, 0.0, 0.0])[None]
    y = series(5)
    reference = given_path(p, y.numpy(), np.zeros(5, dtype=int))
    found = smooth(model_of(p), y)
    close(found.mean, reference.mean, 1e-10)
    close(found.covariance, reference.covariance, 1e-10)


def test_regression_on_what_is_certain_is_nothing():
    assert regression(torch.zeros(2, 1), torch.zeros(2, 2)).equal(torch.zeros(1, 2))
    z = t([[1.0, 0], [0, 0]])
    close(regression(t([[3.0], [0]]), z), [[3.0, 0]])
    many = regression(t([[[3.0], [0]], [[3.0], [4.0]]]), torch.stack([z, 2 * torch.eye(2).double()]))
    close(many, [[[3.0, 0]], [[1.5, 2]]])


@pytest.mark.parametrize("varying", [False, True])
def test_the_law_of_a_transition_is_that_of_its_prediction(varying):
    """A mean and covariance through the law are what `predict` says, and their joint moments give the law back."""
    model = model_of(parameters(modes=3), "belief")
    if varying:
        model = replace(model, dynamics=torch.stack([model.dynamics, 2 * model.dynamics]))
    propagator = model.propagator()
    begin = propagator.initial().belief
    belief = type(begin)(*(leaf.unsqueeze(1) for leaf in begin))  # (from, to, …, batch)
    law = propagator.transition_law(belief, 1)
    before = propagator.moments(belief)
    predicted = propagator.moments(propagator.state(propagator.predict(belief, 1)))
    cross = torch.einsum("...abn,...bcn->...acn", law.coefficient, before.covariance)
    spread = torch.einsum("...abn,...cbn->...acn", cross, law.coefficient) + law.noise
    close(torch.einsum("...abn,...bn->...an", law.coefficient, before.mean) + law.offset, predicted.mean, 1e-12)
    close(spread, predicted.covariance, 1e-12)
    for ours, theirs in zip(linear_law(before, predicted, cross), law, strict=True):
        close(ours, theirs.expand_as(ours), 1e-11)


def test_a_family_without_a_law_of_transitions_says_so():
    counts = SwitchingConjugate(GammaPoisson(t([1.0, 2.0])), t([[0.5, 0.5], [0.5, 0.5]]), t([1.0, 1.0]))
    propagator = counts.propagator()
    with pytest.raises(NotImplementedError, match=r"transition_law: expected a family with normal beliefs, got none"):
        propagator.transition_law(propagator.initial().belief, 0)


# ---------------------------------------------------------------------- where it is approximate


@pytest.mark.parametrize("start", ["prior", "belief"])
def test_order_two_is_the_textbook(start):
    p, y = parameters(modes=3), GAPS
    agrees(smooth(model_of(p, start), y, method="kim"), textbook(p, y.numpy(), start), 1e-11)


def test_reference_run_of_kims_smoother():
    case = json.loads((REFERENCE_RUNS / "exact_reference.json").read_text())["cases"]["common_prior"]
    f, q, h, r = (t(case[name]) for name in "FQHR")
    start = {"initial_mean": t(case["m0"]), "initial_covariance": t(case["P0"]), "initial_modes": t(case["mu0"])}
    model = SwitchingLinearGaussian(t(case["transition"]), f, q, h, r, **start, start="belief")
    y = t(case["observations"])
    names = {"mean": "mean", "covariance": "cov", "mode_probabilities": "mode_probs"}
    for order, key in ((2, "gpb2_kim_smoother"), (8, "exact_smooth")):
        found = smooth(model, y, order=order, method="kim")
        for ours, theirs in names.items():
            close(getattr(found, ours), case[key][theirs][1:], 1e-9)


def walk(**change) -> SwitchingLinearGaussian:
    one = torch.ones(1, 1, dtype=torch.float64)
    given = {"initial_mean": 0 * one[0], "initial_covariance": one}
    noise = change.pop("process_noise", torch.stack([0.1 * one, 4 * one]))
    return SwitchingLinearGaussian(t([[0.9, 0.1], [0.2, 0.8]]), one, noise, one, one, **given, **change)


class Errors(NamedTuple):
    modes: float
    largest: float
    means: float


def errors(found, truth) -> Errors:
    modes = (found.mode_probabilities - truth.mode_probabilities)[..., 0].abs()
    means = (found.mean - truth.mean).abs() / truth.covariance[..., 0].sqrt()
    return Errors(modes.mean().item(), modes.max().item(), means.mean().item())


def test_the_figures_of_the_docstring():
    y = walk().simulate(8, batch_shape=(200,), generator=torch.Generator().manual_seed(0)).observations
    truth, filtered = smooth(walk(), y, method="exact"), exact(walk(), y)
    agrees(smooth(walk(), y[0], method="exact"), enumerated(arrays(walk()), y[0].numpy(), "prior"), 1e-9)
    expected = {
        ("kim", 2): (0.040, 0.33, 0.059),
        ("kim", 3): (0.018, 0.23, 0.023),
        ("kim", 4): (0.009, 0.15, 0.012),
        ("correction", 2): (0.017, 0.07, 0.034),
        ("propagation", 2): (0.0019, 0.030, 0.0129),
        ("propagation", 3): (0.0006, 0.015, 0.0046),
        ("propagation", 4): (0.0002, 0.010, 0.0017),
    }
    for (method, order), figures in expected.items():
        found = errors(smooth(walk(), y, order=order, method=method), truth)
        assert found.largest == pytest.approx(figures[1], abs=0.006)
        assert (found.modes, found.means) == pytest.approx((figures[0], figures[2]), abs=0.0006)
    assert errors(gpb(walk(), y), filtered).modes == pytest.approx(0.0009, abs=1e-4)
    assert errors(filtered, truth).modes == pytest.approx(0.12, abs=0.005)


def arrays(model):
    names = ("transition", "dynamics", "process_noise", "observation", "observation_noise", *FIELDS)
    return [getattr(model, name).numpy() for name in names]


@pytest.mark.parametrize(("method", "modes", "means"), [("kim", 0.06, 0.1), ("propagation", 0.003, 0.02)])
def test_a_higher_order_is_nearer_the_truth(method, modes, means):
    y = walk().simulate(6, batch_shape=(40,), generator=torch.Generator().manual_seed(0)).observations
    truth = smooth(walk(), y, order=7)
    found = [errors(smooth(walk(), y, order=k, method=method), truth) for k in (2, 3, 4)]
    assert modes > found[0].modes > 2 * found[1].modes > 2 * found[2].modes > 0
    assert means > found[0].means > 2 * found[1].means > 2 * found[2].means > 0


def test_kim_over_imm_is_near_kim_over_gpb2():
    y = walk().simulate(30, batch_shape=(20,), generator=torch.Generator().manual_seed(2)).observations
    ours, theirs = kim(walk(), imm(walk(), y)), smooth(walk(), y, method="kim")
    agrees(kim(walk(), gpb(walk(), y)), theirs, 1e-12)
    gap = (ours.mean - theirs.mean).abs().mean()
    assert 0 < gap < 0.02


@pytest.mark.long
def test_errors_of_simulated_states():
    drawn = walk().simulate(100, batch_shape=(200,), generator=torch.Generator().manual_seed(3))
    before = (gpb(walk(), drawn.observations).mean - drawn.states).square()
    for method, order, stated in (("kim", 2, 0.92), ("kim", 3, 0.98), ("correction", 2, 1.0), ("propagation", 2, 1.01)):
        found = smooth(walk(), drawn.observations, order=order, method=method)
        after = (found.mean - drawn.states).square()
        assert after.mean() < 0.75 * before.mean()
        assert (after / found.covariance[..., 0]).mean() == pytest.approx(stated, abs=0.01)


# ---------------------------------------------------------------------- where Kim's is worse than its filter


def turning(q, covariance=(25.0, 25.0, 1.0, 1.0)) -> SwitchingLinearGaussian:
    """Flies straight or turns at 0.1 rad a step: x, y and their velocities, of which the position is measured."""
    sin, cos, rate = np.sin(0.1), np.cos(0.1), 0.1
    straight = np.eye(4) + np.eye(4, k=2)
    turn = [
        [1, 0, sin / rate, (cos - 1) / rate],
        [0, 1, (1 - cos) / rate, sin / rate],
        [0, 0, cos, -sin],
        [0, 0, sin, cos],
    ]
    noise = np.kron([[1 / 3, 1 / 2], [1 / 2, 1]], np.eye(2))
    return SwitchingLinearGaussian(
        t([[0.9, 0.1], [0.1, 0.9]]),
        t(np.array([straight, turn])),
        t(q * noise),
        t(np.eye(2, 4)),
        t(25 * np.eye(2)),
        initial_mean=t([0, 0, 10, 0]),
        initial_covariance=torch.diag(t(covariance)),
    )


def flown(q, count=40):
    return turning(q).simulate(150, batch_shape=(count,), generator=torch.Generator().manual_seed(0))


def position_error(record, drawn) -> float:
    return (record.mean - drawn.states)[..., :2].square().sum(-1).mean().sqrt().item()


@pytest.mark.long
@pytest.mark.parametrize(
    ("q", "filtered", "smoothed"),
    [(1e-2, 4.0, (13.8, 7.4, 4.2)), (1e-3, 3.9, (43.7, 26.4, 15.9)), (1e-4, 3.8, (106.8, 72.8, 47.8))],
)
def test_the_figures_of_a_turning_target_and_that_it_is_said(q, filtered, smoothed):
    model, drawn = turning(q), flown(q)
    y = drawn.observations
    assert position_error(imm(model, y), drawn) == pytest.approx(filtered, rel=0.02)
    assert position_error(gpb(model, y), drawn) < filtered
    for order, error in zip((2, 3, 4), smoothed, strict=True):
        expected = (
            r"^smooth.method=kim: expected .* got .* and more in 40 of 40 sequences\. .*propagation.*variance_ratio\.$"
        )
        with pytest.warns(SmootherWarning, match=expected) as given:
            found = smooth(model, y, order=order, method="kim")
        assert len(given) == 1
        assert Path(given[0].filename) == Path(__file__)
        assert position_error(found, drawn) == pytest.approx(error, rel=0.02)
        before, after = (r.covariance.diagonal(dim1=-2, dim2=-1) for r in (gpb(model, y, order=order), found))
        close(found.variance_ratio, after / before, 1e-12)
        assert (found.variance_ratio.mean(1)[:, :2] > 1).all()


@pytest.mark.parametrize("q", [1e-2, 1e-4])
def test_propagation_halves_the_error_of_the_filter_there(q):
    model, drawn = turning(q), flown(q, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = smooth(model, drawn.observations)
    assert position_error(found, drawn) < 0.6 * position_error(gpb(model, drawn.observations), drawn)
    assert (found.variance_ratio.mean(1) < 0.5).all()


def test_kim_says_it_too():
    model, y = turning(1e-3), flown(1e-3, 1).observations[0]
    with pytest.warns(SmootherWarning, match=r"^kim: expected .* times as much for entry [01] of the state\. "):
        kim(model, imm(model, y))


def test_a_vague_start_does_not_hide_what_comes_later():
    """Nothing is known of the first rows: their variances are a million times those of all later ones together."""
    model, y = turning(1e-3, (1e12, 1e12, 1e6, 1e6)), flown(1e-3, 1).observations[0]
    y[:5] = NAN
    with pytest.warns(SmootherWarning) as given:
        found = smooth(model, y, method="kim")
    before, after = (r.covariance.diagonal(dim1=-2, dim2=-1).sum(0) for r in (gpb(model, y), found))
    assert (after < before).all()
    assert len(given) == 1


def test_only_the_steps_of_a_sequence_count():
    """A sequence of one step and one of none beside a long one: they cannot be worse than their filter."""
    model, y = turning(1e-3), flown(1e-3, 3).observations
    mask = torch.arange(150) < torch.tensor([[1], [150], [0]])
    with pytest.warns(SmootherWarning, match=r" in sequence 1, and more in 1 of 3 sequences\."):
        smooth(model, y, mask=mask, method="kim")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smooth(model, y, mask=torch.arange(150) < torch.tensor([[1], [0], [1]]), method="kim")


@pytest.mark.parametrize("method", ["propagation", "kim"])
@pytest.mark.parametrize("case", ["one mode", "no switching", "every path", "no steps", "no sequences", "known states"])
def test_no_warning_where_it_is_exact_or_there_is_nothing(case, method):
    model, y, order = turning(1e-3), flown(1e-3, 3).observations, 2
    if case == "one mode":
        model = turning(1e-3)
        names = "dynamics", "process_noise", "observation", "observation_noise", "initial_mean", "initial_covariance"
        kept = {name: getattr(model, name)[:1] for name in (*names, "state_offset", "observation_offset")}
        model = SwitchingLinearGaussian(torch.ones(1, 1).double(), **kept)
    if case == "no switching":
        model = replace(model, transition=torch.eye(2).double())
    if case == "every path":
        y, order = 50 * y[:, :4], 5
    if case == "no steps":
        y = y[:, :0]
    if case == "no sequences":
        y = y[:0]
    if case == "known states":
        model = replace(model, initial_covariance=0 * model.initial_covariance, process_noise=0 * model.process_noise)
        model = replace(model, dynamics=model.dynamics[:1].expand(2, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = smooth(model, y, order=order, method=method)
    assert found.variance_ratio.shape == found.mean.shape
    assert found.variance_ratio.isfinite().all()
    if case == "one mode":
        assert (found.variance_ratio < 1 + 1e-9).all()
    if case == "known states":
        assert (found.variance_ratio == 1).all()


def test_alarms_of_exact_smoothing_are_rare():
    """By chance the exact variances of a sequence exceed those of the filter, the less often the longer it is."""
    rates = []
    for steps in (4, 8):
        y = walk().simulate(steps, batch_shape=(200,), generator=torch.Generator().manual_seed(1)).observations
        found = smooth(walk(), y, order=steps + 1)
        rates.append((variance_excess(gpb(walk(), y, order=steps + 1), found.covariance) > 1).double().mean().item())
    assert rates[0] < 0.12
    assert rates[1] < 0.04


# ---------------------------------------------------------------------- layouts and edges


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("start", ["prior", "belief"])
def test_sequences_of_different_lengths_as_one_by_one(order, start, method):
    model, y = model_of(parameters(), start), series(6, batch=(2, 3))
    y[0, 1, 2] = NAN
    lengths = torch.tensor([[6, 4, 1], [2, 3, 0]])
    mask = torch.arange(6) < lengths[..., None]
    found = smooth(model, y, order=order, mask=mask, method=method)
    filtered = gpb(model, y, order=order, mask=mask)
    for index in itertools.product(range(2), range(3)):
        length = int(lengths[index])
        alone = smooth(model, y[index][:length], order=order, method=method)
        agrees(Smoothed(*(part[index][:length] for part in found)), alone, 1e-11)
        close(found.variance_ratio[index][length:], torch.ones(6 - length, 2).double(), 1e-12)
        for name in Reference._fields:
            end = getattr(filtered, name)[index][length:]
            torch.testing.assert_close(getattr(found, name)[index][length:], end, rtol=1e-12, atol=1e-12)
    if order == 2 and method == "kim":
        agrees(kim(model, filtered, mask=mask), found, 1e-12)


def test_an_ended_sequence_does_not_run_away():
    model = replace(walk(), dynamics=1e30 * torch.ones(2, 1, 1).double())
    mask = torch.arange(30) < torch.tensor([[30], [2]])
    y = torch.where(mask[..., None], 0, NAN).double()
    y[0, 2:] = NAN
    ragged = smooth(model, y[:, :6], order=3, mask=mask[:, :6])
    assert all(part.isfinite().all() for part in ragged)
    close(smooth(model, y[1:], order=3, mask=mask[1:]).mean[0, :2], ragged.mean[1, :2])


@pytest.mark.parametrize("order", [2, 4])
def test_batches_are_independent_sequences(order):
    model, y = model_of(parameters(modes=3)), series(4, batch=(2, 2))
    found = smooth(model, y, order=order)
    assert found.mode_covariances.shape == (2, 2, 4, 3, 2, 2)
    for index in itertools.product(range(2), range(2)):
        agrees(Smoothed(*(part[index] for part in found)), smooth(model, y[index], order=order), 1e-12)


@pytest.mark.parametrize("order", [2, 3])
def test_no_steps_and_no_sequences(order):
    model = model_of(parameters())
    assert smooth(model, series(0), order=order).mode_means.shape == (0, 2, 2)
    assert smooth(model, series(0, batch=(3,)), order=order).mean.shape == (3, 0, 2)
    assert smooth(model, series(3, batch=(0,)), order=order).covariance.shape == (0, 3, 2, 2)


@pytest.mark.parametrize("order", [2, 3])
def test_modes_that_cannot_be(order):
    p, y = parameters(modes=3), series(4)
    p[0] = np.array([[0.5, 0.5, 0], [0.3, 0.7, 0], [0, 0.5, 0.5]])
    p[9] = np.array([1.0, 0, 0])
    found = smooth(model_of(p), y, order=order)
    assert (found.mode_probabilities[:, 2] == 0).all()
    assert (found.mode_probabilities[0] == t([1.0, 0, 0])).all()
    assert all(part.isfinite().all() for part in found)
    two = [p[0][:2, :2], *(part[:2] for part in p[1:])]
    without = smooth(model_of(two), y, order=order)
    close(found.mean, without.mean, 1e-11)
    close(found.covariance, without.covariance, 1e-11)


def test_parameters_that_vary_in_time():
    """Two models taking turns are one model with a time axis; and a time axis that repeats changes nothing."""
    p, y = parameters(), GAPS
    model = model_of(p)
    names = ("transition", "dynamics", "process_noise", "observation", "observation_noise", *FIELDS[:2])
    steady = {name: getattr(model, name).expand(5, *getattr(model, name).shape) for name in names}
    for method in METHODS:
        agrees(smooth(replace(model, **steady), y, method=method), smooth(model, y, method=method), 1e-12)
    q = list(p)
    rng = np.random.default_rng(5)
    f = rng.normal(size=(5, 1, 2, 2))
    q[1] = np.eye(2)[None]
    one = [part[:1] for part in q]
    one[0], one[9] = np.ones((1, 1)), np.ones(1)
    turning = replace(model_of(one), dynamics=t(f))
    found = smooth(turning, y)
    # the same by hand: x_t = F_t x_{t−1} + … written as a path through five modes
    five = [np.eye(5), f[:, 0], *(np.repeat(part, 5, 0) for part in one[2:9]), np.ones(5)]
    five[0] = np.ones((5, 5))
    reference = given_path(five, y.numpy(), np.arange(5))
    close(found.mean, reference.mean, 1e-10)
    close(found.covariance, reference.covariance, 1e-10)


def test_single_precision_far_from_the_origin():
    far = replace(walk(), initial_mean=t([[1e4], [1e4]]))
    y = far.simulate(200, generator=torch.Generator().manual_seed(0)).observations
    truth, found = smooth(far, y), smooth(far.to(torch.float32), y.float())
    assert (found.mean - truth.mean).abs().max() < 1e-2
    assert (found.covariance > 0).all()
    assert (found.mode_probabilities - truth.mode_probabilities).abs().max() < 1e-2


@pytest.mark.long
@pytest.mark.parametrize("order", [2, 3])
def test_gradients(order):
    model, y = model_of(parameters()), series(3).requires_grad_()
    f, q = (getattr(model, name).clone().requires_grad_() for name in ("dynamics", "process_noise"))

    def moments(f, q, y):
        found = smooth(replace(model, dynamics=f, process_noise=(q + q.mT) / 2), y, order=order)
        return found.mean, found.covariance, found.mode_probabilities

    assert torch.autograd.gradcheck(moments, (f, q, y))


@pytest.mark.long
def test_gradients_in_every_parameter():
    model, y = model_of(parameters(modes=2, d=1, m=1)), series(4, m=1)
    names = ("transition", "dynamics", "process_noise", "observation", "observation_noise", *FIELDS)
    leaves = [getattr(model, name).clone().requires_grad_() for name in names]

    def moments(*values):
        given = dict(zip(names, values, strict=True))
        for name in ("transition", "initial_modes"):  # on the simplex
            given[name] = torch.softmax(given[name], -1)
        found = smooth(replace(model, **given), y)
        return found.mean, found.covariance, found.mode_probabilities

    assert torch.autograd.gradcheck(moments, leaves)


# ---------------------------------------------------------------------- forecast


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_forecast_is_the_filter_of_missing_rows(start, order):
    model, y = model_of(parameters(modes=3), start), series(5, batch=(2,))
    longer = torch.cat([y, torch.full((2, 4, 2), NAN).double()], 1)
    expected = gpb(model, longer, order=order)
    found = forecast(model, gpb(model, y, order=order), 4, order=order)
    for name in ("mean", "covariance", "mode_probabilities"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name)[:, 5:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", ["prior", "belief"])
def test_a_forecast_adds_no_approximation(start):
    model, y = model_of(parameters(), start), series(3)
    expected = exact(model, torch.cat([y, torch.full((4, 2), NAN).double()]))
    found = forecast(model, exact(model, y), 4)
    for name in ("mean", "covariance", "mode_probabilities"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name)[3:], rtol=1e-12, atol=1e-12)
    state = imm(model, torch.cat([y, torch.full((4, 2), NAN).double()]))
    close(forecast(model, imm(model, y), 4).mean, state.mean[3:])


def test_what_will_be_observed():
    p, y = parameters(modes=2), series(3)
    model = model_of(p)
    seen = gpb(model, y)
    found, record = forecast(model, seen, 2), gpb(model, torch.cat([y, torch.full((2, 2), NAN).double()]))
    for k in range(2):
        w, x, v = (
            part[3 + k].numpy() for part in (record.mode_probabilities, record.mode_means, record.mode_covariances)
        )
        means = np.array([p[3][s] @ x[s] + p[6][s] for s in range(2)])
        covs = np.array([p[3][s] @ v[s] @ p[3][s].T + p[4][s] for s in range(2)])
        mean, covariance = mixture(w, means, covs)
        close(found.observation_mean[k], mean)
        close(found.observation_covariance[k], covariance)


def test_a_forecast_of_one_mode_is_the_joint_gaussian_law():
    p, y = parameters(modes=1), series(3).numpy()
    longer = np.concatenate([y, np.full((2, 2), NAN)])
    reference = given_path(p, longer, np.zeros(5, dtype=int))
    found = forecast(model_of(p), kalman(model_of(p), t(y)), 2)
    close(found.mean, reference.mean[3:], 1e-11)
    close(found.covariance, reference.covariance[3:], 1e-11)


def test_forecasts_without_steps_or_before_any():
    model, y = model_of(parameters()), series(3, batch=(2,))
    empty = forecast(model, gpb(model, y), 0)
    assert [tuple(part.shape) for part in empty] == [(2, 0, 2), (2, 0, 2, 2), (2, 0, 2), (2, 0, 2), (2, 0, 2, 2)]
    for start in ("prior", "belief"):
        model = model_of(parameters(), start)
        before = forecast(model, gpb(model, series(0)), 3)
        close(before.mean, gpb(model, torch.full((3, 2), NAN).double()).mean)


def test_a_forecast_goes_on_from_each_end():
    model, y = model_of(parameters()), series(4, batch=(2,))
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    found = forecast(model, gpb(model, y, mask=mask), 3)
    alone = forecast(model, gpb(model, y[1, :2]), 3)
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours[1], theirs, rtol=1e-12, atol=1e-12)


def test_a_forecast_with_parameters_of_the_steps_to_come():
    p, y = parameters(), series(5)
    f = t(np.random.default_rng(3).normal(size=(5, 2, 2, 2)))
    model = replace(model_of(p), dynamics=f)
    y[3:] = NAN
    close(forecast(model, gpb(model, y[:3]), 2).mean, gpb(model, y).mean[3:])
    with pytest.raises(ValueError, match=r"forecast.steps: expected at most T=5 filtered and future steps, got 3 \+ 3"):
        forecast(model, gpb(model, y[:3]), 3)


def test_gradients_of_a_forecast():
    model, y = model_of(parameters()), series(3)
    f = model.dynamics.clone().requires_grad_()

    def moments(f):
        there = replace(model, dynamics=f)
        found = forecast(there, gpb(there, y), 2)
        return found.mean, found.observation_covariance

    assert torch.autograd.gradcheck(moments, (f,))


# ---------------------------------------------------------------------- errors


def test_calls_that_cannot_be_answered():
    model, y = model_of(parameters()), series(3)
    filtered = gpb(model, y)
    counts = SwitchingConjugate(GammaPoisson(t([1.0, 2.0])), t([[0.5, 0.5], [0.5, 0.5]]), t([1.0, 1.0]))
    for call in (lambda: kim(counts, filtered), lambda: forecast(counts, filtered, 1)):
        with pytest.raises(TypeError, match=r"expected a SwitchingLinearGaussian.*, got SwitchingConjugate"):
            call()
    with pytest.raises(
        TypeError, match=r"smooth.model: expected a model with normal beliefs, got SwitchingConjugate\. .*law"
    ):
        smooth(counts, y)
    with pytest.raises(TypeError, match=r"smooth.model: expected a switching model, got int"):
        smooth(3, y)
    with pytest.raises(
        ValueError, match=r"smooth.method: expected one of propagation, correction, kim, exact, got 'Kim'"
    ):
        smooth(model, y, method="Kim")
    for sweeps in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"smooth.sweeps: expected an integer ≥ 1, got"):
            smooth(model, y, sweeps=sweeps)
    with pytest.raises(ValueError, match=r"smooth.method=exact: expected at most 65536 mode paths, got 2\^30"):
        smooth(model, series(30), method="exact")
    with pytest.raises(ValueError, match=r"filters.y: expected shape"):
        smooth(model, y[0])
    for call in (lambda: kim(model, y), lambda: forecast(model, y, 1)):
        with pytest.raises(TypeError, match="expected a Filtered record, got Tensor"):
            call()
    for order in (1, 0):
        with pytest.raises(ValueError, match="expected an integer ≥"):
            smooth(model, y, order=order)
    with pytest.raises(ValueError, match=r"kim.filtered: expected mode_means of shape \(\*batch, T, M=3, d=2\)"):
        kim(model_of(parameters(modes=3)), filtered)
    with pytest.raises(ValueError, match=r"kim.mask: expected a Boolean tensor of shape"):
        kim(model, filtered, mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"kim.mask: expected a Boolean tensor of shape \(3,\), got list"):
        kim(model, filtered, mask=[True])
    for steps in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"forecast.steps: expected an integer ≥ 0"):
            forecast(model, filtered, steps)
    assert isinstance(forecast(model, filtered, 1), Forecast)
