"""Statistics of attention heads: per query, as means over a few queries, and on sampled queries what costs more.

quantities.py defines them. A record keeps the numbers of every query (`head_quantities`), and what takes d × d numbers
or a sort per query, spectra, volumes and fits, of a sample of queries (`sampled_statistics`): for these the weights p
over the keys are written out, a few rows per sequence, so that nothing grows with the square of its length.
A monitor keeps means over a few queries of a training step (`head_statistics`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention import attend
from cumulant.checks import everywhere, sentence
from cumulant.hopfield import mass_count
from cumulant.kernels import moments
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.statistics.quantities import BY_NAME, QUANTITIES
from cumulant.observatory.statistics.sampling import sample_queries

MAX_ROWS = 16  # sampled queries of one sequence at most
TOP_KEYS = 3  # of every query of an excerpt
MAX_NUMBERS = 1 << 22  # numbers held at once: rows × heads × keys × dimension
SampledQueries = list[tuple[int, Tensor]]  # sequences with the indices of their sampled queries
# what `moments` computes for a quantity, beside the log-normalizer
MOMENTS = {
    "entropy": "entropy",
    "effective_atoms": "effective_atoms",
    "kl_to_base": "entropy",
    "condensed": "entropy",
    "max_score": "max_score",
    "collapse_loss": "value_trace",
    "fisher_trace": "atom_trace",
}
DEFAULT = tuple(BY_NAME)


def select_quantities(names: str | Sequence[str] | None) -> frozenset[str]:
    """The wanted names, checked; None is all, a group's name is its members."""
    if names is None:
        return frozenset(DEFAULT)
    names = [names] if isinstance(names, str) else list(names)
    groups = {q.group for q in QUANTITIES}
    for name in names:
        if name not in BY_NAME and name not in groups:
            expected = f"names among {', '.join(BY_NAME)}, or a group: {', '.join(sorted(groups))}"
            raise ValueError(sentence("quantities", expected, repr(name), "Copy one exactly."))
    return frozenset(q.name for q in QUANTITIES if q.name in names or q.group in names)


def head_quantities(call: AttentionCall, wanted: frozenset[str], first: int | Tensor = 0) -> dict[str, Tensor]:
    """name → (batch, heads, q) for the wanted quantities; NaN where the query is padding or sees no key.

    first  the key of the first token, of all sequences or (batch,)

    Quantities that need the weights of single keys are left out: see `sampled_statistics`.
    """
    requested = sorted({MOMENTS[name] for name in wanted if name in MOMENTS})
    value = call.value if "collapse_loss" in wanted else None
    family = moments(call.eta, call.key, value, statistics=requested, **call.support.arguments())
    g = family.log_normalizer
    out: dict[str, Tensor | None] = {"log_normalizer": g, "sink_mass": family.sink_mass}
    for name in wanted & {"entropy", "effective_atoms", "max_score"}:
        out[name] = getattr(family, name)
    if wanted & {"kl_to_base", "condensed"}:
        count, log_mass = call.support.visible_keys(call.eta, call.key.shape[-2])
        score = family.mean_log_weight if call.capped else family.mean_score  # a capped score is carried as a weight
        out["kl_to_base"] = kl = score - g + (torch.log(count) if call.capped else log_mass)
        out["condensed"] = (kl > torch.log(count) - 1).to(g.dtype)
    if "first_mass" in wanted:
        out["first_mass"] = _first_mass(call, g, first)
    if "collapse_loss" in wanted:
        out["collapse_loss"] = family.value_trace
    if "fisher_trace" in wanted:
        out["fisher_trace"] = call.scale * family.atom_trace
    if call.capped:
        out["max_score"] = torch.full_like(g, torch.nan)
    blank = g == -torch.inf
    if call.rows is not None:
        blank = blank | ~call.rows[:, None, :]
    return {name: x.masked_fill(blank, torch.nan) for name, x in out.items() if name in wanted and x is not None}


