"""K, continued. Switching filters: the mixture that a mode inherits, its projection, what an observation changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy import integrate, optimize, stats
from torch.distributions import Bernoulli

from cumulant import from_distribution
from cumulant.filters import SwitchingLinearGaussian, gpb, imm
from cumulant.filters.heads import sinkhorn_attention
from cumulant.filters.projection import m_projection
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.samplers import gibbs

MODES, NEW = 3, 1  # modes, and the one that is looked at


class Switch(NamedTuple):
    """A belief over three modes in the plane, and how each of them moves."""

    prior: np.ndarray
    transition: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    maps: np.ndarray
    noise: np.ndarray

    def model(self) -> SwitchingLinearGaussian:
        return SwitchingLinearGaussian(
            *(tensor(x) for x in (self.transition, self.maps, self.noise, np.eye(2), np.eye(2))),
            initial_mean=tensor(self.means),
            initial_covariance=tensor(self.covariances),
            initial_modes=tensor(self.prior),
            start="belief",
        )

    def inherited(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the new state in the new mode, if the old modes have these weights."""
        moved = self.means @ self.maps[NEW].T
        mean = weights @ moved
        within = np.einsum("i,iab->ab", weights, self.covariances)
        between = (moved - mean).T @ (weights[:, None] * (moved - mean))
        return mean, self.maps[NEW] @ within @ self.maps[NEW].T + self.noise[NEW] + between


def _switch(inputs: RandomInputs) -> Switch:
    return Switch(
        inputs.probabilities(MODES),
        inputs.rng.dirichlet(np.full(MODES, 0.5), MODES),
        2 * inputs.normal(MODES, 2),
        np.stack([inputs.covariance(2, 0.2, 0.8) for _ in range(MODES)]),
        inputs.normal(MODES, 2, 2),
        np.stack([inputs.covariance(2, 0.1, 0.4) for _ in range(MODES)]),
    )


def _unseen(switch: Switch, method=gpb) -> tuple[np.ndarray, np.ndarray]:
    """The engine's belief in the new mode after one step without an observation."""
    ours = method(switch.model(), torch.full((1, 2), torch.nan, dtype=torch.float64))
    return array(ours.mode_means[0, NEW]), array(ours.mode_covariances[0, NEW])


@check("K1", "the new mode inherits the old ones with weights P(i given j) ∝ P(j given i) π_i")
def inherited_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    switch = _switch(inputs)
    weights = switch.prior * switch.transition[:, NEW]
    mean, _ = switch.inherited(weights / weights.sum())
    yield agrees("mean in the new mode", _unseen(switch)[0], mean, 1e-12)
    runs = switch.model().simulate(1, batch_shape=(200_000,), generator=inputs.generator)
    here = runs.states[:, 0][runs.modes[:, 0] == NEW]
    error = here.std(0) / len(here) ** 0.5
    yield agrees("by simulation, in standard errors", (here.mean(0) - tensor(mean)) / error, 0.0, 4.5)


@check("K2", "weights π_i alone, without the transition, belong to another law")
def prior_weights(inputs: RandomInputs) -> Iterator[Evidence]:
    base = _switch(inputs)
    # two modes apart, of which one hardly ever leads to the new mode: the error is visible for every seed
    switch = base._replace(
        prior=np.array([0.45, 0.1, 0.45]),
        means=np.array([[3.0, 0.0], [0.0, 0.0], [-3.0, 0.0]]),
        transition=np.array([[0.05, 0.9, 0.05], [0.3, 0.4, 0.3], [0.5, 0.01, 0.49]]),
        maps=np.stack([np.eye(2)] * MODES),
    )
    mean, _ = switch.inherited(switch.prior)
    ours, _ = _unseen(switch)
    yield differs("mean with prior weights", mean, ours, 1.0)
    weights = switch.prior * switch.transition[:, NEW]
    yield agrees("with the transition in them", ours, switch.inherited(weights / weights.sum())[0], 1e-12)


