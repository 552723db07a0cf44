"""E. The propositions of the poster: base measures other than a set of keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy import integrate, stats
from scipy.special import gammaln, iv
from torch.distributions import Gamma

from cumulant import Empirical, Gaussian, Measure, Sphere, convolve, from_distribution
from cumulant.paper.checks.evidence import Evidence, agrees, differs, true
from cumulant.paper.checks.oracle import differences, log_normalizer, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

# three components: masses that need not sum to 1, centres, and covariances far from each other
MASSES = np.array([0.2, 0.5, 1.1])
CENTRES = np.array([[-1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
SPREADS = np.array([2.5, 1.0, 0.2])[:, None, None] * np.eye(2)
QUERY = np.array([1.3, -0.9])


@check("E1", "a Gamma law as h: attention over it shifts its natural parameter")
def shifted_member(inputs: RandomInputs) -> Iterator[Evidence]:
    shape, rate, eta = 3.0, 2.0, inputs.rng.uniform(-1.0, 1.0)

    def moment(power: int) -> float:
        def tilted(x: float) -> float:
            return x**power * np.exp(eta * x) * stats.gamma.pdf(x, shape, scale=1 / rate)

        return integrate.quad(tilted, 0, 80, epsabs=1e-13, limit=400)[0]

    h = from_distribution(Gamma(tensor(shape), tensor(rate)))
    yield agrees("G(η) against quadrature", h.log_normalizer(tensor([eta])), np.log(moment(0)), 1e-9)
    yield agrees("∇G(η) against quadrature", h.mean(tensor([eta])), moment(1) / moment(0), 1e-9)
    member = stats.gamma(shape, scale=1 / (rate - eta))
    yield agrees("mean of Gamma(3, 2 − η)", h.mean(tensor([eta])), member.mean(), 1e-12)
    yield agrees("variance of Gamma(3, 2 − η)", h.fisher(tensor([eta])), member.var(), 1e-12)
    yield true("G = +∞ from η = 2 on", h.log_normalizer(tensor([[2.0], [2.5]])).isposinf())


@check("E2", "a mixture of one covariance: attention over the centroids plus Ση")
def common_covariance(inputs: RandomInputs) -> Iterator[Evidence]:
    sigma, eta = inputs.covariance(2), 0.8 * inputs.normal(2)
    centroids, noise = Empirical(tensor(CENTRES), tensor(np.log(MASSES))), Gaussian(tensor(np.zeros(2)), tensor(sigma))
    h, query = convolve(centroids, noise), tensor(eta)
    covariances = np.array([sigma] * 3)
    yield agrees("G", h.log_normalizer(query), quadrature(eta, covariances), 1e-10)
    yield agrees("∇G by differences", h.mean(query), differences(lambda e: quadrature(e, covariances), eta), 1e-7)
    weights = softmax(np.log(MASSES) + CENTRES @ eta)
    yield agrees("Ση + Σ softmax(log π_n + ⟨μ_n,η⟩) μ_n", h.mean(query), sigma @ eta + weights @ CENTRES, 1e-13)
    yield agrees(
        "the same as a sum of Gaussians", mixture(covariances).mean(query), sigma @ eta + weights @ CENTRES, 1e-13
    )


@check("E3", "a mixture of several covariances: the weights gain ½ηᵀΣ_nη, each component is affine")
def several_covariances(inputs: RandomInputs) -> Iterator[Evidence]:
    covariances = np.array([inputs.covariance(2) for _ in range(3)])
    eta = 0.8 * inputs.normal(2)
    h, query = mixture(covariances), tensor(eta)
    yield agrees("G", h.log_normalizer(query), quadrature(eta, covariances), 1e-10)
    yield agrees("∇G by differences", h.mean(query), differences(lambda e: quadrature(e, covariances), eta), 1e-7)

    weights = softmax(np.log(MASSES) + CENTRES @ eta + eta @ covariances @ eta / 2)
    means = CENTRES + covariances @ eta
    yield agrees("Σ w_n (μ_n + Σ_nη)", h.mean(query), weights @ means, 1e-13)
    centred = means - weights @ means
    hessian = np.tensordot(weights, covariances, 1) + centred.T @ (weights[:, None] * centred)
    yield agrees("Hessian Σ w_nΣ_n + Cov_w(μ_n + Σ_nη)", h.fisher(query), hessian, 1e-13)


@check("E4", "the weights of one covariance are wrong where covariances differ")
def missing_quadratic_term(inputs: RandomInputs) -> Iterator[Evidence]:
    slope = differences(lambda e: quadrature(e, SPREADS), QUERY)
    ours = mixture(SPREADS).mean(tensor(QUERY))
    yield agrees("weights with ½ηᵀΣ_nη", ours, slope, 1e-7)
    weights = softmax(np.log(MASSES) + CENTRES @ QUERY)
    yield differs("weights without it", weights @ (CENTRES + SPREADS @ QUERY), slope, 1e-2)


@check("E5", "the uniform law on a sphere: G of von Mises–Fisher against quadrature")
def von_mises_fisher(inputs: RandomInputs) -> Iterator[Evidence]:
    dim, kappa = 5, inputs.rng.uniform(0.5, 4.0)
    query = tensor(kappa * direction(inputs, dim))
    yield agrees("G by quadrature over the height", Sphere(dim).log_normalizer(query), sphere(kappa, dim), 1e-10)
    bessel = gammaln(dim / 2) + (dim / 2 - 1) * np.log(2 / kappa) + np.log(iv(dim / 2 - 1, kappa))
    yield agrees("G by Bessel functions", Sphere(dim).log_normalizer(query), bessel, 1e-12)
    yield agrees("G(0)", Sphere(dim).log_normalizer(0 * query), 0.0, 0.0)


@check("E6", "the mean resultant of von Mises–Fisher is a quotient of Bessel functions")
def mean_resultant(inputs: RandomInputs) -> Iterator[Evidence]:
    dim, kappa = 5, inputs.rng.uniform(0.5, 4.0)
    north = direction(inputs, dim)
    ours = Sphere(dim).mean(tensor(kappa * north))
    slope = differences(lambda k: sphere(k[0], dim), np.array([kappa]))[0]
    yield agrees("∇G by differences", ours, slope * north, 1e-8)
    yield agrees("I_{d/2}(κ) / I_{d/2−1}(κ)", ours, iv(dim / 2, kappa) / iv(dim / 2 - 1, kappa) * north, 1e-12)


def mixture(covariances: np.ndarray) -> Measure:
    """Σ π_n N(μ_n, Σ_n)"""
    components = zip(MASSES, CENTRES, covariances, strict=True)
    first, *others = (float(mass) * Gaussian(tensor(centre), tensor(c)) for mass, centre, c in components)
    return sum(others, first)


def quadrature(eta: np.ndarray, covariances: np.ndarray) -> float:
    """G of the mixture by Gauss–Hermite, component by component."""
    nodes, weights = hermegauss(60)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    log_weights = np.log(np.outer(weights, weights).ravel() / (2 * np.pi))
    points = CENTRES[:, None] + grid @ np.linalg.cholesky(covariances).swapaxes(-1, -2)
    return log_normalizer(eta, points.reshape(-1, 2), (np.log(MASSES)[:, None] + log_weights).ravel())


def sphere(kappa: float, dim: int) -> float:
    """G of the uniform law: the height t over the equator has density ∝ (1 − t²)^{(d−3)/2}."""

    def integral(k: float) -> float:
        return integrate.quad(lambda t: np.exp(k * t) * (1 - t * t) ** ((dim - 3) / 2), -1, 1, epsabs=1e-14)[0]

    return np.log(integral(kappa) / integral(0.0))


def direction(inputs: RandomInputs, dim: int) -> np.ndarray:
    """A unit vector."""
    vector = inputs.normal(dim)
    return vector / np.linalg.norm(vector)
