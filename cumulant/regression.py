"""Kernel regression: attention is a Nadaraya–Watson estimator, and the kernel has random features (S0-E7, S0-R2).

    mean(q) = Σ_n K(q,x_n) v_n / Σ_n K(q,x_n)

    "dot"       K = e^{⟨q,x⟩/s²}          η = q/s², every point counts e^{w_n}: attention itself
    "gaussian"  K = e^{−|q−x|²/2s²}       the same with base weights e^{w_n − |x_n|²/2s²}; equal iff all |x_n| are equal

    e^{⟨q,k⟩} = E_{ω∼N(0,I)} [ e^{⟨ω,q⟩−|q|²/2} e^{⟨ω,k⟩−|k|²/2} ]

The last line trades the sum over all pairs for a sum over m drawn directions. `approximate_attention` is that trade; it
is the only function here that does not return the exact number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import broadcast, holds, require_alike, require_float, require_log_weights, sentence, shape
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast, autocast_float32, without_autocast
from cumulant.kernels.dense import accumulate, normalize
from cumulant.typing import PerQuery, Queries

KERNELS = ("gaussian", "dot")


class Regression(NamedTuple):
    """Kernel-weighted mean of the values and its precision, per query; p_n are the normalised kernel weights.

    mean              (*batch, q, e)  Σ p_n v_n
    variance          (*batch, q)     tr Cov_p(v), the spread of the values around the mean
    log_density       (*batch, q)     log of the kernel density estimate of the points; None for "dot"
    effective_points  (*batch, q)     1/Σp²; variance / effective_points estimates the squared error of the mean
    """

    mean: Queries
    variance: PerQuery
    log_density: PerQuery | None
    effective_points: PerQuery


def nadaraya_watson(
    query: Tensor,
    points: Tensor,
    values: Tensor,
    *,
    kernel: str = "gaussian",
    bandwidth: float | Tensor = 1.0,
    log_weights: Tensor | None = None,
) -> Regression:
    """The kernel-weighted mean of the values around each query, exactly and in linear memory (S0-E7).

        mean(q) = Σ_n e^{w_n} K(q,x_n) v_n / Σ_n e^{w_n} K(q,x_n)
        density(q) = Σ_n e^{w_n} N(q; x_n, s²) / Σ_n e^{w_n}                                     "gaussian" only

    query        (*batch, q, d), or (d,) for one
    points       (*batch, n, d)
    values       (*batch, n, e)
    kernel       "gaussian" e^{−|q−x|²/2s²} or "dot" e^{⟨q,x⟩/s²}, which is attention of scale 1/s²
    bandwidth    s: a number, or (*batch, d) for one per coordinate, (*batch, 1) for one per batch entry
    log_weights  (*batch, n) per point or (*batch, q, n) per pair; −inf removes a point (diagonal: leave one out)

    A query without points has mean 0, variance 0, log density −inf and gradient 0. Differentiable twice in everything,
    the bandwidth included. Distances are taken from the centre of the points, so that a common offset costs nothing;
    beyond some hundred bandwidths from there float32 loses digits and float64 should be used. Under torch.autocast
    "gaussian" is computed in float32, as torch.cdist is, "dot" from rounded numbers, as attention is.

    >>> import torch
    >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [4.0]])
    >>> nadaraya_watson(torch.tensor([[1.0]]), x, y, bandwidth=0.5).mean            # (1 + 4e⁻²)/(1 + 2e⁻²)
    tensor([[1.2130]])
    """
    if kernel not in KERNELS:
        raise ValueError(sentence("nadaraya_watson.kernel", f"one of {', '.join(KERNELS)}", repr(kernel), "Pick one."))
    cast = autocast if kernel == "dot" else autocast_float32
    (query, points, values), (log_weights,) = cast(query, points, values), cast(log_weights)
    _check(query, points, values, log_weights)
    rows, x = accumulate(query[None] if query.ndim == 1 else query), accumulate(points)
    w = None if log_weights is None else accumulate(log_weights)
    s = _bandwidth(cast(bandwidth)[0] if isinstance(bandwidth, Tensor) else bandwidth, query)
    broadcast("nadaraya_watson.bandwidth", s.shape[:-2], query.shape[:-2], points.shape[:-2])
    if kernel == "dot":
        eta, atoms, base = rows / s.square(), x, w
    else:
        eta, atoms, base = _centred(rows, x, w, s)
    statistics = ("mean", "value_trace", "effective_atoms")
    with without_autocast(eta):
        local = moments(eta, atoms, accumulate(values), log_weights=base, statistics=statistics)
    density = _log_density(local.log_normalizer, eta, x, w, s) if kernel == "gaussian" else None
    mean = local.mean.to(query.dtype)
    if query.ndim > 1:
        return Regression(mean, local.value_trace, density, local.effective_atoms)
    density = None if density is None else density[..., 0]
    return Regression(mean[..., 0, :], local.value_trace[..., 0], density, local.effective_atoms[..., 0])


def _centred(rows: Tensor, x: Tensor, w: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and points from the centre of the points in bandwidths, and the base weights w − |x|²/2 there."""
    if w is None:
        present = torch.ones_like(x[..., 0], dtype=torch.bool)
    else:
        present = (w > -torch.inf).any(-2) if w.ndim >= x.ndim else w > -torch.inf
    # nothing depends on the centre but rounding, so it needs no gradient
    total, count = torch.where(present[..., None], x, 0).sum(-2), present.sum(-1, keepdim=True).clamp_min(1)
    centre = (total / count)[..., None, :].detach()
    eta, atoms = (rows - centre) / s, torch.where(present[..., None], (x - centre) / s, 0)
    half = atoms.square().sum(-1) / 2
    if not holds(half.isfinite()) or not holds(eta.square().sum(-1).isfinite()):
        expected = "finite points and queries whose squared distance in bandwidths does not overflow"
        advice = "Use float64, a larger bandwidth, or remove them."
        raise ValueError(sentence("nadaraya_watson.points", expected, "some that are not", advice))
    if w is None:
        return eta, atoms, -half
    return eta, atoms, w - (half[..., None, :] if w.ndim >= x.ndim else half)


