"""Log-masses by non-negative least squares: entries have the mass of all tokens, query by query (arXiv 2602.16284)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.atoms import Atoms
from cumulant.cache.fitted.mass import LOWEST
from cumulant.cache.fitted.query_law import UNDERFLOW
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, Readings

HIGHEST = 7.0  # log-mass that an atom has at most, as in Attention Matching with keys by matching pursuit
STEPS = 30  # of the projected gradient
POWER_STEPS = 4  # that bring a bound of the largest eigenvalue near it
JITTER = 1e-6  # of the diagonal, so that columns that are nearly equal have a factor


class MassTarget(NamedTuple):
    """The mass that queries see in a measure, relative to its largest term: Σ_j e^{s_ij − highest_i}.

    highest  (key heads, r) max_j s_ij,    s_ij = ⟨η_i, k_j⟩ + w_j
    mass     (key heads, r) of 1 and more
    """

    highest: Tensor
    mass: Tensor


def mass_target(tokens: KeyHeads, queries: LawQueries) -> MassTarget:
    """The mass of a measure for every query, what it reads beside the measure left out.

    >>> tokens = KeyHeads.tokens(torch.tensor([[[0.0], [1.0]]]), torch.zeros(1, 2, 1))
    >>> queries = LawQueries(torch.tensor([[[0.0], [100.0]]]), torch.zeros(1, 2), torch.zeros(1, 2, 1))
    >>> mass_target(tokens, queries).mass
    tensor([[2., 1.]])
    """
    scores = torch.baddbmm(tokens.log_mass[:, None], queries.eta, tokens.keys.mT)
    highest = scores.amax(-1)
    terms = scores.sub_(highest[..., None]).clamp_min_(UNDERFLOW).exp_()
    return MassTarget(highest, terms.sum(-1))


def nnls_mass(atoms: Atoms, tokens: KeyHeads, queries: LawQueries, readings: Readings) -> Tensor:
    """The mass of all atoms is that of all tokens, for every query of a law, as nearly as least squares bring it.

        argmin over −30 ≤ w_c ≤ 7 of  Σ_i (Σ_c e^{w_c} e^{s_ic − max_j s_ij} − Σ_j e^{s_ij − max_j s_ij})²,  s = ⟨η, k⟩

    >>> tokens = KeyHeads.tokens(torch.zeros(1, 3, 1), torch.zeros(1, 3, 1))
    >>> queries = LawQueries(torch.ones(1, 2, 1), torch.zeros(1, 2), torch.zeros(1, 2, 1))
    >>> from cumulant.cache.fitted.readings import read
    >>> one = Atoms(tokens.keys[:, :1], tokens.values[:, :1], torch.ones(1, 1))
    >>> nnls_mass(one, tokens, queries, read(tokens, queries)).exp().round(decimals=3)
    tensor([[3.]])
    """
    return matched_mass(atoms.keys, queries, mass_target(tokens, queries), (LOWEST, HIGHEST))


def matched_mass(
    keys: Tensor, queries: LawQueries, target: MassTarget, bounds: tuple[float, float], steps: int = STEPS
) -> Tensor:
    """(key heads, m) log-masses within ``bounds`` of keys (key heads, m, d) by least squares to a mass."""
    terms = relative_terms(keys, queries, target)
    right = (terms.mT @ target.mass[..., None])[..., 0]
    lower, upper = (math.exp(bound) for bound in bounds)
    return bounded_least_squares(terms.mT @ terms, right, lower, upper, steps).log().to(keys.dtype)


def relative_terms(keys: Tensor, queries: LawQueries, target: MassTarget) -> Tensor:
    """(key heads, r, m) e^{⟨η_i, k_c⟩ − highest_i}."""
    return (queries.eta @ keys.mT).sub_(target.highest[..., None]).clamp_min_(UNDERFLOW).exp_()


def bounded_least_squares(gram: Tensor, right: Tensor, lower: float, upper: float, steps: int = STEPS) -> Tensor:
    """Least squares with bounds, from MᵀM (…, m, m) and Mᵀy (…, m) of a matrix M of numbers that are not negative.

        argmin over lower ≤ x ≤ upper of |M x − y|²

    The solution without bounds, brought within them, then accelerated projected gradient with columns of norm 1.

    >>> matrix, y = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([2.0, -1.0])
    >>> bounded_least_squares(matrix.T @ matrix, matrix.T @ y, 0.0, 9.0).round(decimals=3)   # without bounds (3, −1)
    tensor([2., 0.], dtype=torch.float64)
    """
    gram, right = gram.double(), right.double()
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
    gram = gram / (norm[..., None] * norm[..., None, :])
    right, low, high = right / norm, lower * norm, upper * norm
    size = 1 / _eigenvalue_bound(gram)
    x = torch.cholesky_solve(right[..., None], factor_with_jitter(gram))[..., 0].clamp(low, high)
    ahead, momentum = x, torch.ones_like(size)
    for _ in range(steps):
        gradient = (gram @ ahead[..., None])[..., 0] - right
        moved = (ahead - size * gradient).clamp(low, high)
        uphill = ((ahead - moved) * (moved - x)).sum(-1, keepdim=True) > 0  # then momentum starts anew
        momentum = torch.where(uphill, 1.0, momentum)
        following = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = moved + torch.where(uphill, 0.0, (momentum - 1) / following) * (moved - x)
        x, momentum = moved, following
    return x / norm


def factor_with_jitter(gram: Tensor, scale: Tensor | None = None) -> Tensor:
    """(…, m, m) the Cholesky factor, of the matrix with as little more on its diagonal as lets one exist: 10⁻⁶ of
    ``scale`` (…, m) or more; None: of the diagonal itself.

    >>> factor_with_jitter(torch.ones(2, 2)).diagonal()
    tensor([1.0000, 0.0014])
    """
    scale = gram.diagonal(dim1=-2, dim2=-1) if scale is None else scale
    diagonal = torch.diag_embed(scale.clamp_min(torch.finfo(torch.float32).tiny))
    more = JITTER
    while bool((result := torch.linalg.cholesky_ex(gram + more * diagonal)).info.any()) and more < 1:
        more *= 10
    return result.L


def _eigenvalue_bound(gram: Tensor) -> Tensor:
    """(…, 1) not below the largest eigenvalue of a matrix without negative numbers: λ ≤ max_i (A x)_i / x_i, x > 0."""
    x = torch.ones_like(gram[..., 0])
    for _ in range(POWER_STEPS):
        x = (gram @ x[..., None])[..., 0]
        x = (x / x.amax(-1, keepdim=True)).clamp_min(JITTER)
    return ((gram @ x[..., None])[..., 0] / x).amax(-1, keepdim=True)
