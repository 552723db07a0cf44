"""B. What transformers add to the formula: masks, sinks, rotary positions, caches, heads, units, cheaper sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.special import expit
from torch.nn import functional

from cumulant import Empirical, Gaussian, Measure, moments
from cumulant.attention import attend
from cumulant.duality import elbo_gap
from cumulant.paper.checks.evidence import Evidence, agrees, array, measured, true
from cumulant.paper.checks.oracle import attention_mean, covariance, differences, kl, log_normalizer, logsumexp, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.potentials import Block, ReluSquare, Units, asymmetry, least_slope, multihead
from cumulant.regression import random_features


@check("B1", "a mask is a log weight of −∞: the key is not there")
def mask(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    visible = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    restricted = attention_mean(eta, x[visible])
    # 1e-14 and not 1e-15: the two sides add the same numbers in another order
    ours = attend(tensor(eta)[None], tensor(x), mask=torch.as_tensor(visible)[None], scale=1.0)
    yield agrees("attention with a mask", ours.output[0], restricted, 1e-14)
    yield agrees("its G", ours.log_normalizer[0], log_normalizer(eta, x[visible]), 1e-14)
    absent = Empirical(tensor(x), tensor(np.where(visible, 0.0, -np.inf)))
    yield agrees("measure with weights −∞", absent.mean(tensor(eta)), restricted, 1e-14)


@check("B2", "softmax-plus-one is one more key at 0 with value 0")
def softmax_plus_one(inputs: RandomInputs) -> Iterator[Evidence]:
    k, v, eta = inputs.normal(7, 3), inputs.normal(7, 5), inputs.normal(3)
    mass = np.exp(k @ eta)
    ours = attend(tensor(eta)[None], tensor(k), tensor(v), sink=0.0, scale=1.0)
    yield agrees("e^s v / (1 + Σe^s)", ours.output[0], mass @ v / (1 + mass.sum()), 1e-14)
    yield agrees("mass of the sink", ours.sink_mass[0], 1 / (1 + mass.sum()), 1e-14)


@check("B3", "the moments of two sets of keys merge into those of their union")
def merge(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    cov, query = covariance(eta, x), tensor(eta)[None]
    left, right, nothing = (moments(query, tensor(part), statistics="all") for part in (x[:4], x[4:], x[:0]))
    for label, whole in {"merged": left.merge(right), "merged with nothing": right.merge(nothing).merge(left)}.items():
        yield agrees(f"{label}: G", whole.log_normalizer[0], log_normalizer(eta, x), 1e-13)
        yield agrees(f"{label}: mean", _present(whole.mean)[0], attention_mean(eta, x), 1e-13)
        yield agrees(f"{label}: ηᵀCη", _present(whole.score_variance)[0], eta @ cov @ eta, 1e-13)
        yield agrees(f"{label}: tr C", _present(whole.atom_trace)[0], np.trace(cov), 1e-13)
    union = Empirical(tensor(x[:4])) + Empirical(tensor(x[4:]))
    yield agrees("covariance of h + g", union.fisher(tensor(eta)), cov, 1e-13)


@check("B4", "rotary positions: atoms R_j k_j and parameter R_i q_i, so that scores depend on j − i")
def rotary(inputs: RandomInputs) -> Iterator[Evidence]:
    k, v, q, angle, i = inputs.normal(5, 2), inputs.normal(5, 3), inputs.normal(2), 0.7, 4
    relative = np.array([q @ _rotation((j - i) * angle) @ k[j] for j in range(5)])
    turned = np.stack([_rotation(j * angle) @ k[j] for j in range(5)])
    ours = attend(tensor(_rotation(i * angle) @ q)[None], tensor(turned), tensor(v), scale=1.0)
    yield agrees("G of the relative scores", ours.log_normalizer[0], logsumexp(relative), 1e-14)
    yield agrees("values stay unrotated", ours.output[0], softmax(relative) @ v, 1e-14)


def _heads(inputs: RandomInputs) -> tuple[list[np.ndarray], list[np.ndarray], Measure]:
    """Keys and weights of two heads, and the two as one measure."""
    keys = [inputs.normal(7, 3), inputs.normal(4, 3)]
    weights = [inputs.normal(3, 3), inputs.normal(3, 3)]
    return keys, weights, multihead([Empirical(tensor(x)) for x in keys], [tensor(w) for w in weights])


@check("B5", "two heads with tied weights are one measure of N₁N₂ atoms")
def heads(inputs: RandomInputs) -> Iterator[Evidence]:
    (x, y), (a, b), both = _heads(inputs)
    eta = inputs.normal(3)
    atoms = np.array([a.T @ u + b.T @ w for u, w in product(x, y)])
    yield agrees("G of the convolution", both.log_normalizer(tensor(eta)), log_normalizer(eta, atoms), 1e-12)
    yield agrees("mean", both.mean(tensor(eta)), attention_mean(eta, atoms), 1e-12)


@check("B6", "the gradient of that measure is multi-head attention, Σ_h W_hᵀ attention_h(W_h η)")
def heads_gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    keys, weights, both = _heads(inputs)
    eta = inputs.normal(3)

    def potential(e: np.ndarray) -> float:
        return sum(log_normalizer(w @ e, x) for x, w in zip(keys, weights, strict=True))

    yield agrees("∇ by differences", both.mean(tensor(eta)), differences(potential, eta), 1e-8)
    pairs = list(zip(keys, weights, strict=True))
    written = sum(w.T @ attention_mean(w @ eta, x) for x, w in pairs)
    yield agrees("Σ_h W_hᵀ attention_h", both.mean(tensor(eta)), written, 1e-12)
    curvature = sum(w.T @ covariance(w @ eta, x) @ w for x, w in pairs)
    yield agrees("∇² = Σ_h W_hᵀ C_h W_h", both.fisher(tensor(eta)), curvature, 1e-12)


@check("B7", "a layer of sigmoid units sums over all 2^H states of its units")
def units(inputs: RandomInputs) -> Iterator[Evidence]:
    w, b, eta = inputs.normal(6, 3), inputs.normal(6), inputs.normal(3)
    states = np.array(list(product([0, 1], repeat=6)))
    atoms, weights = states @ w, states @ b
    layer = Units(tensor(w), tensor(b))
    yield agrees("Σ softplus(Wη + b)", layer.log_normalizer(tensor(eta)), log_normalizer(eta, atoms, weights), 1e-12)
    yield agrees("mean", layer.mean(tensor(eta)), attention_mean(eta, atoms, weights), 1e-12)


@check("B8", "its gradient is Wᵀ sigmoid(Wη + b); ReLU units and whole blocks are gradients too")
def units_gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    w, b, eta = inputs.normal(6, 3), inputs.normal(6), inputs.normal(3)
    states, x = np.array(list(product([0, 1], repeat=6))), inputs.normal(7, 3)

    def free_energy(e: np.ndarray) -> float:
        return log_normalizer(e, states @ w, states @ b)

    def rectified(e: np.ndarray) -> float:
        return float((np.maximum(w @ e + b, 0) ** 2).sum() / 2)

    layer, relu = Units(tensor(w), tensor(b)), ReluSquare(tensor(w), tensor(b))
    yield agrees("∇ by differences", layer.mean(tensor(eta)), differences(free_energy, eta), 1e-8)
    yield agrees("Wᵀ sigmoid(Wη + b)", layer.mean(tensor(eta)), w.T @ expit(w @ eta + b), 1e-13)
    yield agrees("ReLU: ∇½Σrelu²", relu.gradient(tensor(eta)), differences(rectified, eta), 1e-8)

    def block(e: np.ndarray) -> np.ndarray:
        return e + attention_mean(e, x) + w.T @ expit(w @ e + b)

    step = Block((Empirical(tensor(x)), layer)).step(tensor(eta))
    yield agrees("attention and units in parallel", step.eta, block(eta), 1e-12)
    volume = np.linalg.slogdet(differences(block, eta))[1]
    yield agrees("log-volume of the block", step.log_volume, volume, 1e-8, f"{volume:.3f} ≥ 0")


@check("B9", "GELU and SiLU are no gradients of convex functions, SwiGLU is no gradient at all")
def activations(inputs: RandomInputs) -> Iterator[Evidence]:
    grid = np.linspace(-6, 6, 200_001)
    slopes = {
        "GELU": (functional.gelu, lambda t: stats.norm.cdf(t) + t * stats.norm.pdf(t)),
        "SiLU": (functional.silu, lambda t: expit(t) * (1 + t * expit(-t))),
    }
    for name, (activation, slope) in slopes.items():
        ours = least_slope(activation)
        yield agrees(f"least slope of {name}", ours, slope(grid).min(), 1e-6, f"{ours:.4f}")
        yield true(f"{name} falls somewhere", ours < -0.05)
    monotone = (torch.relu, torch.sigmoid, functional.softplus)
    yield true("ReLU, sigmoid and softplus never fall", all(least_slope(f) >= 0 for f in monotone))

    gate, up, down, x = inputs.normal(6, 3), inputs.normal(6, 3), inputs.normal(3, 6), inputs.normal(3)
    jacobian = differences(lambda e: down @ (gate @ e * expit(gate @ e) * (up @ e)), x)
    g, u, d = tensor(gate), tensor(up), tensor(down)
    ours = asymmetry(lambda e: d @ (functional.silu(g @ e) * (u @ e)), tensor(x))
    yield agrees("SwiGLU: max|J − Jᵀ|", ours, np.abs(jacobian - jacobian.T).max(), 1e-7, f"{ours.item():.3g}")
    yield true("it is not 0", ours > 1e-2)


@check("B10", "the exponential kernel is a mean over Gaussian directions of positive features")
def kernel(inputs: RandomInputs) -> Iterator[Evidence]:
    q, k = inputs.normal(2, 2) * 0.7
    nodes, weights = np.polynomial.hermite_e.hermegauss(50)
    directions = np.array(list(product(nodes, nodes)))
    mass = np.outer(weights, weights).ravel() / (2 * np.pi)
    features = array(random_features(tensor([q, k]), tensor(directions)))  # carry a factor 1/√m each
    estimate = len(mass) * (mass * features[0] * features[1]).sum()
    yield agrees("Gauss–Hermite mean of φ(q)φ(k) against e^⟨q,k⟩", estimate, np.exp(q @ k), 1e-12)


class _Clustered(NamedTuple):
    """4000 keys in 8 clusters, and three summaries of them."""

    keys: np.ndarray
    counts: np.ndarray
    locs: np.ndarray
    covariances: np.ndarray
    summaries: dict[str, Measure]


SCALES = (0.5, 1.0, 2.0, 4.0)


def _clustered(inputs: RandomInputs) -> _Clustered:
    label, centres = np.arange(4000) % 8, inputs.normal(8, 6) * 1.5
    keys = centres[label] + inputs.normal(4000, 6) * np.linspace(0.2, 0.9, 6)
    groups = [keys[label == c] for c in range(8)]
    counts, locs = np.array([float(len(g)) for g in groups]), np.array([g.mean(0) for g in groups])
    covariances = np.array([np.cov(g.T, bias=True) for g in groups])
    parts = [n * Gaussian(tensor(m), tensor(c)) for n, m, c in zip(counts, locs, covariances, strict=True)]
    summaries = {
        "one Gaussian": Gaussian(tensor(keys.mean(0)), tensor(np.cov(keys.T, bias=True))),
        "centroids": Empirical(tensor(locs), tensor(np.log(counts))),
        "sum of Gaussians": sum(parts[1:], start=parts[0]),
    }
    return _Clustered(keys, counts, locs, covariances, summaries)


def _errors(inputs: RandomInputs, data: _Clustered) -> dict[str, list[float]]:
    """Squared error of each summary relative to the spread of attention, by the scale of the queries."""
    errors: dict[str, list[float]] = {name: [] for name in data.summaries}
    for scale in SCALES:
        eta = inputs.normal(50, 6) * scale / np.sqrt(6)
        exact = softmax(eta @ data.keys.T, axis=1) @ data.keys
        spread = ((exact - data.keys.mean(0)) ** 2).sum()
        for name, measure in data.summaries.items():
            errors[name].append(((array(measure.mean(tensor(eta))) - exact) ** 2).sum() / spread)
    return errors


@check("B11", "4000 keys in 8 clusters, summarised by one Gaussian, by centroids, by a sum of Gaussians")
def summaries(inputs: RandomInputs) -> Iterator[Evidence]:
    data = _clustered(inputs)
    eta = inputs.normal(6) / np.sqrt(6)
    scores = np.log(data.counts) + data.locs @ eta + np.einsum("i,cij,j->c", eta, data.covariances, eta) / 2
    mean = softmax(scores) @ (data.locs + data.covariances @ eta)
    yield agrees("mean of the sum (P2′)", data.summaries["sum of Gaussians"].mean(tensor(eta)), mean, 1e-12)
    for name, ours in _errors(inputs, data).items():
        for scale, error in zip(SCALES, ours, strict=True):
            yield measured(f"relative squared error, {name}, query scale {scale:g}", error)


@check("B12", "with covariances the clusters stand for their keys at every query scale, better than centroids")
def clusters(inputs: RandomInputs) -> Iterator[Evidence]:
    errors = _errors(inputs, _clustered(inputs))
    pairs = zip(SCALES, errors["sum of Gaussians"], errors["centroids"], strict=True)
    for scale, gaussians, centroids in pairs:
        label, note = f"smaller error at query scale {scale:g}", f"{gaussians:.1e} < {centroids:.1e}"
        yield true(label, gaussians < centroids, note)
    yield agrees("relative squared error at scale 0.5", errors["sum of Gaussians"][0], 0.0, 1e-3)


@check("B13", "keeping some keys costs −log of their mass, which is the gap of the evidence bound")
def kept_keys(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta, w = inputs.normal(7, 3), inputs.normal(3), np.log(inputs.probabilities(7))
    p = softmax(x @ eta + w)
    kept = np.argsort(p)[-4:]
    q = np.zeros(7)
    q[kept] = p[kept] / p[kept].sum()
    query, atoms, weights = tensor(eta)[None], tensor(x), tensor(w)
    lost = -np.log(p[kept].sum())
    by_index = elbo_gap(query, atoms, kept=torch.as_tensor(kept)[None], log_weights=weights)
    yield agrees("top 4 keys: −log of the kept mass", by_index[0], lost, 1e-12)
    by_mask = elbo_gap(query, atoms, kept=torch.as_tensor(q > 0)[None], log_weights=weights)
    yield agrees("G − G_kept", by_mask[0], log_normalizer(eta, x, w) - log_normalizer(eta, x[kept], w[kept]), 1e-12)
    by_weights = elbo_gap(query, atoms, weights=tensor(q)[None], log_weights=weights)
    yield agrees("KL(q‖p) of the renormalised weights", by_weights[0], kl(q, p), 1e-12)
    other = inputs.probabilities(7)
    gap = elbo_gap(query, atoms, weights=tensor(other)[None], log_weights=weights)
    yield agrees("KL(q‖p) of any other weights", gap[0], kl(other, p), 1e-12)


@check("B14", "a sink at 0 shrinks the mean and adds a rank-one term to the covariance")
def sink(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    share = 1 / (1 + np.exp(x @ eta).sum())
    m, c = attention_mean(eta, x), covariance(eta, x)
    ours = attend(tensor(eta)[None], tensor(x), sink=0.0, scale=1.0)
    yield agrees("mean (1 − p) m", ours.output[0], (1 - share) * m, 1e-13)
    cov = (1 - share) * c + share * (1 - share) * np.outer(m, m)
    extended = Empirical(tensor(x)) + Empirical(tensor(np.zeros((1, 3))))
    yield agrees("covariance (1 − p) C + p(1 − p) mmᵀ", extended.fisher(tensor(eta)), cov, 1e-13)
    yield agrees("its trace, from attention", ours.collapse_loss[0], np.trace(cov), 1e-13)


def _rotation(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def _present(value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ValueError("a statistic that was asked for is missing")
    return value
