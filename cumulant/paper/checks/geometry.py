"""H. Information geometry: two divergences, two charts, one metric; and when keys are dual coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cumulant import Empirical, Gaussian, geometry
from cumulant.attention import attend
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import attention_mean, covariance, differences, kl, log_normalizer, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check


@check("H1", "the Bregman divergence of G is KL with its arguments exchanged")
def bregman(inputs: RandomInputs) -> Iterator[Evidence]:
    two = pair(inputs)
    ours = geometry.bregman(two.measure, tensor(two.a), tensor(two.b))
    yield agrees("B_G(a,b) = KL(p_b‖p_a)", ours, kl(two.p_b, two.p_a), 1e-12)
    slope = differences(lambda e: log_normalizer(e, two.x, two.w), two.b)
    gap = log_normalizer(two.a, two.x, two.w) - log_normalizer(two.b, two.x, two.w) - slope @ (two.a - two.b)
    yield agrees("G(a) − G(b) − ⟨∇G(b), a−b⟩", ours, gap, 1e-8)


@check("H2", "B_G(a,b) is not KL(p_a‖p_b)")
def bregman_as_written(inputs: RandomInputs) -> Iterator[Evidence]:
    two = uneven_pair(inputs)
    ours = geometry.bregman(two.measure, tensor(two.a), tensor(two.b))
    yield agrees("B_G(a,b) = KL(p_b‖p_a)", ours, kl(two.p_b, two.p_a), 1e-12)
    yield differs("B_G(a,b) = KL(p_a‖p_b)", kl(two.p_a, two.p_b), array(ours), 1e-2)


@check("H3", "the Bregman divergence of G* is KL with its arguments in order")
def dual_bregman(inputs: RandomInputs) -> Iterator[Evidence]:
    two = pair(inputs)
    mean_a, mean_b = tensor(two.p_a @ two.x), tensor(two.p_b @ two.x)
    # a solver finds η from the mean: the round trip has 1e-8, not the 1e-12 of an identity
    ours = geometry.dual_bregman(two.measure, mean_a, mean_b)
    yield agrees("B_G*(μ_a,μ_b) = KL(p_a‖p_b)", ours, kl(two.p_a, two.p_b), 1e-8)
    exchanged = geometry.bregman(two.measure, tensor(two.b), tensor(two.a))
    yield agrees("B_G(b,a) = KL(p_a‖p_b)", exchanged, kl(two.p_a, two.p_b), 1e-12)
    young = geometry.fenchel_young(two.measure, tensor(two.b), mean_a)
    yield agrees("G(b) + G*(μ_a) − ⟨b,μ_a⟩ = KL(p_a‖p_b)", young, kl(two.p_a, two.p_b), 1e-8)


@check("H4", "B_G*(μ_a,μ_b) is not KL(p_b‖p_a)")
def dual_bregman_as_written(inputs: RandomInputs) -> Iterator[Evidence]:
    two = uneven_pair(inputs)
    ours = geometry.dual_bregman(two.measure, tensor(two.p_a @ two.x), tensor(two.p_b @ two.x))
    yield agrees("B_G*(μ_a,μ_b) = KL(p_a‖p_b)", ours, kl(two.p_a, two.p_b), 1e-8)
    yield differs("B_G*(μ_a,μ_b) = KL(p_b‖p_a)", kl(two.p_b, two.p_a), array(ours), 1e-2)


@check("H5", "KL is half the squared Fisher length of a small step, and dμ = C dη")
def metric(inputs: RandomInputs) -> Iterator[Evidence]:
    two, step = pair(inputs), 1e-3 * inputs.normal(3)
    here, there = tensor(two.a), tensor(two.a + step)
    curve = covariance(two.a, two.x, two.w)
    length = geometry.inner(two.measure, here, tensor(step), tensor(step))
    yield agrees("⟨δ,δ⟩_η = δᵀCδ, relative", array(length) / (step @ curve @ step), 1.0, 1e-12)
    divergence = kl(two.p_a, softmax(two.x @ (two.a + step) + two.w))
    yield agrees("KL(p_η‖p_{η+δ}) / ½⟨δ,δ⟩_η", divergence / (array(length) / 2), 1.0, 2e-2)
    yield agrees("KL(p_η‖p_{η+δ})", geometry.kl(two.measure, here, there), divergence, 1e-14)
    pushed = two.measure.fisher_mv(here, tensor(two.b))
    slope = differences(lambda e: attention_mean(e, two.x, two.w), two.a)
    yield agrees("dμ = C dη", pushed, slope @ two.b, 1e-8)


@check("H6", "the natural gradient in η is the plain gradient in μ; attention's step is not one")
def natural_gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    two, target = pair(inputs), inputs.normal(3)
    mean = attention_mean(two.a, two.x, two.w)
    gradient = differences(lambda e: ((attention_mean(e, two.x, two.w) - target) ** 2).sum() / 2, two.a)
    ours = geometry.natural_gradient(two.measure, tensor(two.a), tensor(gradient))
    yield agrees("C⁻¹∇_ηL = ∇_μL for L = ½|μ − t|²", ours, mean - target, 1e-5)
    slope = two.measure.mean(tensor(two.a))
    steepest = geometry.natural_gradient(two.measure, tensor(two.a), slope)
    solved = np.linalg.solve(covariance(two.a, two.x, two.w), mean)
    yield agrees("C⁻¹∇G, relative", array(steepest) / np.abs(solved).max(), solved / np.abs(solved).max(), 1e-9)
    yield true("it is not ∇G, the step of attention", np.abs(solved - array(slope)).max() > 1e-2)


@check("H7", "a Gaussian h: keys k = Σq are the dual coordinates of the queries, up to a row constant")
def dual_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    mu, sigma, queries = inputs.normal(3), inputs.covariance(3), inputs.normal(6, 3)
    keys = queries @ sigma
    duals = Gaussian(tensor(mu), tensor(sigma)).mean(tensor(queries))
    yield agrees("∇G(q_j) = k_j + μ", duals, keys + mu, 1e-13)
    weights = attend(tensor(queries), duals, tensor(np.eye(6)), scale=1.0).output
    yield agrees("softmax⟨q_i,∇G(q_j)⟩ = softmax⟨q_i,k_j⟩", weights, softmax(queries @ keys.T, axis=1), 1e-13)
    yield differs("⟨q_i,k_j⟩ = ⟨q_i,∇G(q_j)⟩ before the softmax", queries @ keys.T, queries @ array(duals).T, 1e-2)


@check("H8", "finitely many keys are not their own dual coordinates unless all of them coincide")
def no_dual_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    keys, queries = inputs.normal(6, 3), inputs.normal(6, 3)
    duals = array(Empirical(tensor(keys)).mean(tensor(queries)))
    yield agrees("∇G(q_j)", duals, [attention_mean(q, keys) for q in queries], 1e-14)
    yield differs("k_j = ∇G(q_j)", keys, duals, 1e-2)
    # a mean of all keys with positive weights lies strictly between the least and the largest, in every direction
    weights = softmax(queries @ keys.T, axis=1)
    shrink = 1 - len(keys) * weights.min()
    yield true("the range of ∇G(q_j) is smaller", np.ptp(duals, axis=0) <= shrink * np.ptp(keys, axis=0) + 1e-14)

    # keys in the unit ball: no weight is below e⁻²/6, and each step shrinks the range by 1 − e⁻² at least
    keys = keys / np.linalg.norm(keys, axis=1).max()
    for _ in range(150):
        keys = array(Empirical(tensor(keys)).mean(tensor(keys)))
    yield agrees("k ← ∇G_k(k) ends in one point", np.ptp(keys, axis=0), 0.0, 1e-8)


class Pair(NamedTuple):
    """A measure of seven atoms, two natural parameters and their laws."""

    measure: Empirical
    x: np.ndarray
    w: np.ndarray
    a: np.ndarray
    b: np.ndarray
    p_a: np.ndarray
    p_b: np.ndarray


def pair(inputs: RandomInputs) -> Pair:
    return laws(inputs.normal(7, 3), np.log(inputs.probabilities(7)), inputs.normal(3), inputs.normal(3))


def uneven_pair(inputs: RandomInputs) -> Pair:
    """A law close to the uniform one and one close to a single atom: the two orders of KL are far apart."""
    x, far = inputs.normal(7, 3), inputs.normal(3)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return laws(unit, np.zeros(7), 0.3 * inputs.normal(3), 6 * far / np.linalg.norm(far))


def laws(x: np.ndarray, w: np.ndarray, a: np.ndarray, b: np.ndarray) -> Pair:
    return Pair(Empirical(tensor(x), tensor(w)), x, w, a, b, softmax(x @ a + w), softmax(x @ b + w))
