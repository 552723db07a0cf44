"""Attention if the keys were Gaussian, or a few Gaussians: approximate, and named so.

    Gaussian (S1-C1)    out = v̄ + Cov(v, k) η                                     exact to O(|η|²) for any keys
    mixture  (S1-P2′)   out = Σ_c w_c (v̄_c + Cov_c(v, k) η),  w = softmax_c(log π_c + ⟨k̄_c, η⟩ + ½ ηᵀ Cov_c(k) η)

Means and covariances are of the keys that a query sees, under their base weights: η = 0. For n keys and q queries of
width d both take O((n + q) d²) where `attend` takes O(n q d).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from cumulant.checks import holds, known, sentence, shape
from cumulant.kernels.arguments import Support
from cumulant.kernels.dense import accumulate, normalize

QUERY_CHUNK = 64  # queries behind a causal mask at a time
MAX_SCORES = 1 << 22  # scores held at once
KMEANS_STEPS = 10  # steps of k-means


def approximate_by_gaussian(
    eta: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    causal: bool = False,
    offset: int = 0,
    sink: float | Tensor | None = None,
) -> Tensor:
    """One Gaussian in the place of the keys each query sees.  S1-C1

        out = v̄ + Cov(v, k) η,  (batch, heads, q, e)

    eta          (batch, heads, q, d); key, value (batch, key heads, n, ·), fewer heads than eta are shared by groups
    mask         (batch | 1, heads | 1, q | 1, n), True = attend
    log_weights  (batch | 1, heads | 1, n) or (batch | 1, heads | 1, q, n)
    causal       key j is visible to query i iff j ≤ i + offset
    sink         log weight of one more atom at 0 with value 0, a number or (1 | batch, heads)

    Keys that all queries see have one covariance; behind a causal mask sums run along with the queries; any other mask
    or bias is taken row by row. A query that sees nothing gets 0.

    >>> import torch
    >>> k = torch.tensor([[[[1.0], [-1.0]]]])
    >>> approximate_by_gaussian(torch.full((1, 1, 1, 1), 0.1), k, k)      # attention is tanh 0.1 = 0.0997
    tensor([[[[0.1000]]]])
    """
    call = _Call(eta, key, value, Support(mask, causal, offset, None, log_weights, sink))
    base = call.common_base()
    if base is not None:
        return _shared(call, base)
    seen = call.prefix()
    return _running(call, seen) if seen is not None else _by_row(call, None)


def approximate_by_mixture(
    eta: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    components: int | None = None,
    responsibilities: Tensor | None = None,
    seed: int = 0,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    causal: bool = False,
    offset: int = 0,
    sink: float | Tensor | None = None,
) -> Tensor:
    """A few Gaussians in the place of the keys each query sees.  S1-P2′

        out = Σ_c w_c (v̄_c + Cov_c(v, k) η),     w = softmax_c(log π_c + ⟨k̄_c, η⟩ + ½ ηᵀ Cov_c(k) η)

    components        how many at most, from k-means on the keys of each sequence and head; 1 is one Gaussian. All
                      queries must see the same keys: else each would need clusters of its own.
    responsibilities  (…, n, c) instead: shares ≥ 0 of the components in each key, of any sum; then any mask will do
    seed              of the first centres; they do not depend on the other sequences of the batch

    Clusters are constants of the gradient, everything else is differentiable. Other arguments as of
    `approximate_by_gaussian`. With one component per key it is attention itself.

    >>> import torch
    >>> k = torch.tensor([[[[1.0], [-1.0]]]])
    >>> approximate_by_mixture(torch.full((1, 1, 1, 1), 0.1), k, k, components=2)
    tensor([[[[0.0997]]]])
    """
    call = _Call(eta, key, value, Support(mask, causal, offset, None, log_weights, sink))
    base = call.common_base()
    if responsibilities is not None:
        shares = _shares(responsibilities, call)
        return _by_row(call, shares) if base is None else _components(call, base, shares)
    if components is None or components < 1:
        advice = "Use 1 for one Gaussian, or give responsibilities."
        raise ValueError(sentence("approximate_by_mixture.components", "at least 1", components, advice))
    if base is None:
        expected, advice = "queries that all see the same keys", "Give responsibilities, or use one Gaussian."
        raise DifferentKeysError(sentence("approximate_by_mixture.mask", expected, "rows that differ", advice))
    with torch.no_grad():
        label = clusters(call.key, call.base_weights(base)[0], components, seed)
    return _components(call, base, functional.one_hot(label, components).to(call.eta.dtype))


class DifferentKeysError(ValueError):
    """Queries see different keys, so that no clusters serve all of them."""


class _Call:
    """The arguments, keys repeated for every head."""

    def __init__(self, eta: Tensor, key: Tensor, value: Tensor, support: Support):
        group = eta.shape[1] // key.shape[1]
        self.eta = accumulate(eta)
        parts = (accumulate(x) for x in (key, value))
        self.key, self.value = (x.repeat_interleave(group, 1) if group > 1 else x for x in parts)
        self.mask, self.log_weights, sink = support.pair_mask(), support.pair_weights(eta.shape[1]), support.sink
        self.support = replace(support, log_weights=self.log_weights)
        self.sink = None if sink is None else torch.as_tensor(sink, dtype=self.eta.dtype, device=eta.device)

    def common_base(self) -> Tensor | None:
        """Log base weights (…, n) of the keys if all queries have the same, else None."""
        if self.support.causal:
            return None
        base = self.eta.new_zeros(1, 1, self.key.shape[-2])
        for name in ("log_weights", "mask"):
            table = getattr(self, name)
            if table is None:
                continue
            if table.shape[-2] > 1 and not known(table == table[..., :1, :]):
                return None
            first = table[..., 0, :]
            base = base + first if name == "log_weights" else torch.where(first, base, -torch.inf)
        return base

    def sink_column(self) -> Tensor:
        """(… | 1, heads | 1, 1); −inf without one."""
        sink = self.eta.new_tensor(-torch.inf) if self.sink is None else self.sink
        return sink.reshape(-1, sink.shape[-1] if sink.ndim else 1, 1)

    def base_weights(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities at η = 0 of the keys (batch, heads, *rows, n) and of the sink (…); 0 where nothing is seen."""
        lead, rows = self.eta.shape[:2], base.shape[2:-1]
        column = self.sink_column()
        column = column.reshape(*column.shape, *[1] * len(rows)).expand(*lead, *rows, 1)
        p = normalize(torch.cat([base.expand(*lead, *rows, base.shape[-1]), column], -1))[1]
        return p[..., :-1], p[..., -1]

    def prefix(self) -> Tensor | None:
        """Which keys can be seen at all, (…, n), if query i sees those of them up to i; else None."""
        q, n = self.eta.shape[-2], self.key.shape[-2]
        if q != n or self.log_weights is not None or self.support.offset:
            return None
        if self.support.causal:
            if self.mask is None:
                return torch.ones(1, 1, n, dtype=torch.bool, device=self.eta.device)
            return self.mask[..., 0, :] if self.mask.shape[-2] == 1 else None
        if self.mask is None or self.mask.shape[-2] != q:
            return None
        last = self.mask[..., -1:, :]
        before = torch.ones(q, n, dtype=torch.bool, device=self.mask.device).tril()
        return last[..., 0, :] if known(self.mask == (last & before)) else None

    def base_rows(self, rows: Tensor) -> Tensor:
        """Log base weights (…, rows, n) of some queries."""
        return self.support.weigh(self.eta.new_zeros(1, 1, len(rows), self.key.shape[-2]), rows)