def _first_mass(call: AttentionCall, g: Tensor, first: int | Tensor) -> Tensor:
    """p of the first token's key, e^{⟨η,k₀⟩ + w₀ − G}, 0 where it is hidden."""
    heads, n = call.eta.shape[1], call.key.shape[-2]
    index = torch.as_tensor(first, device=call.key.device).expand(len(call.key))[:, None, None, None]
    key = call.key.take_along_dim(index, 2).repeat_interleave(heads // call.key.shape[1], 1)  # (batch, heads, 1, d)
    logit = (call.eta @ key.mT)[..., 0] - g
    weights, mask = call.support.pair_weights(heads), call.support.pair_mask()
    in_band = call.support.in_band(torch.arange(call.eta.shape[2], device=index.device), index[..., 0])
    if weights is not None:
        logit = logit + weights.take_along_dim(index, 3)[..., 0]
    if mask is not None:
        visible = mask.expand(-1, -1, -1, n).take_along_dim(index, 3)[..., 0]
        logit = logit.masked_fill(~visible, -torch.inf)
    if in_band is not None:
        logit = logit.masked_fill(~in_band, -torch.inf)
    return logit.exp()


class HeadStatistics(NamedTuple):
    """Means over queries, per head (heads,), float64; p_ij is what query i gives to key j.

    entropy         −Σ_j p log p, in nats
    evenness        entropy / log N: 1 if all N visible keys are attended to alike, 0 if one is
    log_normalizer  G = log Σ_j exp(score)
    max_score       the largest score of any of these queries; NaN where scores are capped
    first_mass      p of the first token, where attention goes that has nowhere to go
    sink_mass       p of the sink that a model has learned; NaN without one
    output_size     |output|/√e
    queries         how many there are; those that see fewer than two keys cannot choose, and do not count

    Everything is NaN where no query counts.
    """

    entropy: Tensor
    evenness: Tensor
    log_normalizer: Tensor
    max_score: Tensor
    first_mass: Tensor
    sink_mass: Tensor
    output_size: Tensor
    queries: int

    @property
    def finite(self) -> bool:
        """Whether the numbers of attention are numbers; True also if no query counted."""
        return self.queries == 0 or bool((self.entropy + self.output_size).isfinite().all())

    def merge(self, other: HeadStatistics) -> HeadStatistics:
        """Of two calls of one layer: means by the number of queries, the larger of the scores."""
        if not self.queries or not other.queries:
            return self if self.queries else other
        share = self.queries / (self.queries + other.queries)
        mean = [share * a + (1 - share) * b for a, b in zip(self[:-1], other[:-1], strict=True)]
        mean[MEANS.index("max_score")] = torch.maximum(self.max_score, other.max_score)
        return HeadStatistics(*mean, queries=self.queries + other.queries)


MEANS = HeadStatistics._fields[:-1]


@torch.no_grad()
def head_statistics(call: AttentionCall, *, sequences: int = 4, queries: int = 32) -> HeadStatistics:
    """Statistics of up to ``queries`` tokens in each of up to ``sequences`` sequences of a call, evenly spread.

    The same positions are taken in every call of the same shape, so that numbers of different steps compare.

    >>> import torch
    >>> from cumulant.nn import AttentionCall, Support
    >>> x = torch.zeros(1, 2, 4, 3)                        # four tokens that look alike, two heads
    >>> heads = head_statistics(AttentionCall(torch.nn.Identity(), x, x, x, Support(), x))
    >>> heads.entropy, heads.first_mass                    # log 4, 1/4
    (tensor([1.3863, 1.3863], dtype=torch.float64), tensor([0.2500, 0.2500], dtype=torch.float64))
    """
    sample, tokens, first = sample_queries(call, sequences, queries)
    n, weights = sample.key.shape[-2], sample.support.log_weights
    if 0 in sample.eta.shape or n == 0:
        return _without_numbers(call, 0)
    usable = sample.eta.isfinite().all() & sample.key.isfinite().all()
    if weights is not None:
        usable = usable & (weights < torch.inf).all()  # also false for NaN
    if not everywhere(usable):
        return _without_numbers(call, int(tokens.sum()))
    values = head_quantities(sample, frozenset(MEANS), first)
    count, _ = sample.support.visible_keys(sample.eta, n)
    values["evenness"] = values["entropy"] / count.log().clamp_min(log(2))
    values["output_size"] = sample.output.square().mean(-1).sqrt()
    nothing = torch.full_like(count, torch.nan)
    table = torch.stack([values.get(name, nothing) for name in MEANS]).double().movedim(2, 1).flatten(2)
    counted = (tokens[:, None] & (count > 1)).movedim(1, 0).flatten(1)  # (heads, b · s), table (means, heads, b · s)
    number = counted.sum(1)
    mean = torch.where(counted, table, 0).sum(2) / number
    top = MEANS.index("max_score")
    mean[top] = torch.where(counted, table[top], -torch.inf).amax(1)
    mean = torch.where(number > 0, mean, torch.nan)
    everything = torch.cat([mean.flatten(), number.max().to(mean)[None]]).cpu()  # one transfer from the device
    return HeadStatistics(*everything[:-1].reshape(mean.shape), queries=int(everything[-1]))


def _without_numbers(call: AttentionCall, queries: int) -> HeadStatistics:
    nothing = torch.full((call.eta.shape[1],), torch.nan, dtype=torch.float64)
    return HeadStatistics(*(nothing for _ in MEANS), queries=queries)


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
    index = index.to(call.eta.device)
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
    """The sampled queries, few enough at a time."""
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
        crossed = call.scale * under.key_value.mT @ product[:, None].to(spread)  # (heads, rows, e, e)
        eye = torch.eye(crossed.shape[-1], dtype=crossed.dtype, device=crossed.device)
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


def top_keys(call: AttentionCall, sequence: int, queries: int, count: int = TOP_KEYS) -> tuple[Tensor, Tensor]:
    """The keys with most attention of the first queries of a sequence, and their shares, (heads, queries, count).

    Where fewer keys are visible their share is 0.
    """
    keys, shares = [], []
    for rows in _strips(call, [(sequence, torch.arange(min(queries, call.eta.shape[2])))]):
        share, key = rows.p.topk(min(count, rows.p.shape[-1]), -1)
        keys.append(key)
        shares.append(share)
    return torch.cat(keys, 1), torch.cat(shares, 1)


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
