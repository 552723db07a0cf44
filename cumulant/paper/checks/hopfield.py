"""J. Modern Hopfield networks: retrieval is attention without residual, a descent of E = ½|ξ|² − G(βξ)/β + const."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from cumulant import attend
from cumulant.hopfield import energy, retrieve
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import differences, log_normalizer, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

BETA = 0.8


def energy_by_hand(state: np.ndarray, patterns: np.ndarray) -> float:
    """−lse_β + ½|ξ|² + log N/β + ½ max|x|²"""
    constant = np.log(len(patterns)) / BETA + (patterns**2).sum(1).max() / 2
    return constant + state @ state / 2 - log_normalizer(BETA * state, patterns) / BETA


def update_by_hand(state: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    return softmax(BETA * patterns @ state) @ patterns


@check("J1", "retrieval is a unit step of descent on E, and attention without the residual, weights and all")
def unit_step(inputs: RandomInputs) -> Iterator[Evidence]:
    patterns, state = inputs.normal(7, 3), inputs.normal(3)
    downhill = state - differences(lambda s: energy_by_hand(s, patterns), state)
    yield agrees("E", energy(tensor(state), tensor(patterns), beta=BETA), energy_by_hand(state, patterns), 1e-13)
    retrieved = retrieve(tensor(state), tensor(patterns), beta=BETA, steps=1).state
    yield agrees("ξ − ∇E by differences = retrieval", retrieved, downhill, 1e-8)
    attended = attend(tensor(state)[None], tensor(patterns), scale=BETA).output[0]
    yield agrees("ξ − ∇E by differences = attention", attended, downhill, 1e-8)

    tokens, memory = inputs.normal(5, 4), inputs.normal(7, 4)
    query_weight, key_weight, value_weight = inputs.normal(4, 3), inputs.normal(4, 3), inputs.normal(3, 4)
    query, key = tokens @ query_weight, memory @ key_weight
    whole = softmax(BETA * query @ key.T, axis=1) @ key @ value_weight
    ours = retrieve(tensor(query), tensor(key), beta=BETA, steps=1).state @ tensor(value_weight)
    yield agrees("W_Q, W_K before and W_V after a step are a weighted head", ours, whole, 1e-12)
    head = attend(tensor(query), tensor(key), tensor(key @ value_weight), scale=BETA).output
    yield agrees("the same head by attention", head, whole, 1e-12)
    bare = retrieve(tensor(tokens), tensor(memory), beta=BETA, steps=1).state
    yield differs("the same tokens with the weights ignored", bare, whole, 0.5)


@check("J2", "E never rises along retrieval, and 0 ≤ E ≤ 2M² on the hull of the patterns")
def descent(inputs: RandomInputs) -> Iterator[Evidence]:
    patterns, state = inputs.normal(7, 3), inputs.normal(3)
    path = [state]
    for _ in range(60):
        path.append(update_by_hand(path[-1], patterns))
    ours = retrieve(tensor(state), tensor(patterns), beta=BETA, steps=60)
    yield agrees("state after 60 steps", ours.state, path[-1], 1e-12)
    yield agrees("E along the path", ours.energy, [energy_by_hand(s, patterns) for s in path], 1e-12)
    yield true("E does not rise", np.diff(array(ours.energy)) < 1e-12)
    inside = inputs.rng.dirichlet(np.full(7, 0.3), 200) @ patterns
    level, limit = energy(tensor(inside), tensor(patterns), beta=BETA), 2 * (patterns**2).sum(1).max()
    yield true("0 ≤ E ≤ 2M² at 200 points of the hull", (level >= -1e-12) & (level <= limit))


@check("J3", "on a sphere −E and the log-sum-exp have one tangential gradient")
def on_the_sphere(inputs: RandomInputs) -> Iterator[Evidence]:
    patterns, state = inputs.normal(7, 3), inputs.normal(3)
    state /= np.linalg.norm(state)
    tangent = np.eye(3) - np.outer(state, state)
    slope = differences(lambda s: log_normalizer(BETA * s, patterns) / BETA, state)
    point = tensor(state).requires_grad_()
    (gradient,) = torch.autograd.grad(energy(point, tensor(patterns), beta=BETA), point)
    yield agrees("tangential part", -tensor(tangent) @ gradient, tangent @ slope, 1e-8)

    mean = retrieve(tensor(state), tensor(patterns), beta=BETA, steps=1).state
    level = energy_by_hand(state, patterns)
    for words, moved in {"m": mean, "ξ + m": tensor(state) + mean}.items():
        after = energy(moved / moved.norm(), tensor(patterns), beta=BETA)
        yield true(f"{words}, brought back to the sphere, lowers E", array(after) < level)


@check("J4", "the gated step (1 − g)ξ + g·attention lowers E for every g between 0 and 2")
def gates(inputs: RandomInputs) -> Iterator[Evidence]:
    patterns, state = inputs.normal(7, 3), 3 * inputs.normal(3)
    for gate in (0.1, 0.5, 1.0, 1.9):
        end = state
        for _ in range(50):
            end = (1 - gate) * end + gate * update_by_hand(end, patterns)
        ours = retrieve(tensor(state), tensor(patterns), beta=BETA, steps=50, gate=gate)
        yield agrees(f"state after 50 steps, g = {gate}", ours.state, end, 1e-11)
        yield agrees(f"largest rise of E, g = {gate}", max(0.0, np.diff(array(ours.energy)).max()), 0.0, 1e-12)
