"""I. Contrast: losses that descend G, and contrastive divergence, which is another thing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import i0

from cumulant import Empirical, attend
from cumulant.boltzmann import RestrictedBoltzmann, contrastive_divergence
from cumulant.contrastive import (
    alignment_uniformity,
    info_nce,
    mutual_information_bound,
    nce_loss,
    sgns_loss,
    sgns_optimum,
    vmf_nll,
)
from cumulant.geometry import fenchel_young
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import differences, kl, logsumexp, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

STATES = np.array(list(product((0.0, 1.0), repeat=3)))  # of three binary units


@check("I1", "InfoNCE has the gradient (mean − positive)/τ: the loss descends G, attention ascends it")
def info_nce_gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    queries, keys, tau = inputs.normal(8, 4), inputs.normal(8, 4), 0.5
    query, key = tensor(queries).requires_grad_(), tensor(keys)

    def loss(q: np.ndarray) -> float:
        return (logsumexp(q @ keys.T / tau, axis=1) - (q * keys).sum(1) / tau).sum()

    slope = differences(loss, queries)
    (gradient,) = torch.autograd.grad(info_nce(query, key, temperature=tau, reduction="sum"), query)
    yield agrees("gradient in the queries against differences", gradient, slope, 1e-8)
    mean = attend(tensor(queries), key, scale=1 / tau).output
    yield agrees("(attention − positive)/τ", (mean - key) / tau, slope, 1e-8)

    parts = alignment_uniformity(query, key, temperature=tau)
    pairs = np.mean(np.sum(queries * keys, axis=1)) / tau
    yield agrees("alignment is −mean ⟨q,k⁺⟩/τ", parts.alignment, -pairs, 1e-13)
    yield agrees("uniformity is the mean of G(q/τ)", parts.uniformity, loss(queries) / 8 + pairs, 1e-13)
    (rise,) = torch.autograd.grad(8 * parts.uniformity, query)
    here = logsumexp(queries @ keys.T / tau, axis=1)
    h = Empirical(key)
    yield true("a small step down the loss's G lowers G", array(h.log_normalizer((query - 0.01 * rise) / tau)) < here)
    yield true("a step along attention raises G", array(h.log_normalizer(query / tau + mean)) > here)


@check(
    "I2",
    "InfoNCE is KL(δ ‖ p), a Fenchel–Young gap, a bound on information; over the whole sphere it is von Mises–Fisher",
)
def info_nce_divergence(inputs: RandomInputs) -> Iterator[Evidence]:
    q, keys, tau = inputs.normal(1, 4), inputs.normal(8, 4), 0.5
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)  # every point of a sphere is a vertex of their hull
    divergence = kl(np.eye(8)[0], softmax(keys @ q[0] / tau))
    yield agrees("KL(δ_{k⁺} ‖ p)", info_nce(tensor(q), tensor(keys), temperature=tau), divergence, 1e-12)
    gap = fenchel_young(Empirical(tensor(keys)), tensor(q[0] / tau), tensor(keys[0]))
    yield agrees("G + G*(k⁺) − ⟨η,k⁺⟩", gap, divergence, 1e-7)

    joint = inputs.probabilities(9).reshape(3, 3)
    information = kl(joint, np.outer(joint.sum(1), joint.sum(0)))
    loss = expected_info_nce(np.log(joint / joint.sum(0)), joint)
    bound = array(mutual_information_bound(loss, 2))
    yield true(
        "log N − loss ≤ I and ≤ log N", bound <= information and bound <= np.log(2), f"{bound:.3f} ≤ {information:.3f}"
    )

    angles, kappa = 2 * np.pi * np.arange(64) / 64, 1 / tau
    circle = np.c_[np.cos(angles), np.sin(angles)]
    exact = np.log(i0(kappa)) - kappa * circle[5, 0]
    yield agrees("von Mises–Fisher", vmf_nll(tensor(circle[5:6]), tensor(kappa * circle[:1])), exact, 1e-12)
    many = info_nce(tensor(circle[:1]), tensor(circle), temperature=tau, positives=torch.tensor([5]))
    yield agrees("InfoNCE over 64 directions, less log 64", many - np.log(64), exact, 1e-12)


def expected_info_nce(score: np.ndarray, joint: np.ndarray) -> torch.Tensor:
    """Of one positive and one negative, over all triples (x, y⁺, y⁻)."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y, other in product(range(3), repeat=3):
        key = tensor(np.eye(3)[[y, other]])
        total += joint[x, y] * joint[:, other].sum() * info_nce(tensor(score[x : x + 1]), key)
    return total


