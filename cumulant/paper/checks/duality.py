"""G. Duality: maximum entropy, the conjugate of G, the evidence bound, free energy and boosting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import optimize
from scipy.special import xlogy

from cumulant import Empirical, Status
from cumulant.duality import boosting, elbo, elbo_gap, free_energy, generalized_kl
from cumulant.geometry import kkt_residual, maximum_entropy
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import attention_mean, covariance, kl, log_normalizer, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.residual import ascend

# the corners of the unit square with unequal masses
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
SHARES = np.array([0.1, 0.2, 0.3, 0.4])


@check("G1", "the least log-sum-exp is the largest entropy; attention's step moves away from both")
def strong_duality(inputs: RandomInputs) -> Iterator[Evidence]:
    rows, offsets = centred(inputs, 6, 3), inputs.normal(6)
    ours = maximum_entropy(tensor(rows), tensor(offsets))
    least = minimiser(rows, offsets)
    yield agrees("primal against BFGS and Newton", ours.primal, log_normalizer(least, rows, offsets), 1e-12)
    largest = entropy_maximiser(rows, offsets)
    yield agrees("dual against SLSQP", ours.dual, offsets @ largest - xlogy(largest, largest).sum(), 1e-9)
    yield agrees("primal − dual", ours.primal - ours.dual, 0.0, 1e-12)

    h, eta = Empirical(tensor(rows), tensor(offsets)), least + inputs.normal(20, 3)
    moved = array(ascend(h, tensor(eta)).eta)
    gain = array(h.log_normalizer(tensor(moved)) - h.log_normalizer(tensor(eta)))
    slope = np.array([attention_mean(e, rows, offsets) for e in eta])
    yield true("an ascent step raises G by |∇G|² or more", gain >= (slope**2).sum(1) - 1e-12)
    before, after = np.linalg.norm(eta - least, axis=1), np.linalg.norm(moved - least, axis=1)
    yield true("an ascent step leaves the minimiser", after > before, note=f"×{(after / before).min():.2f} or more")


@check("G2", "the maximiser of the entropy is the softmax at the minimiser of the log-sum-exp")
def optimality(inputs: RandomInputs) -> Iterator[Evidence]:
    rows, offsets = centred(inputs, 6, 3), inputs.normal(6)
    ours = maximum_entropy(tensor(rows), tensor(offsets))
    least = minimiser(rows, offsets)
    yield agrees("ν = softmax(Ax + b)", ours.weights, softmax(rows @ least + offsets), 1e-9)
    yield agrees("ν against SLSQP on the dual alone", ours.weights, entropy_maximiser(rows, offsets), 1e-6)
    yield agrees("Aᵀν", rows.T @ array(ours.weights), 0.0, 1e-11)
    yield agrees("KKT residual", ours.kkt_residual, 0.0, 1e-12)
    theirs = kkt_residual(tensor(rows), tensor(offsets), tensor(least), tensor(softmax(rows @ least + offsets)))
    yield agrees("KKT residual of the oracle's solution", theirs, 0.0, 1e-9)


@check("G3", "G*(μ) is the least KL to h among laws of mean μ")
def conjugate(inputs: RandomInputs) -> Iterator[Evidence]:
    x, share, eta = inputs.normal(7, 3), inputs.probabilities(7), inputs.normal(3)
    h, p = Empirical(tensor(x), tensor(np.log(share))), softmax(x @ eta + np.log(share))
    ours = h.conjugate(tensor(p @ x))
    yield agrees("⟨μ,η⟩ − G(η)", ours, p @ x @ eta - log_normalizer(eta, x, np.log(share)), 1e-12)
    yield agrees("KL(p_η‖h)", ours, kl(p, share), 1e-12)
    nearest = entropy_maximiser(x - p @ x, np.log(share))
    yield agrees("least KL(q‖h) over laws q of mean μ, by SLSQP", ours, kl(nearest, share), 1e-9)


@check("G4", "the link ∇G* inverts the mean map, up to directions the keys do not span")
def link(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, eta = inputs.normal(7, 3), np.log(inputs.probabilities(7)), inputs.normal(3)
    ours = Empirical(tensor(x), tensor(w)).natural(tensor(attention_mean(eta, x, w)))
    yield true("converged", ours.converged)
    yield agrees("η", ours.value, eta, 1e-8)

    turn = np.linalg.qr(inputs.normal(4, 4))[0][:3]
    flat = x @ turn  # the same keys in a hyperplane of R⁴
    ours = Empirical(tensor(flat), tensor(w)).natural(tensor(attention_mean(eta, x, w) @ turn))
    yield true("keys in a hyperplane: converged", ours.converged)
    yield agrees("keys in a hyperplane: the η of least norm", ours.value, eta @ turn, 1e-8)


@check("G5", "on the boundary of the hull G* is finite and η at infinity: at a corner −log h_n")
def boundary(inputs: RandomInputs) -> Iterator[Evidence]:
    h = Empirical(tensor(SQUARE), tensor(np.log(SHARES)))
    corner = tensor([1.0, 1.0])
    yield agrees("at the corner (1,1)", h.conjugate(corner), -np.log(0.4), 1e-8)
    yield true("no finite η", h.natural(corner).status == Status.BOUNDARY)
    for gap in (1e-2, 1e-4, 1e-6):
        yield agrees(f"{gap:g} inside it", h.conjugate(corner - gap), least_kl_on_square(gap), 1e-12)
    edge = 0.5 * np.log(0.5 / 0.2) + 0.5 * np.log(0.5 / 0.4)
    yield agrees("in the middle of an edge: KL on that edge", h.conjugate(tensor([1.0, 0.5])), edge, 1e-8)
    twice = Empirical(tensor(np.vstack([SQUARE, SQUARE[3:]])), tensor(np.log([*SHARES, 0.25])))
    yield agrees("at a repeated corner the masses add", twice.conjugate(corner), -np.log(0.65), 1e-8)


@check("G6", "outside the hull G* is +∞")
def outside(inputs: RandomInputs) -> Iterator[Evidence]:
    h, beyond = Empirical(tensor(SQUARE), tensor(np.log(SHARES))), np.array([1.2, 1.2])
    yield agrees("G*", h.conjugate(tensor(beyond)), np.inf, 0.0)
    yield true("no η at all", h.natural(tensor(beyond)).status == Status.OUTSIDE)
    eta = np.linspace(0, 200, 5)[:, None] * np.ones(2)
    objective = eta @ beyond - array(h.log_normalizer(tensor(eta)))
    yield true("⟨η,μ⟩ − G(η) grows without bound", np.diff(objective) > 15)
    # the largest of the corners' dot products is all of G that grows
    yield agrees("and linearly", np.diff(objective)[1:], 50 * (beyond.sum() - 2), 1e-9)


@check("G7", "G is the largest evidence bound; a law q falls short of it by KL(q‖p)")
def evidence_bound(inputs: RandomInputs) -> Iterator[Evidence]:
    x, share, eta = inputs.normal(7, 3), inputs.probabilities(7), inputs.normal(3)
    w, q = np.log(share), inputs.probabilities(7)
    evidence, p = log_normalizer(eta, x, w), softmax(x @ eta + w)
    bound = elbo(tensor(q), tensor(x @ eta), tensor(w))
    yield agrees("ELBO(q) = E_q⟨η,x⟩ − KL(q‖h)", bound, q @ x @ eta - kl(q, share), 1e-12)
    gap = elbo_gap(tensor(eta), tensor(x), weights=tensor(q), log_weights=tensor(w))
    yield agrees("G − ELBO(q) = KL(q‖p)", gap, kl(q, p), 1e-12)
    yield agrees("ELBO(p) = G", elbo(tensor(p), tensor(x @ eta), tensor(w)), evidence, 1e-12)
    top = np.argsort(p)[-3:]
    lost = elbo_gap(tensor(eta), tensor(x), kept=tensor(top).long(), log_weights=tensor(w))
    yield agrees("the three largest weights: −log of the mass kept", lost, -np.log(p[top].sum()), 1e-12)
    uniform = np.full(7, 1 / 7)
    literal = elbo(tensor(uniform), tensor(x @ eta), tensor(w))
    yield differs("“the log-normalizer is the ELBO”, for uniform weights", literal, evidence, 1e-2)


@check("G8", "F = −T log Z = ⟨E⟩ − T·S, with weights e^{−E/T}/Z")
def helmholtz(inputs: RandomInputs) -> Iterator[Evidence]:
    energies, temperature = inputs.rng.uniform(0.5, 3.0, 7), 0.37
    p = softmax(-energies / temperature)
    result = free_energy(tensor(energies), temperature=temperature)
    yield agrees("−T log Z", result.value, -temperature * np.log(np.exp(-energies / temperature).sum()), 1e-12)
    yield agrees("⟨E⟩", result.mean_energy, p @ energies, 1e-12)
    yield agrees("S", result.entropy, -xlogy(p, p).sum(), 1e-12)
    split = p @ energies + temperature * xlogy(p, p).sum()
    yield agrees("F = ⟨E⟩ − T·S", result.value, split, 1e-12)

    x, q, beta = inputs.normal(7, 3), inputs.normal(3), 1.7
    ours = free_energy(tensor(-x @ q), temperature=1 / beta).value
    yield agrees("with E = −⟨q,k⟩, T = 1/β: −G(βq)/β", ours, -log_normalizer(beta * q, x) / beta, 1e-12)

    gibbs = Empirical(tensor(np.eye(7))).mean(tensor(-energies / temperature))
    yield agrees("Gibbs weights", gibbs, p, 1e-14)
    yield differs("“Z normalises the Hamiltonian”: E/ΣE", energies / energies.sum(), array(gibbs), 1e-2)
    yield differs("e^{−E} at a temperature other than 1", softmax(-energies), array(gibbs), 1e-2)


@check("G9", "boosting: Σq₀ less the least exponential loss is the least generalised KL under Mᵀp = 0")
def adaboost(inputs: RandomInputs) -> Iterator[Evidence]:
    margins, start = centred(inputs, 9, 2), inputs.rng.uniform(0.2, 1.0, 9)
    ours = boosting(tensor(margins), tensor(start))
    least = minimiser(-margins, np.log(start))
    masses = start * np.exp(-margins @ least)
    yield agrees("least loss against BFGS and Newton", ours.loss, masses.sum(), 1e-12)
    yield agrees("coefficients", ours.coefficients, least, 1e-9)
    yield agrees("p = q₀e^{−Mλ}", ours.weights, masses, 1e-9)
    yield agrees("Mᵀp", margins.T @ array(ours.weights), 0.0, 1e-11)

    def divergence(p: np.ndarray) -> float:
        return float((xlogy(p, p / start) - p + start).sum())

    dual = optimize.minimize(
        divergence,
        start,
        jac=lambda p: np.log(np.maximum(p, 1e-300) / start),
        bounds=[(1e-12, None)] * 9,
        constraints=[{"type": "eq", "fun": lambda p: margins.T @ p}],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    yield agrees("Σq₀ − loss against SLSQP on the dual", start.sum() - array(ours.loss), dual.fun, 1e-9)
    yield agrees("Σq₀ − loss = D(p‖q₀)", start.sum() - array(ours.loss), divergence(masses), 1e-11)
    yield agrees("D of any masses", generalized_kl(tensor(2 * masses), tensor(start)), divergence(2 * masses), 1e-12)

    apart = boosting(tensor(np.abs(margins)), tensor(start))
    yield true("separable data are recognised", apart.separable)
    yield agrees("separable data: loss 0, p = 0", np.r_[array(apart.loss), array(apart.weights)], 0.0, 0.0)
    yield agrees("separable data: D(0‖q₀) = Σq₀", apart.divergence, start.sum(), 1e-12)


def centred(inputs: RandomInputs, n: int, d: int) -> np.ndarray:
    """Rows with 0 inside their hull, so that the minimum is attained."""
    rows = inputs.normal(n, d)
    return rows - rows.mean(0)


def minimiser(rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """argmin log Σ exp(Ax + b): BFGS to come near, then a root of the gradient."""
    near = optimize.minimize(
        lambda x: log_normalizer(x, rows, offsets),
        np.zeros(rows.shape[1]),
        jac=lambda x: attention_mean(x, rows, offsets),
    )
    return optimize.root(
        lambda x: attention_mean(x, rows, offsets), near.x, jac=lambda x: covariance(x, rows, offsets), tol=1e-14
    ).x


def entropy_maximiser(rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """argmax bᵀν − Σ ν log ν subject to 1ᵀν = 1, Aᵀν = 0, ν ≥ 0: the dual on its own."""
    n = len(rows)
    ours = optimize.minimize(
        lambda v: xlogy(v, v).sum() - offsets @ v,
        np.full(n, 1 / n),
        jac=lambda v: np.log(np.maximum(v, 1e-300)) + 1 - offsets,
        bounds=[(1e-12, 1)] * n,
        constraints=[{"type": "eq", "fun": lambda v: v.sum() - 1}, {"type": "eq", "fun": lambda v: rows.T @ v}],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return ours.x


def least_kl_on_square(gap: float) -> float:
    """min KL(p‖h) over laws on the corners of the square with mean (1 − gap, 1 − gap).

    One mass is free, s = p_00; at the minimum the odds p_00 p_11 / (p_10 p_01) are those of h: a quadratic equation.
    """
    odds = SHARES[0] * SHARES[3] / (SHARES[1] * SHARES[2])
    linear = 1 - 2 * gap + 2 * gap * odds
    s = 2 * odds * gap**2 / (linear + np.sqrt(linear**2 + 4 * (1 - odds) * odds * gap**2))
    return kl(np.array([s, gap - s, gap - s, 1 - 2 * gap + s]), SHARES)