def _shared(call: _Call, base: Tensor) -> Tensor:
    """One mean and one covariance for all queries of a sequence and head."""
    p, sink = call.base_weights(base)
    k_mean, v_mean = (p[..., None, :] @ x for x in (call.key, call.value))  # (batch, heads, 1, ·)
    covariance = (call.key - k_mean).mT @ (p[..., None] * (call.value - v_mean))
    covariance = covariance + sink[..., None, None] * k_mean.mT @ v_mean  # its atom is 0
    return v_mean + call.eta @ covariance


def _running(call: _Call, seen: Tensor) -> Tensor:
    """Sums of 1, k, v and k vᵀ that run along with the queries, a chunk of them at a time."""
    # sums of centred numbers are exacter; detached, because the answer does not depend on the centre
    k_centre, v_centre = (x.mean(-2, keepdim=True).detach() for x in (call.key, call.value))
    key, value = call.key - k_centre, call.value - v_centre
    sink = call.sink_column()[..., 0]
    top = sink.clamp_min(0)
    weight = (seen * (-top).exp()[..., None])[..., None]  # (…, n, 1)
    count = (sink - top).exp()[..., None, None]  # the sink, which every query sees, at −centre
    k_sum, v_sum, product = -count * k_centre, -count * v_centre, count * k_centre.mT @ v_centre
    parts = []
    for first in range(0, key.shape[-2], QUERY_CHUNK):
        eta, k, v, w = (x[..., first : first + QUERY_CHUNK, :] for x in (call.eta, key, value, weight))
        n, k_all, v_all = count + w.cumsum(-2), k_sum + (w * k).cumsum(-2), v_sum + (w * v).cumsum(-2)
        second = eta @ product + ((eta @ k.mT) * w.mT).tril() @ v
        least = n.clamp_min(torch.finfo(n.dtype).tiny)
        k_mean, v_mean = k_all / least, v_all / least
        out = v_centre + v_mean + second / least - (eta * k_mean).sum(-1, keepdim=True) * v_mean
        parts.append(torch.where(n > 0, out, 0.0))
        count, k_sum, v_sum = n[..., -1:, :], k_all[..., -1:, :], v_all[..., -1:, :]
        product = product + k.mT @ (w * v)
    return torch.cat(parts, -2) if parts else call.eta.new_zeros(*call.eta.shape[:-1], value.shape[-1])