@check("I3", "word2vec ends at PMI − log k, noise-contrastive estimation at the log-density; both are binary")
def binary_losses(inputs: RandomInputs) -> Iterator[Evidence]:
    joint, k = inputs.probabilities(20).reshape(4, 5), 3
    words, contexts = joint.sum(1), joint.sum(0)
    lowest = [[binary_minimum(joint[a, b], k * words[a] * contexts[b]) for b in range(5)] for a in range(4)]
    optimum = sgns_optimum(tensor(joint), k)
    yield agrees("PMI − log k against minimisation", optimum, lowest, 1e-5)

    score = optimum.clone().requires_grad_()
    basis = torch.eye(5, dtype=torch.float64)
    drawn = basis[None, None, :, None].expand(1, 1, 5, k, 5)  # k times the same: the loss is a sum over negatives
    loss = sgns_loss(score[:, None, None], basis[None, :, None], drawn, reduction="none")
    expected = (loss * tensor(joint[:, :, None] * contexts)).sum()
    yield agrees("slope of the word2vec loss there", torch.autograd.grad(expected, score)[0], np.zeros((4, 5)), 1e-12)
    yield differs("read as log p(context|word)", optimum, np.log(joint / words[:, None]), 0.5)

    data, noise = inputs.probabilities(5), inputs.probabilities(5)
    lowest = [binary_minimum(p, k * n) + np.log(k * n) for p, n in zip(data, noise, strict=True)]
    yield agrees("slope of the NCE loss at its minimum", nce_slope(lowest, data, noise, k), np.zeros(5), 1e-6)
    yield agrees("slope at the log-density", nce_slope(np.log(data), data, noise, k), np.zeros(5), 1e-12)


def nce_slope(log_density: ArrayLike, data: np.ndarray, noise: np.ndarray, k: int) -> torch.Tensor:
    """The derivative of the expected NCE loss in the score of every outcome."""
    score, log_noise = tensor(log_density).requires_grad_(), tensor(np.log(noise))
    pairs = len(data), len(noise), k
    noise_score, noise_log_noise = (t[None, :, None].expand(pairs) for t in (score, log_noise))
    loss = nce_loss(score[:, None], noise_score, log_noise[:, None], noise_log_noise, reduction="none")
    return torch.autograd.grad((loss * tensor(np.outer(data, noise))).sum(), score)[0]


def binary_minimum(yes: float, no: float) -> float:
    """The s that minimises yes · log(1 + e^−s) + no · log(1 + e^s)."""

    def loss(s: float) -> float:
        return yes * np.logaddexp(0, -s) + no * np.logaddexp(0, s)

    return minimize_scalar(loss, bounds=(-20, 20), method="bounded", options={"xatol": 1e-12}).x


@check("I4", "contrastive divergence tends to the likelihood gradient of a Boltzmann machine as its chains grow long")
def long_chains(inputs: RandomInputs) -> Iterator[Evidence]:
    machine, exact, rows = boltzmann(inputs)
    ours = machine.likelihood_gradient(tensor(rows))
    yield agrees("likelihood gradient against the table of all states", ours.weight, exact, 1e-12)
    yield agrees("chains of 10,000 steps, expected", expected_divergence(machine, rows, 10_000), exact, 1e-10)
    many = np.tile(rows, (1000, 1))
    drawn = contrastive_divergence(machine, tensor(many), 50, generator=inputs.generator)
    error = 0.5 / np.sqrt(len(many))  # at most, for a mean of numbers in [0, 1]; the side of the data is exact
    off = (array(drawn.weight) - expected_divergence(machine, rows, 50)) / error
    yield agrees("simulated chains of 50 steps, in standard errors", off, np.zeros((3, 3)), 4.5)


