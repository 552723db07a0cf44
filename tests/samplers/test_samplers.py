"""Samplers against laws known in closed form: resampling, diagnostics, conjugate Gibbs, tempering, particles."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax
from torch import Tensor
from torch import distributions as td

import cumulant.samplers.resampling as resampling_module
from cumulant import Empirical, Gaussian, Sphere, Status, from_distribution
from cumulant.filters import GammaPoisson, NormalGamma, SwitchingConjugate, SwitchingLinearGaussian, exact, gpb, kalman
from cumulant.samplers import (
    ConjugatePrior,
    autocovariance,
    crank_nicolson,
    diagnose,
    effective_sample_size,
    effective_size,
    gibbs,
    mean_iteration,
    multinomial,
    normal_scores,
    particle_filter,
    particles,
    redraw,
    rhat,
    smc,
    split_rhat,
    stratified,
    systematic,
    temper,
)
from cumulant.samplers.gibbs import GibbsState
from tests.compare import close

SCHEMES = {"systematic": systematic, "stratified": stratified, "multinomial": multinomial}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def within_errors(sample, expected, deviations: float = 4.5):
    """The mean over the first axis, within standard errors of that mean."""
    sample = np.asarray(sample)
    error = sample.std(0, ddof=1) / np.sqrt(len(sample))
    assert (np.abs(sample.mean(0) - np.asarray(expected)) <= deviations * error + 1e-12).all()


# resampling

P = np.array([0.3, 0.02, 0.0, 0.41, 0.27])
N = 7


def count_variance(name: str) -> np.ndarray:
    if name == "multinomial":
        return N * P * (1 - P)
    if name == "systematic":
        part = N * P - np.floor(N * P)
        return part * (1 - part)
    ends = np.r_[0, np.cumsum(P)] * N
    strata = np.arange(N)
    inside = np.minimum(ends[1:, None], strata + 1) - np.maximum(ends[:-1, None], strata)
    share = inside.clip(0)
    return (share * (1 - share)).sum(1)


@pytest.mark.parametrize("name", SCHEMES)
def test_counts_have_the_mean_and_the_variance_of_the_scheme(name):
    w = torch.tensor(np.log(P, where=P > 0, out=np.full(5, -np.inf))) + 3.0  # the mass is free
    chosen = SCHEMES[name](w.expand(40_000, 5), N, generator=generator(1))
    assert chosen.shape == (40_000, N)
    assert (chosen.diff(dim=-1) >= 0).all()
    counts = torch.nn.functional.one_hot(chosen, 5).sum(1).numpy()
    within_errors(counts, N * P)
    within_errors((counts - N * P) ** 2, count_variance(name))
    assert (counts[:, 2] == 0).all()
    if name == "systematic":
        assert ((counts == np.floor(N * P)) | (counts == np.ceil(N * P))).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_resampling_edges(name, monkeypatch):
    scheme, g = SCHEMES[name], generator()
    assert torch.equal(scheme(tensor(-3.0), generator=g), torch.tensor([0]))
    assert torch.equal(scheme(tensor(-1e6, -1e6 - 800), 3, generator=g), torch.zeros(3, dtype=torch.int64))
    alone = scheme(torch.zeros(2, 3, 4).log_softmax(-1), generator=generator(5))
    assert alone.shape == (2, 3, 4)
    assert torch.equal(scheme(torch.zeros(9), generator=generator(3)), scheme(torch.zeros(9), generator=generator(3)))
    monkeypatch.setattr(
        resampling_module, "_uniform", lambda like, count, g: torch.ones(*like.shape[:-1], count).double()
    )
    assert (scheme(tensor(0.0, 0.0, -torch.inf), 4, generator=g)[..., -1:] == 1).all()  # a point on the end


def test_effective_size():
    p = softmax(draw(3, 6).numpy(), -1)
    close(effective_size(torch.tensor(np.log(p)) - 700), 1 / (p**2).sum(-1))
    close(effective_size(tensor(-torch.inf, -torch.inf)), 0)
    assert effective_size(torch.zeros(5)) == 5


# diagnostics


def autoregressive(rho: float, chains: int, n: int, *events: int, seed: int = 0) -> Tensor:
    noise = draw(n, chains, *events, seed=seed)
    x = [noise[0]]
    for e in noise[1:]:
        x.append(rho * x[-1] + np.sqrt(1 - rho**2) * e)
    return torch.stack(x, 1)


def halves(x: np.ndarray) -> np.ndarray:
    h = x.shape[1] // 2
    return np.concatenate([x[:, :h], x[:, x.shape[1] - h :]])


def slow_ess(x: np.ndarray) -> float:
    """Chain by chain, lag by lag, from the definition."""
    x = halves(x)
    m, n = x.shape
    c = [np.mean([((y - y.mean())[: n - t] * (y - y.mean())[t:]).sum() / n for y in x]) for t in range(n)]
    within = x.var(1, ddof=1).mean()
    plus = within * (n - 1) / n + x.mean(1).var(ddof=1)
    rho = [1.0] + [1 - (within - c[t]) / plus for t in range(1, n)]
    total, smallest = 0.0, np.inf
    for t in range(0, n - n % 2, 2):
        pair = rho[t] + rho[t + 1]
        if pair <= 0:
            break
        smallest = min(smallest, pair)
        total += smallest
    return m * n / max(2 * total - 1, 1 / np.log10(m * n))


def slow_rhat(x: np.ndarray, ranked: bool) -> float:
    x = halves(x)
    if ranked:
        x = stats.norm.ppf((stats.rankdata(x).reshape(x.shape) - 3 / 8) / (x.size + 1 / 4))
    n = x.shape[1]
    within, apart = x.var(1, ddof=1).mean(), x.mean(1).var(ddof=1)
    return float(np.sqrt((within * (n - 1) / n + apart) / within))


@pytest.mark.parametrize(("chains", "n", "rho"), [(1, 4, 0.0), (1, 63, 0.5), (4, 100, 0.9), (3, 41, -0.8)])
def test_effective_sample_size_and_rhat_against_loops(chains, n, rho):
    x = autoregressive(rho, chains, n, 2, 1)
    ess, plain, ranked, both = effective_sample_size(x), split_rhat(x), normal_scores(x), rhat(x)
    assert ess.shape == plain.shape == both.shape == (2, 1)
    for k in range(2):
        one = x[:, :, k, 0].numpy()
        close(ess[k, 0], slow_ess(one), 1e-10)
        close(plain[k, 0], slow_rhat(one, False))
        scores = stats.norm.ppf((stats.rankdata(one).reshape(one.shape) - 3 / 8) / (one.size + 1 / 4))
        close(ranked[:, :, k, 0], scores)
        folded = np.abs(one - np.median(halves(one)))
        close(both[k, 0], max(slow_rhat(one, True), slow_rhat(folded, True)))
        lags = [((y - y.mean())[:, None] * (y - y.mean())).trace(o) / n for y in one for o in range(n)]
        close(autocovariance(x)[:, :, k, 0].flatten(), lags, 1e-11)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.6, 0.9])
def test_effective_sample_size_of_an_autoregression(rho):
    found = effective_sample_size(autoregressive(rho, 4, 5000, 20))
    expected = 20_000 * (1 - rho) / (1 + rho)
    assert abs(found.mean() / expected - 1) < 0.06


def test_diagnosis_sees_what_is_wrong():
    x = draw(4, 400)
    good = diagnose(x)
    assert good.rhat < 1.01
    close(good.mean, x.mean())
    close(good.error, x.std() / good.ess.sqrt())
    shifted = diagnose(x + tensor(0.0, 0.0, 0.0, 1.0)[:, None])
    assert shifted.rhat > 1.1
    assert shifted.ess < 0.1 * good.ess
    drifting = x + torch.linspace(-1, 1, 400)
    assert diagnose(drifting).rhat > 1.1
    heavy = torch.tensor(np.random.default_rng(0).standard_cauchy((4, 400)))
    assert diagnose(heavy).rhat < 1.02
    close(rhat(heavy), rhat(heavy * 3 - 7))
    close(normal_scores(x.exp()), normal_scores(x))


def test_diagnostics_of_draws_that_stand_still():
    same = torch.full((2, 5, 3), 0.1)
    assert (split_rhat(same) == 1).all()
    assert (rhat(same) == 1).all()
    assert (effective_sample_size(same) == 8).all()
    assert diagnose(same).error.abs().max() < 1e-15
    apart = torch.tensor([[0.1], [0.3]]).expand(2, 6)
    assert split_rhat(apart) == torch.inf
    assert rhat(apart) == torch.inf
    close(effective_sample_size(apart), 4)  # no more than half chains


# Gibbs

SIMPLEX = Empirical(tensor([0.0, 0.0], [1.0, 0.5], [-0.5, 2.0]), tensor(0.2, -0.3, 0.5))
SKEW = Gaussian(tensor(0.5, -1.0), tensor([2.0, 0.6], [0.6, 1.0]))
PRIORS = {
    "Bernoulli": ConjugatePrior(from_distribution(td.Bernoulli(torch.tensor(0.3).double())), tensor(2.0), 5.0),
    "categorical": ConjugatePrior(from_distribution(td.Categorical(tensor(0.2, 0.5, 0.3))), tensor(1.0, 2.5, 0.5), 4.0),
    "simplex": ConjugatePrior(SIMPLEX, tensor(0.7, 2.6), 3.5),
    "Poisson": ConjugatePrior(from_distribution(td.Poisson(torch.tensor(0.7).double())), tensor(3.0), 1.5),
    "Gamma": ConjugatePrior(
        from_distribution(td.Gamma(tensor(2.5).squeeze(), tensor(1.5).squeeze())), tensor(6.0), 4.0
    ),
    "exponential": ConjugatePrior(from_distribution(td.Exponential(torch.tensor(2.0).double())), tensor(2.0), 5.0),
    "negative binomial": ConjugatePrior(
        from_distribution(td.NegativeBinomial(3.0, probs=torch.tensor(0.4).double())), tensor(5.0), 3.0
    ),
    "Gaussian": ConjugatePrior(SKEW, tensor(1.0, -4.0), 2.0),
}


@pytest.mark.parametrize("name", PRIORS)
def test_means_follow_the_mean_iteration_from_any_start(name):
    """E[∇G(η_k) | x_0] is the k-th iterate of m ← (χ + m)/(ν + 1), exactly, and tends to χ/ν (X-18)."""
    prior, g = PRIORS[name], generator(3)
    h, d = prior.measure, prior.measure.dim
    state = gibbs.init(prior, 20_000, generator=g)
    within_errors(h.mean(state.eta), prior.mean)
    x0 = h.sample(torch.zeros(d).double(), 1, generator=g)[0]
    path = mean_iteration(prior, x0, 4)
    state = GibbsState(x0.expand(20_000, d), state.eta)
    for k in range(1, 4):
        state, info = gibbs.step(state, prior, generator=g)
        within_errors(info.mean, path[k])
        within_errors(state.x, path[k])
    close(path[4] - prior.mean, (x0 - prior.mean) / (prior.nu + 1) ** 4, 1e-13)


@pytest.mark.long
def test_stationary_mean_of_long_chains():
    prior = PRIORS["Bernoulli"]
    found = gibbs.run(prior, 500, chains=40, burn_in=20, generator=generator())
    assert found.x.shape == found.eta.shape == found.mean.shape == (40, 500, 1)
    look = diagnose(found.mean)
    assert look.rhat < 1.02
    assert (look.mean - prior.mean).abs() < 4.5 * look.error
    plain = diagnose(found.x)
    assert look.error < 0.8 * plain.error  # the mean without the noise of the draw
    lag = autocovariance(found.mean).mean(0)[:, 0]
    assert abs(lag[1] / lag[0] - 1 / 6) < 0.03  # a linear conditional expectation with slope 1/(ν + 1)


LAWS = {
    "Bernoulli": (lambda h, eta: h.mean(eta), stats.beta(2.0, 3.0)),
    "Poisson": (lambda h, eta: h.mean(eta), stats.gamma(3.0, scale=1 / 1.5)),
    "Gamma": (lambda h, eta: 1.5 - eta, stats.gamma(2.5 * 4 + 1, scale=1 / 6)),
    "negative binomial": (lambda h, eta: 0.4 * eta.exp(), stats.beta(5.0, 3 * 3 + 1)),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_eta(name):
    quantity, law = LAWS[name]
    eta = PRIORS[name].sample(20_000, generator=generator(1))
    assert stats.kstest(quantity(PRIORS[name].measure, eta).flatten().numpy(), law.cdf).pvalue > 1e-3


def test_the_law_of_eta_on_a_simplex_by_quadrature():
    prior = PRIORS["simplex"]
    axis = torch.linspace(-25, 25, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    log_density = grid @ prior.chi - prior.nu * SIMPLEX.log_normalizer(grid)
    p = torch.softmax(log_density, 0)
    close(p @ SIMPLEX.mean(grid), prior.mean, 1e-6)
    eta = prior.sample(40_000, generator=generator(2))
    for f in (torch.tanh, lambda e: e.clamp(-3, 3).square(), lambda e: (e[:, :1] > e[:, 1:]).double()):
        within_errors(f(eta), p @ f(grid))


def test_the_law_of_eta_of_a_gaussian():
    eta, nu = PRIORS["Gaussian"].sample(40_000, generator=generator()), 2.0
    precision = nu * SKEW.covariance
    centred = eta - torch.linalg.solve(precision, tensor(1.0, -4.0) - nu * SKEW.loc)
    within_errors(centred, [0, 0])
    within_errors(centred[:, :, None] * centred[:, None], torch.linalg.inv(precision))


def test_weak_evidence_gives_far_but_finite_parameters():
    coin = from_distribution(td.Bernoulli(torch.tensor(0.5).double()))
    eta = ConjugatePrior(coin, tensor(1e-4), 2e-4).sample(1000, generator=generator())
    assert eta.isfinite().all()
    assert eta.abs().median() > 1000
    counts = ConjugatePrior(from_distribution(td.Poisson(torch.tensor(1.0).double())), tensor(1e-4), 1.0)
    state, info = gibbs.step(gibbs.init(counts, 1000, generator=generator()), counts, generator=generator())
    assert info.mean.isfinite().all()
    assert (state.x >= 0).all()


def test_gibbs_batches_and_single_precision():
    h = from_distribution(td.Poisson(torch.tensor([0.5, 2.0])))
    prior = ConjugatePrior(h, torch.tensor([[3.0], [8.0]]), torch.tensor([1.0, 4.0]))
    found = gibbs.run(prior, 3, chains=5000, generator=generator())
    assert found.x.shape == (2, 5000, 3, 1)
    assert found.x.dtype == torch.float32
    within_errors(found.mean.movedim(1, 0)[..., -1, 0], [3.0, 2.0])
    again = prior.posterior(torch.tensor([[1.0], [2.0]]))
    close(again.mean[:, 0], [2.0, 2.0])
    wide = ConjugatePrior(SKEW, tensor([1.0, 0.0], [0.0, 1.0], [3.0, 3.0]), 1.0)  # one law, three priors
    assert gibbs.init(wide, 4, generator=generator()).x.shape == (3, 4, 2)
    close(mean_iteration(wide, tensor(0.0, 0.0), 0), torch.zeros(1, 3, 2).double())


# tempering


def two_peaks() -> Empirical:
    return Empirical(torch.cat([draw(40, 2) - 1, draw(20, 2, seed=1) + 2]), 0.3 * draw(60, seed=2))


@pytest.mark.parametrize("resample", SCHEMES.values(), ids=SCHEMES)
def test_fixed_temperatures_estimate_the_normalizer_without_bias(resample):
    h, end = two_peaks(), tensor(1.2, -0.7)
    start = tensor(0.1, 0.2).expand(3000, 2)
    found = temper(
        h, start, end, particles=20, temperatures=[0.2, 0.5, 1.0], moves=2, resample=resample, generator=generator(4)
    )
    exact_ratio = h.log_normalizer(end) - h.log_normalizer(start[0])
    within_errors((found.log_ratio - exact_ratio).exp(), 1.0)
    assert (found.status == Status.CONVERGED).all()
    close(found.temperatures[:, 0], [0, 0.2, 0.5, 1])


@pytest.mark.parametrize("kind", ["Empirical", "Gaussian"])
def test_adaptive_tempering_reaches_the_end(kind):
    h = two_peaks() if kind == "Empirical" else SKEW
    start, end = tensor(0.0, 0.0), tensor(2.0, -1.5)
    move = crank_nicolson(SKEW, start, 0.6) if kind == "Gaussian" else None
    rows = start.expand(60, 2)
    found = temper(h, rows, end, particles=400, target=0.6, proposal=move, moves=20, generator=generator())
    exact_ratio = h.log_normalizer(end) - h.log_normalizer(start)
    assert (found.log_ratio.mean() - exact_ratio).abs() < 0.05
    w = torch.softmax(found.log_weights, -1)[..., None]
    mean = (w * found.particles).sum(-2)
    assert (mean.mean(0) - h.mean(end)).abs().max() < 0.05
    apart = found.particles - mean[..., None, :]
    assert (((w * apart).mT @ apart).mean(0) - h.fisher(end)).abs().max() < 0.12
    steps = found.effective.shape[0]
    assert found.temperatures.shape == (steps + 1, 60)
    assert (found.temperatures.diff(dim=0) >= 0).all()
    between = found.temperatures[1:] < 1
    assert between.any()
    assert (found.effective[between] / 400 - 0.6).abs().max() < 1e-6  # what bisection was asked for
    assert ((found.acceptance > 0) & (found.acceptance <= 1)).all()


def test_moves_leave_the_tilted_law_alone():
    start, tilt = tensor(0.3, 0.1), tensor(0.8, -0.4)
    for h, proposal in (
        (two_peaks(), redraw(two_peaks(), start)),
        (SKEW, crank_nicolson(SKEW, start)),
        (Sphere(2), redraw(Sphere(2), start)),
    ):
        x = h.sample(start + tilt, 20_000, generator=generator(1))
        moved, rate = smc.metropolis_moves(x, tilt, proposal, 4, generator(2))
        within_errors(moved, h.mean(start + tilt))
        apart = moved - h.mean(start + tilt)
        within_errors(apart[:, :, None] * apart[:, None], h.fisher(start + tilt))
        assert 0 < rate < 1
        assert ((moved != x).any(-1)).double().mean() > 0.2


def test_queries_with_one_start_do_not_share_their_draws():
    start = tensor(0.0, 0.0)
    for proposal in (redraw(SKEW, start), crank_nicolson(SKEW, start)):
        first, second = proposal(torch.zeros(2, 500, 2).double(), generator())
        assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.2


def test_tempering_edges():
    h, zero = two_peaks(), tensor(0.0, 0.0)
    still = temper(h, zero, zero, particles=10, generator=generator())
    assert still.log_ratio == 0
    assert still.effective.shape == (1,)
    lone = temper(h, zero, tensor(1.0, 0.0), particles=1, moves=0, generator=generator())
    close(lone.log_ratio, lone.particles[0, 0])
    atom = Empirical(tensor([2.0, 1.0]))
    close(temper(atom, zero, tensor(3.0, 1.0), particles=5, generator=generator()).log_ratio, 7.0)
    short = temper(h, zero, tensor(30.0, 0.0), particles=50, max_steps=2, generator=generator())
    assert short.status == Status.MAX_STEPS
    assert 0 < short.temperatures[-1] < 1
    state = smc.init(h, zero, 6, generator=generator())
    done = smc.step(state, tensor(1.0, 0.0), redraw(h, zero), temperature=1.0, generator=generator())[0]
    after, info = smc.step(done, tensor(1.0, 0.0), redraw(h, zero), generator=generator(1))
    assert torch.equal(after.log_ratio, done.log_ratio)
    assert torch.equal(after.log_weights, done.log_weights)
    assert info.effective == effective_size(done.log_weights)


# particles


def tracker(start: str = "prior", modes: int = 3) -> SwitchingLinearGaussian:
    g = np.random.default_rng(5)
    transition = g.dirichlet(np.ones(modes), modes)
    transition[0, -1] = 0 if modes > 1 else 1
    transition /= transition.sum(1, keepdims=True)
    f = 0.9 * np.eye(2) + 0.2 * g.standard_normal((modes, 2, 2))
    q = np.stack([(0.1 + k) * np.eye(2) for k in range(modes)])
    return SwitchingLinearGaussian(
        *(torch.tensor(a) for a in (transition, f, q, g.standard_normal((modes, 1, 2)), 0.5 * np.eye(1))),
        initial_mean=tensor(0.0, 1.0),
        initial_covariance=torch.eye(2).double(),
        start=start,
    )


def counter(start: str = "belief") -> SwitchingConjugate:
    transition = tensor([0.8, 0.2], [0.3, 0.7])
    return SwitchingConjugate(
        GammaPoisson(tensor(0.5, 4.0)), transition, tensor(2.0, 1.0), tensor(1.0, 0.0), start=start
    )


PATHS = {
    "linear, prior": (tracker("prior"), tensor([0.5], [3.0], [torch.nan], [-2.0], [1.0])),
    "linear, belief": (tracker("belief"), tensor([0.5], [3.0], [torch.nan], [-2.0])),
    "counts, prior": (counter("prior"), tensor([1.0], [7.0], [torch.nan], [0.0], [4.0])),
    "counts, belief": (counter("belief"), tensor([1.0], [7.0], [torch.nan], [0.0])),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("scheme", [systematic, multinomial])
def test_particles_agree_with_enumeration(name, scheme):
    model, y = PATHS[name]
    truth = exact(model, y)
    copies = y.expand(1500, *y.shape)
    found = particle_filter(model, copies, particles=24, threshold=0.9, resample=scheme, generator=generator(7))
    total = found.log_likelihood.sum(-1) - truth.total_log_likelihood
    within_errors(total.exp(), 1.0)  # unbiased for every number of particles
    many = particle_filter(model, y, particles=40_000, generator=generator(8))
    assert (many.mean - truth.mean).abs().max() < 0.03
    assert (many.covariance - truth.covariance).abs().max() < 0.15
    assert (many.mode_probabilities - truth.mode_probabilities).abs().max() < 0.015
    close(many.mode_probabilities.sum(-1), torch.ones(len(y)).double())
    assert ((many.effective > 0) & (many.effective <= 40_000 * (1 + 1e-12))).all()


def test_what_particles_know_without_sampling():
    model, y = PATHS["linear, prior"]
    first = particle_filter(model, y[:1], particles=1, generator=generator())
    truth = exact(model, y[:1])
    for name in ("mean", "covariance", "mode_probabilities", "log_likelihood"):
        close(getattr(first, name), getattr(truth, name), 1e-12)
    single = tracker(modes=1)
    found, whole = particle_filter(single, y, particles=3, generator=generator()), kalman(single, y)
    for name in ("mean", "covariance", "log_likelihood"):
        close(getattr(found, name), getattr(whole, name), 1e-11)
    close(found.effective, 3 * torch.ones(5).double())


def test_particles_step_by_step_and_in_batches():
    model, y = PATHS["counts, belief"]
    batch = torch.stack([y, y.flip(0)]).expand(3, 2, 4, 1)
    whole = particle_filter(model, batch, particles=2000, generator=generator())
    assert whole.mean.shape == (3, 2, 4, 1)
    assert whole.covariance.shape == (3, 2, 4, 1, 1)
    assert whole.mode_probabilities.shape == (3, 2, 4, 2)
    g = generator()
    state = particles.init(model, 2000, batch_shape=(3, 2), generator=g)
    for t in range(4):
        state, record = particles.step(state, batch[..., t, :], generator=g)
        assert torch.equal(record.mean, whole.mean[:, :, t])
        assert torch.equal(record.log_likelihood, whole.log_likelihood[:, :, t])
    truth = exact(model, batch)
    assert (whole.mean - truth.mean).abs().max() < 0.3


def test_particles_survive_outliers_and_infinite_variances():
    model = tracker()
    found = particle_filter(model, tensor([0.0], [1e5], [0.0]), particles=50, generator=generator())
    assert all(part.isfinite().all() for part in found)
    wild = SwitchingConjugate(NormalGamma(), torch.eye(2).double(), tensor(0.0, 1.0, 0.3, 1.0))
    found = particle_filter(wild, tensor([1.0], [2.0]), particles=10, generator=generator())
    assert found.mean.isfinite().all()
    assert found.covariance[0, 0, 0] == torch.inf
    assert not found.covariance.isnan().any()


@pytest.mark.long
def test_second_order_filter_is_within_a_percent_of_particles_on_a_small_tracker():
    model = tracker(modes=2)
    truth = model.simulate(60, batch_shape=(100,), generator=generator())
    found = particle_filter(model, truth.observations, particles=500, generator=generator(1))
    errors = [(f.mean - truth.states).square().sum(-1).mean() for f in (found, gpb(model, truth.observations))]
    assert abs(errors[1] / errors[0] - 1) < 0.01


COIN = from_distribution(td.Bernoulli(torch.tensor(0.5).double()))
H, ZERO = two_peaks(), tensor(0.0, 0.0)
G = generator()
WALK, COUNTS = tracker(), counter()
BAD = {
    "weights": (lambda: systematic(torch.zeros(0), generator=G), "systematic.log_weights: expected shape (*batch, n"),
    "nan": (lambda: stratified(tensor(torch.nan), generator=G), "stratified.log_weights: expected values below +inf"),
    "empty": (
        lambda: multinomial(tensor([0.0], [-torch.inf]), generator=G),
        "multinomial.log_weights: expected at least one particle",
    ),
    "count": (lambda: systematic(ZERO, 0, generator=G), "systematic.count: expected a number of ancestors ≥ 1, got 0"),
    "generator": (lambda: systematic(ZERO, generator=None), "systematic.generator: expected a torch.Generator"),
    "draws": (
        lambda: rhat(torch.zeros(5)),
        "rhat.draws: expected shape (chains ≥ 1, n ≥ 4, *event) with something in it, got (5)",
    ),
    "few": (lambda: diagnose(torch.zeros(3, 3)), "diagnose.draws: expected shape (chains ≥ 1, n ≥ 4"),
    "nothing": (lambda: autocovariance(torch.zeros(2, 4, 0)), "autocovariance.draws: expected shape (chains ≥ 1"),
    "infinite": (lambda: split_rhat(torch.full((2, 4), torch.inf)), "split_rhat.draws: expected finite values"),
    "measure": (lambda: ConjugatePrior(Sphere(2), ZERO, 1.0), "ConjugatePrior.measure: expected Empirical, Gaussian"),
    "chi": (lambda: ConjugatePrior(COIN, ZERO, 1.0), "ConjugatePrior.chi: expected shape (*batch, d=1), got (2)"),
    "dtype": (lambda: ConjugatePrior(COIN, torch.ones(1), 2.0), "ConjugatePrior.chi: expected dtype torch.float64"),
    "nu": (lambda: ConjugatePrior(COIN, tensor(0.0), 0.0), "ConjugatePrior.nu: expected numbers > 0"),
    "coin": (lambda: ConjugatePrior(COIN, tensor(2.0), 2.0), "ConjugatePrior.chi: expected χ/ν inside the simplex"),
    "off": (
        lambda: ConjugatePrior(PRIORS["categorical"].measure, tensor(1.0, 1.0, 1.0), 4.0),
        "ConjugatePrior.chi: expected χ/ν inside the simplex",
    ),
    "positive": (
        lambda: ConjugatePrior(PRIORS["Poisson"].measure, tensor(0.0), 1.0),
        "ConjugatePrior.chi: expected values > 0 for PoissonLaw",
    ),
    "atoms": (lambda: ConjugatePrior(H, ZERO, 1.0), "ConjugatePrior.measure: expected atoms that are the corners"),
    "masked": (
        lambda: ConjugatePrior(Empirical(tensor([0.0], [1.0]), tensor(0.0, -torch.inf)), tensor(1.0), 2.0),
        "ConjugatePrior.measure: expected one finite weight per atom",
    ),
    "singular": (
        lambda: ConjugatePrior(Gaussian(ZERO, torch.zeros(2, 2).double()), ZERO, 1.0),
        "ConjugatePrior.measure: expected a regular covariance",
    ),
    "draw": (lambda: PRIORS["Poisson"].sample(0, generator=G), "ConjugatePrior.sample: expected at least one draw"),
    "posterior": (
        lambda: PRIORS["Gaussian"].posterior(tensor(1.0, 2.0, 3.0)),
        "ConjugatePrior.posterior: expected batch axes that broadcast",
    ),
    "prior": (lambda: gibbs.init(COIN, generator=G), "init.prior: expected a ConjugatePrior"),
    "state": (
        lambda: gibbs.step(GibbsState(ZERO, ZERO), PRIORS["Poisson"], generator=G),
        "step.state: expected x of shape (chains, 1), got (2)",
    ),
    "steps": (lambda: gibbs.run(PRIORS["Poisson"], 0, generator=G), "run.steps: expected a number of sweeps ≥ 1"),
    "burn": (lambda: gibbs.run(PRIORS["Poisson"], 1, burn_in=-1, generator=G), "run.burn_in: expected a number"),
    "iteration": (
        lambda: mean_iteration(PRIORS["Poisson"], tensor(1.0), -1),
        "mean_iteration.steps: expected a number",
    ),
    "particles": (lambda: smc.init(H, ZERO, 0, generator=G), "init.particles: expected a number of particles ≥ 1"),
    "target": (lambda: temper(H, ZERO, ZERO, target=1.0, generator=G), "step.target: expected a part of the particles"),
    "moves": (lambda: temper(H, ZERO, ZERO, moves=-1, generator=G), "step.moves: expected a number of moves ≥ 0"),
    "ladder": (
        lambda: temper(H, ZERO, ZERO, temperatures=[0.5, 0.9], generator=G),
        "temper.temperatures: expected numbers that rise",
    ),
    "max steps": (lambda: temper(H, ZERO, ZERO, max_steps=0, generator=G), "temper.max_steps: expected a number"),
    "domain": (
        lambda: temper(PRIORS["Gamma"].measure, tensor(0.0), tensor(2.0), generator=G),
        "temper.end: expected parameters with a finite G",
    ),
    "proposal": (lambda: crank_nicolson(H, ZERO), "crank_nicolson.measure: expected a Gaussian, got Empirical"),
    "stride": (lambda: crank_nicolson(SKEW, ZERO, 0.0), "crank_nicolson.step: expected a number in (0, 1]"),
    "model": (lambda: particles.init(H, 3, generator=G), "init.model: expected a switching model, got Empirical"),
    "swarm": (lambda: particles.init(WALK, 0, generator=G), "init.particles: expected a number of particles ≥ 1"),
    "y": (
        lambda: particle_filter(WALK, ZERO, generator=G),
        "particle_filter.y: expected shape (*batch, T, m=1), got (2)",
    ),
    "no steps": (lambda: particle_filter(WALK, torch.zeros(0, 1), generator=G), "particle_filter.y: expected at least"),
    "threshold": (
        lambda: particle_filter(WALK, tensor([0.0]), threshold=2, generator=G),
        "step.threshold: expected a part of the particles",
    ),
    "one y": (
        lambda: particles.step(particles.init(COUNTS, 3, generator=G), ZERO, generator=G),
        "step.y: expected shape (1,), got (2)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_every_sampler_wants_a_generator():
    calls = (
        lambda g: gibbs.init(PRIORS["Poisson"], generator=g),
        lambda g: gibbs.step(gibbs.init(PRIORS["Poisson"], generator=G), PRIORS["Poisson"], generator=g),
        lambda g: smc.init(H, ZERO, 3, generator=g),
        lambda g: particles.init(WALK, 3, generator=g),
        lambda g: particles.step(particles.init(WALK, 3, generator=G), tensor(0.0), generator=g),
    )
    for call, wrong in itertools.product(calls, (None, 0)):
        with pytest.raises(TypeError, match=r"expected a torch\.Generator"):
            call(wrong)
