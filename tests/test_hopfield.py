"""Hopfield energy and retrieval: golden values, Lyapunov property, bounds of the theory, classes of heads."""

import math
from itertools import pairwise

import pytest
import torch

from cumulant import Status
from cumulant.hopfield import (
    CLASSES,
    capacity,
    contraction_bound,
    energy,
    fixed_point_bound,
    head_class,
    jacobian_bound,
    mass_count,
    retrieve,
    separation,
    update_error_bound,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


toy = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
start = torch.tensor([0.5, 0.25], dtype=torch.float64)


@pytest.mark.parametrize(
    ("beta", "before", "after", "image"),
    [
        (1.0, 0.490939721599, 0.447987786264, (0.294464239103, 0.362793104570)),
        (4.0, 0.349262411850, 0.312428513521, (0.708186297320, 0.265387928772)),
    ],
)
def test_golden_values(beta, before, after, image):
    found = retrieve(start, toy, beta=beta, steps=1)
    torch.testing.assert_close(found.energy, torch.tensor([before, after], dtype=torch.float64), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.state, torch.tensor(image, dtype=torch.float64), rtol=0, atol=1e-11)
    assert energy(start, toy, beta=beta) == found.energy[0]


def test_the_update_is_a_unit_step_down_the_energy():
    x, state = normal(7, 3), normal(5, 3, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(energy(state, x, beta=0.8).sum(), state)
    torch.testing.assert_close(retrieve(state.detach(), x, beta=0.8, steps=1).state, state.detach() - slope)


@pytest.mark.parametrize("weights", [None, normal(9, seed=5)])
def test_energy_stays_between_its_bounds_on_the_hull(weights):
    x = normal(9, 4)
    state = torch.softmax(3 * normal(200, 9, seed=1), -1) @ x
    for beta in (0.1, 1.0, 30.0):
        e = energy(state, x, beta=beta, log_weights=weights)
        assert (e >= -1e-12).all()
        assert (e <= 2 * x.square().sum(-1).max() + 1e-12).all()


@pytest.mark.parametrize("gate", [0.1, 0.5, 1.0, 1.9])
@pytest.mark.parametrize("beta", [0.3, 3.0, 100.0])
def test_energy_never_increases(gate, beta):
    found = retrieve(3 * normal(50, 4, seed=2), normal(9, 4), beta=beta, gate=gate, steps=60)
    assert found.energy.shape == (61, 50)
    assert found.energy.diff(dim=0).max() < 1e-12
    ended = retrieve(3 * normal(50, 4, seed=2), normal(9, 4), beta=beta, gate=gate, max_steps=2000)
    assert ended.energy.diff(dim=0).max() < 1e-12
    assert (ended.status == Status.CONVERGED).all()


def test_the_energy_falls_at_least_by_half_the_square_of_the_step():
    states, x = [3 * normal(50, 4, seed=2)], normal(9, 4)
    for _ in range(20):
        states.append(retrieve(states[-1], x, beta=2.0, steps=1).state)
    for a, b in pairwise(states):
        fall = energy(a, x, beta=2.0) - energy(b, x, beta=2.0)
        assert (fall >= (a - b).square().sum(-1) / 2 - 1e-12).all()


def test_a_state_does_not_depend_on_its_batch_mates():
    x, states = normal(9, 4), 2 * normal(6, 4, seed=3)
    together = retrieve(states, x, beta=2.5)
    other = retrieve(torch.cat([states[:3], 50 * states[3:]]), x, beta=2.5)
    assert torch.equal(together.state[:3], other.state[:3])
    assert torch.equal(together.steps[:3], other.steps[:3])
    for i in range(6):
        torch.testing.assert_close(retrieve(states[i], x, beta=2.5).state, together.state[i], rtol=0, atol=1e-10)


def test_heads_keep_their_own_beta():
    x, states, beta = normal(2, 9, 4), normal(2, 5, 4, seed=1), torch.tensor([0.5, 8.0], dtype=torch.float64)
    found = retrieve(states, x, beta=beta, steps=3)
    for head in range(2):
        alone = retrieve(states[head], x[head], beta=float(beta[head]), steps=3)
        torch.testing.assert_close(found.state[head], alone.state, rtol=0, atol=1e-14)
        torch.testing.assert_close(found.energy[:, head], alone.energy, rtol=0, atol=1e-13)


def test_implicit_gradient_is_the_unrolled_one():
    x, state = normal(5, 3).requires_grad_(), normal(4, 3, seed=1)
    ended, long = retrieve(state, x, beta=0.7), retrieve(state, x, beta=0.7, steps=200)
    direction = normal(4, 3, seed=2)
    (mine,) = torch.autograd.grad((ended.state * direction).sum(), x)
    (unrolled,) = torch.autograd.grad((long.state * direction).sum(), x)
    torch.testing.assert_close(mine, unrolled, rtol=0, atol=1e-8)


def test_masked_patterns_are_absent_and_an_empty_memory_returns_zero():
    x, state = normal(6, 3), normal(3, seed=1)
    mask = torch.tensor([0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0], dtype=torch.float64)
    few, masked = retrieve(state, x[mask == 0], beta=2.0), retrieve(state, x, beta=2.0, log_weights=mask)
    torch.testing.assert_close(masked.state, few.state, rtol=0, atol=1e-12)
    torch.testing.assert_close(masked.energy, few.energy, rtol=0, atol=1e-12)
    for patterns, weights in ((x, torch.full((6,), -torch.inf, dtype=torch.float64)), (x[:0], None)):
        found = retrieve(state, patterns, steps=2, log_weights=weights)
        assert (found.state == 0).all()
        torch.testing.assert_close(found.energy[0], state.square().sum() / 2)
        assert found.energy[-1] == 0


def test_no_states_give_no_answers():
    found = retrieve(torch.zeros(0, 2, dtype=torch.float64), toy)
    assert found.state.shape == (0, 2)


def test_one_measure_per_state():
    x, state = normal(6, 3), normal(2, 3, seed=1)
    weights = torch.zeros(2, 6, dtype=torch.float64)
    weights[0, :3] = -torch.inf
    found = retrieve(state, x, log_weights=weights, steps=2)
    torch.testing.assert_close(found.energy[:, 0], retrieve(state[0], x[3:], steps=2).energy, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.energy[:, 1], retrieve(state[1], x, steps=2).energy, rtol=0, atol=1e-13)


# ---------------------------------------------------------------------- bounds


def test_contraction_bound_is_one():
    x = normal(2, 40, 3)
    for method in ("diameter", "centre"):
        bound = contraction_bound(x, beta=0.4, method=method)
        a, b = 5 * normal(2, 300, 3, seed=1), 5 * normal(2, 300, 3, seed=2)
        moved = [retrieve(s, x, beta=0.4, steps=1).state for s in (a, b)]
        ratio = (moved[0] - moved[1]).norm(dim=-1) / (a - b).norm(dim=-1)
        assert (ratio <= bound[:, None] + 1e-12).all()
    diameter = torch.cdist(x, x).flatten(1).amax(1)
    torch.testing.assert_close(contraction_bound(x, beta=0.4), 0.4 * (diameter / 2) ** 2)
    assert (contraction_bound(x) <= contraction_bound(x, method="centre") + 1e-12).all()
    assert contraction_bound(x[0, :0]) == 0
    assert contraction_bound(x[0, :1]) == 0


def test_below_one_there_is_one_fixed_point():
    x = 0.6 * torch.nn.functional.normalize(normal(8, 3), dim=-1)
    assert contraction_bound(x) < 1
    found = retrieve(5 * normal(20, 3, seed=1), x)
    assert (found.state - found.state[0]).abs().max() < 1e-9
    apart = retrieve(4 * torch.eye(3, dtype=torch.float64), 4 * torch.eye(3, dtype=torch.float64))
    assert (apart.state[0] - apart.state[1]).abs().max() > 1


def test_separation_by_hand():
    x = normal(3, 50, 4)
    gram = x @ x.mT
    own = gram.diagonal(dim1=-2, dim2=-1)
    others = gram.masked_fill(torch.eye(50, dtype=torch.bool), -torch.inf).amax(-1)
    torch.testing.assert_close(separation(x), own - others)
    assert separation(x[0, :1]).item() == math.inf
    assert separation(x[0, :0]).shape == (0,)


def test_one_step_error_bounds_hold():
    x = 3 * torch.nn.functional.normalize(normal(12, 30), dim=-1)
    beta = 2.0
    ends = retrieve(x, x, beta=beta)
    away = (ends.state - x).norm(dim=-1)
    assert (away <= fixed_point_bound(x, beta=beta) + 1e-12).all()
    noisy = x + 0.05 * torch.nn.functional.normalize(normal(12, 30, seed=1), dim=-1)
    distance = torch.maximum(away, (noisy - x).norm(dim=-1))
    found = retrieve(noisy, x, beta=beta, steps=1).state
    assert ((found - x).norm(dim=-1) <= update_error_bound(x, distance, beta=beta) + 1e-12).all()
    rate = (found - ends.state).norm(dim=-1) / (noisy - ends.state).norm(dim=-1)
    assert (rate <= jacobian_bound(x, distance, beta=beta)).all()
    assert (update_error_bound(x, distance, beta=beta) < 1).all()  # and they say something


@pytest.mark.parametrize(
    ("dim", "radius", "base", "patterns"), [(20, 3.0, 3.15461077, 7.413), (75, 1.0, 1.37187777, 10.973)]
)
def test_capacity_constants(dim, radius, base, patterns):
    found = capacity(dim, radius=radius, failure=0.001)
    assert found.base == pytest.approx(base, abs=1e-8)
    assert found.patterns == pytest.approx(patterns, abs=1e-3)
    assert found.holds
    assert found.base >= found.threshold


def test_capacity_can_fail():
    assert not capacity(20, radius=1.0).holds


# ---------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("logits", "k", "name"),
    [
        (torch.zeros(32), 29, "I"),
        (torch.arange(32.0), 3, "III"),
        (0.1 * torch.arange(32.0), 20, "I"),
        (50 * torch.arange(32.0), 1, "IV"),
        (torch.zeros(10), 9, "I"),
    ],
)
def test_classes_of_heads(logits, k, name):
    count = mass_count(torch.softmax(logits, 0))
    assert count == k
    assert CLASSES[head_class(count, len(logits))] == name


def test_mass_count_of_rows():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert mass_count(weights).tolist() == [2, 0, 1]
    assert head_class(torch.tensor([17.0, 16.0, 4.0, 1.0]), 32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: energy(start, toy, beta=0.0), "positive finite"),
        (lambda: energy(start, toy, beta=torch.ones(3)), "one beta per head"),
        (lambda: retrieve(normal(2, 3, 2), normal(2, 4, 2), beta=torch.ones(3)), "one beta per head"),
        (lambda: energy(start, toy[0]), "pattern axis"),
        (lambda: energy(start[:1], toy), "Check the last axis"),
        (lambda: retrieve(start, toy, gate=2.0), "0 < gate < 2"),
        (lambda: retrieve(start, toy, steps=-1), "steps"),
        (lambda: contraction_bound(toy, method="ball"), "Pick one"),
        (lambda: capacity(1), "at least 2 dimensions"),
        (lambda: capacity(20, failure=2.0), "between 0 and 1"),
        (lambda: capacity(20, beta=0.0), "positive number"),
        (lambda: update_error_bound(toy, -1.0), "distance ≥ 0"),
        (lambda: update_error_bound(toy, torch.ones(5)), "one per pattern"),
        (lambda: mass_count(torch.tensor([-1.0, 2.0])), "non-negative"),
        (lambda: mass_count(torch.ones(3), mass=0.0), "share"),
    ],
)
def test_bad_input_gets_a_sentence(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_wrong_dtype_gets_a_sentence():
    with pytest.raises(TypeError, match=r"retrieve\.gate: expected a number"):
        retrieve(start, toy, gate=torch.ones(5))
    with pytest.raises(TypeError, match="dtype"):
        energy(start.float(), toy)
