"""Statistics that cost d × d numbers or a sort per query, on a sample of queries: spectra, volumes, fits.

Per sampled query the weights p over its keys are written out; per sequence there are a few such rows, so that nothing
grows with the square of its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention import attend
from cumulant.hopfield import mass_count
from cumulant.nn.calls import AttentionCall

MAX_ROWS = 16  # sampled queries of one sequence at most
MAX_NUMBERS = 1 << 22  # numbers held at once: rows × heads × keys × dimension
SampledQueries = list[tuple[int, Tensor]]  # sequences with the indices of their sampled queries


class SampledStatistics(NamedTuple):
    """quantities: name → (heads, samples);  sums: name → sums over the samples, which add over batches (`fit_sums`)."""

    quantities: dict[str, Tensor]
    sums: dict[str, Tensor]


def sampled_statistics(call: AttentionCall, queries: SampledQueries, product: Tensor | None) -> SampledStatistics:
    """The statistics of the sampled queries of one call.

    product  (heads, d, e) W_Q W_O of every head, for the volume in the residual stream; None where it is not known
    """
    parts: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for rows in _strips(call, queries):
        under = _covariances(rows.p, rows)
        for name, value in _quantities(call, rows, under, product).items():
            parts.setdefault(name, []).append(value)
        if not call.capped:
            for name, value in _fit_sums(rows, under).items():
                sums[name] = sums[name] + value if name in sums else value
    return SampledStatistics({name: torch.cat(values, 1) for name, values in parts.items()}, sums)


class QueryRows(NamedTuple):
    """Some queries of one sequence: η (heads, rows, d), p and log base weights (heads, rows, n), keys and values
    (heads, n, ·) from their plain means, and those means (heads, 1, ·)."""

    eta: Tensor
    p: Tensor
    base: Tensor
    key: Tensor
    value: Tensor
    key_mean: Tensor
    value_mean: Tensor


class Covariances(NamedTuple):
    """Under some weights: means (heads, rows, ·) of centred keys and values; Cov(k, k) and Cov(k, v), (…, d, ·)."""

    key: Tensor
    value: Tensor
    key_key: Tensor
    key_value: Tensor


def query_rows(call: AttentionCall, sequence: int, index: Tensor) -> QueryRows:
    """The weights of some queries of a sequence over all keys."""
    heads, group = call.eta.shape[1], call.eta.shape[1] // call.key.shape[1]
    eta = call.eta[sequence, :, index]
    key, value = (x[sequence].repeat_interleave(group, 0) if group > 1 else x[sequence] for x in (call.key, call.value))
    support = call.support.of_sequences(torch.tensor([sequence]))
    base = support.weigh(eta.new_zeros(1, heads, len(index), key.shape[1]), index)[0]
    logits = eta @ key.mT + base
    if isinstance(support.sink, Tensor):
        column = support.sink.reshape(-1, 1, 1).expand(heads, len(index), 1)
        p = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    else:
        p = torch.softmax(logits, -1)
    key_mean, value_mean = key.mean(1, keepdim=True), value.mean(1, keepdim=True)
    return QueryRows(eta, p, base, key - key_mean, value - value_mean, key_mean, value_mean)


def _strips(call: AttentionCall, queries: SampledQueries) -> Iterator[QueryRows]:
    """The queries queries, few enough at a time."""
    each = call.eta.shape[1] * call.key.shape[-2] * call.key.shape[-1]
    for sequence, index in queries:
        for part in index.split(max(1, MAX_NUMBERS // each)):
            yield query_rows(call, sequence, part)


def _covariances(p: Tensor, rows: QueryRows) -> Covariances:
    """One product of (rows · d, n) by (n, d + e) per head; with a sink p sums to less than one, and its atom is 0."""
    heads, count, _ = p.shape
    d = rows.key.shape[-1]
    both = torch.cat([rows.key, rows.value], -1)
    weighted = (p[:, :, None] * rows.key.mT[:, None]).flatten(1, 2)  # (heads, rows · d, n)
    second = (weighted @ both).unflatten(1, (count, d))
    mean = p @ both
    left = 1 - p.sum(-1)  # mass of a sink, whose atom is 0, so −key_mean from the centre
    first_k, first_v = mean[..., :d], mean[..., d:]
    if bool((left > 1e-6).any()):
        k0, v0 = -rows.key_mean, -rows.value_mean
        atom = torch.cat([k0, v0], -1)
        second = second + left[..., None, None] * k0[..., None].expand(heads, count, d, 1) * atom[:, :, None]
        first_k, first_v = first_k + left[..., None] * k0, first_v + left[..., None] * v0
    crossed = first_k[..., None] * torch.cat([first_k, first_v], -1)[..., None, :]
    second = second - crossed
    return Covariances(first_k, first_v, second[..., :d], second[..., d:])


def _quantities(call: AttentionCall, rows: QueryRows, under: Covariances, product: Tensor | None) -> dict[str, Tensor]:
    visible = (rows.base > -torch.inf).sum(-1)
    k90 = mass_count(rows.p).to(rows.p.dtype)
    spread = (under.key_key + under.key_key.mT) / 2
    eigenvalues = call.scale * torch.linalg.eigvalsh(spread).clamp_min(0)
    out = {
        "k90": k90,
        "k90_share": k90 / visible.clamp_min(1),
        "fisher_top": eigenvalues[..., -1],
        "fisher_volume": torch.log1p(eigenvalues).sum(-1),
    }
    if product is not None and not call.capped:
        crossed = call.scale * under.key_value.mT @ product[:, None].to(spread.dtype)  # (heads, rows, e, e)
        eye = torch.eye(crossed.shape[-1], dtype=crossed.dtype)
        out["head_volume"] = torch.linalg.slogdet(eye + crossed).logabsdet
    return out


def _fit_sums(rows: QueryRows, under: Covariances) -> dict[str, Tensor]:
    """Sums from which the link fit and the local Gaussian fit of a head follow.

    link: count (heads), η (heads, d), m, ηηᵀ, mmᵀ, ηmᵀ;  keys: count, k, kkᵀ;
    gauss: Σ|out − v̄ − Cov(v,k)η|² and Σ|out − v̄|² over sampled queries, with base moments of the keys each one sees
    """
    prior = torch.softmax(rows.base, -1)
    same = bool((rows.base == rows.base[:, :1]).all())
    base = _covariances(prior[:, :1] if same else prior, rows)
    left = under.value - base.value
    predicted = (base.key_value.mT @ rows.eta[..., None])[..., 0]
    visible = (rows.base > -torch.inf).any(1).to(rows.key.dtype)  # (heads, n)
    key = rows.key + rows.key_mean
    eta, mean = rows.eta.double(), (under.key + rows.key_mean).double()
    return {
        "gauss/left": (left - predicted).square().sum((-2, -1)).double(),
        "gauss/whole": left.square().sum((-2, -1)).double(),
        "link/count": torch.full((len(key),), float(eta.shape[1]), dtype=torch.float64),
        "link/eta": eta.sum(1),
        "link/mean": mean.sum(1),
        "link/eta_eta": eta.mT @ eta,
        "link/mean_mean": mean.mT @ mean,
        "link/eta_mean": eta.mT @ mean,
        "keys/count": visible.double().sum(1),
        "keys/sum": (visible[..., None] * key).double().sum(1),
        "keys/square": (key.mT @ (visible[..., None] * key)).double(),
    }


def received_attention(call: AttentionCall, sequence: int) -> dict[str, Tensor]:
    """The implied source marginal of one sequence: σ_j = Σ_i p_ij / N over its tokens, as (heads, 1) figures."""
    index = torch.tensor([sequence])
    eta, key, support = call.eta[index], call.key[index], call.support.of_sequences(index)
    tokens = eta.new_ones(eta.shape[2]) if call.rows is None else call.rows[sequence].to(eta.dtype)
    share = (tokens / tokens.sum().clamp_min(1)).expand(eta.shape[:3])
    sigma = attend(eta, key, scale=1.0, source_marginal=share.contiguous(), **support.arguments()).source_marginal
    assert sigma is not None
    sigma = sigma[0]
    return {
        "received_top": sigma.amax(-1, keepdim=True),
        "received_effective": sigma.sum(-1, keepdim=True).square() / sigma.square().sum(-1, keepdim=True),
    }