def _log_density(g: Tensor, eta: Tensor, x: Tensor, w: Tensor | None, s: Tensor) -> Tensor:
    n, d = x.shape[-2:]
    if w is None:
        total = torch.full_like(g, math.log(n) if n else -math.inf)
    else:
        total = normalize(w)[0]
        total = (total if w.ndim >= x.ndim else total[..., None]).expand(g.shape)
    absent = g == -torch.inf
    volume = d / 2 * math.log(2 * math.pi) + s.expand(*s.shape[:-1], d).log().sum(-1)
    log_density = torch.where(absent, 0, g) - torch.where(absent, 0, total) - eta.square().sum(-1) / 2 - volume
    return torch.where(absent, -torch.inf, log_density)


def random_projection(
    dim: int,
    features: int,
    *,
    orthogonal: bool = False,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Directions ω_r ∼ N(0, I) for `random_features`:  (features, dim).

    orthogonal  rows in blocks of ``dim`` that are orthogonal to each other; every row alone is still N(0, I), so that
                estimates stay unbiased, and their variance is smaller (Choromanski et al. 2021).

    >>> import torch
    >>> w = random_projection(4, 4, orthogonal=True, dtype=torch.float64)
    >>> gram = w @ w.mT
    >>> bool((gram - torch.diag(gram.diagonal())).abs().max() < 1e-12)
    True
    """
    for name, size in (("dim", dim), ("features", features)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(sentence(f"random_projection.{name}", "a positive integer", repr(size), "Use at least 1."))
    options = {"generator": generator, "dtype": dtype, "device": device}
    normal = torch.randn(features, dim, **options)
    if not orthogonal:
        return normal
    blocks = torch.randn(-(-features // dim), dim, dim, **options)
    q, r = torch.linalg.qr(accumulate(blocks))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # uniform on the rotations, which QR alone is not
    length = torch.linalg.vector_norm(normal, dim=-1, keepdim=True)
    return (q.flatten(0, 1)[:features] * length).to(normal.dtype)


def random_features(x: Tensor, projection: Tensor, *, log: bool = False) -> Tensor:
    """Positive features whose inner products estimate the exponential kernel (S0-R2).

        φ_r(x) = exp(⟨ω_r,x⟩ − |x|²/2) / √m,        E ⟨φ(q), φ(k)⟩ = e^{⟨q,k⟩}

    x (*batch, n, d), projection (m, d) → (*batch, n, m); half precision is returned in float32. Under torch.autocast
    both are rounded as for a matrix product.
    log  return log φ, which cannot overflow. φ itself does where ⟨ω,x⟩ − |x|²/2 passes 88 in float32, 709 in float64.

    >>> import torch
    >>> w = random_projection(2, 100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> q, k = (random_features(torch.tensor([x], dtype=torch.float64), w)[0] for x in ([0.6, -0.9], [-0.3, 0.8]))
    >>> bool(abs(q @ k - torch.tensor(-0.9).exp()) < 0.01)
    True
    """
    x, projection = autocast(x, projection)
    _check_projection("random_features", projection, "x", require_float("random_features.x", x))
    wide, directions = accumulate(x), accumulate(projection)
    with without_autocast(wide):
        score = wide @ directions.mT
    exponent = score - wide.square().sum(-1, keepdim=True) / 2 - math.log(directions.shape[-2]) / 2
    return exponent if log else exponent.exp()


class ApproximateAttention(NamedTuple):
    """Estimates: output (*batch, q, e) of attention, log_normalizer (*batch, q) of G."""

    output: Queries
    log_normalizer: PerQuery


def approximate_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    scale: float | None = None,
    log_weights: Tensor | None = None,
) -> ApproximateAttention:
    """Attention with the exponential kernel replaced by m random features, in O((q + n) m) instead of O(q n) time.

        e^{G_i} ≈ Σ_r φ_r(q_i) Σ_j e^{w_j} φ_r(k_j),     output_i ≈ Σ_r φ_r(q_i) Σ_j e^{w_j} φ_r(k_j) v_j / e^{G_i}

    It is an approximation (Performer; Choromanski et al. 2021): unbiased for e^{G}, not for G nor for the output, which
    are a logarithm and a quotient of it. The relative error of one e^{⟨q,k⟩} is e^{|q+k|²/2}/√m for scaled q, k, with
    heavy tails: it needs m beyond e^{|q+k|²}, so small norms. Centring the keys leaves attention as it is and helps.

    query       (*batch, q, d), or (d,) for one
    key, value  (*batch, n, d) and (*batch, n, e); fewer heads than in query are shared by groups, as in `moments`
    projection  (m, d) from `random_projection`; draw it anew for independent estimates
    scale       1/√d by default; it is divided evenly between queries and keys
    log_weights (*batch, n) per key; −inf removes a key. Weights per pair, and so causal masks, need the exact `attend`

    Computed as two exact attentions, of the directions over the keys and of the queries over the directions, so that no
    feature is ever formed: extreme norms stay finite, and the output is an average of values. A query without keys has
    output 0, log_normalizer −inf and gradient 0. Under torch.autocast all are rounded as for attention.

    >>> import torch
    >>> from cumulant.attention import attention
    >>> g = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 50, 8, generator=g) / 2
    >>> w = random_projection(8, 1024, orthogonal=True, generator=g)
    >>> bool((approximate_attention(q, k, v, w).output - attention(q, k, v)).abs().max() < 0.05)
    True
    """
    where = "approximate_attention"
    (query, key, value, projection), (log_weights,) = autocast(query, key, value, projection), autocast(log_weights)
    _check_keys(where, query, key, value, log_weights)
    _check_projection(where, projection, "query", query)
    factor = max(1, query.shape[-1]) ** -0.5 if scale is None else float(scale)
    root = math.sqrt(abs(factor))
    q, k, v, directions = (accumulate(t) for t in (query, key, value, projection))
    q, k = math.copysign(root, factor) * q, root * k
    half = k.square().sum(-1) / 2
    w = -half if log_weights is None else accumulate(log_weights) - half
    with without_autocast(q):
        of_keys = moments(directions, k, v, log_weights=w, statistics=("mean",))
        g = of_keys.log_normalizer
        of_queries = moments(q, directions.expand(*g.shape, -1), of_keys.mean, log_weights=g, statistics=("mean",))
    total = of_queries.log_normalizer
    absent = total == -torch.inf
    rest = q.square().sum(-1) / 2 + math.log(directions.shape[-2])
    total = torch.where(absent, -torch.inf, torch.where(absent, 0, total) - rest)
    return ApproximateAttention(of_queries.mean.to(query.dtype), total)


# ---------------------------------------------------------------------- checks of arguments


def _check(query: Tensor, points: Tensor, values: Tensor, log_weights: Tensor | None) -> None:
    where = "nadaraya_watson"
    d = require_float(f"{where}.query", query).shape[-1] if query.ndim else 0
    require_alike(f"{where}.points", require_float(f"{where}.points", points), "query", query)
    require_alike(f"{where}.values", require_float(f"{where}.values", values), "query", query)
    if query.ndim == 0 or points.ndim < 2 or points.shape[-1] != d:
        got = f"query {shape(query)} and points {shape(points)}"
        expected = "query (*batch, q, d) and points (*batch, n, d)"
        raise ValueError(sentence(f"{where}.points", expected, got, "Use points[:, None] for d=1."))
    n = points.shape[-2]
    if values.ndim < 2 or values.shape[-2] != n:
        advice = "Use values[:, None] for one number per point."
        raise ValueError(sentence(f"{where}.values", f"shape (*batch, n={n}, e)", shape(values), advice))
    broadcast(where, query.shape[:-2], points.shape[:-2], values.shape[:-2])
    if log_weights is not None:
        w = require_float(f"{where}.log_weights", log_weights)
        require_alike(f"{where}.log_weights", w, "query", query)
        q = query.shape[-2] if query.ndim > 1 else 1
        if w.ndim < 1 or w.shape[-1] != n or (w.ndim >= points.ndim and w.shape[-2] not in (1, q)):
            expected = f"(*batch, n={n}) per point or (*batch, q={q}, n={n}) per pair"
            raise ValueError(sentence(f"{where}.log_weights", expected, shape(w), "Match points or pairs."))
        broadcast(f"{where}.log_weights", w.shape[: -2 if w.ndim >= points.ndim else -1], points.shape[:-2])
        require_log_weights(f"{where}.log_weights", w)


def _bandwidth(bandwidth: float | Tensor, query: Tensor) -> Tensor:
    """s as a tensor that divides (*batch, n, d)."""
    where, d = "nadaraya_watson.bandwidth", query.shape[-1]
    if not isinstance(bandwidth, Tensor):
        wide = accumulate(query.new_empty(0))
        s = torch.tensor(float(bandwidth), dtype=wide.dtype, device=wide.device)
    else:
        require_alike(where, require_float(where, bandwidth), "query", query)
        s = accumulate(bandwidth)
        if s.ndim and s.shape[-1] not in (1, d):
            expected = f"a number, (*batch, d={d}) or (*batch, 1)"
            raise ValueError(sentence(where, expected, shape(s), "Add a last axis: bandwidth[..., None]."))
        s = s[..., None, :] if s.ndim else s
    if not holds((s > 0) & (s < torch.inf)):
        raise ValueError(sentence(where, "positive finite lengths", bandwidth, "Take the distance that should count."))
    return s


def _check_projection(where: str, projection: Tensor, name: str, x: Tensor) -> None:
    require_alike(f"{where}.projection", require_float(f"{where}.projection", projection), name, x)
    if projection.ndim != 2 or x.ndim < 1 or projection.shape[-1] != x.shape[-1] or projection.shape[0] == 0:
        expected = f"shape (m, d) with m ≥ 1 for {name} {shape(x)}"
        raise ValueError(sentence(f"{where}.projection", expected, shape(projection), "Call random_projection(d, m)."))


def _check_keys(where: str, query: Tensor, key: Tensor, value: Tensor, log_weights: Tensor | None) -> None:
    require_float(f"{where}.query", query)
    for name, tensor in (("key", key), ("value", value)):
        require_alike(f"{where}.{name}", require_float(f"{where}.{name}", tensor), "query", query)
    if query.ndim < 1 or key.ndim < 2 or value.ndim < 2 or key.shape[-1] != query.shape[-1]:
        got = f"query {shape(query)}, key {shape(key)}, value {shape(value)}"
        expected = "query (*batch, q, d), key (*batch, n, d) and value (*batch, n, e)"
        raise ValueError(sentence(f"{where}.key", expected, got, "Match the last axes."))
    if value.shape[-2] != key.shape[-2]:
        expected = f"shape (*batch, n={key.shape[-2]}, e)"
        raise ValueError(sentence(f"{where}.value", expected, shape(value), "One value per key."))
    if log_weights is not None:
        w = require_float(f"{where}.log_weights", log_weights)
        require_alike(f"{where}.log_weights", w, "query", query)
        if w.ndim != key.ndim - 1 or w.shape[-1] != key.shape[-2]:
            expected = f"shape (*batch, n={key.shape[-2]}), one per key"
            advice = "Weights per pair need the exact attend(...)."
            raise ValueError(sentence(f"{where}.log_weights", expected, shape(w), advice))
        broadcast(f"{where}.log_weights", w.shape[:-1], key.shape[:-2])
        require_log_weights(f"{where}.log_weights", w)
