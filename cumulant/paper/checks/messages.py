"""K. Messages: attention read as one step of a switching filter, and the canonical link.

i is a key and an old mode, j a query and a new mode. Matrices here are (query, key): row j holds P(A = i | A′ = j).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import integrate, stats
from scipy.special import expit
from torch.distributions import Bernoulli

from cumulant import Empirical, Gaussian, attend, convolve, from_distribution
from cumulant.link import canonical_link, link_fit
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, measured, true
from cumulant.paper.checks.oracle import attention_mean, covariance, log_normalizer, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

QUERY_SCALES = {0.2: 0.998, 0.5: 0.989, 1.0: 0.963, 2.0: 0.907, 4.0: 0.829, 8.0: 0.756}  # and R² on 200 Gaussian keys


def head(inputs: RandomInputs, modes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, with their queries and keys."""
    hidden = inputs.normal(modes, 4)
    return hidden, hidden @ inputs.normal(4, 4), hidden @ inputs.normal(4, 4)


def weights_of(query: np.ndarray, key: np.ndarray, log_prior: np.ndarray | None = None) -> np.ndarray:
    """The library's attention matrix: what it answers when the values are one-hot."""
    one_hot = torch.eye(len(key), dtype=torch.float64)
    prior = None if log_prior is None else tensor(log_prior)
    return array(attend(tensor(query), tensor(key), one_hot, log_weights=prior).output)


def received(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor | bool = True) -> np.ndarray:
    """The library's Σ_j π_j A_ij, attention received by each key."""
    marginal = attend(query, key, source_marginal=weights).source_marginal
    assert marginal is not None
    return array(marginal)


@check("K5", "the weights are softmax over keys of ⟨H_jW_q, H_iW_k⟩/√d; with the matrices exchanged they are others")
def weights(inputs: RandomInputs) -> Iterator[Evidence]:
    hidden, query, key = head(inputs)
    truth = softmax(query @ key.T / 2, axis=1)
    yield agrees("weights", weights_of(query, key), truth, 1e-13)
    yield differs("⟨H_jW_k, H_iW_q⟩", weights_of(key, query), truth, 0.05)
    symmetric = hidden @ inputs.covariance(4)
    ours = weights_of(hidden, symmetric)
    yield agrees("no matter which, if W_qW_kᵀ is symmetric", ours, softmax(symmetric @ hidden.T / 2, axis=1), 1e-13)


@check("K6", "the prior of the modes stands inside the softmax; a uniform one cancels and must not multiply")
def prior(inputs: RandomInputs) -> Iterator[Evidence]:
    _, query, key = head(inputs)
    sigma = inputs.probabilities(5)
    joint = np.exp(query @ key.T / 2) * sigma
    yield agrees("Bayes' rule", weights_of(query, key, np.log(sigma)), joint / joint.sum(1, keepdims=True), 1e-13)
    uniform = weights_of(query, key, np.full(5, -np.log(5)))
    yield agrees("a uniform prior", uniform, softmax(query @ key.T / 2, axis=1), 1e-13)
    yield differs("softmax · 1/M as a law of the old mode", (uniform / 5).sum(1), np.ones(5), 0.5)


@check("K7", "the weights are the backward kernel: they sum to one over old modes, not over new ones")
def backward(inputs: RandomInputs) -> Iterator[Evidence]:
    _, query, key = head(inputs)
    ours, new = weights_of(query, key), inputs.probabilities(5)
    yield agrees("sum over old modes", ours.sum(1), np.ones(5), 1e-14)
    yield differs("as P(j|i): sum over new modes", ours.sum(0), np.ones(5), 0.1)
    forward = ours * new[:, None] / received(tensor(query), tensor(key), tensor(new))
    yield agrees(
        "P(j|i) by Bayes' rule from the implied marginal: sum over new modes", forward.sum(0), np.ones(5), 1e-12
    )


@check("K8", "uniform weights of the modes survive a layer only if the attention matrix is doubly stochastic")
def source_marginal(inputs: RandomInputs) -> Iterator[Evidence]:
    _, query, key = head(inputs)
    implied = softmax(query @ key.T / 2, axis=1).mean(0)
    ours = received(tensor(query), tensor(key))
    yield agrees("attention received by each key", ours, implied, 1e-13)
    yield agrees("it sums to one", ours.sum(), 1.0, 1e-13)
    yield differs("σ = 1/M", np.full(5, 0.2), implied, 0.03)
    angles = 2 * np.pi * np.arange(5) / 5 + inputs.normal(1)
    ring = tensor(np.c_[np.cos(angles), np.sin(angles)])  # all rows are permutations of one: a doubly stochastic matrix
    yield agrees("tokens on a ring", received(ring, ring), np.full(5, 0.2), 1e-14)