def _by_row(call: _Call, shares: Tensor | None) -> Tensor:
    """Rows with base weights b of their own, in strips; what is needed of a covariance is in the scores s = ⟨η, k⟩:

    ⟨k̄, η⟩ = s̄,     Cov(v, k) η = Σ_j b_j (s_j − s̄) v_j,     ηᵀ Cov(k) η = Σ_j b_j (s_j − s̄)²
    """
    index = torch.arange(call.eta.shape[-2], device=call.eta.device)
    width = call.key.shape[-2] * call.eta.shape[0] * call.eta.shape[1] * (1 if shares is None else shares.shape[-1])
    parts = []
    for rows in index.split(max(1, MAX_SCORES // max(1, width))):
        p, sink = call.base_weights(call.base_rows(rows))
        score = call.eta[..., rows, :] @ call.key.mT
        if shares is None:  # the sink scores 0 and carries 0
            parts.append((p * (1 + score - (p * score).sum(-1, keepdim=True))) @ call.value)
            continue
        part = p[..., None, :] * shares.mT[..., None, :, :]  # (batch, heads, rows, c, n)
        mass, share = _normalized(part)
        mean = (share * score[..., None, :]).sum(-1, keepdim=True)
        centred = score[..., None, :] - mean
        output = (share * (1 + centred)) @ call.value[..., None, :, :]
        logit = mass + mean[..., 0] + (share * centred.square()).sum(-1) / 2
        parts.append(_mixed(logit, output, sink if call.sink is not None else None))
    empty = call.eta.new_zeros(*call.eta.shape[:-1], call.value.shape[-1])
    return torch.cat(parts, -2) if parts else empty


def _components(call: _Call, base: Tensor, shares: Tensor) -> Tensor:
    """Each component with its own mean and covariance, for keys that all queries see."""
    p, sink = call.base_weights(base)  # (batch, heads, n), (batch, heads)
    mass, share = _normalized(p[..., None, :] * shares.mT)  # (batch, heads, c), (batch, heads, c, n)
    k_mean, v_mean = share @ call.key, share @ call.value  # (batch, heads, c, ·)
    first = call.eta @ k_mean.mT + mass[..., None, :]  # (batch, heads, q, c)
    logits, outputs = [], []
    for c in range(share.shape[-2]):
        k, v = call.key - k_mean[..., c : c + 1, :], call.value - v_mean[..., c : c + 1, :]
        weighted = share[..., c, :, None] * k
        along = call.eta @ (k.mT @ weighted)
        logits.append(first[..., c] + (along * call.eta).sum(-1) / 2)
        outputs.append(v_mean[..., c : c + 1, :] + call.eta @ (weighted.mT @ v))
    sink_mass = sink[..., None].expand(logits[0].shape) if call.sink is not None else None
    return _mixed(torch.stack(logits, -1), torch.stack(outputs, -2), sink_mass)


def _normalized(part: Tensor) -> tuple[Tensor, Tensor]:
    """Log masses (…, c) of components and the shares of keys within them; an empty one has −inf and 0."""
    mass = part.sum(-1)
    present = mass > 0
    safe = torch.where(present, mass, 1)
    return torch.where(present, safe.log(), -torch.inf), part / safe[..., None]


def _mixed(logit: Tensor, output: Tensor, sink: Tensor | None) -> Tensor:
    """Σ_c w_c out_c with logits (…, q, c) and outputs (…, q, c, e); a sink is an atom: no covariance, value 0."""
    if sink is not None:
        logit = torch.cat([logit, sink.log()[..., None]], -1)
    weight = normalize(logit)[1][..., : output.shape[-2]]
    return (weight[..., None, :] @ output)[..., 0, :]


def _shares(responsibilities: Tensor, call: _Call) -> Tensor:
    n = call.key.shape[-2]
    if responsibilities.ndim < 2 or responsibilities.shape[-2] != n or responsibilities.shape[-1] < 1:
        expected = f"shape (…, n={n}, components)"
        got = shape(responsibilities)
        raise ValueError(sentence("approximate_by_mixture.responsibilities", expected, got, "One row per key."))
    if not holds((responsibilities >= 0) & responsibilities.isfinite()):
        advice = "They are shares of a key."
        expected = "finite numbers ≥ 0"
        raise ValueError(sentence("approximate_by_mixture.responsibilities", expected, "others", advice))
    return responsibilities.to(call.eta)


def clusters(key: Tensor, weight: Tensor, components: int, seed: int) -> Tensor:
    """Labels (…, n) of weighted k-means, from k-means++ with the same draws for every sequence and head."""
    if not key.shape[-2]:
        return torch.zeros(weight.shape, dtype=torch.int64, device=key.device)
    draws = torch.rand(components, generator=torch.Generator().manual_seed(seed)).tolist()
    probability, centres = weight, []
    distance = torch.full_like(weight, torch.inf)
    for u in draws:
        along = probability.cumsum(-1)
        at = torch.searchsorted(along, u * along[..., -1:]).clamp_max(key.shape[-2] - 1)
        centres.append(key.gather(-2, at[..., None].expand(*at.shape, key.shape[-1])))
        distance = distance.minimum((key - centres[-1]).square().sum(-1))
        probability = weight * distance
    centre = torch.cat(centres, -2)  # (…, c, d)
    label = torch.cdist(key, centre).argmin(-1)
    for _ in range(KMEANS_STEPS):
        part = weight[..., None, :] * functional.one_hot(label, components).mT
        mass = part.sum(-1, keepdim=True)
        centre = torch.where(mass > 0, part @ key / mass.clamp_min(torch.finfo(mass.dtype).tiny), centre)
        label = torch.cdist(key, centre).argmin(-1)
    return label
