"""Laws × families: what makes an exponential family one, and that measures, filters and samplers use the same ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torch import distributions as td

from cumulant import from_distribution
from cumulant.families import DirichletFamily, ExponentialFamily, GammaFamily, NormalFamily, NormalGammaFamily
from cumulant.filters import (
    BetaBernoulli,
    DirichletCategorical,
    GammaPoisson,
    NormalGamma,
    NormalNormal,
    SwitchingLinearGaussian,
    m_projection,
)
from cumulant.filters.packed import Normal, pack
from cumulant.samplers import ConjugatePrior
from tests.compare import close


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Case:
    """A family, a few of its members (n, k), and the measure of the first one on its statistics."""

    family: ExponentialFamily
    members: Tensor
    measure: Callable | None = None


CASES = {
    "Gamma": Case(GammaFamily(), tensor([3.5, 1.2], [0.4, 7.0], [60.0, 2.0]), lambda a, b: td.Gamma(a, b)),
    "Normal": Case(NormalFamily(), tensor([1.3, 2.0], [-4.0, 0.3], [0.0, 9.0]), lambda m, v: td.Normal(m, v.sqrt())),
    "Beta": Case(DirichletFamily(), tensor([2.5, 4.0], [0.6, 0.3], [20.0, 1.0]), lambda a, b: td.Beta(a, b)),
    "Dirichlet": Case(
        DirichletFamily(),
        tensor([0.8, 2.0, 3.5, 1.0], [9.0, 1.0, 0.5, 2.0], [3.0, 3.0, 3.0, 3.0]),
        lambda *a: td.Dirichlet(torch.stack(a, -1)),
    ),
    "Normal–Gamma": Case(
        NormalGammaFamily(), tensor([0.4, 1.5, 6.0, 4.0], [-2.0, 0.5, 3.0, 1.0], [0.0, 8.0, 2.5, 9.0])
    ),
}
laws = pytest.mark.parametrize("name", CASES)


@laws
def test_the_mean_is_the_gradient_of_the_log_partition(name):
    family, members = CASES[name].family, CASES[name].members
    theta = family.natural(members).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(family.log_partition(family.from_natural(theta)).sum(), theta)
    close(gradient, family.mean(members), 1e-10)


@laws
def test_natural_and_mean_parameters_go_there_and_back(name):
    family, members = CASES[name].family, CASES[name].members
    close(family.from_natural(family.natural(members)), members)
    close(family.from_mean(family.mean(members)), members, 1e-11)
    assert family.inside(members).all()
    assert not family.inside(-members).any()
    eta = tensor([0.1] * members.shape[-1])
    close(family.natural(family.shift(members, eta)), family.natural(members) + eta)


@laws
def test_densities_are_those_of_the_table(name):
    """⟨θ, u(x)⟩ − A(θ) is log p(x) up to the reference measure, which two members have in common."""
    family, members = CASES[name].family, CASES[name].members
    log_density = {
        "Gamma": lambda x, p: stats.gamma.logpdf(x[0], p[0], scale=1 / p[1]),
        "Normal": lambda x, p: stats.norm.logpdf(x[0], p[0], math.sqrt(p[1])),
        "Beta": lambda x, p: stats.beta.logpdf(x[0], *p),
        "Dirichlet": lambda x, p: stats.dirichlet.logpdf(x / x.sum(), p),
        "Normal–Gamma": lambda x, p: (
            stats.norm.logpdf(x[0], p[0], 1 / math.sqrt(p[1] * x[1])) + stats.gamma.logpdf(x[1], p[2], scale=1 / p[3])
        ),
    }[name]
    x = family.sample(members, generator())
    theta, u, a = family.natural(members), family.statistics(x), family.log_partition(members)
    ours = theta @ u.mT - a[:, None]  # member × point
    theirs = np.array([[log_density(point.numpy(), p.numpy()) for point in x] for p in members])
    close(ours - ours[:1], theirs - theirs[:1], 1e-9)


@laws
def test_the_projection_of_a_mixture_has_its_expected_statistics(name):
    family, members = CASES[name].family, CASES[name].members
    w = tensor(0.2, 0.5, 0.3)
    target = w @ family.mean(members)
    nearest = family.project(w, members, 0)
    close(family.mean(nearest), target, 1e-11)
    close(family.from_mean(target), nearest, 1e-10)

    def cross_entropy(theta: Tensor) -> Tensor:
        return family.log_partition(family.from_natural(theta)) - theta @ target

    theta = family.natural(nearest)
    for k in range(20):  # KL(mixture ‖ member) up to a constant
        step = 0.01 * theta.abs().min() * torch.randn(theta.shape, generator=generator(k), dtype=torch.float64)
        assert cross_entropy(theta) <= cross_entropy(theta + step)


@laws
def test_between_two_members_natural_parameters_are_a_line(name):
    family, members = CASES[name].family, CASES[name].members
    share = tensor(0.3)
    between = family.interpolate(members[0], members[1], share)
    theta = family.natural(members)
    close(family.natural(between), 0.3 * theta[0] + 0.7 * theta[1], 1e-11)


@laws
def test_draws_have_the_expected_statistics_and_moments(name):
    family, members = CASES[name].family, CASES[name].members
    n = 40_000
    for p in members:
        rows = p.expand(n, -1)
        x, u = family.sample(rows, generator(1)), family.sample_statistics(rows, generator(2))
        for draws in (u, family.statistics(x)):
            error = draws.std(0) / math.sqrt(n)
            assert ((draws.mean(0) - family.mean(p)).abs() < 5 * error).all()
        mean, covariance = family.moments(p)
        assert ((x.mean(0) - mean).abs() < 5 * x.std(0) / math.sqrt(n)).all()
        close(x.mT.cov().reshape(covariance.shape), covariance, 0.15 * float(covariance.max()))


@laws
def test_the_axis_of_the_parameters_is_free(name):
    family, members = CASES[name].family, CASES[name].members
    packed = replace(family, dim=-2)
    for method in ("natural", "mean"):
        close(getattr(packed, method)(members.mT), getattr(family, method)(members).mT)
    close(packed.log_partition(members.mT), family.log_partition(members))
    close(packed.from_mean(packed.mean(members.mT)), members.mT, 1e-11)
    close(packed.moments(members.mT).covariance, family.moments(members).covariance.movedim(0, -1))
    w = tensor(0.2, 0.5, 0.3)
    close(packed.project(w[:, None], members[..., None], 0)[..., 0], family.project(w, members, 0))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.measure is not None])
def test_measures_on_statistics_are_differences_of_log_partitions(name):
    family, members, distribution = CASES[name].family, CASES[name].members, CASES[name].measure
    h = from_distribution(distribution(*members[0]), full=True)
    eta = family.natural(members[1:]) - family.natural(members[0])
    close(h.log_normalizer(eta), family.log_partition(members[1:]) - family.log_partition(members[0]), 1e-11)
    close(h.mean(eta), family.mean(members[1:]), 1e-11)
    jacobian = torch.stack([torch.autograd.functional.jacobian(h.mean, e) for e in eta])
    close(h.fisher(eta), jacobian, 1e-9)


# log h(y) of the observations, so that p(y | x) = h(y) e^{⟨t(y), u(x)⟩}
PAIRS = {
    "GammaPoisson": (GammaPoisson(1.7), "Gamma", (0.0, 1.0, 6.0), lambda y: y * math.log(1.7) - math.lgamma(y + 1)),
    "BetaBernoulli": (BetaBernoulli(), "Beta", (0.0, 1.0), lambda y: 0.0),
    "DirichletCategorical": (DirichletCategorical(), "Dirichlet", (0.0, 3.0), lambda y: 0.0),
    "NormalNormal": (NormalNormal(0.7), "Normal", (0.0, -3.0), lambda y: stats.norm.logpdf(y, 0, math.sqrt(0.7))),
    "NormalGamma": (NormalGamma(0.6), "Normal–Gamma", (0.1, 2.0), lambda y: -math.log(2 * math.pi * 0.6) / 2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_updates_of_conjugate_pairs_are_shifts_and_predictions_differences(name):
    """θ moves by what y alone decides, and log p(y) = A(posterior) − A(prior) + log h(y)."""
    pair, case, ys, log_base = PAIRS[name]
    members = CASES[case].members.mT  # (k, batch), as filters have them
    for y in ys:
        after = pair.observe(members, tensor(y).expand(3), 0)
        evidence = pair.family.natural(after.parameters) - pair.family.natural(members)
        close(evidence, evidence[:, :1].expand_as(evidence), 1e-10)
        close(pair.family.shift(members, evidence), after.parameters, 1e-10)
        gap = pair.family.log_partition(after.parameters) - pair.family.log_partition(members)
        close(after.log_likelihood, gap + log_base(y), 1e-10)


def test_priors_of_samplers_and_pairs_of_filters_agree():
    """The law of the rate λe^η under (χ, ν) is the Gamma law that counts of exposure λ update."""
    rate, n = torch.tensor(1.7, dtype=torch.float64), 40_000
    prior = ConjugatePrior(from_distribution(td.Poisson(rate)), tensor(3.0), 2.0).posterior(tensor(4.0))
    after = GammaPoisson(1.0).observe(tensor([3.0], [2.0]), tensor(4.0), 0).parameters[:, 0]
    x = rate * prior.sample(n, generator=generator())[:, 0].exp()
    assert stats.kstest(x.numpy(), stats.gamma(after[0], scale=1 / after[1]).cdf).pvalue > 1e-3
    coin = ConjugatePrior(from_distribution(td.Bernoulli(tensor(0.5)[0])), tensor(2.0), 5.0).posterior(tensor(1.0))
    after = BetaBernoulli().observe(tensor([2.0], [3.0]), tensor(1.0), 0).parameters[:, 0]
    p = torch.sigmoid(coin.sample(n, generator=generator())[:, 0])
    assert stats.kstest(p.numpy(), stats.beta(*after.tolist()).cdf).pvalue > 1e-3
    # E[∇G(η)] = χ/ν is the mean of that member
    close(prior.mean, [integrate.quad(lambda x: x * stats.gamma.pdf(x, 7, scale=1 / 3), 0, 60)[0]], 1e-8)


def test_the_packed_collapse_of_linear_gaussian_filters_is_that_of_the_family():
    family, members = CASES["Normal"].family, CASES["Normal"].members
    w = tensor(0.2, 0.5, 0.3)
    eye = torch.eye(1, dtype=torch.float64)
    model = SwitchingLinearGaussian(
        torch.full((3, 3), 1 / 3).double(), eye, eye, eye, eye, initial_mean=eye[0], initial_covariance=eye
    )
    engine = model.propagator()
    belief = Normal(pack(members[:, :1], members[:, 1:, None])[..., None])
    mean, covariance = engine.moments(engine.collapse(w[:, None], belief, 0))
    nearest = family.project(w, members, 0)
    close(torch.stack([mean.squeeze(), covariance.squeeze()]), nearest)
    close(torch.cat([part.flatten() for part in m_projection(w, members[:, :1], members[:, 1:, None])]), nearest)
