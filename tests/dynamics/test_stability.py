"""Multipliers and rates against quadrature and against what clouds do; spectra of maps and of runs."""

import itertools
import math
from math import factorial

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import eval_hermitenorm, ive
from torch.testing import assert_close

from cumulant import Empirical
from cumulant.dynamics import Ascend, Layer, Whiten
from cumulant.dynamics.closure import GaussianFlow
from cumulant.dynamics.flow import flow, velocity
from cumulant.dynamics.stability import (
    attracting,
    component_multiplier,
    correlation_multiplier,
    cumulant_map,
    cumulant_multiplier,
    escape_time,
    most_unstable_order,
    sphere_rate,
)
from cumulant.measures import Gaussian

PAIRS = [(1.0, 0.5), (1.0, 1.0), (0.3, 1.0), (-0.3, 1.0), (-0.4, 0.8), (1.0, -0.5), (0.5, 0.25)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(d, order=40):
    """Nodes (k, d) and weights (k,) of the standard normal law."""
    nodes, weights = hermegauss(order)
    points = np.stack(np.meshgrid(*[nodes] * d, indexing="ij"), -1).reshape(-1, d)
    whole = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * d, indexing="ij"), -1).reshape(-1, d), -1)
    return points, whole


def hermite(indices, points):
    """Product over coordinates of He_k, k the number of times the coordinate occurs."""
    counts = [sum(i == a for i in indices) for a in range(points.shape[1])]
    return np.prod([eval_hermitenorm(k, points[:, a]) for a, k in enumerate(counts)], axis=0)


# ---------------------------------------------------------------------- cumulants


@pytest.mark.parametrize(("v", "s"), PAIRS)
def test_multipliers_by_quadrature(v, s):
    z = np.linspace(-20, 20, 2001)
    weight = np.exp(-z * z / 2)
    weight /= weight.sum()
    inner = np.abs(z) < 8.5
    tilted = np.exp(s * np.outer(z[inner], z) + np.log(np.maximum(weight, 1e-300)))
    tilted /= tilted.sum(1, keepdims=True)
    for n in (3, 4, 5):
        bump = eval_hermitenorm(n, z) / factorial(n)
        shift = v * (tilted @ (bump * z) - (tilted @ z) * (tilted @ bump)) / (1 + v * s)
        w, x = weight[inner], z[inner]
        measured = (w * (bump[inner] * eval_hermitenorm(n, x) + n * eval_hermitenorm(n - 1, x) * shift)).sum()
        assert cumulant_multiplier(n, v, s) == pytest.approx(measured, abs=1e-6)
        assert cumulant_multiplier(n, v, s) == pytest.approx(1 + n * v * s ** (n - 1) / (1 + v * s), abs=1e-14)


@pytest.mark.parametrize(("v", "s"), [(1.0, 0.5), (-0.5, 0.5), (0.5, 0.8)])
def test_the_layer_multiplies_the_skewness(v, s):
    z = np.linspace(-11, 11, 1101)
    weight = np.exp(-(z**2) / 2) * (1 + 1e-5 * eval_hermitenorm(3, z) / 6)
    weight /= weight.sum()
    keys = Empirical(torch.from_numpy(z[:, None]), torch.from_numpy(np.log(weight)))
    ascend = Ascend(step=abs(v), sign=1 if v > 0 else -1, scale=s, keys=keys)
    moved = ascend(torch.from_numpy(z[:, None]))[:, 0].numpy()

    def skewness(x):
        away = x - (weight * x).sum()
        return (weight * away**3).sum() / (weight * away**2).sum() ** 1.5

    assert skewness(moved) / skewness(z) == pytest.approx(cumulant_multiplier(3, v, s), abs=1e-3)


def test_components_of_unequal_values():
    points, weights = grid(2, 44)
    s, v = 0.6, np.array([0.7, 0.2])
    tilted = np.exp(s * points @ points.T) * weights
    tilted /= tilted.sum(1, keepdims=True)
    for components in ((0, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0)):
        own = hermite(components, points)
        bump = own / (weights * own**2).sum()
        moved = (tilted @ (bump[:, None] * points) - (tilted @ points) * (tilted @ bump)[:, None]) * v / (1 + v * s)
        measured = (weights * bump * own).sum()
        for k, a in enumerate(components):
            measured += (weights * hermite(components[:k] + components[k + 1 :], points) * moved[:, a]).sum()
        found = component_multiplier(components, torch.from_numpy(v), s).item()
        assert found == pytest.approx(measured, abs=1e-6)
    isotropic = component_multiplier((0, 1, 1, 0), torch.full((2,), 0.4, dtype=torch.float64), 0.5)
    assert isotropic.item() == pytest.approx(cumulant_multiplier(4, 0.4, 0.5), abs=1e-14)


