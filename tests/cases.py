"""One line per measure and composition, each with an oracle that shares no code with the library.

An oracle maps a query (NumPy vector) to G by quadrature, summation, mpmath or brute force over atoms; the laws take it
from there. Parameters are plain NumPy so that both sides build their own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp
import numpy as np
import torch
from scipy import integrate, special, stats
from torch import distributions as td

from cumulant import Box, Empirical, Gaussian, Measure, Sphere, convolve, from_distribution, independent, product
from cumulant.potentials import Units

rng = np.random.default_rng(20220503)


@dataclass(frozen=True)
class Case:
    """A measure, its oracle G(η), and the size of queries that stay inside its domain."""

    name: str
    build: Callable[[], Measure]
    oracle: Callable[[np.ndarray], float]
    reach: float = 1.0
    offset: float = 0.0

    def queries(self, count: int = 5, seed: int = 0) -> torch.Tensor:
        draws = np.random.default_rng(seed).uniform(-1, 1, (count, self.build().dim))
        return torch.from_numpy(self.reach * draws + self.offset)


def t(x) -> torch.Tensor:
    return torch.as_tensor(np.asarray(x, dtype=float))


# ---------------------------------------------------------------------- oracles


def atoms_oracle(x: np.ndarray, log_h: np.ndarray | float = 0.0):
    return lambda eta: special.logsumexp(x @ eta + log_h)


def quad_oracle(log_density, low: float, high: float, points=None, statistic=lambda x: (x,)):
    def g(eta: np.ndarray) -> float:
        def integrand(x: float) -> float:
            return np.exp(log_density(x) + np.dot(eta, statistic(x)))

        return float(
            np.log(integrate.quad(integrand, low, high, epsabs=1e-14, epsrel=1e-13, limit=400, points=points)[0])
        )

    return g


def series_oracle(log_pmf: Callable[[np.ndarray], np.ndarray], terms: int = 400):
    k = np.arange(terms)
    return lambda eta: special.logsumexp(eta[0] * k + log_pmf(k))


def hermite_oracle(loc: np.ndarray, covariance: np.ndarray, order: int = 40):
    """Gauss–Hermite over the factors of the covariance; exact to rounding for the η used here."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(values.clip(0))
    grid = np.stack(np.meshgrid(*[nodes] * len(loc), indexing="ij"), -1).reshape(-1, len(loc))
    w = np.prod(np.stack(np.meshgrid(*[weights] * len(loc), indexing="ij"), -1).reshape(-1, len(loc)), 1)
    points = loc + grid @ root.T
    return lambda eta: special.logsumexp(points @ eta, b=w / w.sum())


def sphere_oracle(dim: int, radius: float = 1.0):
    def g(eta: np.ndarray) -> float:
        kappa, nu = mp.mpf(radius) * mp.norm(mp.matrix(eta.tolist())), mp.mpf(dim) / 2 - 1
        if kappa == 0:
            return 0.0
        return float(mp.loggamma(nu + 1) + nu * mp.log(2 / kappa) + mp.log(mp.besseli(nu, kappa)))

    return g


def box_oracle(low: np.ndarray, high: np.ndarray):
    parts = [quad_oracle(lambda x, a=a, b=b: -np.log(b - a), a, b) for a, b in zip(low, high, strict=True)]
    return lambda eta: sum(part(eta[i : i + 1]) for i, part in enumerate(parts))


# ---------------------------------------------------------------------- parameters

KEYS = rng.normal(size=(7, 3))
LOG_H = np.log(rng.dirichlet(np.ones(7)))
FEW = rng.normal(size=(3, 3))
SQUARE = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]])
SQUARE_H = np.log([0.1, 0.2, 0.3, 0.4])
FLAT = np.outer([1.0, 2.0, -1.0], [1.0, 0.5, 1.0])[:, :2] + 0.0  # three atoms on a line in R²
MU2 = np.array([0.3, -0.6])
COV2 = np.array([[1.2, 0.4], [0.4, 0.7]])
MU3, A3 = rng.normal(size=3), rng.normal(size=(3, 3))
COV3 = A3 @ A3.T / 3
RANK1 = np.outer([1.0, 2.0], [1.0, 2.0])
DOWN, UP = rng.normal(size=(2, 3)), rng.normal(size=(4, 3))
B3, TILT3 = np.array([0.5, -1.0, 2.0]), np.array([0.2, -0.4, 0.3])
MASKED = np.where(np.arange(7) % 3 == 0, -np.inf, LOG_H)
LOW, HIGH = np.array([-1.0, 0.5]), np.array([2.0, 0.75])
UNIT_B, STATES = (
    np.array([0.3, -1.0, 0.5, 0.0]),
    np.stack(np.unravel_index(np.arange(16), (2,) * 4), -1),
)  # 2⁴ of {0,1}⁴

keys = atoms_oracle(KEYS, LOG_H)
few = atoms_oracle(FEW)
normal2 = hermite_oracle(MU2, COV2)
normal3 = hermite_oracle(MU3, COV3, 24)


def empirical() -> Empirical:
    return Empirical(t(KEYS), t(LOG_H))