@check("I5", "contrastive divergence is neither the likelihood gradient nor that of InfoNCE")
def short_chains(inputs: RandomInputs) -> Iterator[Evidence]:
    machine, exact, rows = boltzmann(inputs)
    one_step = expected_divergence(machine, rows, 1)
    many = np.tile(rows, (5000, 1))
    drawn = contrastive_divergence(machine, tensor(many), 1, generator=inputs.generator)
    error = 0.5 / np.sqrt(len(many))
    off = (array(drawn.weight) - one_step) / error
    yield agrees("simulated chains of one step, in standard errors", off, np.zeros((3, 3)), 4.5)
    yield differs("one step as the likelihood gradient", one_step, exact, 0.02)
    yield differs("simulated, as the likelihood gradient", drawn.weight, exact, 0.02)

    weight = machine.weight.clone().requires_grad_()
    hidden, data = machine.hidden_mean(tensor(rows)).detach(), tensor(rows)
    (slope,) = torch.autograd.grad(info_nce(hidden @ weight.mT, data), weight)
    weights = softmax(array(hidden) @ array(machine.weight).T @ rows.T, axis=1)
    negatives = (weights @ rows).T @ array(hidden) / len(rows)  # other data, weighted; no chain
    by_hand = rows.T @ array(hidden) / len(rows) - negatives
    yield agrees("InfoNCE between hidden and visible units", -slope, by_hand, 1e-12)
    yield differs("InfoNCE as contrastive divergence", -slope, one_step, 0.02)
    yield differs("InfoNCE as the likelihood gradient", -slope, exact, 0.02)


def boltzmann(inputs: RandomInputs) -> tuple[RestrictedBoltzmann, np.ndarray, np.ndarray]:
    """A machine of 3 + 3 units, its likelihood gradient from the table of its 64 states, and 16 rows of data.

    Its units hold on to each other, and half of the data is in one state: a short chain stays near there.
    """
    weight = 4 * np.eye(3) + 0.5 * inputs.normal(3, 3)
    visible, hidden = 0.5 * inputs.normal(2, 3) - 2
    rows = np.vstack([np.ones((8, 3)), STATES[inputs.rng.choice(8, 8, p=inputs.probabilities(8))]])
    joint = softmax(STATES @ weight @ STATES.T + (STATES @ visible)[:, None] + STATES @ hidden)
    conditional = joint / joint.sum(1, keepdims=True)
    data = np.einsum("v,vh,va,hb->ab", shares(rows), conditional, STATES, STATES)
    exact = data - np.einsum("vh,va,hb->ab", joint, STATES, STATES)
    return RestrictedBoltzmann(tensor(weight), tensor(visible), tensor(hidden)), exact, rows


def expected_divergence(machine: RestrictedBoltzmann, rows: np.ndarray, steps: int) -> np.ndarray:
    """The mean of contrastive divergence over all chains: the library's conditionals as matrices over states."""

    def kernel(mean: torch.Tensor) -> np.ndarray:
        on = array(mean)[:, None]
        return np.where(STATES == 1, on, 1 - on).prod(-1)

    hidden = machine.hidden_mean(tensor(STATES))
    sweep = kernel(hidden) @ kernel(machine.visible_mean(tensor(STATES)))
    start = shares(rows)
    end = start @ np.linalg.matrix_power(sweep, steps)
    return STATES.T @ ((start - end)[:, None] * array(hidden))


def shares(rows: np.ndarray) -> np.ndarray:
    """How much of the data is in each of the eight states."""
    return (rows[:, None] == STATES).all(-1).mean(0)