@pytest.mark.parametrize("order", [3, 4])
def test_general_matrices_against_the_whole_layer(order):
    """The nonlinear layer with symmetric whitening on quadrature nodes whose weights have a small cumulant."""
    value, bilinear = 0.3 * normal(2, 2).numpy(), 0.4 * normal(2, 2, seed=1).numpy()
    points, weights = grid(2)
    kappa = normal(*[2] * order, seed=2).numpy()
    kappa = sum(np.transpose(kappa, p) for p in itertools.permutations(range(order))) / factorial(order)
    indices = list(itertools.product(range(2), repeat=order))
    bump = sum(kappa[i] * hermite(i, points) for i in indices) / factorial(order)

    def after(epsilon):
        w = weights * (1 + epsilon * bump)
        logits = points @ bilinear @ points.T
        a = np.exp(logits - logits.max(1, keepdims=True)) * w
        moved = points + (a / a.sum(1, keepdims=True)) @ points @ value.T
        away = moved - w @ moved
        values, vectors = np.linalg.eigh(away.T @ (w[:, None] * away))
        white = away @ (vectors / np.sqrt(values)) @ vectors.T
        moment = np.einsum(
            "k," + ",".join(f"k{c}" for c in "abcd"[:order]) + "->" + "abcd"[:order], w, *[white] * order
        )
        if order == 4:
            pair = np.eye(2)
            moment = moment - sum(np.einsum(p, pair, pair) for p in ("ab,cd->abcd", "ac,bd->abcd", "ad,bc->abcd"))
        return moment

    # a small enough scale that the tilted nodes still integrate the bump
    measured = (after(1e-5) - after(-1e-5)) / 2e-5
    found = cumulant_map(order, torch.from_numpy(value), torch.from_numpy(bilinear))
    assert_close(found(torch.from_numpy(kappa)), torch.from_numpy(measured), rtol=0, atol=1e-5)
    wrong = cumulant_map(order, torch.from_numpy(value), torch.from_numpy(bilinear.T))
    assert (wrong(torch.from_numpy(kappa)) - torch.from_numpy(measured)).abs().max() > 1e-2


def test_eigenvalues_of_the_map():
    v, s, orders = torch.tensor([0.7, 0.2], dtype=torch.float64), 0.6, [(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)]
    found = cumulant_map(3, torch.diag(v), s * torch.eye(2, dtype=torch.float64))
    expected = torch.stack([component_multiplier(k, v, s) for k in orders]).sort(descending=True).values
    assert_close(found.eigenvalues.real, expected, rtol=0, atol=1e-12)
    assert_close(found.spectral_radius, expected[0], rtol=0, atol=1e-12)
    assert_close(cumulant_multiplier(3, torch.diag(v), s * torch.eye(2, dtype=torch.float64)).real, expected)
    # every symmetric tensor of a general map stays symmetric, and growth is what the spectrum says
    general = cumulant_map(3, 0.4 * normal(3, 3), 0.5 * normal(3, 3, seed=1))
    kappa = sum((normal(3, 3, 3).permute(p) for p in itertools.permutations(range(3))), start=torch.zeros(3, 3, 3))
    for _ in range(300):
        kappa = general(kappa)
        assert_close(kappa, kappa.permute(1, 0, 2), rtol=1e-10, atol=0)
        kappa = kappa / kappa.norm()
    first = kappa
    for _ in range(400):
        kappa = general(kappa)
    growth = (kappa.norm() / first.norm()).log() / 400
    assert growth.item() == pytest.approx(general.spectral_radius.log().item(), abs=0.01)


def test_which_orders_grow():
    assert attracting(-0.5, 0.5)
    assert not attracting(0.5, 0.5)
    assert not attracting(0.0, 0.5)
    assert not attracting(-3.0, 0.5)  # the step turns clouds over
    assert not attracting(-0.5, 1e9)
    assert all(cumulant_multiplier(n, 0.5, 0.3) > 1 for n in range(3, 25))
    assert cumulant_multiplier(3, 1.0, -0.5) > 1 > cumulant_multiplier(4, 1.0, -0.5)  # s < 0: odd orders grow
    for s in (0.2, 0.5, 0.8, 0.95):
        multipliers = [cumulant_multiplier(n, 0.5, s) for n in range(3, 65)]
        assert most_unstable_order(0.5, s) == 3 + int(np.argmax(multipliers))
        assert abs(most_unstable_order(0.5, s) - max(3, -1 / math.log(s))) <= 1
    assert most_unstable_order(0.5, 1.1) == 64
    assert cumulant_multiplier(64, 0.5, 1e9) == math.inf
    assert cumulant_multiplier(64, 0.5, -1e9) == math.inf  # v s^63/(1 + vs), both negative
    assert cumulant_multiplier(63, 0.5, -1e9) == -math.inf
    assert cumulant_multiplier(64, 0.0, 1e9) == 1


def test_a_grid_of_values_in_tensors():
    v, s = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), torch.tensor(0.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: cumulant_multiplier(3, a, s), v)


def test_escape_time():
    assert escape_time(600, 0.5, 0.5) == pytest.approx(math.log(10) / math.log(1.3))
    assert escape_time(6, 0.5, 0.5) == 0
    assert escape_time(1000, -0.5, 0.5) == math.inf
    # clouds do leave, in that order of magnitude
    layer = Layer(ascend=Ascend(step=0.5, scale=0.5), renormalize=Whiten())
    for particles in (200, 1000):
        left = []
        for seed in range(4):
            x, steps = layer.init(normal(particles, 1, seed=seed)), 0
            while (x**3).mean().abs() < 1 and steps < 100:
                x, steps = layer.step(x)[0], steps + 1
            left.append(steps)
        predicted = escape_time(particles, 0.5, 0.5)
        assert predicted / 4 < np.median(left) < 4 * predicted


