"""F, continued. Whether the Gaussian equilibrium attracts: cumulants, correlations, harmonics; growth without norm."""

from __future__ import annotations

from collections.abc import Iterator
from math import factorial

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import eval_hermitenorm, iv

from cumulant import Empirical, Gaussian, moments
from cumulant.dynamics import Ascend
from cumulant.dynamics.closure import GaussianFlow, blow_up_time, covariance_flow
from cumulant.dynamics.stability import (
    component_multiplier,
    correlation_multiplier,
    cumulant_multiplier,
    sphere_rate,
)
from cumulant.paper.checks.evidence import Evidence, agrees, array, true
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check

PAIRS = ((1, 0.5), (1, 1.0), (0.3, 1.0), (-0.3, 1.0), (-0.4, 0.8), (1, -0.5), (0.5, 0.25))


@check("F8", "a diagonal norm multiplies a small correlation by 1 + 2a/(1+a), a = vs: rank is lost")
def correlations_grow(inputs: RandomInputs) -> Iterator[Evidence]:
    rho = 1e-5
    law = Gaussian(tensor(np.zeros(2)), tensor([[1, rho], [rho, 1]]))
    for a in (0.6, 0.2, -0.3):
        flow = GaussianFlow(step_size=abs(a), sign=1 if a > 0 else -1)
        after = array(flow.step(law)[0].covariance)
        yield agrees(f"a = {a:g}", correlation_multiplier(a), after[0, 1] / after[0, 0] / rho, 1e-6)
    opposite = correlation_multiplier(-0.3)
    yield true("above 1 for attention, below for its opposite", correlation_multiplier(0.6) > 1 > opposite)


@check("F9", "cumulants of order n grow by 1 + n v sⁿ⁻¹/(1 + vs) under the layer, whatever the temperature")
def cumulants_grow(inputs: RandomInputs) -> Iterator[Evidence]:
    grid = np.linspace(-20, 20, 2001)
    density = np.exp(-grid * grid / 2)
    density /= density.sum()
    inner = np.abs(grid) < 8.5
    for v, s in PAIRS:
        ours = [_response(n, v, s, grid, density, inner) for n in (3, 4, 5)]
        expected = [cumulant_multiplier(n, v, s) for n in (3, 4, 5)]
        yield agrees(f"v = {v:g}, s = {s:g}", expected, ours, 1e-6, f"λ₃ = {ours[0]:.3f}")
    yield true("ascent: above 1 in every order", all(cumulant_multiplier(n, 0.5, 0.5) > 1 for n in range(3, 30)))


def _response(n: int, v: float, s: float, grid: np.ndarray, density: np.ndarray, inner: np.ndarray) -> float:
    """First-order change of κ_n under whitening ∘ ascent of the law N(0, 1)(1 + ε He_n/n!), by quadrature."""
    bump, z = eval_hermitenorm(n, grid) / factorial(n), grid[inner]
    law = Empirical(tensor(grid[:, None]), tensor(np.log(np.maximum(density, 1e-300))))
    # ∂ε ∇G(η) = Cov(bump, x) under the law tilted by η
    both, alone, mean = _tilted(law, s * z[:, None], bump * grid, bump, grid)
    moved = v * (both - alone * mean) / (1 + v * s)
    weight = density[inner] / density[inner].sum()
    itself = weight * bump[inner] * eval_hermitenorm(n, z)
    return float((itself + weight * n * eval_hermitenorm(n - 1, z) * moved).sum())


def _tilted(law: Empirical, eta: np.ndarray, *functions: np.ndarray) -> list[np.ndarray]:
    """Means under the tilted law of functions of the atoms, given by their values at them."""
    values = tensor(np.stack(functions, -1))
    ours = moments(tensor(eta), law.atoms, values, log_weights=law.log_weights, statistics=("mean",)).mean
    return list(array(ours).T)  # pyright: ignore[reportArgumentType]


@check("F10", "the same for the whole nonlinear map, on particles with weights")
def skewness_grows(inputs: RandomInputs) -> Iterator[Evidence]:
    grid = np.linspace(-11, 11, 2201)
    weight = np.exp(-(grid**2) / 2) * (1 + 1e-5 * eval_hermitenorm(3, grid) / 6)
    weight /= weight.sum()
    keys = Empirical(tensor(grid[:, None]), tensor(np.log(weight)))
    for v, s in ((1.0, 0.5), (-0.5, 0.5)):
        ascend = Ascend(step=abs(v), sign=1 if v > 0 else -1, scale=s, keys=keys)
        moved = array(ascend(tensor(grid[:, None])))[:, 0]
        grown = _skewness(moved, weight) / _skewness(grid, weight)
        yield agrees(f"v = {v:g}, s = {s:g}", cumulant_multiplier(3, v, s), grown, 1e-3, f"{grown:.4f}")