@check("K3", "the covariance of the projection is that within the modes plus that between their means")
def within_and_between(inputs: RandomInputs) -> Iterator[Evidence]:
    switch = _switch(inputs)
    weights = switch.prior * switch.transition[:, NEW]
    weights /= weights.sum()
    mean, covariance = switch.inherited(weights)
    yield agrees("covariance in the new mode", _unseen(switch)[1], covariance, 1e-12)
    moved = switch.means @ switch.maps[NEW].T
    spread = switch.maps[NEW] @ switch.covariances @ switch.maps[NEW].T + switch.noise[NEW]
    ours = m_projection(tensor(weights), tensor(moved), tensor(spread))
    yield agrees("m_projection: mean", ours.mean, mean, 1e-12)
    yield agrees("m_projection: covariance", ours.covariance, covariance, 1e-12)


@check("K4", "of all normal laws the projection has the least divergence from the mixture")
def least_divergence(inputs: RandomInputs) -> Iterator[Evidence]:
    weights, means, scales = np.array([0.3, 0.7]), inputs.rng.uniform(-2, 2, 2), inputs.rng.uniform(0.4, 1.0, 2)

    def cross_entropy(theta: np.ndarray) -> float:
        def term(x: float) -> float:
            density = (weights * stats.norm.pdf(x, means, scales)).sum()
            return density * stats.norm.logpdf(x, theta[0], np.exp(theta[1]))

        return -integrate.quad(term, -12, 12, points=sorted(means))[0]

    best = optimize.minimize(cross_entropy, [0.0, 0.0], tol=1e-12).x
    ours = m_projection(tensor(weights), tensor(means[:, None]), tensor((scales**2)[:, None, None]))
    yield agrees("mean", ours.mean[0], best[0], 1e-4)
    yield agrees("variance", ours.covariance[0, 0], np.exp(2 * best[1]), 1e-4)


@check("K9", "Sinkhorn attention has uniform marginals on both sides: uniform weights of the modes are consistent")
def doubly_stochastic(inputs: RandomInputs) -> Iterator[Evidence]:
    query, key, value = (tensor(inputs.normal(6, 4)) for _ in range(3))
    ours = sinkhorn_attention(query, key, value)
    yield agrees("each query gives one", ours.weights.sum(-1), 1.0, 1e-10)
    yield agrees("each key receives one", ours.weights.sum(-2), 1.0, 1e-10)
    scores = array(query) @ array(key).T / 2
    balanced = np.exp(scores - scores.max())
    for _ in range(2000):
        balanced /= balanced.sum(0)
        balanced /= balanced.sum(1, keepdims=True)
    yield agrees("the weights, by alternating normalisation", ours.weights, balanced, 1e-9)


@check("K21", "without an observation GPB2 and IMM are one filter: mixing and prediction commute")
def slots_meet(inputs: RandomInputs) -> Iterator[Evidence]:
    switch = _switch(inputs)
    gap = torch.full((5, 2), torch.nan, dtype=torch.float64)
    one, other = gpb(switch.model(), gap), imm(switch.model(), gap)
    yield agrees("means in each mode", one.mode_means, array(other.mode_means), 1e-12)
    yield agrees("covariances", one.mode_covariances, array(other.mode_covariances), 1e-10)
    belief = switch.prior.copy()
    for _ in range(5):
        belief = belief @ switch.transition
    yield agrees("modes: powers of the transition", one.mode_probabilities[-1], belief, 1e-12)


def _line() -> tuple[SwitchingLinearGaussian, dict[str, np.ndarray]]:
    """Two modes on a line, and the numbers they are made of."""
    known = {
        "prior": np.array([0.5, 0.5]),
        "transition": np.array([[0.9, 0.1], [0.2, 0.8]]),
        "mean": np.array([-1.0, 2.0]),
        "variance": np.array([0.3, 0.5]),
        "map": np.array([0.8, 1.2]),
        "noise": np.array([0.2, 0.1]),
    }
    square = {k: tensor(known[k][:, None, None]) for k in ("variance", "map", "noise")}
    model = SwitchingLinearGaussian(
        *(tensor(known["transition"]), square["map"], square["noise"], tensor([[1.0]]), tensor([[0.4]])),
        initial_mean=tensor(known["mean"][:, None]),
        initial_covariance=square["variance"],
        initial_modes=tensor(known["prior"]),
        start="belief",
    )
    return model, known


