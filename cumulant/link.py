"""The canonical link ∇G*: which query gives a wanted attention output, and how linear that map is for a head (S2-E15).

    m(η) = ∇G(η)   attention with V := K,      η = ∇G*(m)   its inverse inside the hull of the keys           (S2-C10)
    m(∇G*(μ)) = μ  attention after the exact link is the identity                                             (X-17)

A transformer computes its query linearly from the hidden state. If the hidden state is a mean μ, this is a linear
approximation of ∇G*, which is exact iff the keys are Gaussian: ∇G*(μ) = Σ⁻¹(μ − k̄). `link_fit` measures both on a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, require_alike, require_finite, require_float, sentence, shape
from cumulant.kernels import moments
from cumulant.kernels.dense import accumulate, normalize
from cumulant.measures import Empirical
from cumulant.measures.dual import RANK
from cumulant.solve import Solution
from cumulant.typing import PerQuery, Queries


def canonical_link(key: Tensor, mean: Queries, *, log_weights: Tensor | None = None) -> Solution:
    """η whose attention over the keys, with the keys as values, is ``mean``: η = ∇G*(μ) (S2-C10).

    key (*batch, n, d), mean (*batch, q, d) or (d,), log_weights as in `Empirical`. The status of each mean is whether η
    is finite, at infinity (BOUNDARY: μ on a face of the hull of the keys) or does not exist (OUTSIDE; also where no key
    has weight). Where the keys span fewer than d directions η has minimum norm. For attention with a scale the query
    is η/scale. Differentiable once, in mean, key and log_weights.

    >>> import torch
    >>> key = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> canonical_link(key, torch.tensor([0.75], dtype=torch.float64)).value              # log(0.75/0.25)
    tensor([1.0986], dtype=torch.float64)
    """
    return Empirical(key, log_weights).natural(mean)


class LinkFit(NamedTuple):
    """How well η ≈ A m(η) + b over the queries of a head; every field has the batch axes (heads) first.

    r_squared         (*batch)        share of the variance of η that the affine map explains
    slope             (*batch, d, d)  A
    gaussian_slope    (*batch, d, d)  Cov(K)⁺, the slope if the keys were Gaussian
    slope_error       (*batch)        |A − Cov(K)⁺| / |Cov(K)⁺| in the Frobenius norm
    hidden_r_squared  (*batch)        share of η that an affine map of ``hidden`` explains, None without
    effective_atoms   (*batch)        1/Σp², averaged over the queries
    """

    r_squared: PerQuery
    slope: Tensor
    gaussian_slope: Tensor
    slope_error: PerQuery
    hidden_r_squared: PerQuery | None
    effective_atoms: PerQuery


def link_fit(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    offset: int | None = None,
    log_weights: Tensor | None = None,
    hidden: Tensor | None = None,
) -> LinkFit:
    """Test the linear-link conjecture on a head: regress η on m(η) = attention with V := K (S2-E15).

    query                  (*batch, q, d); η = scale · query, projected on the directions k_n − k̄: others move nothing
    key                    (*batch, n, d); fewer heads than query are shared by groups, as in `attend`
    scale                  1/√d if None
    mask, causal, offset   as in `attend`. Queries with different visible keys have different measures, and one affine
                           map must serve them all; Cov(K) is over the keys that are visible to any of them
    log_weights            (*batch, n) also weigh Cov(K); (*batch, q, n) do so only where −inf for every query
    hidden                 (*batch, q, e) what the queries were computed from, for ``hidden_r_squared``

    Gaussian keys give R² near 1 while the queries are short; R² < 0.9 with few effective atoms means saturation, not
    that the keys are not Gaussian. A fit needs clearly more queries than d (and e) to mean anything. Queries
    without a visible key are left out; R² is 0 where η does not vary, and all is 0 without queries or keys.

    >>> import torch
    >>> grid = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    >>> fit = link_fit(grid, torch.tensor([[-1.0], [1.0]], dtype=torch.float64))            # m = tanh η
    >>> round(fit.r_squared.item(), 6), round(fit.slope.item(), 6), fit.gaussian_slope.item()
    (0.993557, 1.2174, 1.0)
    """
    for name, tensor in (("query", query), ("key", key)):
        if require_float(f"link_fit.{name}", tensor).ndim < 2:
            expected = "shape (*batch, q, d)" if name == "query" else "shape (*batch, n, d)"
            raise ValueError(sentence(f"link_fit.{name}", expected, shape(tensor), "Regress over many queries."))
        require_finite(f"link_fit.{name}", tensor)
    eta = accumulate(query) * (max(1, query.shape[-1]) ** -0.5 if scale is None else scale)
    support = {"mask": mask, "causal": causal, "offset": offset}
    weights = None if log_weights is None else accumulate(log_weights)
    attended = moments(eta, accumulate(key), log_weights=weights, statistics=("mean", "effective_atoms"), **support)
    g = attended.log_normalizer  # (*batch, q)
    live = (g > -torch.inf).double()
    eps = torch.finfo(g.dtype).eps
    prior = _common_log_weights(eta, key, weights, **support)
    predicted, span = _gaussian(_per_head(key.double(), g.shape[:-1], -3), prior)
    target = eta.double().expand(*g.shape, -1) @ span
    slope, r_squared = _affine(attended.mean.double(), target, live, eps)
    predicted = predicted.expand_as(slope)
    size = torch.linalg.matrix_norm(predicted)
    error = torch.linalg.matrix_norm(slope - predicted) / torch.where(size > 0, size, 1)
    explained = _explained(hidden, target, live, query)
    mean_atoms = (attended.effective_atoms.double() * live).sum(-1) / live.sum(-1).clamp_min(1)
    return LinkFit(
        r_squared=r_squared.to(g.dtype),
        slope=slope.to(g.dtype),
        gaussian_slope=predicted.to(g.dtype),
        slope_error=error.to(g.dtype),
        hidden_r_squared=None if explained is None else explained.to(g.dtype),
        effective_atoms=mean_atoms.to(g.dtype),
    )


def _affine(x: Tensor, y: Tensor, live: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A (*batch, e, d) of the fit y ≈ A x + b by least squares, x (*batch, q, d), y (*batch, q, e), and its R²."""
    share = (live / live.sum(-1, keepdim=True).clamp_min(1))[..., None, :]
    on = live[..., None]
    xc, yc = on * (x - share @ x), on * (y - share @ y)
    noise = 16 * eps * torch.linalg.matrix_norm(on * x)  # what rounding alone makes of rows that are all equal
    inverse = torch.linalg.pinv(xc, atol=noise, rtol=torch.full_like(noise, max(x.shape[-2:]) * 2.0**-52))
    coefficients = inverse @ yc
    left = (yc - xc @ coefficients).square().sum((-2, -1))
    total = yc.square().sum((-2, -1))
    varies = total > (16 * eps) ** 2 * (on * y).square().sum((-2, -1))
    r_squared = torch.where(varies, 1 - left / torch.where(varies, total, 1), 0)
    return coefficients.mT, r_squared.clamp_min(0)


