"""What a head would be if its keys were Gaussian, or a few Gaussians.

    Gaussian (S1-C1)    out = v̄ + Cov(v, k) η                                     exact to O(|η|²) for any keys
    mixture  (S1-P2′)   out = Σ_c w_c (v̄_c + Cov_c(v, k) η),  w = softmax_c(log π_c + ⟨k̄_c, η⟩ + ½ ηᵀ Cov_c(k) η)

Means and covariances are of the keys that a query sees, under their base weights: η = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cumulant.checks import sentence
from cumulant.observatory.interface import Call

CHUNK = 64  # queries of a causal call at a time
LARGE = 1 << 22  # scores held at once
LLOYD = 10  # steps of k-means


def gaussian_output(call: Call) -> Tensor:
    """Every head with one Gaussian in the place of the keys a query sees.  S1-C1

        out = v̄ + Cov(v, k) η,  (batch, heads, q, e)

    Keys that all queries see have one covariance; behind a causal mask sums run along with the queries; any other mask
    or bias is taken row by row. A sink is one more atom at 0. A query that sees nothing gets 0.
    """
    _require_linear("gaussian_output", call)
    base = _common_base(call)
    if base is not None:
        return _shared(call, base)
    seen = _prefix(call)
    return _running(call, seen) if seen is not None else _by_row(call)


def mixture_output(call: Call, components: int, seed: int = 0) -> Tensor | None:
    """Every head with a few Gaussians in the place of its keys, from k-means on them.  S1-P2′

    components  how many at most; 1 is `gaussian_output`
    seed        of the first centres; they do not depend on the other sequences of the batch

    None if the queries do not all see the same keys: each would need clusters of its own.
    """
    if components < 1:
        raise ValueError(sentence("mixture_output.components", "at least 1", components, "Use 1 for one Gaussian."))
    _require_linear("mixture_output", call)
    base = _common_base(call)
    if base is None:
        return None
    key, value = _per_head(call)
    p, sink = _base_weights(call, base)  # (batch, heads, n), (batch, heads)
    label = _clusters(key, p, components, seed)
    part = p[..., None, :] * functional.one_hot(label, components).mT  # (batch, heads, c, n)
    mass = part.sum(-1)
    share = part / mass[..., None].clamp_min(torch.finfo(p.dtype).tiny)
    k_mean, v_mean = share @ key, share @ value  # (batch, heads, c, ·)
    logit = call.eta @ k_mean.mT + mass.log()[..., None, :]  # (batch, heads, q, c)
    outputs = []
    for c in range(components):
        k, v, w = key - k_mean[..., c : c + 1, :], value - v_mean[..., c : c + 1, :], share[..., c, :, None]
        along = call.eta @ (k.mT @ (w * k))
        logit[..., c] += (along * call.eta).sum(-1) / 2
        outputs.append(v_mean[..., c : c + 1, :] + call.eta @ (k.mT @ (w * v)))
    if call.support.get("sink") is not None:  # an atom: no covariance, value 0
        logit = torch.cat([logit, sink.log()[..., None, None].expand(*logit.shape[:-1], 1)], -1)
    weight = torch.softmax(logit, -1).nan_to_num(0.0)[..., :components]
    return sum((weight[..., c, None] * out for c, out in enumerate(outputs)), torch.zeros_like(outputs[0]))


def _require_linear(where: str, call: Call) -> None:
    if call.capped:
        advice = "A Gaussian approximates exponential families in the query only."
        raise ValueError(sentence(f"{where}({call.name})", "scores linear in the query", "capped ones", advice))


def _per_head(call: Call) -> tuple[Tensor, Tensor]:
    group = call.eta.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (call.key, call.value))
    return key, value


def _common_base(call: Call) -> Tensor | None:
    """Log base weights (…, n) of the keys if all queries have the same, else None."""
    if call.support.get("causal"):
        return None
    base = call.eta.new_zeros(1, 1, call.key.shape[-2])
    for name in ("log_weights", "mask"):
        table = call.support.get(name)
        if table is None:
            continue
        if not bool((table == table[..., :1, :]).all()):
            return None
        first = table[..., 0, :]
        base = base + first if name == "log_weights" else torch.where(first, base, -torch.inf)
    return base


def _base_weights(call: Call, base: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities at η = 0 of the keys (batch, heads, *rows, n) and of the sink (…); 0 where nothing is seen."""
    heads, rows = call.eta.shape[:2], base.shape[2:-1]
    base = base.expand(*heads, *rows, base.shape[-1])
    sink = call.support.get("sink")
    column = base.new_full((1, 1), -torch.inf) if sink is None else sink.to(base)
    column = column.reshape(1, -1, *[1] * (len(rows) + 1)).expand(*heads, *rows, 1)
    p = torch.softmax(torch.cat([base, column], -1), -1).nan_to_num(0.0)
    return p[..., :-1], p[..., -1]


