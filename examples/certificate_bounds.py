"""Bounds on the error of attention to clusters of tokens, each replaced by the tangent of its log-normalizer.

A key head holds tokens in clusters c. With the weights p_j ∝ e^⟨η₀,k_j⟩ of a typical query η₀ within c, the tangent of
G_c(η) = log Σ_{j in c} e^⟨η,k_j⟩ at η₀ is one entry: key k̂_c = Σ p_j k_j, log-mass w_c = G_c(η₀) − ⟨η₀,k̂_c⟩, and value
v̂_c = Σ p_j v_j. At another query, δ_j = ⟨η − η₀, k_j − k̂_c⟩ has mean 0 under p, variance σ² and lies in [−m, M]:

    G_c(η) = ⟨η,k̂_c⟩ + w_c + log g_c,    g_c = E e^δ,    1 + σ²φ(−m) ≤ g_c ≤ 1 + σ²φ(M),    φ(x) = (e^x − 1 − x)/x²

The two sides here are the sharp ones, of two atoms: at −m and σ²/m, and at −σ²/M and M (Bennett 1962, Hoeffding 1963).
No bound from mean, variance and range alone is tighter; those with φ follow from them.

With P̂_c the attention that the entries draw, ô their output, P̂_0 and u those of what is held beside them exactly,

    o = Σ_c P̂_c E[e^δ v] / ḡ,    ḡ = Σ_c P̂_c g_c ≥ 1        (g_0 = 1)
    o − ô = (o' − ô) + Σ_c P̂_c (g_c − g'_c)(v̂_c − o') / ḡ + Σ_c P̂_c e_c / ḡ,    e_c = E[(e^δ − 1)(v − v̂_c)]

for any g' and o' = Σ P̂_c g'_c v̂_c / Σ P̂_c g'_c. The first term is known, the second is a sum of vectors with
coefficients in known intervals, and |e_c| is bounded by Cauchy and Schwarz with the spread of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 200.0  # log of a mass above which nothing but the trivial bound is looked at
NOTHING = 1e-24  # variance that is rounding


class Clusters(NamedTuple):
    """m clusters of the tokens of a key head, and their tangents at η₀; float64.

    offset   (T, d) k_j − k̂_c, c the cluster of j
    values   (T, e) v_j − v̂_c
    weight   (T,) p_j within its cluster
    cluster  (T,) c
    typical  (d,) η₀
    key      (m, d) k̂_c
    value    (m, e) v̂_c
    log_mass (m,) w_c
    """

    offset: Tensor
    values: Tensor
    weight: Tensor
    cluster: Tensor
    typical: Tensor
    key: Tensor
    value: Tensor
    log_mass: Tensor


class Spread(NamedTuple):
    """What is known of δ at q queries in m clusters, each (q, m).

    variance  σ² is at most this
    floor     σ² is at least this
    below     m: δ ≥ −m
    above     M: δ ≤ M
    """

    variance: Tensor
    floor: Tensor
    below: Tensor
    above: Tensor


class ValueSpread(NamedTuple):
    """What is known of the values of m clusters.

    radius      (m,) max_j |v_j − v̂_c| is at most this
    deviation   (m,) the root of the largest eigenvalue of V_c = Σ p_j (v_j − v̂_c)(v_j − v̂_c)ᵀ is at most this
    covariance  (m, e, e) V_c; None: it is not stored
    """

    radius: Tensor
    deviation: Tensor
    covariance: Tensor | None = None


class Attending(NamedTuple):
    """q queries of a key head, and what they read beside its clusters, exactly.

    eta           (q, d)
    local         (q,) its log-normalizer
    local_output  (q, e)
    """

    eta: Tensor
    local: Tensor
    local_output: Tensor


class Certificate(NamedTuple):
    """Of q queries: |ô − o| ≤ bound.

    output  (q, e) ô
    bound   (q,)
    mass    (q,) the part of it that comes from masses
    value   (q,) the part that comes from values
    reach   (q,) mean M over clusters of several tokens: how far δ may go, in nats
    """

    output: Tensor
    bound: Tensor
    mass: Tensor
    value: Tensor
    reach: Tensor


def tangent_clusters(keys: Tensor, values: Tensor, cluster: Tensor, typical: Tensor) -> Clusters:
    """Clusters ``cluster`` (T,), numbered without gaps, of keys (T, d) and values (T, e), at η₀ = ``typical`` (d,)."""
    m = int(cluster.max()) + 1
    scores = keys @ typical
    highest = scores.new_full((m,), -torch.inf).scatter_reduce(0, cluster, scores, "amax")
    weight = (scores - highest[cluster]).exp()
    mass = cluster_sums(weight, cluster, m)
    weight = weight / mass[cluster]
    key, value = (cluster_sums(weight[:, None] * x, cluster, m) for x in (keys, values))
    log_mass = mass.log() + highest - key @ typical
    return Clusters(keys - key[cluster], values - value[cluster], weight, cluster, typical, key, value, log_mass)


def cluster_sums(x: Tensor, cluster: Tensor, m: int) -> Tensor:
    """(m, …) sums of x (T, …) over clusters."""
    return x.new_zeros(m, *x.shape[1:]).index_add_(0, cluster, x)


def covariances(x: Tensor, clusters: Clusters) -> Tensor:
    """(m, d, d) Σ_j p_j x_j x_jᵀ over clusters, of centred x (T, d)."""
    return cluster_sums((clusters.weight[:, None] * x)[:, :, None] * x[:, None], clusters.cluster, len(clusters.key))


def radii(x: Tensor, clusters: Clusters) -> Tensor:
    """(m,) max_j |x_j| over clusters."""
    length = torch.linalg.vector_norm(x, dim=1)
    return x.new_zeros(len(clusters.key)).scatter_reduce(0, clusters.cluster, length, "amax")


# ---------------------------------------------------------------------- what is known of δ


def exact_spread(clusters: Clusters, eta: Tensor) -> Spread:
    """From all keys: σ², m and M as they are at every query. No certificate that uses these three can know more."""
    delta = (eta - clusters.typical) @ clusters.offset.mT  # (q, T)
    index, zeros = clusters.cluster.expand(len(eta), -1), delta.new_zeros(len(eta), len(clusters.key))
    variance = zeros.scatter_add(1, index, clusters.weight * delta.square())
    below, above = (zeros.scatter_reduce(1, index, x, "amax") for x in (-delta, delta))
    return Spread(variance, variance, below, above)


def coded_spread(clusters: Clusters, offset: Tensor, zeta: Tensor, bits: int = 8) -> Spread:
    """From codes of every key: coordinates of its offset, rounded to ``bits`` bits of the largest, which is stored too.

    δ_j is known up to s_j |ζ|₁ / 2, s_j the width of a step.

    offset  (T, d) A^½(k_j − k̂_c)
    zeta    (q, d) A^−½(η − η₀)
    """
    step = offset.abs().amax(1) / (2 ** (bits - 1) - 1)
    coded = (offset / step.clamp_min(1e-300)[:, None]).round() * step[:, None]
    delta, off = zeta @ coded.mT, zeta.abs().sum(1)[:, None] * step / 2  # (q, T)
    index, zeros = clusters.cluster.expand(len(zeta), -1), delta.new_zeros(len(zeta), len(clusters.key))
    most, least = delta.abs() + off, (delta.abs() - off).clamp_min(0)
    variance, floor = (zeros.scatter_add(1, index, clusters.weight * x.square()) for x in (most, least))
    below, above = (zeros.scatter_reduce(1, index, x + off, "amax") for x in (-delta, delta))
    return Spread(variance, floor, below, above)


def radius_spread(radius: Tensor, length: Tensor) -> Spread:
    """From radii r_c = max_j |A^½(k_j − k̂_c)|: |δ| ≤ r_c |A^−½(η − η₀)|, and so σ² ≤ its square.

    radius  (m,)
    length  (q,) |A^−½(η − η₀)|
    """
    reach = length[:, None] * radius
    return Spread(reach.square(), torch.zeros_like(reach), reach, reach)


def narrowed(spread: Spread, variance: Tensor, least: Tensor, *, exact: bool) -> Spread:
    """A spread of which the variance is known too, or a bound on it, (q, m), and the least weight p_j of every cluster.

    From Σ p_j δ_j = 0 and Σ p_j δ_j² = σ²:  |δ_j| ≤ σ √((1 − p_j)/p_j) for every j.
    """
    variance = torch.minimum(spread.variance, variance)
    reach = variance.sqrt() * ((1 - least).clamp_min(0) / least).sqrt()
    below, above = (torch.minimum(x, reach) for x in (spread.below, spread.above))
    return Spread(variance, variance if exact else spread.floor, below, above)


def quadratic(covariance: Tensor, zeta: Tensor) -> Tensor:
    """(q, m) ζᵀ Σ_c ζ of covariances (m, d, d) at ζ (q, d)."""
    return torch.einsum("qd,mde,qe->qm", zeta, covariance, zeta).clamp_min(0)


# ---------------------------------------------------------------------- bounds


def log_upper(variance: Tensor, above: Tensor) -> Tensor:
    """log of the largest E e^δ with mean 0, variance at most σ² and δ ≤ M.

    (M² e^{−σ²/M} + σ² e^M) / (M² + σ²) ≤ 1 + σ²φ(M)

    >>> log_upper(torch.tensor(1.0), torch.tensor(1.0)).exp()        # a fair coin: cosh 1
    tensor(1.5431)
    """
    nothing = variance <= NOTHING
    variance, above = variance.clamp_min(NOTHING), torch.maximum(above, variance.clamp_min(NOTHING).sqrt() * 1e-6)
    found = torch.logaddexp(2 * above.log() - variance / above, variance.log() + above)
    return torch.where(nothing, 0.0, (found - (above.square() + variance).log()).clamp_min(0))


def log_lower(floor: Tensor, below: Tensor) -> Tensor:
    """log of the smallest E e^δ with mean 0, variance at least σ² and δ ≥ −m.

    (σ² e^{−m} + m² e^{σ²/m}) / (m² + σ²) ≥ 1 + σ²φ(−m)

    >>> log_lower(torch.tensor(1.0), torch.tensor(1.0)).exp()
    tensor(1.5431)
    """
    nothing = floor <= NOTHING
    floor, below = floor.clamp_min(NOTHING), torch.maximum(below, floor.clamp_min(NOTHING).sqrt() * 1e-6)
    found = torch.logaddexp(floor.log() - below, 2 * below.log() + floor / below)
    return torch.where(nothing, 0.0, (found - (below.square() + floor).log()).clamp_min(0))


def value_bounds(spread: Spread, low: Tensor, high: Tensor, values: ValueSpread) -> tuple[Tensor, Tensor]:
    """|e_c| ≤ the smaller of α s_c and κ ρ_c: α, κ (q, m), s_c the deviation and ρ_c the radius of values.

    α:  sd(e^δ) ≤ σ (e^M − 1)/M, and ≤ (U(4σ², 2M) − g²)^½ with U the largest E e^{2δ}
    κ:  E|e^δ − 1| ≤ g − 1 + σ, and |E e^δ (v − v̂)| ≤ g ρ
    """
    sigma, above = spread.variance.sqrt(), spread.above.clamp(1e-12, LARGEST)
    first = sigma * above.expm1() / above
    second = (log_upper(4 * spread.variance, 2 * above).exp() - (2 * low).exp()).clamp_min(0).sqrt()
    g = high.exp()
    return torch.minimum(first, second), torch.minimum(g, high.expm1() + sigma)


def longest_sum(vectors: Tensor) -> Tensor:
    """(q,) at least max |Σ_c a_c y_c| over |a_c| ≤ 1, of vectors y (q, m, e).

    max_u Σ_c |⟨u,y_c⟩| ≤ √(S λ_max(Σ_c y_c y_cᵀ/|y_c|)) ≤ S = Σ_c |y_c|

    >>> longest_sum(torch.eye(4)[None])                                     # four orthogonal ones: √4, not 4
    tensor([2.])
    """
    length = torch.linalg.vector_norm(vectors, dim=-1)
    total = length.sum(-1)
    scaled = vectors / length.clamp_min(1e-150).sqrt()[..., None]
    return torch.minimum(total, (total * largest_eigenvalue(scaled.mT @ scaled)).sqrt())


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """(q,) of symmetric (q, e, e)."""
    return torch.linalg.eigvalsh(matrices)[..., -1].clamp_min(0)


def _value_part(share: Tensor, alpha: Tensor, kappa: Tensor, values: ValueSpread) -> Tensor:
    """(q,) at least |Σ_c P̂_c e_c|."""
    by_deviation, by_radius = alpha * values.deviation, kappa * values.radius
    if values.covariance is None:
        return (share * torch.minimum(by_deviation, by_radius)).sum(-1)
    directed = by_deviation <= by_radius
    rest = (share * by_radius).masked_fill(directed, 0).sum(-1)
    total = (share * by_deviation).masked_fill(~directed, 0).sum(-1)
    scaled = (share * alpha / values.deviation.clamp_min(1e-150)).masked_fill(~directed, 0)
    scaled = scaled.masked_fill((values.deviation == 0).expand_as(scaled), 0)
    matrix = (scaled @ values.covariance.flatten(1)).unflatten(1, values.covariance.shape[1:])
    return rest + torch.minimum(total, (total * largest_eigenvalue(matrix)).sqrt())


def certificate(clusters: Clusters, spread: Spread, values: ValueSpread, asked: Attending) -> Certificate:
    """A bound on |ô − o| at every query, from what is known of the spread of δ and of values.

    The best of three: g' in the middle of its interval, g' at its lower end, and the trivial one, that o lies among the
    balls of radius ρ_c about v̂_c and what is held exactly.
    """
    scores = asked.eta @ clusters.key.mT + clusters.log_mass
    total = torch.logaddexp(scores.logsumexp(-1), asked.local)
    share, rest = (scores - total[:, None]).exp(), (asked.local - total).exp()  # P̂_c, P̂_0
    beside = rest[:, None] * asked.local_output
    output = share @ clusters.value + beside
    low, high = log_lower(spread.floor, spread.below), log_upper(spread.variance, spread.above)
    vacuous = (torch.maximum(high, spread.above) > LARGEST).any(-1)
    low, high = (x.masked_fill(vacuous[:, None], 0.0) for x in (torch.minimum(low, high), high))
    least = 1 + (share * low.expm1()).sum(-1)  # ≤ ḡ
    by_values = _value_part(share, *value_bounds(spread, low, high, values), values) / least
    by_mass = []
    for middle in ((low.exp() + high.exp()) / 2, low.exp()):
        drawn = share * middle
        centre = (drawn @ clusters.value + beside) / (drawn.sum(-1) + rest)[:, None]
        half = share * torch.maximum(high.exp() - middle, middle - low.exp())
        moved = half[..., None] * (clusters.value - centre[:, None])
        by_mass.append(torch.linalg.vector_norm(centre - output, dim=-1) + longest_sum(moved) / least)
    mass = torch.minimum(*by_mass)
    farthest = (torch.linalg.vector_norm(clusters.value - output[:, None], dim=-1) + values.radius).amax(-1)
    trivial = torch.maximum(farthest, torch.linalg.vector_norm(asked.local_output - output, dim=-1))
    bound = torch.where(vacuous, trivial, torch.minimum(mass + by_values, trivial))
    mass, by_values = (torch.where(vacuous, trivial, x) for x in (mass, by_values))
    reach = spread.above.sum(-1) / (spread.above > 0).sum(-1).clamp_min(1)
    return Certificate(output, bound, mass, by_values, reach)


def attended(keys: Tensor, values: Tensor, asked: Attending) -> Tensor:
    """(q, e) o: attention to all tokens (T, ·) and to what is held beside them."""
    scores = asked.eta @ keys.mT
    total = torch.logaddexp(scores.logsumexp(-1), asked.local)
    return (scores - total[:, None]).exp() @ values + (asked.local - total).exp()[:, None] * asked.local_output
