"""Conjugate switching models against quadrature, mpmath and enumeration of every mode path."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor
from torch.autograd import gradcheck

from cumulant import from_distribution
from cumulant.filters import exact, gpb, imm, init, m_projection_in, step
from cumulant.filters.conjugate import SwitchingConjugate
from cumulant.filters.pairs import BetaBernoulli, DirichletCategorical, GammaPoisson, NormalGamma, NormalNormal
from cumulant.samplers import particle_filter
from tests.compare import close

REFERENCE_RUNS = Path(__file__).parents[1] / "data" / "filters"
NAN = torch.nan


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# families: the law of x on a grid, without any conjugacy


class Oracle:
    """A law of x as weights on a quadrature grid; ``density`` and ``likelihood`` by scipy."""

    def __init__(self, grid, weights, density, likelihood, statistics):
        self.grid, self.weights, self.density = grid, weights, density
        self.likelihood, self.statistics = likelihood, statistics

    def law(self, parameters) -> np.ndarray:
        p = self.weights * self.density(self.grid, *parameters)
        return p / p.sum()


def line(low: float, high: float, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(n)
    return (x + 1) / 2 * (high - low) + low, w * (high - low) / 2


def plane() -> tuple[np.ndarray, np.ndarray]:
    (m, v), (t, w) = line(-25, 25), line(0, 16)
    return np.stack(np.meshgrid(m, t, indexing="ij"), -1).reshape(-1, 2), np.outer(v, w).reshape(-1)


def normal_gamma(x: np.ndarray, m, k, a, b) -> np.ndarray:
    mean, precision = x[:, 0], x[:, 1]
    return stats.norm.pdf(mean, m, 1 / np.sqrt(k * precision)) * stats.gamma.pdf(precision, a, scale=1 / b)


CASES = {
    "GammaPoisson": (
        GammaPoisson(1.7),
        (3.5, 1.2),
        (0.0, 1.0, 6.0),
        Oracle(
            *line(0, 60),
            lambda x, a, b: stats.gamma.pdf(x, a, scale=1 / b),
            lambda y, x: stats.poisson.pmf(y, 1.7 * x),
            lambda x: (x, np.log(x)),
        ),
    ),
    "BetaBernoulli": (
        BetaBernoulli(),
        (2.5, 4.0),
        (0.0, 1.0),
        Oracle(
            *line(0, 1),
            stats.beta.pdf,
            lambda y, x: x if y else 1 - x,
            lambda x: (np.log(x), np.log1p(-x)),
        ),
    ),
    "NormalNormal": (
        NormalNormal(0.7),
        (1.3, 2.0),
        (0.0, -3.0),
        Oracle(
            *line(-20, 20),
            lambda x, m, p: stats.norm.pdf(x, m, np.sqrt(p)),
            lambda y, x: stats.norm.pdf(y, x, np.sqrt(0.7)),
            lambda x: (x, x**2),
        ),
    ),
    "NormalGamma": (
        NormalGamma(0.6),
        (0.4, 1.5, 6.0, 4.0),
        (0.1, 2.0),
        Oracle(
            *plane(),
            normal_gamma,
            lambda y, x: stats.norm.pdf(y, x[:, 0], np.sqrt(0.6 / x[:, 1])),
            lambda x: (np.log(x[:, 1]), x[:, 1], x[:, 1] * x[:, 0], x[:, 1] * x[:, 0] ** 2),
        ),
    ),
}


def column(parameters) -> Tensor:
    return torch.tensor(parameters, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("name", CASES)
def test_updates_predictions_and_statistics_by_quadrature(name):
    family, parameters, ys, oracle = CASES[name]
    p, tolerance = oracle.law(parameters), 1e-8
    x = oracle.grid.reshape(len(p), -1)
    mean, covariance = family.moments(column(parameters))
    close(mean[:, 0], p @ x, tolerance)
    close(covariance[..., 0], (x - p @ x).T @ (p[:, None] * (x - p @ x)), tolerance)
    close(family.family.mean(column(parameters))[:, 0], [p @ u for u in oracle.statistics(oracle.grid)], tolerance)
    for y in ys:
        found = family.observe(column(parameters), tensor(y), 0)
        likelihood = oracle.likelihood(y, oracle.grid)
        close(found.log_likelihood.exp(), [p @ likelihood], tolerance)
        posterior = oracle.law(found.parameters[:, 0].tolist())
        close(posterior @ x, p * likelihood @ x / (p @ likelihood), tolerance)
        close(np.abs(posterior - p * likelihood / (p @ likelihood)).sum(), 0, 1e-7)


def test_dirichlet_by_its_definition():
    family, a = DirichletCategorical(), np.array([0.8, 2.0, 3.5])
    p = column(a)
    found = family.observe(p.expand(3, 3), tensor(0.0, 1.0, 2.0), 0)
    close(found.log_likelihood.exp(), a / a.sum())
    close(found.parameters, a[:, None] + np.eye(3))
    mean, covariance = family.moments(p)
    close(mean[:, 0], stats.dirichlet.mean(a))
    close(covariance[..., 0], stats.dirichlet.cov(a))
    close(family.family.mean(p)[:, 0], special.digamma(a) - special.digamma(a.sum()))
    coin = BetaBernoulli()
    close(coin.family.mean(column([2.0, 3.0])), family.family.mean(column([2.0, 3.0])))


def test_student_prediction_against_scipy():
    family, (m, k, b), y = NormalGamma(0.6), (0.4, 1.5, 3.0), tensor(0.4, 0.5, 3.0)
    for a in (0.3, 2.0, 30.0):
        found = family.observe(column([m, k, a, b]), y, 0).log_likelihood
        close(found, stats.t.logpdf(y.numpy(), 2 * a, m, np.sqrt(b / a * (0.6 + 1 / k))), 1e-12)
    far = family.observe(column([m, k, 1e12, 1e12]), y, 0).log_likelihood  # so many degrees of freedom are a normal law
    close(far, stats.norm.logpdf(y.numpy(), m, np.sqrt(0.6 + 1 / k)), 1e-11)


FAMILIES = {
    "GammaPoisson": (GammaPoisson(), lambda r: r.uniform(0.2, 9.0, 2)),
    "BetaBernoulli": (BetaBernoulli(), lambda r: r.uniform(0.2, 9.0, 2)),
    "DirichletCategorical": (DirichletCategorical(), lambda r: r.uniform(0.2, 9.0, 4)),
    "NormalNormal": (NormalNormal(1.0), lambda r: np.r_[r.normal(), r.uniform(0.2, 3.0)]),
    "NormalGamma": (NormalGamma(), lambda r: np.r_[r.normal(), r.uniform(0.5, 5.0, 3)]),
}


def some(name: str, *hypotheses: int, batch: int = 2, seed: int = 0) -> Tensor:
    _, one = FAMILIES[name]
    rng = np.random.default_rng(seed)
    many = np.stack([one(rng) for _ in range(int(np.prod(hypotheses)) * batch)])
    return torch.tensor(many.reshape(*hypotheses, batch, -1)).movedim(-1, -2)


@pytest.mark.parametrize("name", FAMILIES)
def test_projection_matches_expected_statistics(name):
    family, _ = FAMILIES[name]
    p = some(name, 3, 4)
    close(family.family.from_mean(family.family.mean(p)), p, 1e-11)
    for axis in (0, 1):
        w = torch.softmax(torch.randn(3, 4, 2, generator=generator(1), dtype=torch.float64), axis)
        found = family.family.project(w, p, axis)
        mixed = (w.unsqueeze(-2) * family.family.mean(p)).sum(axis)
        close(family.family.mean(found), mixed, 1e-12)
        close(found, family.family.from_mean(mixed), 1e-10)
        order = torch.arange(w.shape[axis] - 1, -1, -1)
        close(family.family.project(w.index_select(axis, order), p.index_select(axis, order), axis), found, 1e-12)
    certain = torch.tensor([0.0, 1.0, 0.0]).double()[:, None, None].expand(3, 4, 2)
    close(family.family.project(certain, p, 0), p[1], 1e-11)
    shared = p[:1]  # one belief for all hypotheses
    w = torch.softmax(torch.randn(3, 4, 2, generator=generator(1), dtype=torch.float64), 0)
    close(family.family.project(w, shared, 0), shared[0], 1e-11)


def test_gamma_projection_through_the_measure_on_statistics():
    p, w = some("GammaPoisson", 3, batch=1), tensor(0.2, 0.5, 0.3)
    a, b = p[:, 0, 0], p[:, 1, 0]
    base = from_distribution(torch.distributions.Gamma(tensor(1.0).squeeze(), tensor(1.0).squeeze()), full=True)
    eta = torch.stack([1 - b, a - 1], -1)
    found = m_projection_in(base, w, eta).value
    ours = GammaPoisson().family.project(w[:, None], p, 0)[:, 0]
    close(torch.stack([found[1] + 1, 1 - found[0]]), ours, 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_forgetting_is_a_line_of_natural_parameters(name):
    family, _ = FAMILIES[name]
    p, prior, x = some(name, 2), some(name, 2, seed=1)[..., :1], {}
    x["GammaPoisson"] = np.linspace(0.3, 4, 5), lambda x, q: stats.gamma.logpdf(x, q[0], scale=1 / q[1])
    x["BetaBernoulli"] = np.linspace(0.1, 0.9, 5), lambda x, q: stats.beta.logpdf(x, *q)
    points = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25]])
    x["DirichletCategorical"] = points, lambda x, q: np.array([stats.dirichlet.logpdf(z, q) for z in x])
    x["NormalNormal"] = np.linspace(-3, 3, 5), lambda x, q: stats.norm.logpdf(x, q[0], np.sqrt(q[1]))
    pairs = np.array([[0.1, 0.5], [-1.0, 2.0], [2.0, 1.0]])
    x["NormalGamma"] = pairs, lambda x, q: np.log(normal_gamma(x, *q))
    at, log_density = x[name]
    for keep in (0.0, 0.3, 1.0):
        found = family.family.interpolate(p, prior, tensor(keep, keep)[:, None, None])
        for mode, sequence in itertools.product(range(2), range(2)):
            old, base = p[mode, :, sequence].numpy(), prior[mode, :, 0].numpy()
            target = keep * log_density(at, old) + (1 - keep) * log_density(at, base)
            off = target - log_density(at, found[mode, :, sequence].numpy())
            close(off, np.full(len(at), off[0]), 1e-11)
    close(family.family.interpolate(p, prior, tensor(0.0, 0.0)[:, None, None]), prior.expand_as(p))
    close(family.family.interpolate(p, prior, tensor(1.0, 1.0)[:, None, None]), p)


# models: every path on its own


def path_oracle(model: SwitchingConjugate, y: np.ndarray):
    """Mode probabilities, mean, covariance and log-likelihood at every step, path by path with one belief each."""
    family, modes = model.family, model.modes
    transition, first = model.transition.numpy(), model.initial_modes.numpy()
    memory = np.ones(modes) if model.memory is None else torch.as_tensor(model.memory).numpy()
    paths = [((s,), first[s], model.prior[s][:, None]) for s in range(modes)]
    answers, evidence = [], 1.0
    for t, value in enumerate(y):
        if t > 0 or model.start == "belief":
            grown = []
            for path, weight, p in paths:
                for s in range(modes):
                    keep = tensor(memory[s])[:, None, None]
                    moved = family.family.interpolate(p[None], model.prior[s][None, :, None], keep)[0]
                    grown.append(((*path, s), weight * transition[path[-1], s], moved))
            paths = grown
        if not np.isnan(value):
            seen = []
            for path, weight, p in paths:
                found = family.observe(p.expand(modes, -1, 1), tensor(value), t)
                own = path[-1] if len(found.log_likelihood) > 1 else 0
                seen.append((path, weight * float(found.log_likelihood[own].exp()), found.parameters[own]))
            paths = seen
        total = sum(weight for _, weight, _ in paths)
        w = np.array([weight for _, weight, _ in paths]) / total
        moments = [family.moments(p) for _, _, p in paths]
        means = np.stack([m.mean[:, 0].numpy() for m in moments])
        mean = w @ means
        spread = np.stack([m.covariance[..., 0].numpy() for m in moments])
        apart = means - mean
        covariance = np.tensordot(w, spread + apart[:, :, None] * apart[:, None], 1)
        chances = [sum(v for (path, _, _), v in zip(paths, w, strict=True) if path[-1] == s) for s in range(modes)]
        answers.append((chances, mean, covariance, np.log(total) - np.log(evidence)))
        evidence = total
    return [np.stack(column) for column in zip(*answers, strict=True)]


TWO = tensor([0.8, 0.2], [0.35, 0.65])
THREE = tensor([0.7, 0.3, 0.0], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5])
MODELS = {
    "exposures": (
        lambda start: SwitchingConjugate(GammaPoisson(tensor(0.5, 2.0, 6.0)), THREE, tensor(2.0, 1.0), start=start),
        [1, 4, NAN, 9, 3],
    ),
    "exposures in time": (
        lambda start: SwitchingConjugate(
            GammaPoisson(torch.rand(4, 2, generator=generator(), dtype=torch.float64)),
            TWO,
            tensor([2.0, 1.0], [5.0, 0.5]),
            tensor(1.0, 0.0),
            start=start,
        ),
        [1, 0, 2, 3],
    ),
    "clutter": (
        lambda start: SwitchingConjugate(BetaBernoulli([None, 0.3]), TWO, tensor(2.0, 1.0), start=start),
        [1, 0, 1, 1, NAN, 0],
    ),
    "categories": (
        lambda start: SwitchingConjugate(
            DirichletCategorical([None, None, tensor(0.1, 0.9, 0.0)]),
            THREE,
            tensor(2.0, 1.0, 0.5),
            tensor(1.0, 0.4, 1.0),
            tensor(0.5, 0.0, 0.5),
            start=start,
        ),
        [0, 1, 1, NAN, 2],
    ),
    "outliers": (
        lambda start: SwitchingConjugate(
            NormalNormal(tensor(0.3, 50.0)), TWO, tensor(0.0, 4.0), 0.9, tensor(0.9, 0.1), start=start
        ),
        [0.1, -0.3, 14.0, NAN, 0.4],
    ),
    "unknown noise": (
        lambda start: SwitchingConjugate(
            NormalGamma(tensor(1.0, 9.0, 1.0)),
            THREE,
            tensor(0.0, 0.5, 2.5, 2.0),
            tensor(1.0, 1.0, 0.0),
            start=start,
        ),
        [0.3, 5.0, 0.1, 0.2],
    ),
}


@pytest.mark.parametrize("start", ["prior", "belief"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_filter_by_enumeration(name, start):
    build, values = MODELS[name]
    model, y = build(start), tensor(*values)[:, None]
    chances, mean, covariance, log_likelihood = path_oracle(model, y[:, 0].numpy())
    found = exact(model, y)
    close(found.mode_probabilities, chances, 1e-11)
    close(found.mean, mean, 1e-11)
    close(found.covariance, covariance, 1e-11)
    close(found.log_likelihood, log_likelihood, 1e-11)
    close(found.log_likelihood[y[:, 0].isnan()], 0, 1e-12)
    whole = gpb(model, y, order=len(y) + 2)
    close(whole.mode_probabilities, chances, 1e-11)
    close(whole.mean, mean, 1e-11)
    near = gpb(model, y)
    assert (near.mode_probabilities - found.mode_probabilities).abs().max() < 0.1
    assert near.beliefs.parameters.shape == (len(y), model.modes, model.prior.shape[-1])


@pytest.mark.parametrize("name", MODELS)
def test_invariants_of_the_engine_hold(name):
    build, values = MODELS[name]
    y = tensor(*values)[:, None]
    model = build("belief")
    parts = {f: getattr(model, f) for f in ("family", "prior", "memory", "initial_modes", "start")}
    modes = model.modes
    fields = ("mode_probabilities", "mean", "covariance", "log_likelihood")

    def same(a, b, tolerance=1e-10):
        for field in fields:
            close(getattr(a, field), getattr(b, field), tolerance)

    still = SwitchingConjugate(transition=torch.eye(modes).double(), **parts)
    same(imm(still, y), exact(still, y))
    same(gpb(still, y), exact(still, y))
    if model.memory is None:  # with a common prior and nothing forgotten, nothing but the observation tells modes apart
        rows = SwitchingConjugate(transition=THREE[1:2, :modes].softmax(-1).expand(modes, modes), **parts)
        same(imm(rows, y), gpb(rows, y, order=1))
        blind = torch.full_like(y, NAN)
        same(imm(model, blind), gpb(model, blind))
    batch = torch.stack([y, y.flip(0)])
    both = gpb(model, batch)
    same(gpb(model, y), type(both)(*(f[0] for f in both[:-1]), None), 1e-12)
    state = init(model)
    records = imm(model, y)
    for t in range(len(y)):
        state, record = step(state, y[t])
        close(record.mean, records.mean[t], 1e-12)
        close(record.beliefs.parameters, records.beliefs.parameters[t], 1e-12)


def test_sequences_of_different_lengths():
    build, values = MODELS["outliers"]
    model, y = build("belief"), tensor(*values)[:, None]
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    found, short = gpb(model, torch.stack([y, y]), mask=mask), gpb(model, y[:3])
    close(found.mean[1, :3], short.mean)
    close(found.mean[1, 3:], short.mean[-1:].expand(2, 1))
    close(found.log_likelihood[1, 3:], 0)
    close(found.log_likelihood[0], gpb(model, y).log_likelihood)


def test_clutter_has_exactly_the_chance_that_was_given():
    model = SwitchingConjugate(BetaBernoulli([0.9, None]), torch.eye(2).double(), GAMMA, initial_modes=tensor(1.0, 0.0))
    close(imm(model, tensor([1.0], [0.0])).log_likelihood, np.log([0.9, 0.1]), 1e-15)


def test_gamma_poisson_reference_run():
    case = json.loads((REFERENCE_RUNS / "expfam_reference.json").read_text())["cases"]["gamma_poisson"]
    exposure, transition, prior, modes = (tensor(*case[k]) for k in ("mode_values", "transition", "prior", "mu0"))
    model = SwitchingConjugate(GammaPoisson(exposure), transition, prior, initial_modes=modes, start="belief")
    y = tensor(*case["observations"])[:, None]
    runs = {"exact": exact(model, y), "gpb1": gpb(model, y, order=1), "imm": imm(model, y), "gpb2": gpb(model, y)}
    for name, found in runs.items():
        truth = case[name]
        close(found.mode_probabilities, [step["mode_probs"] for step in truth], 1e-11)
        close(found.mean[:, 0], [step["mean"] for step in truth], 1e-11)
        close(found.log_likelihood, [step["loglik"] for step in truth], 1e-11)
        statistics = model.family.family.mean(found.beliefs.parameters[..., None])[..., 0]
        mixed = (found.mode_probabilities[..., None] * statistics).sum(1).flip(-1)  # there log x comes first
        close(mixed, [step["expected_stats"] for step in truth], 1e-11)
        if "mode_params" in truth[0]:
            close(found.beliefs.parameters, [step["mode_params"] for step in truth], 1e-11)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_log_likelihood(name):
    build, values = MODELS[name]
    model, y = build("belief"), tensor(*values)[:3, None]
    memory = 0.6 * torch.ones(model.modes).double()

    def total(prior: Tensor, logits: Tensor, memory: Tensor, filter_) -> Tensor:
        transition = torch.softmax(logits, -1)
        moved = SwitchingConjugate(model.family, transition, prior, memory, model.initial_modes, model.start)
        return filter_(moved, y).log_likelihood.sum()

    logits = model.transition.clamp_min(0.05).log().requires_grad_()
    prior, memory = model.prior.clone().requires_grad_(), memory.requires_grad_()
    for filter_ in (gpb, imm):
        assert gradcheck(lambda *x, f=filter_: total(*x, f), (prior, logits, memory), eps=1e-6, rtol=1e-5, atol=1e-7)


def test_gradient_in_what_the_modes_know():
    def total(exposure: Tensor) -> Tensor:
        return gpb(
            SwitchingConjugate(GammaPoisson(exposure), TWO, tensor(2.0, 1.0)), tensor([1.0], [6.0], [0.0])
        ).mean.sum()

    assert gradcheck(total, tensor(0.5, 3.0).requires_grad_(), rtol=1e-5)


# robustness


def test_exposure_zero_and_impossible_clutter_have_the_answer_of_the_other_mode():
    model = SwitchingConjugate(GammaPoisson(tensor(0.0, 1.0)), TWO, tensor(2.0, 1.0))
    found = imm(model, tensor([0.0], [3.0], [0.0]))
    assert all(part.isfinite().all() for part in found[:-1])
    close(found.mode_probabilities[1], [0.0, 1.0])
    chances, mean, *_ = path_oracle(model, np.array([0.0, 3.0, 0.0]))
    close(exact(model, tensor([0.0], [3.0], [0.0])).mean, mean, 1e-12)
    close(exact(model, tensor([0.0], [3.0], [0.0])).mode_probabilities, chances, 1e-12)
    coin = SwitchingConjugate(BetaBernoulli([None, 1.0]), TWO, tensor(1.0, 1.0))
    close(gpb(coin, tensor([0.0])).mode_probabilities, [[1.0, 0.0]])


@pytest.mark.long
def test_long_runs_with_much_evidence():
    model = SwitchingConjugate(GammaPoisson(tensor(1.0, 10.0)), TWO, tensor(2.0, 1.0))
    y = model.simulate(300, batch_shape=(20,), generator=generator()).observations
    found = gpb(model, y)
    assert all(part.isfinite().all() for part in found[:-1])
    huge = gpb(model, tensor([1e6], [1e6], [0.0]))
    assert all(part.isfinite().all() for part in huge[:-1])
    single = SwitchingConjugate(GammaPoisson(torch.tensor([1.0, 10.0])), TWO.float(), torch.tensor([2.0, 1.0]))
    rough = gpb(single, y.float())
    assert rough.mean.dtype == torch.float32
    assert ((rough.mean.double() - found.mean) / found.mean).abs().max() < 1e-3
    assert (rough.mode_probabilities.double() - found.mode_probabilities).abs().max() < 1e-2


def test_normal_beliefs_far_from_zero_in_single_precision():
    for family, prior in ((NormalNormal, [1e4, 1.0]), (NormalGamma, [1e4, 1.0, 3.0, 3.0])):
        models = [
            SwitchingConjugate(family(torch.tensor([0.1, 5.0], dtype=d)), TWO.to(d), torch.tensor(prior, dtype=d), 0.95)
            for d in (torch.float32, torch.float64)
        ]
        y = 1e4 + torch.randn(50, 1, generator=generator(), dtype=torch.float64).round(decimals=2)
        rough, fine = (gpb(m, y.to(m.transition.dtype)) for m in models)
        assert (rough.mean.double() - fine.mean)[:, 0].abs().max() < 1e-2
        assert rough.covariance.diagonal(dim1=-2, dim2=-1).min() > 0


def test_a_precision_without_variance_of_the_mean():
    model = SwitchingConjugate(NormalGamma(), TWO, tensor(0.0, 1.0, 0.3, 1.0), tensor(1.0, 0.0))
    found = gpb(model, tensor([0.1], [0.2], [0.3]))
    assert found.covariance[0, 0, 0] == torch.inf
    assert not found.covariance.isnan().any()
    assert found.mean.isfinite().all()


# simulation


def test_simulation_follows_the_model():
    model = SwitchingConjugate(GammaPoisson(tensor(1.0, 4.0)), TWO, tensor(3.0, 2.0), tensor(1.0, 0.0), start="belief")
    drawn = model.simulate(6, batch_shape=(4000, 2), generator=generator())
    assert drawn.modes.shape == (4000, 2, 6)
    assert drawn.states.shape == drawn.observations.shape == (4000, 2, 6, 1)
    x, s = drawn.states[..., 0], drawn.modes
    kept = s[..., 1:] == 0
    assert torch.equal(kept, x[..., 1:] == x[..., :-1])
    assert abs(x.mean() - 1.5) < 0.03
    moved = (TWO.mT @ tensor(0.5, 0.5))[1]
    assert abs((s[..., 0] == 1).double().mean() - moved) < 0.03
    for mode, exposure in ((0, 1.0), (1, 4.0)):
        here = s == mode
        ratio = drawn.observations[..., 0][here].mean() / x[here].mean()
        assert abs(ratio / exposure - 1) < 0.03
    assert model.simulate(0, generator=generator()).states.shape == (0, 1)
    assert model.simulate(3, batch_shape=(0,), generator=generator()).observations.shape == (0, 3, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_have_the_moments_of_the_family(name):
    family, _ = FAMILIES[name]
    p = some(name, batch=1)[:, 0] + (3.0 if name == "NormalGamma" else 0.0)
    x = family.draw(p.expand(40_000, -1), generator(2))
    mean, covariance = family.moments(p[:, None])
    error = x.std(0) / 200
    assert ((x.mean(0) - mean[:, 0]).abs() < 4.5 * error).all()
    close(torch.cov(x.mT).reshape(covariance[..., 0].shape), covariance[..., 0], 0.2)
    zeros = torch.zeros(40_000, dtype=torch.int64)
    y = family.emit(x, zeros, 0, generator(3))
    if name == "DirichletCategorical":
        close(torch.bincount(y.long(), minlength=4).double() / 40_000, mean[:, 0], 0.02)
    else:
        assert abs(y.mean() - mean[0, 0]) < 4.5 * y.std() / 200


def test_clutter_is_drawn_without_regard_to_the_state():
    family = BetaBernoulli([None, 0.9])
    x = torch.full((20_000, 1), 0.2, dtype=torch.float64)
    mode = torch.arange(20_000) % 2
    y = family.emit(x, mode, 0, generator())
    assert abs(y[mode == 0].mean() - 0.2) < 0.02
    assert abs(y[mode == 1].mean() - 0.9) < 0.02


def test_filtering_what_was_simulated_beats_knowing_no_modes():
    model = SwitchingConjugate(NormalNormal(tensor(0.2, 40.0)), TWO, tensor(0.0, 9.0), start="prior")
    drawn = model.simulate(30, batch_shape=(400,), generator=generator())
    known = gpb(model, drawn.observations).mean
    plain = SwitchingConjugate(NormalNormal(15.0), torch.ones(1, 1).double(), tensor(0.0, 9.0))
    blind = imm(plain, drawn.observations).mean
    ours, theirs = ((m - drawn.states).square().mean() for m in (known, blind))
    assert ours < 0.5 * theirs
    look = (drawn.states - known)[:, -1, 0].square() / gpb(model, drawn.observations).covariance[:, -1, 0, 0]
    assert abs(look.mean() - 1) < 0.3  # calibrated


def test_quadrature_of_a_whole_run():
    """One mode, all of it against one integral over x."""
    model = SwitchingConjugate(GammaPoisson(2.0), torch.ones(1, 1).double(), tensor(2.0, 1.5))
    y = [1, 0, 4]
    total = integrate.quad(lambda x: stats.gamma.pdf(x, 2, scale=1 / 1.5) * stats.poisson.pmf(y, 2 * x).prod(), 0, 40)[
        0
    ]
    close(imm(model, tensor(*y)[:, None]).log_likelihood.sum(), np.log(total), 1e-9)


GAMMA = tensor(2.0, 1.0)
BAD = {
    "family": (
        lambda: SwitchingConjugate("Gamma", TWO, GAMMA),
        "SwitchingConjugate.family: expected a conjugate family",
    ),
    "rows": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO.mT, GAMMA),
        "SwitchingConjugate.transition: expected rows of probabilities with sum 1, got row 0 with sum 1.15",
    ),
    "square": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO[:1], GAMMA),
        "SwitchingConjugate.transition: expected shape (M, M), got (1, 2)",
    ),
    "start": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, start="now"),
        'SwitchingConjugate.start: expected "prior" or "belief"',
    ),
    "modes": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, initial_modes=tensor(0.2, 0.3, 0.5)),
        "SwitchingConjugate.initial_modes: expected shape (M=2), got (3)",
    ),
    "sum": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, initial_modes=tensor(0.2, 0.3)),
        "SwitchingConjugate.initial_modes: expected probabilities with sum 1, got the sum 0.5",
    ),
    "prior": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, tensor(1.0, 2.0, 3.0)),
        "SwitchingConjugate.prior: expected shape (k=2) or (M=2, k=2): concentration, rate, got (3)",
    ),
    "no law": (
        lambda: SwitchingConjugate(NormalGamma(), TWO, tensor(0.0, 1.0, -1.0, 1.0)),
        "SwitchingConjugate.prior: expected parameters of a law for NormalGamma, got [0.0, 1.0, -1.0, 1.0]",
    ),
    "one category": (
        lambda: SwitchingConjugate(DirichletCategorical(), TWO, tensor(1.0)),
        "SwitchingConjugate.prior: expected shape (k=2) or (M=2, k=2): K ≥ 2 concentrations",
    ),
    "dtype": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA.float()),
        "SwitchingConjugate.prior: expected dtype torch.float64",
    ),
    "memory": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, 1.5),
        "SwitchingConjugate.memory: expected values in [0, 1]",
    ),
    "memories": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, tensor(1.0, 1.0, 0.0)),
        "SwitchingConjugate.memory: expected a number or shape (M=2), got (3)",
    ),
    "exposure": (
        lambda: SwitchingConjugate(GammaPoisson(tensor(1.0, 2.0, 3.0)), TWO, GAMMA),
        "GammaPoisson.exposure: expected a number, shape (M=2) or (T, M=2), got (3)",
    ),
    "negative": (
        lambda: SwitchingConjugate(GammaPoisson(-1.0), TWO, GAMMA),
        "GammaPoisson.exposure: expected values ≥ 0",
    ),
    "variance": (
        lambda: SwitchingConjugate(NormalNormal(0.0), TWO, GAMMA),
        "NormalNormal.variance: expected values > 0",
    ),
    "text": (
        lambda: SwitchingConjugate(NormalNormal("1"), TWO, GAMMA),
        "NormalNormal.variance: expected a number or a tensor, got str",
    ),
    "clutter": (
        lambda: SwitchingConjugate(DirichletCategorical([None]), TWO, GAMMA),
        "DirichletCategorical.clutter: expected M=2 entries, None or probabilities, got 1 entries",
    ),
    "chances": (
        lambda: SwitchingConjugate(DirichletCategorical([None, tensor(0.2, 0.2)]), TWO, GAMMA),
        "DirichletCategorical.clutter: expected K=2 probabilities ≥ 0 with sum 1, got (2) with sum 0.4 for mode 1",
    ),
    "categories": (
        lambda: SwitchingConjugate(DirichletCategorical([None, tensor(0.5, 0.5)]), TWO, tensor(1.0, 1.0, 1.0)),
        "DirichletCategorical.clutter: expected K=3 probabilities ≥ 0 with sum 1, got (2)",
    ),
    "coins": (
        lambda: SwitchingConjugate(BetaBernoulli([None, tensor(0.5, 0.5)]), TWO, GAMMA),
        "BetaBernoulli.clutter: expected M=2 entries, None or the probability of a 1",
    ),
    "count": (
        lambda: imm(SwitchingConjugate(GammaPoisson(), TWO, GAMMA), tensor([1.0], [1.5])),
        "expected counts 0, 1, 2, … for GammaPoisson, got 1.5 at step 1",
    ),
    "coin": (
        lambda: imm(SwitchingConjugate(BetaBernoulli(), TWO, GAMMA), tensor([2.0])),
        "expected 0 or 1 for BetaBernoulli, got 2 at step 0",
    ),
    "category": (
        lambda: imm(SwitchingConjugate(DirichletCategorical(), TWO, GAMMA), tensor([[2.0]], [[NAN]])),
        "expected categories 0, …, K−1 for DirichletCategorical, got 2 at step 0",
    ),
    "infinite": (
        lambda: particle_filter(
            SwitchingConjugate(NormalGamma(), TWO, tensor(0.0, 1.0, 1.0, 1.0)),
            tensor([torch.inf]),
            generator=generator(),
        ),
        "expected finite numbers for NormalGamma, got inf at step 0",
    ),
    "steps": (
        lambda: imm(SwitchingConjugate(GammaPoisson(torch.ones(1, 2).double()), TWO, GAMMA), tensor([1.0], [1.0])),
        "SwitchingConjugate.family: expected at most T=1 steps, got 2",
    ),
    "simulate": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA, 0.5).simulate(3),
        "SwitchingConjugate.simulate: expected a memory of 0 or 1 in every mode",
    ),
    "length": (
        lambda: SwitchingConjugate(GammaPoisson(), TWO, GAMMA).simulate(-1),
        "SwitchingConjugate.simulate: expected a number of steps ≥ 0, got -1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")
