"""C. The residual step η + ∇G(η): expansion, its inverse, its iteration, and what moving keys change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import optimize, stats
from scipy.special import xlogy

from cumulant import Empirical, moments
from cumulant.attention import attend
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, measured, true
from cumulant.paper.checks.oracle import attention_mean, covariance, differences, log_normalizer, root, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.potentials import asymmetry
from cumulant.residual import ascend, gradientness, prox, self_attention_jacobian


def _keys(inputs: RandomInputs) -> tuple[np.ndarray, np.ndarray, Empirical]:
    """Seven keys with log weights, and their measure."""
    x, w = inputs.normal(7, 3), np.log(inputs.probabilities(7))
    return x, w, Empirical(tensor(x), tensor(w))


def _least_ratio(before: np.ndarray, after: np.ndarray) -> float:
    """By how much the most shrunken of many differences (…, d) shrinks."""
    return float((np.linalg.norm(after, axis=-1) / np.linalg.norm(before, axis=-1)).min())


@check("C1", "the step never brings two queries closer")
def expansive(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    a, b = inputs.normal(2, 200, 3) * 3
    moved = array(ascend(h, tensor(a)).eta)
    yield agrees("η + attention", moved, a + softmax(a @ x.T + w, axis=1) @ x, 1e-13)
    ratio = _least_ratio(a - b, moved - array(ascend(h, tensor(b)).eta))
    yield true("|T(a) − T(b)| ≥ |a − b|", ratio >= 1 - 1e-12, f"least ratio {ratio:.6f} of 200 pairs")


@check("C2", "the log-volume of the step is Σ log(1 + λ) over the eigenvalues of the Fisher matrix")
def volume(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    eta = inputs.normal(3)
    jacobian = differences(lambda e: e + attention_mean(e, x, w), eta)
    ours = ascend(h, tensor(eta)).log_volume
    yield agrees("log|det| of the Jacobian by differences", ours, np.linalg.slogdet(jacobian)[1], 1e-8)
    spectrum = np.linalg.eigvalsh(covariance(eta, x, w))
    yield agrees("Σ log(1 + λ)", ours, np.log1p(spectrum).sum(), 1e-12)
    point = ascend(Empirical(tensor(x[:1])), tensor(eta)).log_volume
    yield agrees("0 for a single key", point, 0.0, 1e-15)


@check("C3", "the step is undone by the proximal map of G")
def inverse(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    eta = inputs.normal(3)
    y = eta + attention_mean(eta, x, w)
    solution = optimize.minimize(
        lambda e: log_normalizer(e, x, w) + ((e - y) ** 2).sum() / 2,
        np.zeros(3),
        jac=lambda e: attention_mean(e, x, w) + e - y,
        method="BFGS",
        tol=1e-13,
    )
    ours = prox(h, tensor(y)).value
    yield agrees("argmin G(x) + ½|x − y|² by BFGS", ours, solution.x, 1e-6)
    yield agrees("the query before the step", ours, eta, 1e-12)


@check("C4", "in a metric M the step expands the norm of M⁻¹")
def metric(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    m, eta = inputs.covariance(3), inputs.normal(3)
    a, b = inputs.normal(2, 200, 3) * 3
    steps = [array(ascend(h, tensor(e), tensor(m)).eta) for e in (a, b)]
    yield agrees("η + M attention", steps[0], a + softmax(a @ x.T + w, axis=1) @ x @ m, 1e-13)
    unit = np.linalg.inv(root(m))
    ratio = _least_ratio((a - b) @ unit, (steps[0] - steps[1]) @ unit)
    yield true("|T(a) − T(b)| ≥ |a − b| in that norm", ratio >= 1 - 1e-12, f"least ratio {ratio:.6f} of 200 pairs")
    jacobian = differences(lambda e: e + m @ attention_mean(e, x, w), eta)
    ours = ascend(h, tensor(eta), tensor(m)).log_volume
    yield agrees("log-volume", ours, np.linalg.slogdet(jacobian)[1], 1e-8)


def _ascent(h: Empirical, eta: np.ndarray, steps: int) -> np.ndarray:
    """η_0, …, η_steps"""
    path = [tensor(eta)]
    for _ in range(steps):
        path.append(path[-1] + h.mean(path[-1]))
    return array(torch.stack(path))


@check("C5", "iterated ascent runs to infinity along one key")
def divergence(inputs: RandomInputs) -> Iterator[Evidence]:
    # keys on a random frame: the lead of the winning key over the next decides how many steps it takes to settle
    frame, _ = np.linalg.qr(inputs.normal(3, 3))
    x = np.vstack([frame, -frame]) * inputs.rng.uniform(1.0, 1.5, (6, 1))
    path = _ascent(Empirical(tensor(x)), inputs.normal(3), 400)
    winner = x[np.argmax(x @ path[-1])]
    yield agrees("the last step is a key", path[-1] - path[-2], winner, 1e-8)
    yield agrees("η_t/t tends to it", path[-1] / 400, winner, 0.05, f"|η_400| = {np.linalg.norm(path[-1]):.0f}")
    yield true("⟨x*, x*⟩ ≥ ⟨x*, x_n⟩", bool((x @ winner <= winner @ winner + 1e-12).all()))


@check("C6", "along the ascent |∇G| never falls and G gains at least |∇G|² a step")
def monotone(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    path = _ascent(h, inputs.normal(3), 100)
    exact = np.array([log_normalizer(e, x, w) for e in path])
    gain = array(h.log_normalizer(tensor(path)))
    slope = np.linalg.norm(array(h.mean(tensor(path))), axis=1)
    yield agrees("G along the path, relative", gain / exact.max(), exact / exact.max(), 1e-13)
    yield true("|∇G| non-decreasing", np.diff(slope) >= -1e-12)
    yield true("G(η_{t+1}) ≥ G(η_t) + |∇G(η_t)|²", np.diff(gain) >= slope[:-1] ** 2 - 1e-11)


@check("C7", "the exception: a parameter of mean zero is a fixed point, and repels")
def zero_mean(inputs: RandomInputs) -> Iterator[Evidence]:
    half = inputs.normal(7, 3)
    x = np.vstack([half, -half])
    h, origin = Empirical(tensor(x)), np.zeros(3)
    yield agrees("a step from there", ascend(h, tensor(origin)).eta, origin, 1e-15)
    near = inputs.normal(3) * 1e-4
    away = (np.eye(3) + covariance(origin, x)) @ near
    ours = ascend(h, tensor(near)).eta
    yield agrees("a step from nearby is (I + C)δ", ours, away, 1e-9)
    yield true("and leads away", ours.norm() > np.linalg.norm(near))


@check("C8", "the entropy of a density of queries grows by the mean log-volume")
def entropy(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(7, 1) * 1.3
    grid = np.linspace(-12, 12, 2001)
    density = stats.norm.pdf(grid, 0, 1.5)
    image = grid + softmax(np.outer(grid, x[:, 0]), axis=1) @ x[:, 0]
    pushed = density / np.gradient(image, grid, edge_order=2)
    gain = np.trapezoid(xlogy(density, density), grid) - np.trapezoid(xlogy(pushed, pushed), image)
    ours = ascend(Empirical(tensor(x)), tensor(grid)[:, None]).log_volume
    mean = np.trapezoid(density * array(ours), grid)
    yield agrees("H(T#ρ) − H(ρ) by quadrature", mean, gain, 2e-4, f"{mean:.3f} nats")


def _self_attention(x: np.ndarray, visible: np.ndarray | bool = True) -> np.ndarray:
    """x_i + Σ_j a_ij x_j for tokens (…, n, d)"""
    scores = np.where(visible, x @ np.swapaxes(x, -1, -2), -np.inf)
    return x + softmax(scores, axis=-1) @ x


@check("C9", "the Jacobian of self-attention, whose keys move with the queries")
def moving_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(5, 2)
    ours = self_attention_jacobian(tensor(x))
    yield agrees("δ_ij (I + C_i) + a_ij (I + (x_j − m_i) x_iᵀ)", ours, differences(_self_attention, x), 1e-8)
    causal = np.tril(np.ones((5, 5), bool))
    ours = self_attention_jacobian(tensor(x), causal=True)
    yield agrees("causal", ours, differences(lambda z: _self_attention(z, causal), x), 1e-8)
    wq, wk, wv = inputs.normal(4, 2) * 0.5, inputs.normal(4, 2) * 0.5, inputs.normal(2, 2)
    ours = self_attention_jacobian(tensor(x), query_weight=tensor(wq), key_weight=tensor(wk), value_weight=tensor(wv))
    slope = differences(lambda z: z + softmax(z @ wq.T @ wk @ z.T, axis=1) @ z @ wv.T, x)
    yield agrees("with weights", ours, slope, 1e-8)


def _clouds(inputs: RandomInputs) -> np.ndarray:
    """400 draws of five tokens in the plane."""
    return inputs.normal(400, 5, 2) * 1.5


def _gaps(x: np.ndarray) -> np.ndarray:
    """Differences of all pairs of tokens (…, pairs, d)."""
    i, j = np.triu_indices(x.shape[-2], 1)
    return x[..., i, :] - x[..., j, :]


@check("C10", "self-attention without a mask never brings two tokens closer, for they share one G")
def tokens_expand(inputs: RandomInputs) -> Iterator[Evidence]:
    x = _clouds(inputs)
    moved = x + array(attend(tensor(x), tensor(x), scale=1.0).output)
    yield agrees("the step", moved, _self_attention(x), 1e-12)
    ratio = _least_ratio(_gaps(x), _gaps(moved))
    yield true("distances of tokens", ratio >= 1 - 1e-12, f"least ratio {ratio:.4f} in 400 draws")


@check("C11", "yet the whole map can contract: its Jacobian has singular values below 1")
def contraction(inputs: RandomInputs) -> Iterator[Evidence]:
    x = _clouds(inputs)
    jacobian = self_attention_jacobian(tensor(x)).reshape(400, 10, 10)
    least = torch.linalg.svdvals(jacobian)[:, -1]
    worst = int(least.argmin())
    slope = differences(_self_attention, x[worst]).reshape(10, 10)
    oracle = np.linalg.svd(slope, compute_uv=False)[-1]
    yield agrees("least singular value by differences", least[worst], oracle, 1e-7, f"{oracle:.4f} in 400 draws")
    yield true("below 1", least[worst] < 1 - 1e-3)
    alone = sum(np.linalg.slogdet(np.eye(2) + covariance(e, x[worst]))[1] for e in x[worst])
    whole = torch.linalg.slogdet(jacobian[worst])[1].item()
    yield true("log|det| is not Σ_i log det(I + C_i)", abs(whole - alone) > 1e-2, f"{whole:.3f}, not {alone:.3f}")
    yield measured("draws with a negative determinant, of 400", float((torch.linalg.det(jacobian) < 0).sum()))


@check("C12", "under a causal mask tokens can come closer: every row has its own G")
def causal_mask(inputs: RandomInputs) -> Iterator[Evidence]:
    x, visible = _clouds(inputs), np.tril(np.ones((5, 5), bool))
    moved = x + array(attend(tensor(x), tensor(x), causal=True, scale=1.0).output)
    yield agrees("the step", moved, _self_attention(x, visible), 1e-12)
    ratio = _least_ratio(_gaps(x), _gaps(moved))
    yield differs("distances never shrink: least ratio 1", 1.0, ratio, 0.05, f"least ratio {ratio:.4f} in 400 draws")
    own = Empirical(tensor(x), tensor(np.where(visible, 0.0, -np.inf)).expand(400, 5, 5))
    a, b = inputs.normal(2, 400, 5, 2) * 3
    steps = [array(ascend(own, tensor(e)).eta) for e in (a, b)]
    scores = np.where(visible, a @ np.swapaxes(x, 1, 2), -np.inf)
    yield agrees("a step with the context frozen", steps[0], a + softmax(scores, axis=-1) @ x, 1e-12)
    ratio = _least_ratio(a - b, steps[0] - steps[1])
    yield true("each row expands with its own context frozen", ratio >= 1 - 1e-12, f"least ratio {ratio:.6f}")


@check("C13", "with moving keys attention is not the gradient of Σ G_i, which is (A + Aᵀ)X")
def full_gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(5, 2) * 0.7  # e^{|x|²} stays small enough for differences
    tokens = tensor(x).requires_grad_()
    ours = attend(tokens, tokens, scale=1.0)
    (gradient,) = torch.autograd.grad(ours.log_normalizer.sum(), tokens)

    def total(z: np.ndarray) -> float:
        return sum(log_normalizer(e, z) for e in z)

    yield agrees("∇ Σ G_i by differences", gradient, differences(total, x), 1e-7)
    a = softmax(x @ x.T, axis=1)
    yield agrees("(A + Aᵀ)X", gradient, (a + a.T) @ x, 1e-12)
    gap = np.abs(array(gradient) - array(ours.output)).max()
    yield true("AX alone is not it", gap > 1e-2, f"off by {gap:.3g}")
    # it is a preconditioned gradient of the pairwise energy
    slope = differences(lambda z: np.exp(z @ z.T).sum() / 2, x)
    yield agrees("AX = diag(1/Z) ∇ ½Σe^⟨x_i,x_j⟩", ours.output, slope / np.exp(x @ x.T).sum(1)[:, None], 1e-7)


@check("C14", "a head is a gradient field iff W_v = c W_qᵀW_k")
def head_field(inputs: RandomInputs) -> Iterator[Evidence]:
    wq, wk, context, x = inputs.normal(4, 3) * 0.5, inputs.normal(4, 3) * 0.5, inputs.normal(6, 3), inputs.normal(8, 3)
    keys = tensor(context @ wk.T)

    def ours(wv: np.ndarray) -> torch.Tensor:
        values, read = tensor(context @ wv.T), tensor(wq)
        return asymmetry(lambda e: attend((read @ e)[None], keys, values, scale=1.0).output[0], tensor(x))

    def truth(wv: np.ndarray) -> list[float]:
        slopes = [differences(lambda e: softmax(context @ wk.T @ wq @ e) @ context @ wv.T, point) for point in x]
        return [float(np.abs(slope - slope.T).max()) for slope in slopes]

    tied, untied = wq.T @ wk, np.eye(3)
    yield agrees("W_v = W_qᵀW_k: max|J − Jᵀ|", ours(tied), 0.0, 1e-12)
    yield agrees("the same by differences", ours(tied), truth(tied), 1e-8)
    yield agrees("W_v = I: max|J − Jᵀ| by differences", ours(untied), truth(untied), 1e-8)
    largest = ours(untied).max().item()
    yield true("it is not 0", largest > 1e-2, f"up to {largest:.3g} at 8 points")
    q, k, v = tensor(wq), tensor(wk), inputs.normal(4, 3)
    ends = torch.stack([gradientness(q, k, k, q.mT), gradientness(q, k, k, -q.mT)])
    yield agrees("cosine ±1 for tied weights", ends, [1, -1], 1e-12)
    written = wq.T @ v
    cosine = (written * tied).sum() / np.linalg.norm(written) / np.linalg.norm(tied)
    yield agrees("cosine for others", gradientness(q, k, tensor(v), q.mT), cosine, 1e-12)


@check("C15", "in continuous time the log-volume grows at the rate tr Cov")
def continuous(inputs: RandomInputs) -> Iterator[Evidence]:
    x, w, h = _keys(inputs)
    eta, dt = inputs.normal(3), 1e-6
    rate = np.trace(covariance(eta, x, w))
    yield agrees("log-volume of a step of 1e-6, per time", ascend(h, tensor(eta), dt).log_volume / dt, rate, 1e-4)
    ours = moments(tensor(eta), tensor(x), log_weights=tensor(w), statistics=("atom_trace",)).atom_trace
    yield agrees("tr Cov", array(ours if ours is not None else np.nan), rate, 1e-13)