def _skewness(x: np.ndarray, weight: np.ndarray) -> float:
    away = x - (weight * x).sum()
    return float((weight * away**3).sum() / (weight * away**2).sum() ** 1.5)


@check("F11", "on the circle every harmonic of the uniform law grows, at n² I_n(β)/(β I_0(β))")
def harmonics_grow(inputs: RandomInputs) -> Iterator[Evidence]:
    beta, n = 4.0, 1000
    angle = 2 * np.pi * np.arange(n) / n
    for degree in (1, 2, 3, 4, 5):
        bent = angle + 1e-5 * np.sin(degree * angle)
        cloud = tensor(np.stack([np.cos(bent), np.sin(bent)], -1))
        pull = array(Ascend(scale=beta).mean(cloud))
        speed = -pull[:, 0] * np.sin(bent) + pull[:, 1] * np.cos(bent)
        measured = 2 * (speed * np.sin(degree * angle)).mean() / 1e-5
        yield agrees(f"degree {degree}, measured", sphere_rate(degree, 2, beta), measured, 1e-4, f"rate {measured:.4f}")
        closed = degree**2 * iv(degree, beta) / (beta * iv(0, beta))
        yield agrees(f"degree {degree}, by Bessel functions", sphere_rate(degree, 2, beta), closed, 1e-12)


@check("F12", "without a norm the Gaussian closure Ċ = 2C² is infinite at t = 1/(2λ_max)")
def closure_blows_up(inputs: RandomInputs) -> Iterator[Evidence]:
    covariance = inputs.covariance(3)
    end = float(blow_up_time(tensor(covariance)))
    yield agrees("1/(2λ_max)", end, 1 / (2 * np.linalg.eigvalsh(covariance)[-1]), 1e-12)
    c, steps = covariance.copy(), 4000
    h = 0.9 * end / steps
    for _ in range(steps):
        half = c + h * c @ c
        c = c + 2 * h * half @ half
    near = covariance_flow(tensor(covariance), 0.9 * end)
    yield agrees("C at nine tenths of it, by steps", near, c, 1e-3 * np.abs(c).max())
    yield true("infinite afterwards", bool(covariance_flow(tensor(covariance), 1.01 * end).isinf().all()))


@check("F13", "finitely many particles never blow up: |x| ≤ eᵗ times what it was")
def particles_do_not(inputs: RandomInputs) -> Iterator[Evidence]:
    start = inputs.normal(300, 2)
    largest, cloud, step = np.linalg.norm(start, axis=1).max(), tensor(start), Ascend(step=0.01)
    for _ in range(300):
        cloud = step(cloud)
    grown = float(np.linalg.norm(array(cloud), axis=1).max())
    yield true("after time 3", grown <= np.exp(3.0) * largest + 1e-9, f"{grown / largest:.2f} ≤ e³ = 20.09")
    yield true("where the closure has long been infinite", float(blow_up_time(tensor(np.cov(start.T)))) < 1)


@check("F15", "unequal values: the cumulant of coordinates 1, 1, 2 grows by 1 + s²(2v₁/(1+v₁s) + v₂/(1+v₂s))")
def mixed_cumulants(inputs: RandomInputs) -> Iterator[Evidence]:
    nodes, weights = hermegauss(44)
    points = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(weights, weights).ravel() / weights.sum() ** 2
    s, v = 0.6, np.array([0.7, 0.2])
    second, first = points[:, 0] ** 2 - 1, points[:, 1]
    bump = second * first / 2
    law = Empirical(tensor(points), tensor(np.log(weights)))
    x, y = points.T
    with_x, with_y, alone, mean_x, mean_y = _tilted(law, s * points, bump * x, bump * y, bump, x, y)
    moved = np.stack([with_x - alone * mean_x, with_y - alone * mean_y], -1) * v / (1 + v * s)
    itself = weights * bump * second * first
    grown = (itself + weights * (2 * x * first * moved[:, 0] + second * moved[:, 1])).sum()
    yield agrees("by quadrature", component_multiplier((0, 0, 1), tensor(v), s), grown, 1e-6, f"{grown:.4f}")
    spectrum = cumulant_multiplier(3, tensor(np.diag(v)), tensor(s * np.eye(2)))
    orders = ((0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1))
    apart = [float(component_multiplier(k, tensor(v), s)) for k in orders]
    yield agrees("all of them, as eigenvalues", np.sort(array(spectrum.real)), np.sort(apart), 1e-10)
