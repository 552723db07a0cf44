"""F. Theorem 1: a Gaussian as equilibrium of attention and renormalisation, and what finitely many keys make of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.polynomial.hermite_e import hermegauss

from cumulant import Gaussian, Measure
from cumulant.attention import attend
from cumulant.measures.transform import Image
from cumulant.paper.checks.evidence import Evidence, agrees, array, measured, true
from cumulant.paper.checks.oracle import attention_mean, differences, log_normalizer, root, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.residual import ascend


@check(
    "F1", "the residual step over N(μ,Σ) is affine; it sends N(Σ⁻¹μ, Σ⁻¹) to mean Σ⁻¹μ + 2μ, covariance Σ⁻¹ + 2I + Σ"
)
def step_of_the_equilibrium(inputs: RandomInputs) -> Iterator[Evidence]:
    mu, sigma, eta = inputs.normal(3), inputs.covariance(3), inputs.normal(20, 3)
    eye, inverse = np.eye(3), np.linalg.inv(sigma)
    step = ascend(Gaussian(tensor(mu), tensor(sigma)), tensor(eta))
    yield agrees("T(η) = (I + Σ)η + μ", step.eta, eta @ (eye + sigma) + mu, 1e-13)
    yield agrees("log-volume log det(I + Σ)", step.log_volume, np.linalg.slogdet(eye + sigma)[1], 1e-13)
    after = image(equilibrium(mu, sigma), eye + sigma, mu)
    zero = tensor(np.zeros(3))
    yield agrees("mean after the step", after.mean(zero), inverse @ mu + 2 * mu, 1e-12)
    yield agrees("covariance after the step", after.fisher(zero), inverse + 2 * eye + sigma, 1e-12)


@check("F2", "a symmetric (ZCA) renormalisation undoes the step for every particle; another square root only in law")
def pointwise_inverse(inputs: RandomInputs) -> Iterator[Evidence]:
    mu, sigma, eta = inputs.normal(3), inputs.covariance(3), inputs.normal(20, 3)
    inverse = np.linalg.inv(sigma)
    before = equilibrium(mu, sigma)
    after = image(before, np.eye(3) + sigma, mu)
    moved = array(ascend(Gaussian(tensor(mu), tensor(sigma)), tensor(eta)).eta)
    centre, spread = moments_of(after)

    zca = root(inverse) @ np.linalg.inv(root(spread))
    yield agrees("R(I + Σ) = I", zca @ (np.eye(3) + sigma), np.eye(3), 1e-10)
    yield agrees("RN(T(η)) = η", (moved - centre) @ zca.T + inverse @ mu, eta, 1e-10)

    cholesky = np.linalg.cholesky(inverse) @ np.linalg.inv(np.linalg.cholesky(spread))
    shift = inverse @ mu - cholesky @ centre
    cumulants = eta @ inverse @ mu + (eta @ inverse * eta).sum(1) / 2
    yield agrees("Cholesky: the same law", image(after, cholesky, shift).log_normalizer(tensor(eta)), cumulants, 1e-10)
    yield true("Cholesky: other particles", np.abs(moved @ cholesky.T + shift - eta).max() > 1e-3)


@check("F3", "any Gaussian, any linear keys and values: attention is affine, and renormalisation restores the law")
def any_gaussian(inputs: RandomInputs) -> Iterator[Evidence]:
    mean, covariance, eta = inputs.normal(3), inputs.covariance(3), inputs.normal(10, 3)
    key_map, value_map = inputs.normal(3, 3), inputs.normal(3, 3)
    # short values: a step that nearly loses a direction would lose digits in RN, whatever the theorem says
    value_map /= 2 * np.linalg.norm(value_map, 2) * np.linalg.norm(key_map @ covariance @ key_map.T, 2)
    law = Gaussian(tensor(mean), tensor(covariance))
    keys = image(law, key_map)
    yield agrees("∇G(η) = A(m + CAᵀη)", keys.mean(tensor(eta)), (mean + eta @ key_map @ covariance) @ key_map.T, 1e-12)

    for label, values in (("values = keys", np.eye(3)), ("values = V·keys", value_map)):
        start = values @ array(keys.mean(tensor(np.zeros(3))))
        stretch = np.eye(3) + values @ array(keys.fisher(tensor(np.zeros(3))))
        moved = eta + array(keys.mean(tensor(eta))) @ values.T
        yield agrees(f"{label}: the step is affine", moved, eta @ stretch.T + start, 1e-12)
        after = image(law, stretch, start)
        centre, spread = moments_of(after)
        renormalise = root(covariance) @ np.linalg.inv(root(spread))
        restored = image(after, renormalise, mean - renormalise @ centre)
        cumulants = eta @ mean + (eta @ covariance * eta).sum(1) / 2
        yield agrees(f"{label}: the law after RN", restored.log_normalizer(tensor(eta)), cumulants, 1e-10)


@check("F4", "keys Aη are the dual coordinates of their queries, up to a constant, iff A = C⁻¹")
def self_dual_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    mean, covariance, eta = inputs.normal(3), inputs.covariance(3), inputs.normal(10, 3)
    precision, zero = np.linalg.inv(covariance), tensor(np.zeros(3))
    law = Gaussian(tensor(mean), tensor(covariance))
    keys = image(law, precision)
    yield agrees("ACAᵀ = A", keys.fisher(zero), precision, 1e-11)
    yield agrees("∇G(η) − ∇G(0) = Aη", keys.mean(tensor(eta)) - keys.mean(zero), eta @ precision, 1e-11)
    others = {"A = 2C⁻¹": 2 * precision, "A = I + C⁻¹": np.eye(3) + precision, "a random A": inputs.normal(3, 3)}
    for label, other in others.items():
        keys = image(law, other)
        gap = array(keys.mean(tensor(eta)) - keys.mean(zero)) - eta @ other.T
        yield true(f"not for {label}", np.abs(gap).max() > 1e-2)


@check("F5", "h = law of Ση is N(μ,Σ): attention over particles is μ + Σq, also where Σ is singular")
def law_of_the_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    mu, sigma, count = inputs.normal(3), inputs.covariance(3), 200_000
    query = np.array([0.3, -0.2, 0.25])
    law = equilibrium(mu, sigma)
    cumulant = mu @ query + query @ sigma @ query / 2
    yield agrees("G of the law of Ση", image(law, sigma).log_normalizer(tensor(query)), cumulant, 1e-12)
    particles = law.sample(tensor(np.zeros(3)), count, generator=inputs.generator)
    ours = attend(tensor(query), particles @ tensor(sigma), scale=1.0).output
    error = np.sqrt(np.diag(fluctuation(query, sigma)) / count)
    z = (array(ours) - mu - sigma @ query) / error
    yield agrees("attention over 200,000 particles, in standard errors", z, 0.0, 4.5)

    factor = inputs.normal(3, 2)
    flat = Gaussian(tensor(mu), tensor(factor @ factor.T))
    slope = differences(lambda e: mu @ e + hermite(factor.T @ e), query)
    yield agrees("a plane in R³, by quadrature over it", flat.mean(tensor(query)), slope, 1e-8)


@check("F6", "finitely many keys: the covariance of attention is e^{qᵀΣq}(Σ + ΣqqᵀΣ)/N")
def finite_sample(inputs: RandomInputs) -> Iterator[Evidence]:
    repeats, count, query = 600, 2000, np.array([0.8, 0.5, -0.3])
    keys = inputs.normal(repeats, count, 3)
    ours = array(attend(tensor(query).expand(repeats, 1, 3), tensor(keys), scale=1.0).output)[:, 0]
    yield agrees("one set of keys", ours[0], attention_mean(query, keys[0]), 1e-12)
    predicted = fluctuation(query, np.eye(3)) / count
    relative = (np.cov(ours.T) - predicted) / np.abs(predicted).max()
    yield agrees("covariance over 600 sets of 2000 keys, relative", relative, 0.0, 0.25)


@check("F7", "softmax condenses: the population formula holds while |q|² < 2 log N, beyond it the largest key rules")
def condensation(inputs: RandomInputs) -> Iterator[Evidence]:
    repeats, lengths = 16, np.array([0.25, 0.5, 1.0, 2.0, 4.0])  # in units of √(2 log N)
    population = Gaussian(tensor([0.0]), tensor([[1.0]]))
    for count in (100, 1000, 10_000):
        queries = (lengths * np.sqrt(2 * np.log(count)))[:, None]
        keys = inputs.normal(repeats, count, 1)
        ours = attend(tensor(queries).expand(repeats, 5, 1), tensor(keys), scale=1.0).output
        ratio = array((ours / population.mean(tensor(queries))).mean(0))[:, 0]
        for r, value in zip(lengths, ratio, strict=True):
            yield measured(f"attention/population, N = {count}, |q| = {r:g} √(2 log N)", value)
        oracle = [attention_mean(q, keys[0]) for q in queries]
        yield agrees(f"one set of {count} keys", ours[0], oracle, 1e-12)
        yield true(f"no output beyond the largest of {count} keys", ours <= tensor(keys).amax(1, keepdim=True))
    yield agrees("N = 10000: the population's up to r = ½", ratio[:2], 1.0, 0.25, note=f"mean of {repeats} sets")
    yield true("N = 10000: below .7 at r = 2", ratio[3] < 0.7, note=f"{ratio[3]:.2f}")
    yield true("N = 10000: below .4 at r = 4", ratio[4] < 0.4, note=f"{ratio[4]:.2f}")


@check("F14", "in whitened coordinates Theorem 1 has logits ⟨z_i,z_j⟩ and values Σz, for every Σ")
def whitened_coordinates(inputs: RandomInputs) -> Iterator[Evidence]:
    for low, high in ((0.02, 0.1), (0.3, 2.0), (3.0, 20.0)):
        mu, sigma = inputs.normal(3), inputs.covariance(3, low, high)
        centre, z = np.linalg.solve(sigma, mu), inputs.normal(6, 3)
        eta = centre + z @ np.linalg.inv(root(sigma))
        keys = eta @ sigma
        weights = attend(tensor(eta), tensor(keys), tensor(np.eye(6)), scale=1.0).output
        # ⟨centre, k_j⟩ tilts the keys; what depends on the query alone cancels in the row
        expected = softmax(z @ z.T + keys @ centre, axis=1)
        yield agrees(f"weights, eigenvalues of Σ in [{low:g}, {high:g}]", weights, expected, 1e-9)
        moved = array(ascend(Gaussian(tensor(mu), tensor(sigma)), tensor(eta)).eta)
        whitened = (moved - centre - 2 * mu) @ root(sigma)
        yield agrees(f"z + Σz, eigenvalues of Σ in [{low:g}, {high:g}]", whitened, z + z @ sigma, 1e-9)


def equilibrium(mu: np.ndarray, sigma: np.ndarray) -> Gaussian:
    """p_eq = N(Σ⁻¹μ, Σ⁻¹)"""
    inverse = np.linalg.inv(sigma)
    return Gaussian(tensor(inverse @ mu), tensor((inverse + inverse.T) / 2))


def image(law: Measure, matrix: np.ndarray, offset: np.ndarray | None = None) -> Measure:
    """The law of Bη + b for η of this law."""
    mapped = Image(law, tensor(matrix))
    return mapped if offset is None else mapped.shift(tensor(offset))


def moments_of(law: Measure) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance: the first two derivatives of G at 0."""
    zero = tensor(np.zeros(law.dim))
    return array(law.mean(zero)), array(law.fisher(zero))


def fluctuation(query: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """N times the covariance of attention over N keys of N(μ,Σ), to first order in 1/N (X-8)."""
    push = sigma @ query
    return np.exp(query @ push) * (sigma + np.outer(push, push))


def hermite(tilt: np.ndarray) -> float:
    """log E e^⟨z,tilt⟩ of a standard normal z in the plane, by quadrature."""
    nodes, weights = hermegauss(60)
    log_weights = np.log(weights / weights.sum())
    return sum(log_normalizer(np.array([t]), nodes[:, None], log_weights) for t in tilt)
