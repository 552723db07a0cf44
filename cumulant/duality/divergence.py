"""Boosting and its dual: a divergence between masses that need not sum to 1 (S3-F4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.geometry import maximum_entropy
from cumulant.kernels.autocast import autocast_float32, without_autocast
from cumulant.kernels.dense import accumulate
from cumulant.measures import Empirical
from cumulant.residual import prox
from cumulant.solve import Status
from cumulant.typing import PerQuery


def generalized_kl(p: Tensor, q: Tensor) -> PerQuery:
    """The Bregman divergence of Σ x log x between masses that need not sum to 1 (S3-F4).

        D(p ‖ q) = Σ_n p_n log(p_n/q_n) − p_n + q_n ≥ 0,       0 iff p = q

    p, q (..., n) non-negative and finite; leading axes broadcast. 0 log 0 = 0, and +inf where p has mass and q has
    none. KL(p ‖ q) where both sum to 1. Differentiable; masses of 0 get the gradient 0.

    >>> import torch
    >>> generalized_kl(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0]))            # 2 log 2 − 1 + 3
    tensor(3.3863)
    """
    p, q = autocast_float32(p, q)
    for name, mass in (("p", p), ("q", q)):
        where = f"generalized_kl.{name}"
        require_alike(where, require_float(where, mass), "p", p)
        if mass.ndim == 0 or not holds((mass >= 0) & (mass < torch.inf)):
            got = shape(mass) if mass.ndim == 0 else "a value that is negative, infinite or NaN"
            expected, advice = "non-negative finite masses (..., n)", "Pass masses, not logarithms."
            raise ValueError(sentence(where, expected, got, advice))
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(sentence("generalized_kl.q", f"last axis n={p.shape[-1]} as p", shape(q), "Match the atoms."))
    broadcast("generalized_kl", p.shape[:-1], q.shape[:-1])
    p, q = torch.broadcast_tensors(accumulate(p), accumulate(q))
    both = (p > 0) & (q > 0)
    ratio = torch.where(both, p, 1).log() - torch.where(both, q, 1).log()
    terms = torch.where(both, p * ratio - p + q, torch.where(p > 0, torch.inf, q))
    return terms.sum(-1)


class Boosting(NamedTuple):
    """Both sides of boosting.

    coefficients  (d,)  λ; where the data are separable a vector with Mλ > 0, as the minimiser is at infinity
    weights       (n,)  p = q₀ e^{−Mλ}, the unnormalised weights of the examples; 0 if separable
    loss          ()    inf_λ Σ q₀ e^{−Mλ} = Σ p
    divergence    ()    D(p ‖ q₀) = Σq₀ − loss, the dual value
    separable     ()    some λ makes every margin positive
    status        ()    `Status`; BOUNDARY: the infimum is positive but not attained, because some examples can be
                        classified at no cost: their weights tend to 0, and are within 1e-9 of it
    """

    coefficients: Tensor
    weights: Tensor
    loss: Tensor
    divergence: Tensor
    separable: Tensor
    status: Tensor


def boosting(margins: Tensor, weights: Tensor | None = None) -> Boosting:
    """AdaBoost's problem solved to the end: exponential loss and its maximum-entropy dual (S3-F4).

        inf_λ Σ_i q₀ᵢ e^{−(Mλ)ᵢ}     and     Σq₀ − that = min{D(p ‖ q₀): p ≥ 0, Mᵀp = 0}

    margins (n, d) is M: y_i f_j(x_i) for label y = ±1 and feature f_j. weights (n,) is q₀ ≥ 0, ones if None. Solved
    through `maximum_entropy` of the rows −M, which differs only in that its weights sum to 1. Without examples of
    positive weight the loss is 0 and λ = 0.

    >>> import torch
    >>> solution = boosting(torch.tensor([[1.0], [1.0], [-1.0]], dtype=torch.float64))
    >>> solution.coefficients, solution.loss                              # λ = ½ log 2, loss 2 √2
    (tensor([0.3466], dtype=torch.float64), tensor(2.8284, dtype=torch.float64))
    """
    m = accumulate(require_float("boosting.margins", margins))
    if m.ndim != 2:
        raise ValueError(sentence("boosting.margins", "shape (n, d)", shape(m), "Rows are examples."))
    require_finite("boosting.margins", m)
    q = torch.ones_like(m[:, 0]) if weights is None else accumulate(require_float("boosting.weights", weights))
    require_alike("boosting.weights", q, "margins", m)
    if q.shape != m.shape[:1] or not holds((q >= 0) & (q < torch.inf)):
        expected = f"{len(m)} non-negative finite weights"
        raise ValueError(sentence("boosting.weights", expected, shape(q), "One per example."))
    used = q > 0
    if not used.any():
        zero, code = q.sum(), torch.tensor(int(Status.CONVERGED), dtype=torch.int8, device=m.device)
        return Boosting(m.new_zeros(m.shape[1]), q, zero, zero, torch.ones_like(zero, dtype=torch.bool), code)
    with without_autocast(m):
        dual = maximum_entropy(-m, q.log())
    separable = dual.status == Status.OUTSIDE
    if separable:
        p, coefficients = torch.zeros_like(q), _separating(m[used], dual.x)
    else:
        p, coefficients = dual.primal.exp() * dual.weights, dual.x
    return Boosting(coefficients, p, p.sum(), generalized_kl(p, q), separable, dual.status)


def _separating(m: Tensor, guess: Tensor) -> Tensor:
    """λ with Mλ > 0, known to exist: equal margins, the solver's last iterate, or the loss with a vanishing penalty."""
    size = torch.linalg.vector_norm(m, dim=-1).amax()
    unit = (m / size).double()
    candidates = [torch.linalg.pinv(unit).sum(-1), guess.double() * size]
    rows, origin = Empirical(-unit), torch.zeros_like(unit[0])
    for step in 10.0 ** torch.arange(0, 20, 2):
        for x in candidates:
            if (unit @ x).min() > 0:
                return (x / size).to(m.dtype)
        candidates = [prox(rows, origin, step=float(step)).value]
    return guess