def gaussian() -> Gaussian:
    return Gaussian(t(MU3), t(COV3))


CASES = [
    Case("Empirical, weighted", empirical, keys),
    Case("Empirical, counting", lambda: Empirical(t(KEYS)), atoms_oracle(KEYS)),
    Case("Empirical, masked atoms", lambda: Empirical(t(KEYS), t(MASKED)), atoms_oracle(KEYS[MASKED > -np.inf], LOG_H[MASKED > -np.inf])),
    Case("Empirical, one atom", lambda: Empirical(t(KEYS[:1]), t(LOG_H[:1])), atoms_oracle(KEYS[:1], LOG_H[:1])),
    Case("Empirical, repeated atoms", lambda: Empirical(t(np.vstack([KEYS, KEYS[:2]]))), atoms_oracle(KEYS, np.log([2, 2, 1, 1, 1, 1, 1]))),
    Case("Empirical, collinear", lambda: Empirical(t(FLAT)), atoms_oracle(FLAT)),
    Case("Empirical, square of §15", lambda: Empirical(t(SQUARE), t(SQUARE_H)), atoms_oracle(SQUARE, SQUARE_H)),
    Case("Gaussian, 2-D", lambda: Gaussian(t(MU2), t(COV2)), normal2),
    Case("Gaussian, 3-D", gaussian, normal3),
    Case("Gaussian, singular", lambda: Gaussian(t(MU2), t(RANK1)), hermite_oracle(MU2, RANK1)),
    Case("Gaussian, point mass", lambda: Gaussian(t(MU2), t(np.zeros((2, 2)))), lambda eta: float(MU2 @ eta)),
    Case("Sphere 1", lambda: Sphere(1), sphere_oracle(1)),
    Case("Sphere 2", lambda: Sphere(2), sphere_oracle(2), reach=3),
    Case("Sphere 3, radius 2", lambda: Sphere(3, 2.0), sphere_oracle(3, 2.0)),
    Case("Sphere 16", lambda: Sphere(16), sphere_oracle(16)),
    Case("Box", lambda: Box(t(LOW), t(HIGH)), box_oracle(LOW, HIGH), reach=3),
    Case("Normal", lambda: from_distribution(td.Normal(t(0.3), t(1.4))), quad_oracle(lambda x: stats.norm.logpdf(x, 0.3, 1.4), -40, 40, points=[0.3])),
    Case("MultivariateNormal", lambda: from_distribution(td.MultivariateNormal(t(MU2), t(COV2))), normal2),
    Case("Bernoulli", lambda: from_distribution(td.Bernoulli(t(0.3))), lambda eta: float(np.log(0.7 + 0.3 * np.exp(eta[0])))),
    Case("Categorical", lambda: from_distribution(td.Categorical(t([0.2, 0.3, 0.5]))), lambda eta: float(np.log(np.exp(eta) @ [0.2, 0.3, 0.5]))),
    Case("OneHotCategorical", lambda: from_distribution(td.OneHotCategorical(t([0.2, 0.8]))), lambda eta: float(np.log(np.exp(eta) @ [0.2, 0.8]))),
    Case("Poisson", lambda: from_distribution(td.Poisson(t(1.7))), series_oracle(lambda k: stats.poisson.logpmf(k, 1.7))),
    Case("Gamma", lambda: from_distribution(td.Gamma(t(3.0), t(2.0))), quad_oracle(lambda x: stats.gamma.logpdf(x, 3.0, scale=0.5), 0, 80, points=[1.0, 4.0]), reach=1.2),
    Case("Exponential", lambda: from_distribution(td.Exponential(t(2.0))), quad_oracle(lambda x: np.log(2) - 2 * x, 0, 60, points=[1.0, 4.0])),
    Case("NegativeBinomial", lambda: from_distribution(td.NegativeBinomial(t(3.0), t(0.25))), series_oracle(lambda k: stats.nbinom.logpmf(k, 3, 0.75)), reach=0.8),
    Case("Laplace", lambda: from_distribution(td.Laplace(t(0.4), t(0.5))), quad_oracle(lambda x: stats.laplace.logpdf(x, 0.4, 0.5), -60, 60, points=[0.4])),
    Case("Uniform", lambda: from_distribution(td.Uniform(t(-1.0), t(2.0))), box_oracle(np.array([-1.0]), np.array([2.0])), reach=3),
    Case("Independent Poisson", lambda: from_distribution(td.Independent(td.Poisson(t([1.0, 2.5])), 1)), lambda eta: float(np.array([1.0, 2.5]) @ (np.exp(eta) - 1))),
    Case("Gamma on (x, log x)", lambda: from_distribution(td.Gamma(t(3.0), t(2.0)), full=True), quad_oracle(lambda x: stats.gamma.logpdf(x, 3.0, scale=0.5), 0, 80, [1.0, 4.0], lambda x: (x, np.log(x)))),
    Case("Normal on (x, x²)", lambda: from_distribution(td.Normal(t(0.2), t(0.6)), full=True), quad_oracle(lambda x: stats.norm.logpdf(x, 0.2, 0.6), -30, 30, [0.2], lambda x: (x, x * x))),
    Case("Beta on (log x, log(1−x))", lambda: from_distribution(td.Beta(t(3.0), t(2.5)), full=True), lambda eta: float(special.betaln(3 + eta[0], 2.5 + eta[1]) - special.betaln(3, 2.5))),
    Case("Dirichlet on log x", lambda: from_distribution(td.Dirichlet(t([3.0, 2.0, 4.0])), full=True), lambda eta: float(special.gammaln(eta + [3, 2, 4]).sum() - special.gammaln((eta + [3, 2, 4]).sum()) - special.gammaln([3, 2, 4]).sum() + special.gammaln(9))),
    Case("Empirical + Empirical", lambda: empirical() + Empirical(t(FEW)), atoms_oracle(np.vstack([KEYS, FEW]), np.r_[LOG_H, np.zeros(3)])),
    Case("Gaussian + Gaussian (P2′)", lambda: 0.3 * Gaussian(t(MU2), t(COV2)) + 0.7 * Gaussian(t(-MU2), t(RANK1)), lambda eta: np.logaddexp(np.log(0.3) + normal2(eta), np.log(0.7) + hermite_oracle(-MU2, RANK1)(eta))),
    Case("Empirical + Gaussian", lambda: empirical() + gaussian(), lambda eta: np.logaddexp(keys(eta), normal3(eta))),
    Case("three-part sum", lambda: sum([empirical(), gaussian(), Sphere(3)]), lambda eta: special.logsumexp([keys(eta), normal3(eta), sphere_oracle(3)(eta)])),
    Case("2.5 · Empirical", lambda: 2.5 * empirical(), lambda eta: keys(eta) + np.log(2.5)),
    Case("Empirical, normalized", lambda: Empirical(t(KEYS)).normalized(), lambda eta: atoms_oracle(KEYS)(eta) - np.log(7)),
    Case("2 · Sphere", lambda: 2 * Sphere(3), lambda eta: sphere_oracle(3)(eta) + np.log(2)),
    Case("image, down", lambda: t(DOWN) @ empirical(), atoms_oracle(KEYS @ DOWN.T, LOG_H)),
    Case("image, up (flat support)", lambda: t(UP) @ empirical(), atoms_oracle(KEYS @ UP.T, LOG_H)),
    Case("image of Gaussian", lambda: t(DOWN) @ gaussian(), hermite_oracle(DOWN @ MU3, DOWN @ COV3 @ DOWN.T)),
    Case("shift", lambda: empirical().shift(t(B3)), atoms_oracle(KEYS + B3, LOG_H)),
    Case("tilt", lambda: empirical().tilt(t(TILT3)), atoms_oracle(KEYS, LOG_H + KEYS @ TILT3)),
    Case("tilted Sphere (vMF)", lambda: Sphere(3).tilt(t(TILT3)), lambda eta: sphere_oracle(3)(eta + TILT3)),
    Case("convolve(Empirical, Empirical)", lambda: convolve(empirical(), Empirical(t(FEW))), atoms_oracle((KEYS[:, None] + FEW).reshape(-1, 3), np.repeat(LOG_H, 3))),
    Case("convolve(Empirical, Gaussian) (P2)", lambda: convolve(empirical(), gaussian()), lambda eta: special.logsumexp([w + hermite_oracle(k + MU3, COV3, 24)(eta) for k, w in zip(KEYS, LOG_H, strict=True)])),
    Case("product(Empirical, Sphere)", lambda: product(empirical(), Sphere(2)), lambda eta: keys(eta[:3]) + sphere_oracle(2)(eta[3:])),
    Case("product of three", lambda: product(Gaussian(t(MU2), t(COV2)), Box(t(LOW), t(HIGH)), Sphere(1)), lambda eta: normal2(eta[:2]) + box_oracle(LOW, HIGH)(eta[2:4]) + float(np.log(np.cosh(eta[4])))),
    Case("independent Empirical", lambda: independent(Empirical(t(np.stack([FEW, -2 * FEW])))), lambda eta: few(eta[:3]) + few(-2 * eta[3:])),
    Case("nested: A @ (h + c·tilt(shift(g)))", lambda: t(DOWN) @ (empirical() + 0.5 * gaussian().shift(t(B3)).tilt(t(TILT3))), lambda eta: np.logaddexp(keys(DOWN.T @ eta), np.log(0.5) + normal3(DOWN.T @ eta + TILT3) + B3 @ (DOWN.T @ eta + TILT3))),
    Case("multi-head: convolve of images (X-12)", lambda: convolve(t(DOWN.T) @ Empirical(t(SQUARE), t(SQUARE_H)), t(A3) @ empirical()), lambda eta: atoms_oracle(SQUARE, SQUARE_H)(DOWN @ eta) + keys(A3.T @ eta)),
    Case("Units, 2⁴ atoms (X-13)", lambda: Units(t(UP), t(UNIT_B)), atoms_oracle(STATES @ UP, STATES @ UNIT_B)),
]  # fmt: skip