def _explained(hidden: Tensor | None, target: Tensor, live: Tensor, query: Tensor) -> Tensor | None:
    if hidden is None:
        return None
    require_alike("link_fit.hidden", require_float("link_fit.hidden", hidden), "query", query)
    if hidden.ndim < 2 or hidden.shape[-2] != target.shape[-2]:
        expected = f"shape (*batch, q={target.shape[-2]}, e)"
        raise ValueError(sentence("link_fit.hidden", expected, shape(hidden), "One row per query."))
    broadcast("link_fit.hidden", hidden.shape[:-2], target.shape[:-2])
    rows = hidden.double().expand(*target.shape[:-1], hidden.shape[-1])
    return _affine(rows, target, live, torch.finfo(query.dtype).eps)[1]


def _gaussian(key: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Cov(K)⁺ under normalised weights, and the projector on the directions that keys span; both (*batch, d, d)."""
    p = normalize(prior)[1]
    centred = key - p[..., None, :] @ key
    centred = centred * (prior > -torch.inf)[..., None]
    values, vectors = torch.linalg.eigh(centred.mT @ (p[..., None] * centred))
    scale = (p[..., None] * key.square()).sum((-2, -1))[..., None]
    noise = (16 * torch.finfo(key.dtype).eps) ** 2 * scale
    spanned = values > torch.maximum(RANK * values[..., -1:], noise)
    inverse = torch.where(spanned, 1 / torch.where(spanned, values, 1), 0)
    return (vectors * inverse[..., None, :]) @ vectors.mT, (vectors * spanned[..., None, :]) @ vectors.mT


def _common_log_weights(
    eta: Tensor, key: Tensor, w: Tensor | None, mask: Tensor | None, causal: bool, offset: int | None
) -> Tensor:
    """Log weights of the keys for the queries together, (*batch, n): −inf where the key is visible to no query."""
    q, n = eta.shape[-2], key.shape[-2]
    lead = eta.shape[:-2]
    prior = key.new_zeros(n, dtype=torch.float64)
    if causal:
        hidden = torch.arange(n, device=key.device) > (offset or 0) + q - 1
        prior = prior.masked_fill(hidden, -torch.inf)
    if mask is not None:
        prior = torch.where((mask if mask.ndim == 1 else mask.any(-2)), prior, -torch.inf)
    if w is None:
        return prior
    if w.ndim == key.ndim - 1 and not w.ndim == eta.ndim > key.ndim - 1:
        return prior + _per_head(w.double(), lead, -2)
    return torch.where((w > -torch.inf).any(-2), prior, -torch.inf)


def _per_head(tensor: Tensor, lead: torch.Size, axis: int) -> Tensor:
    """Heads shared by groups of queries, repeated for each query head."""
    if not lead or tensor.ndim < -axis or tensor.shape[axis] in (1, lead[-1]):
        return tensor
    return tensor.repeat_interleave(lead[-1] // tensor.shape[axis], dim=axis)