def _evidence(known: dict[str, np.ndarray], observation: float) -> np.ndarray:
    """π_i P(j given i) p(o given i, j) by quadrature over the new state, (i, j)."""
    grid = np.linspace(-12, 12, 12001)
    mean = known["map"][None] * known["mean"][:, None]
    spread = np.sqrt(known["map"][None] ** 2 * known["variance"][:, None] + known["noise"][None])
    likelihood = stats.norm.pdf(observation, grid, np.sqrt(0.4))
    density = stats.norm.pdf(grid, mean[..., None], spread[..., None])  # (i, j, grid)
    return known["prior"][:, None] * known["transition"] * np.trapezoid(density * likelihood, grid)


@check("K22", "with an observation the modes follow σ(j) ∝ Σ_i P(j given i) σ_i L_ij")
def observed_modes(inputs: RandomInputs) -> Iterator[Evidence]:
    model, known = _line()
    for observation in (1.7, inputs.rng.uniform(-2, 3)):
        joint = _evidence(known, observation)
        ours = gpb(model, tensor([[observation]]))
        yield agrees(
            f"modes after observing {observation:.1f}", ours.mode_probabilities[0], joint.sum(0) / joint.sum(), 1e-9
        )
        yield agrees("and the likelihood", ours.log_likelihood[0], np.log(joint.sum()), 1e-9)


@check("K23", "a message of the modes that ignores the observation misses it")
def ignored_observation(inputs: RandomInputs) -> Iterator[Evidence]:
    model, known = _line()
    ours = array(gpb(model, tensor([[1.7]])).mode_probabilities[0])
    yield differs("Σ_i P(j given i) σ_i", known["prior"] @ known["transition"], ours, 1e-2)
    joint = _evidence(known, 1.7)
    yield agrees("with L_ij in it", ours, joint.sum(0) / joint.sum(), 1e-9)


@check("K24", "with an observation GPB2 and IMM differ: one collapses after it, the other before")
def slots_part(inputs: RandomInputs) -> Iterator[Evidence]:
    model, _ = _line()
    one, other = gpb(model, tensor([[1.7]])), imm(model, tensor([[1.7]]))
    yield differs("means in each mode", one.mode_means, array(other.mode_means), 1e-2)
    exact = gpb(model, tensor([[1.7]]), order=3)
    yield agrees("after one step GPB2 is exact", one.mean, array(exact.mean), 1e-12)


@check("K26", "a conjugate Gibbs sampler and the iteration of means have the same stationary mean χ/ν")
def stationary_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    coin = from_distribution(Bernoulli(tensor(0.5)))
    prior = gibbs.ConjugatePrior(coin, tensor([2.0]), 5.0)
    yield agrees("mean iteration", gibbs.mean_iteration(prior, tensor([0.9]), 60)[-1], 0.4, 1e-12)
    heads = tensor(np.ones((20_000, 1)))
    state, total = gibbs.GibbsState(heads, torch.zeros_like(heads)), []  # far from stationarity
    for turn in range(60):
        state, _ = gibbs.step(state, prior, generator=inputs.generator)
        if turn >= 20:
            total.append(float(state.x.mean()))
    yield agrees("mean of the draws", np.mean(total), 0.4, 5e-3)
    steps = array(gibbs.mean_iteration(prior, tensor([0.9]), 3))[:, 0] - 0.4
    yield agrees("contraction by 1/(ν + 1) a step", steps[1:] / steps[:-1], 1 / 6, 1e-12)