def _shared(call: Call, base: Tensor) -> Tensor:
    """One mean and one covariance for all queries of a sequence and head."""
    key, value = _per_head(call)
    p, sink = _base_weights(call, base)
    k_mean, v_mean = (p[..., None, :] @ x for x in (key, value))  # (batch, heads, 1, ·)
    covariance = (key - k_mean).mT @ (p[..., None] * (value - v_mean))
    covariance = covariance + sink[..., None, None] * k_mean.mT @ v_mean  # its atom is 0
    return v_mean + call.eta @ covariance


def _prefix(call: Call) -> Tensor | None:
    """Which keys can be seen at all, (…, n), if query i sees those of them up to i; else None."""
    q, n = call.eta.shape[-2], call.key.shape[-2]
    mask, weights = call.support.get("mask"), call.support.get("log_weights")
    if q != n or weights is not None:
        return None
    if call.support.get("causal"):
        return None if mask is not None else torch.ones(1, 1, n, dtype=torch.bool, device=call.eta.device)
    if mask is None or mask.shape[-2] != q:
        return None
    last = mask[..., -1:, :]
    before = torch.ones(q, n, dtype=torch.bool, device=mask.device).tril()
    return last[..., 0, :] if bool((mask == (last & before)).all()) else None


def _running(call: Call, seen: Tensor) -> Tensor:
    """Sums of 1, k, v and k vᵀ that run along with the queries, a chunk of them at a time."""
    key, value = _per_head(call)
    k_centre, v_centre = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)  # sums of centred numbers are exacter
    key, value = key - k_centre, value - v_centre
    sink = call.support.get("sink")
    sink = call.eta.new_full((1, 1), -torch.inf) if sink is None else sink.to(call.eta)
    top = sink.clamp_min(0)
    weight = (seen * (-top).exp()[..., None])[..., None]  # (…, n, 1)
    count = (sink - top).exp()[..., None, None]  # the sink, which every query sees, at −centre
    k_sum, v_sum, product = -count * k_centre, -count * v_centre, count * k_centre.mT @ v_centre
    parts = []
    for first in range(0, key.shape[-2], CHUNK):
        eta, k, v, w = (x[..., first : first + CHUNK, :] for x in (call.eta, key, value, weight))
        n, k_all, v_all = count + w.cumsum(-2), k_sum + (w * k).cumsum(-2), v_sum + (w * v).cumsum(-2)
        second = eta @ product + ((eta @ k.mT) * w.mT).tril() @ v
        k_mean, v_mean = k_all / n, v_all / n
        out = v_centre + v_mean + second / n - (eta * k_mean).sum(-1, keepdim=True) * v_mean
        parts.append(torch.where(n > 0, out, 0.0))
        count, k_sum, v_sum = n[..., -1:, :], k_all[..., -1:, :], v_all[..., -1:, :]
        product = product + k.mT @ (w * v)
    return torch.cat(parts, -2)


def _by_row(call: Call) -> Tensor:
    """Rows with base weights b of their own: Σ_j b_j (1 + s_j − s̄) v_j with scores s = ⟨η, k⟩, in strips."""
    key, value = _per_head(call)
    n = key.shape[-2]
    parts = []
    index = torch.arange(call.eta.shape[-2], device=key.device)
    for rows in index.split(max(1, LARGE // max(1, n * call.eta.shape[0] * call.eta.shape[1]))):
        base = call.eta.new_zeros(1, 1, len(rows), n)
        weights, mask = call.support.get("log_weights"), call.support.get("mask")
        if weights is not None:
            base = base + (weights[..., rows, :] if weights.shape[-2] > 1 else weights)
        if mask is not None:
            base = torch.where(mask[..., rows, :] if mask.shape[-2] > 1 else mask, base, -torch.inf)
        if call.support.get("causal"):
            base = base.masked_fill(torch.arange(n, device=key.device) > rows[:, None], -torch.inf)
        p, _ = _base_weights(call, base)  # the sink scores 0 and carries 0
        score = call.eta[..., rows, :] @ key.mT
        parts.append((p * (1 + score - (p * score).sum(-1, keepdim=True))) @ value)
    return torch.cat(parts, -2)


def _clusters(key: Tensor, weight: Tensor, components: int, seed: int) -> Tensor:
    """Labels (…, n) of weighted k-means, from k-means++ with the same draws for every sequence and head."""
    drawn = torch.rand(components, generator=torch.Generator().manual_seed(seed)).tolist()
    chance, centres = weight, []
    distance = torch.full_like(weight, torch.inf)
    for u in drawn:
        along = chance.cumsum(-1)
        at = torch.searchsorted(along, u * along[..., -1:]).clamp_max(key.shape[-2] - 1)
        centres.append(key.gather(-2, at[..., None].expand(*at.shape, key.shape[-1])))
        distance = distance.minimum((key - centres[-1]).square().sum(-1))
        chance = weight * distance
    centre = torch.cat(centres, -2)  # (…, c, d)
    label = torch.cdist(key, centre).argmin(-1)
    for _ in range(LLOYD):
        part = weight[..., None, :] * functional.one_hot(label, components).mT
        mass = part.sum(-1, keepdim=True)
        centre = torch.where(mass > 0, part @ key / mass.clamp_min(torch.finfo(mass.dtype).tiny), centre)
        label = torch.cdist(key, centre).argmin(-1)
    return label