# ---------------------------------------------------------------------- other normalisers


@pytest.mark.parametrize("a", [0.6, 0.2, -0.3])
def test_a_diagonal_norm_multiplies_correlations(a):
    rho = 1e-5
    law = Gaussian(torch.zeros(2, dtype=torch.float64), torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64))
    after = GaussianFlow(step_size=abs(a), sign=1 if a > 0 else -1).step(law)[0].covariance
    assert correlation_multiplier(a) == pytest.approx((after[0, 1] / after[0, 0] / rho).item(), abs=1e-6)


@pytest.mark.parametrize("d", [2, 3, 10])
@pytest.mark.parametrize("beta", [1e-3, 1.0, 4.0, 300.0])
def test_sphere_rates_by_bessel_functions(d, beta):
    for n in (1, 2, 5):
        expected = n * (n + d - 2) / beta * ive(n + d / 2 - 1, beta) / ive(d / 2 - 1, beta)
        assert sphere_rate(n, d, beta) == pytest.approx(expected, rel=1e-11)
        assert sphere_rate(n, d, 0.0) == ((d - 1) / d if n == 1 else 0)


def test_harmonics_of_the_circle_grow_at_their_rates():
    beta, n = 4.0, 800
    angle = 2 * np.pi * np.arange(n) / n
    for degree in range(1, 6):
        bent = angle + 1e-5 * np.sin(degree * angle)
        cloud = torch.from_numpy(np.stack([np.cos(bent), np.sin(bent)], -1))
        v = velocity(cloud, beta=beta).numpy()
        speed = -v[:, 0] * np.sin(bent) + v[:, 1] * np.cos(bent)
        measured = 2 * (speed * np.sin(degree * angle)).mean() / 1e-5
        assert sphere_rate(degree, 2, beta) == pytest.approx(measured, abs=1e-4)


def test_a_harmonic_grows_along_the_flow():
    beta, n, degree, t = 4.0, 120, 3, 1.0
    angle = 2 * np.pi * np.arange(n) / n
    bent = angle + 1e-6 * np.sin(degree * angle)
    cloud = torch.from_numpy(np.stack([np.cos(bent), np.sin(bent)], -1))
    after = flow(cloud, [t], beta=beta).states[0].numpy()
    moved = np.angle(np.exp(1j * (np.arctan2(after[:, 1], after[:, 0]) - angle)))
    grown = 2 * (moved * np.sin(degree * angle)).mean() / 1e-6
    assert math.log(grown) / t == pytest.approx(sphere_rate(degree, 2, beta), abs=1e-4)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: cumulant_multiplier(2, 1.0, 0.5),
            ValueError,
            r"cumulant_multiplier.n: expected an order n ≥ 3, got 2",
        ),
        (lambda: cumulant_multiplier(3, -2.0, 0.5), ValueError, r"expected 1 \+ v s other than 0, got v=-2, s=0.5"),
        (
            lambda: cumulant_multiplier(3, torch.eye(2), torch.eye(3)),
            ValueError,
            r"cumulant_multiplier: expected two numbers or two matrices \(d, d\), got \(2, 2\) and \(3, 3\)",
        ),
        (lambda: cumulant_map(2, torch.eye(2), torch.eye(2)), ValueError, r"cumulant_map.n: expected an order n ≥ 3"),
        (lambda: cumulant_map(9, torch.eye(4), torch.eye(4)), ValueError, r"expected d\^n ≤ 65536, got 4\^9"),
        (lambda: cumulant_map(3, torch.eye(2), -torch.eye(2)), ValueError, r"expected I \+ VBᵀ invertible"),
        (
            lambda: cumulant_map(3, torch.eye(2), torch.eye(2))(torch.zeros(2, 2)),
            ValueError,
            r"CumulantMap.cumulant: expected n = 3 axes of length d = 2, got \(2, 2\)",
        ),
        (lambda: component_multiplier((0, 0), torch.ones(2), 0.5), ValueError, r"an order n ≥ 3, got 2"),
        (lambda: component_multiplier((0, 0, 0), torch.ones(2, 2), 0.5), ValueError, r"v: expected shape \(d,\)"),
        (lambda: escape_time(5, 0.5, 0.5), ValueError, r"escape_time.particles: expected at least 6, got 5"),
        (lambda: sphere_rate(0, 3, 1.0), ValueError, r"sphere_rate: expected a degree n ≥ 1 and a dimension d ≥ 2"),
        (lambda: sphere_rate(1, 3, -1.0), ValueError, r"sphere_rate.beta: expected a number ≥ 0, got -1.0"),
        (lambda: correlation_multiplier(-1.0), ValueError, r"correlation_multiplier.a: expected v s > −1, got -1.0"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