@check("K10", "the mean of the new state given the new mode is Σ_i A_ij H_iW_v")
def mixture_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    hidden, query, key = head(inputs)
    value = hidden @ inputs.normal(4, 3)
    by_hand = np.zeros((5, 3))
    for j in range(5):
        scores = np.array([np.exp(query[j] @ key[i] / 2) for i in range(5)])
        by_hand[j] = sum(scores[i] / scores.sum() * value[i] for i in range(5))
    yield agrees("output", attend(tensor(query), tensor(key), tensor(value)).output, by_hand, 1e-13)


@check("K11", "a component of that mean integrates x′ against one density, not against its square")
def component_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    loc, spread, w = 0.7, 0.5, 1.3

    def first_moment(power: int) -> float:
        return integrate.quad(lambda x: x * stats.norm.pdf(x, w * loc, w * spread) ** power, -10, 10)[0]

    image = tensor([[w]]) @ Gaussian(tensor([loc]), tensor([[spread**2]]))
    yield agrees("mean of the image", image.mean(tensor([0.0])), first_moment(1), 1e-9)
    yield differs("∫ x′ p(x′) p(x′) dx′", first_moment(2), first_moment(1), 0.3)


@check("K12", "a linear map of h evaluates G at the transposed parameter, invertible or not")
def pushforward(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, matrix, eta = inputs.normal(7, 3), np.log(inputs.probabilities(7)), inputs.normal(2, 3), inputs.normal(2)
    h = Empirical(tensor(x), tensor(w))
    mapped = log_normalizer(eta, x @ matrix.T, w)
    yield agrees("G of W#h, W (2, 3)", (tensor(matrix) @ h).log_normalizer(tensor(eta)), mapped, 1e-13)
    yield agrees("G of h at Wᵀη", h.log_normalizer(tensor(matrix.T @ eta)), mapped, 1e-13)
    square, here = inputs.covariance(3), inputs.normal(3)
    there = (tensor(square) @ h).mean(tensor(np.linalg.solve(square.T, here)))
    yield agrees("W invertible: W⁻ᵀη is the same member", there, square @ attention_mean(here, x, w), 1e-12)


@check("K13", "the mean is mapped linearly, noise or not: one W_v for all modes is one value matrix")
def mapped_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, matrix, eta = inputs.normal(7, 3), np.log(inputs.probabilities(7)), inputs.normal(2, 3), inputs.normal(2)
    image = tensor(matrix) @ Empirical(tensor(x), tensor(w))
    mapped = matrix @ attention_mean(matrix.T @ eta, x, w)
    yield agrees("mean of W#h", image.mean(tensor(eta)), mapped, 1e-13)
    noisy = convolve(image, Gaussian(tensor([0, 0]), tensor(inputs.covariance(2))))
    plain = matrix @ (np.exp(w) @ x)
    yield agrees("with zero-mean noise", noisy.mean(tensor([0, 0])), plain, 1e-13)
    query = inputs.normal(4, 3)
    ours = attend(tensor(query), tensor(x), tensor(x @ matrix.T), scale=1.0).output
    yield agrees("attention with values W_v x", ours, softmax(query @ x.T, axis=1) @ x @ matrix.T, 1e-13)


@check("K14", "under a conjugate prior the expected mean is χ/ν, and (χ + x)/(ν + 1) after an observation")
def conjugate_prior(inputs: RandomInputs) -> Iterator[Evidence]:
    chi, nu = inputs.rng.uniform(2.0, 4.0), 6.0
    bernoulli = from_distribution(Bernoulli(tensor(0.5)))
    grid = np.linspace(-60, 60, 12001)  # equal steps: exponentially accurate for what decays at both ends
    mean, g = (array(f(tensor(grid[:, None]))) for f in (bernoulli.mean, bernoulli.log_normalizer))
    yield agrees("the mean is a sigmoid", mean[:, 0], expit(grid), 1e-14)

    def expected(chi: float, nu: float) -> float:
        return softmax(chi * grid - nu * g) @ mean[:, 0]

    yield agrees("E[∇G] = χ/ν", expected(chi, nu), chi / nu, 1e-9)
    for x in (0, 1):
        yield agrees(f"after x = {x}", expected(chi + x, nu + 1), (chi + x) / (nu + 1), 1e-9)
    yield differs("without −νG(η), cut off at |η| = 60", expected(chi, 0.0), chi / nu, 0.3)


@check("K15", "attention at the exact link is the identity on means; what grows is the residual")
def exact_link(inputs: RandomInputs) -> Iterator[Evidence]:
    keys = inputs.normal(200, 2)
    keys -= keys.mean(0)
    queries = 0.7 * inputs.normal(40, 2)
    key, mean = tensor(keys), softmax(queries @ keys.T, axis=1) @ keys
    link = canonical_link(key, tensor(mean))
    yield true("the link exists inside the hull", link.converged)
    yield agrees("attention(∇G*(μ)) = μ", attend(link.value, key, scale=1.0).output, mean, 1e-10)
    yield agrees("∇G*(∇G(η)) = η", link.value, queries, 1e-9)

    inside = 0.3 * queries  # within the hull, so that f can be applied to parameters as if they were means
    wrong = attend(canonical_link(key, tensor(inside)).value, key, scale=1.0).output
    yield differs("f applied to η in the place of μ", wrong, softmax(inside @ keys.T, axis=1) @ keys, 0.01)
    moved = tensor(queries)
    for _ in range(3):
        mean = attend(moved, key, scale=1.0).output
        moved = canonical_link(key, mean).value + mean
    yield true(
        "with a residual every parameter grows, though the link is exact",
        moved.norm(dim=1) > tensor(queries).norm(dim=1),
    )
    yield differs("no growth without a linear link", moved, queries, 0.5)


def linear_link(keys: np.ndarray, queries: np.ndarray) -> float:
    """R² of the best affine map from attention outputs back to queries."""
    outputs = softmax(queries @ keys.T, axis=1) @ keys
    design = np.c_[outputs, np.ones(len(queries))]
    left = queries - design @ np.linalg.lstsq(design, queries, rcond=None)[0]
    return 1 - (left**2).sum() / ((queries - queries.mean(0)) ** 2).sum()


@check("K16", "how linear the link is: R² of queries on attention outputs, by length of the queries")
def link_linearity(inputs: RandomInputs) -> Iterator[Evidence]:
    keys, ours = inputs.normal(200, 2), []
    for scale, reference in QUERY_SCALES.items():
        queries = scale * inputs.normal(300, 2)
        fit = link_fit(tensor(queries), tensor(keys), scale=1.0)
        ours.append(float(fit.r_squared))
        yield agrees(f"R², query scale {scale:g}", fit.r_squared, linear_link(keys, queries), 1e-10)
        atoms = f"expected near {reference}; {float(fit.effective_atoms):.0f} effective keys of 200"
        yield measured(f"R² at {scale:g}", ours[-1], atoms)
        yield agrees(f"R² at {scale:g} near the expected value", ours[-1], reference, 0.1)  # keys and queries are drawn
    yield true("longer queries, less linear", np.diff(ours) < 0)


@check("K17", "a linear link is right for short queries on Gaussian keys, exact for a Gaussian, poor once saturated")
def linear_link_limits(inputs: RandomInputs) -> Iterator[Evidence]:
    keys = inputs.normal(200, 2)
    short, long = (link_fit(tensor(s * inputs.normal(300, 2)), tensor(keys), scale=1.0) for s in (0.2, 8.0))
    inverse = np.linalg.inv(np.cov(keys.T, bias=True))
    yield agrees("Gaussian slope is Cov(K)⁻¹", short.gaussian_slope, inverse, 1e-12)
    yield true("R² above 0.99 for short queries", short.r_squared > 0.99)
    yield agrees("their slope, relative to Cov(K)⁻¹", short.slope_error, 0.0, 0.1)
    yield differs("the linear link as exact for long queries: R² = 1", long.r_squared, 1.0, 0.1)
    loc, sigma = inputs.normal(2), inputs.covariance(2)
    mean = inputs.normal(5, 2)
    exact = np.linalg.solve(sigma, (mean - loc).T).T
    yield agrees(
        "Gaussian h: Σ⁻¹(μ − m)", Gaussian(tensor(loc), tensor(sigma)).natural(tensor(mean)).value, exact, 1e-11
    )


@check("K18", "fixed weights without a residual average to a consensus, a single row")
def consensus(inputs: RandomInputs) -> Iterator[Evidence]:
    hidden = inputs.normal(5, 4)
    values, tokens = tensor(hidden), tensor(hidden)
    for _ in range(100):
        values = attend(tokens, tokens, values, scale=0.1).output
    mass = np.exp(0.1 * hidden @ hidden.T).sum(1)  # symmetric scores: a reversible chain, at rest in its normalisers
    yield agrees("spread of the tokens", np.ptp(array(values), axis=0), np.zeros(4), 1e-12)
    yield agrees("their common value", values, mass / mass.sum() @ hidden, 1e-12)


@check("K19", "attention over Gaussian keys is importance sampling of the tilted Gaussian")
def importance_sampling(inputs: RandomInputs) -> Iterator[Evidence]:
    count, q = 20_000, 1.5
    keys = inputs.normal(count, 1)
    share = softmax(q * keys[:, 0])
    ours = attend(tensor([[q]]), tensor(keys), scale=1.0)
    yield agrees("effective keys are 1/Σp²", ours.effective_atoms, 1 / (share**2).sum(), 1e-9)
    yield measured(
        "effective keys", float(ours.effective_atoms), f"of {count}; N e^(−q²) = {count * np.exp(-(q**2)):.0f}"
    )
    ratio = float(ours.effective_atoms) / (count * np.exp(-(q**2)))
    yield true("within a factor 2 of N e^(−q²)", 0.5 < ratio < 2, f"{ratio:.2f}")
    error = np.sqrt(np.exp(q**2) * (1 + q**2) / count)
    yield agrees("output against the tilted mean q, in standard errors", (float(ours.output) - q) / error, 0.0, 4.5)


@check("K20", "near a query a head is a local Gaussian model, and its error is the third cumulant")
def local_model(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta, step = inputs.normal(7, 3), inputs.normal(3), inputs.normal(3)
    step *= 1e-3 / np.linalg.norm(step)
    h, here, there = Empirical(tensor(x)), tensor(eta), tensor(eta + step)
    error = h.mean(there) - h.mean(here) - h.fisher_mv(here, tensor(step))
    centred = x - attention_mean(eta, x)
    third = (softmax(x @ eta) * (centred @ step) ** 2) @ centred / 2
    size = float(np.linalg.norm(third))
    yield agrees("error of the linear model, relative to ½κ₃[δ,δ]", error / size, third / size, 1e-2)


@check("K25", "a key drawn by its weight has attention as mean and Fisher information as covariance")
def stochastic_attention(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta, count = inputs.normal(7, 3), inputs.normal(2, 3), 100_000
    p, mean = softmax(eta @ x.T, axis=1), softmax(eta @ x.T, axis=1) @ x
    h = Empirical(tensor(x))
    drawn = array(h.sample(tensor(eta), count, generator=inputs.generator))  # (query, inputs, dim)
    hits = (drawn[:, :, None] == x).all(-1).sum(1)
    yield agrees("counts, in standard errors", (hits - count * p) / np.sqrt(count * p * (1 - p)), np.zeros((2, 7)), 4.5)

    cov = np.stack([covariance(e, x) for e in eta])
    error = np.sqrt(np.diagonal(cov, axis1=1, axis2=2) / count)
    yield agrees("mean against attention, in standard errors", (drawn.mean(1) - mean) / error, np.zeros((2, 3)), 4.5)
    around = drawn - mean[:, None]
    second = np.einsum("qna,qnb->qab", around, around) / count
    fourth = np.einsum("qn,qna,qnb->qab", p, (x - mean[:, None]) ** 2, (x - mean[:, None]) ** 2)
    error = np.sqrt((fourth - cov**2) / count)
    fisher = array(h.fisher(tensor(eta)))
    yield agrees("covariance against Fisher, in standard errors", (second - fisher) / error, np.zeros((2, 3, 3)), 4.5)
    across = around[0].T @ around[1] / count
    error = np.sqrt(np.outer(np.diag(cov[0]), np.diag(cov[1])) / count)
    yield agrees("tokens are independent given the input, in standard errors", across / error, np.zeros((3, 3)), 4.5)

    second_layer = attend(tensor(x), tensor(x), scale=1.0).output  # of each key that may have been drawn
    ancestral = p @ (softmax(x @ x.T, axis=1) @ x)
    yield agrees("two layers, by samples", p @ array(second_layer), ancestral, 1e-13)
    passed = attend(tensor(mean), tensor(x), scale=1.0).output
    yield true("two layers, by means, are another answer", np.abs(array(passed) - ancestral).max() > 1e-2)
