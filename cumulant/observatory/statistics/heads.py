"""Statistics of attention heads: numbers per head and query, and their means over a sample of queries.

A record keeps the numbers of every query (`head_quantities`; definitions are in `quantities`); a monitor keeps means
over a few queries of a training step (`head_statistics`).
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels import moments
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.statistics.query_sample import sample_queries

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


def head_quantities(call: AttentionCall, wanted: frozenset[str], first: int | Tensor = 0) -> dict[str, Tensor]:
    """name → (batch, heads, q) for the wanted quantities; NaN where the query is padding or sees no key.

    first  the key of the first token, of all sequences or (batch,)

    Quantities that need the weights of single keys are left out: see `sampled_heads`.
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
    band = call.support.band(torch.arange(call.eta.shape[2], device=index.device), n)
    if weights is not None:
        logit = logit + weights.take_along_dim(index, 3)[..., 0]
    for table in (mask, None if band is None else band[None, None]):
        if table is not None:
            seen = table.expand(-1, -1, -1, n).take_along_dim(index, 3)[..., 0]
            logit = logit.masked_fill(~seen, -torch.inf)
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
    if not bool(usable):
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
    mean = torch.where(number > 0, mean, torch.nan).cpu()
    return HeadStatistics(*mean, queries=int(number.max()))


def _without_numbers(call: AttentionCall, queries: int) -> HeadStatistics:
    nothing = torch.full((call.eta.shape[1],), torch.nan, dtype=torch.float64)
    return HeadStatistics(*(nothing for _ in MEANS), queries=queries)
