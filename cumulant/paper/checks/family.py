"""A. Exponential families and attention: G, its gradient and its Hessian."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import integrate, stats
from scipy.special import gammaln
from torch.distributions import Exponential, Poisson

from cumulant import Empirical, Gaussian, attend, from_distribution, moments
from cumulant.paper.checks.evidence import Evidence, agrees, array, differs, true
from cumulant.paper.checks.oracle import attention_mean, covariance, differences, log_normalizer, logsumexp, softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.regression import nadaraya_watson


@check("A1", "a Poisson law in natural form: G by summation and in closed form")
def poisson(inputs: RandomInputs) -> Iterator[Evidence]:
    eta, k = 0.7, np.arange(60)
    h = np.e * from_distribution(Poisson(tensor(1.0)))  # 1/x! is e times the Poisson law of rate 1
    summed = logsumexp(k * eta - gammaln(k + 1))
    yield agrees("G(η) = e^η for h = 1/x!", h.log_normalizer(tensor([eta])), summed, 1e-12)


@check("A2", "G of the exponential law is the log of its Laplace transform at −y")
def laplace_transform(inputs: RandomInputs) -> Iterator[Evidence]:
    h, y = from_distribution(Exponential(tensor(1.0))), 0.6
    integral = integrate.quad(lambda x: np.exp(y * x - x), 0, 120, epsabs=1e-13, limit=400)[0]
    yield agrees("G(y) against quadrature", h.log_normalizer(tensor([y])), np.log(integral), 1e-9)
    yield true("G = +∞ from y = 1 on", h.log_normalizer(tensor([[1.0], [1.5]])).isposinf())


@check("A3", "G of a Gaussian against quadrature")
def gaussian(inputs: RandomInputs) -> Iterator[Evidence]:
    loc, variance, y = 0.4, 1.7, 0.6
    integral = integrate.quad(lambda x: np.exp(y * x) * stats.norm.pdf(x, loc, np.sqrt(variance)), -30, 30)[0]
    h = Gaussian(tensor([loc]), tensor([[variance]]))
    yield agrees("⟨μ,η⟩ + ½ηᵀΣη", h.log_normalizer(tensor([y])), np.log(integral), 1e-9)


@check("A4", "attention is the gradient of G")
def gradient(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta, w = inputs.normal(7, 3), inputs.normal(3), np.log(inputs.probabilities(7))
    slope = differences(lambda e: log_normalizer(e, x, w), eta)
    h = Empirical(tensor(x), tensor(w))
    yield agrees("G", h.log_normalizer(tensor(eta)), log_normalizer(eta, x, w), 1e-13)
    yield agrees("∇G by differences = mean", h.mean(tensor(eta)), slope, 1e-8)
    ours = attend(tensor(eta)[None], tensor(x), log_weights=tensor(w), scale=1.0)
    yield agrees("∇G by differences = attention with V = K", ours.output[0], slope, 1e-8)


@check("A5", "the mass of h cancels in the weights")
def mass_cancels(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    counting, normalised = Empirical(tensor(x)), Empirical(tensor(x)).normalized()
    yield agrees("mean under h/N", normalised.mean(tensor(eta)), attention_mean(eta, x), 1e-14)
    yield agrees("mean under the counting measure", counting.mean(tensor(eta)), attention_mean(eta, x), 1e-14)
    gap = counting.log_normalizer(tensor(eta)) - normalised.log_normalizer(tensor(eta))
    yield agrees("G moves by log N", gap, np.log(7), 1e-13)
    weights = softmax(x @ x.T, axis=1)
    yield true("p(x_i|x_k) ≠ p(x_k|x_i)", np.abs(weights - weights.T).max() > 1e-3)


@check("A6", "m copies of a key are one key of log weight log m")
def copies(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    tripled = Empirical(tensor(np.vstack([x, x[:1], x[:1]])))
    weighted = attention_mean(eta, x, np.log(np.r_[3, np.ones(6)]))
    yield agrees("mean", tripled.mean(tensor(eta)), weighted, 1e-14)


@check("A7", "an indicator in the place of h loses multiplicities")
def indicator(inputs: RandomInputs) -> Iterator[Evidence]:
    x = inputs.normal(7, 3)
    eta = x[0]  # a query that attends to the key that is there three times
    repeated = np.vstack([x, x[:1], x[:1]])
    literal = attention_mean(eta, np.unique(repeated, axis=0))
    yield agrees(
        "counting measure", Empirical(tensor(repeated)).mean(tensor(eta)), attention_mean(eta, repeated), 1e-14
    )
    yield differs("h = 1 on the set of keys", literal, attention_mean(eta, repeated), 1e-3)


@check("A8", "dot-product attention is Nadaraya–Watson with base weights e^{|x|²/2}")
def kernel_regression(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    logits = -((eta - x) ** 2).sum(1) / 2
    lifted = softmax(logits + (x**2).sum(1) / 2) @ x
    points, query = tensor(x), tensor(eta)[None]
    ours = nadaraya_watson(query, points, points, kernel="dot").mean[0]
    yield agrees("kernel e^⟨q,x⟩", ours, lifted, 1e-13)
    weights = (points**2).sum(1) / 2
    ours = nadaraya_watson(query, points, points, kernel="gaussian", log_weights=weights).mean[0]
    yield agrees("Gaussian kernel with base weights", ours, attention_mean(eta, x), 1e-13)


@check("A9", "the plain Gaussian kernel is dot-product attention only for keys of one length")
def gaussian_kernel(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3), inputs.normal(3)
    gaussian_weights = softmax(-((eta - x) ** 2).sum(1) / 2)
    query = tensor(eta)[None]
    ours = nadaraya_watson(query, tensor(x), tensor(x), kernel="gaussian").mean[0]
    yield agrees("Gaussian Nadaraya–Watson", ours, gaussian_weights @ x, 1e-13)
    yield differs("as dot-product attention", ours, attention_mean(eta, x), 1e-2)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    ours = nadaraya_watson(query, tensor(unit), tensor(unit), kernel="gaussian").mean[0]
    yield agrees("keys of one length", ours, attention_mean(eta, unit), 1e-13)


@check("A10", "G(βq)/β is the potential whose gradient in q is attention at inverse temperature β")
def temperature(inputs: RandomInputs) -> Iterator[Evidence]:
    x, q, beta = inputs.normal(7, 3), inputs.normal(3), 0.31
    slope = differences(lambda e: logsumexp(beta * x @ e) / beta, q)
    yield agrees("∇_q G(βq)/β", attend(tensor(q)[None], tensor(x), scale=beta).output[0], slope, 1e-9)


@check("A11", "with values other than keys the output is ∇_θ of the joint log-normalizer at 0")
def values(inputs: RandomInputs) -> Iterator[Evidence]:
    k, v, eta = inputs.normal(7, 3), inputs.normal(7, 5), inputs.normal(3)
    slope = differences(lambda t: logsumexp(k @ eta + v @ t), np.zeros(5))
    yield agrees("∇_θ G(η, 0)", attend(tensor(eta)[None], tensor(k), tensor(v), scale=1.0).output[0], slope, 1e-9)
    joint = Empirical(tensor(np.hstack([k, v]))).mean(tensor(np.r_[eta, np.zeros(5)]))
    yield agrees("joint measure", joint[3:], slope, 1e-9)


@check("A12", "the derivative of the output in the query is Cov(v, k)")
def value_jacobian(inputs: RandomInputs) -> Iterator[Evidence]:
    k, v, eta = inputs.normal(7, 3), inputs.normal(7, 5), inputs.normal(3)
    slope = differences(lambda e: softmax(k @ e) @ v, eta)

    def output(e: torch.Tensor) -> torch.Tensor:
        return attend(e[None], tensor(k), tensor(v), scale=1.0).output[0]

    yield agrees("autograd", torch.autograd.functional.jacobian(output, tensor(eta)), slope, 1e-9)
    joint = Empirical(tensor(np.hstack([k, v]))).fisher(tensor(np.r_[eta, np.zeros(5)]))
    yield agrees("block of the joint Fisher matrix", joint[3:, :3], slope, 1e-9)


@check("A13", "Fisher information, covariance and Hessian of G are one matrix")
def fisher(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta, w = inputs.normal(7, 3), inputs.normal(3), np.log(inputs.probabilities(7))
    h = Empirical(tensor(x), tensor(w))
    slope = differences(lambda e: attention_mean(e, x, w), eta)
    yield agrees("differences of the mean", h.fisher(tensor(eta)), slope, 1e-9)
    yield agrees("covariance", h.fisher(tensor(eta)), covariance(eta, x, w), 1e-13)
    hessian = torch.autograd.functional.hessian(lambda e: h.log_normalizer(e), tensor(eta))
    yield agrees("Hessian by autograd", hessian, covariance(eta, x, w), 1e-12)


@check("A14", "large scores: shifted sums stay finite where naive ones do not")
def overflow(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(7, 3) * 1e8, inputs.normal(3)
    with np.errstate(over="ignore", invalid="ignore"):
        naive = np.exp(x @ eta) / np.exp(x @ eta).sum()
    yield true("the naive quotient is NaN", np.isnan(naive).any())
    yield agrees("one-hot mean", Empirical(tensor(x)).mean(tensor(eta)), x[np.argmax(x @ eta)], 0.0)
    for backend in ("dense", "streaming"):
        ours = moments(tensor(eta)[None], tensor(x), backend=backend)
        yield agrees(f"G, {backend}", ours.log_normalizer[0] / 1e8, (x @ eta).max() / 1e8, 1e-12)


@check("A15", "one atom: mean x, covariance 0, G linear")
def one_atom(inputs: RandomInputs) -> Iterator[Evidence]:
    x, eta = inputs.normal(1, 3), inputs.normal(3)
    h = Empirical(tensor(x))
    yield agrees("mean", h.mean(tensor(eta)), x[0], 1e-15)
    yield agrees("covariance", h.fisher(tensor(eta)), np.zeros((3, 3)), 0.0)
    yield agrees("G", h.log_normalizer(tensor(eta)), x[0] @ eta, 1e-14)
    yield agrees("G* at the atom", h.conjugate(tensor(x[0])), 0.0, 1e-8)


@check("A16", "a direction the keys do not span changes G affinely and the mean not at all")
def null_direction(inputs: RandomInputs) -> Iterator[Evidence]:
    flat, eta, null = inputs.normal(7, 2), inputs.normal(3), np.array([1.0, 1.0, -1.0])
    x = np.c_[flat, flat.sum(1) + 1.5]
    h, here, there = Empirical(tensor(x)), tensor(eta), tensor(eta + 5 * null)
    yield agrees("mean", h.mean(there), h.mean(here), 1e-12)
    yield agrees("G", h.log_normalizer(there) - h.log_normalizer(here), -7.5, 1e-10)
    yield agrees("least eigenvalue of the Fisher matrix", np.linalg.eigvalsh(array(h.fisher(here)))[0], 0.0, 1e-12)
