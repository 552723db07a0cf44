"""Where a head looks: the mass p_ij that a query i gives to kinds of keys j, and what an even look would give them.

    self_mass        p_ii                                             previous_mass, next_mass   p_{i,i−1}, p_{i,i+1}
    same_token_mass  Σ_j p_ij [t_j = t_i, j ≠ i]                      tokens t of the sequence
    induction_mass   Σ_j p_ij [t_{j−1} = t_i, j − 1 < i]              the token after an earlier occurrence of t_i
    delimiter_mass   Σ_j p_ij [t_j is a delimiter]                    special tokens, punctuation, ends of lines
    baseline         (keys of the kind that i sees) / (keys that it sees)

A mass is NaN where no key of its kind is visible to the query: there was nothing to look at. Nothing here is of the
size queries × keys: single keys are looked up by their distance, tokens that are alike by lists of pairs, made once a
pass, and distances and delimiters are binned in the sweep of the kernel (`attention_profile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.profile import attention_profile
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.statistics.quantities import DISTANCE_EDGES

SHIFTS = {"self_mass": 0, "previous_mass": -1, "next_mass": 1}
PAIRED = ("same_token_mass", "induction_mass")
TARGETS = (*SHIFTS, *PAIRED, "delimiter_mass")
NUMBERS = 1 << 18  # held at once: what stays in cache
STRIP = 1 << 24  # pairs of tokens compared at once


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """The tokens of the sequences of a pass, and which pairs of them are alike.

    ids         (batch, n) int64
    is_token    (batch, n) False where there is padding; None: nowhere
    delimiters  ids that separate; None: not known
    """

    ids: Tensor
    is_token: Tensor | None = None
    delimiters: Tensor | None = None

    @cached_property
    def delimiter(self) -> Tensor | None:
        """(batch, n) True where the token is a delimiter."""
        return None if self.delimiters is None else torch.isin(self.ids, self.delimiters)

    @cached_property
    def pairs(self) -> dict[str, Tensor]:
        """name → (3, pairs): sequence, query and key.

        >>> found = SequenceTokens(torch.tensor([[5, 6, 5, 7]])).pairs
        >>> found["same_token_mass"].T.tolist(), found["induction_mass"].T.tolist()
        ([[0, 0, 2], [0, 2, 0]], [[0, 2, 1]])
        """
        parts: dict[str, list[Tensor]] = {name: [torch.empty(3, 0, dtype=torch.int64)] for name in PAIRED}
        for sequence, rows in self._strips():
            own = self.ids[sequence]
            alike = own[rows][:, None] == own
            if self.is_token is not None:
                alike &= self.is_token[sequence] & self.is_token[sequence][rows][:, None]
            query, key = alike.nonzero(as_tuple=True)
            query = query + rows[0]
            others = query != key
            parts["same_token_mass"].append(_pairs(sequence, query[others], key[others]))
            # the key after an earlier occurrence: it exists, as the query itself is later
            earlier = key < query
            parts["induction_mass"].append(_pairs(sequence, query[earlier], key[earlier] + 1))
        return {name: torch.cat(found, 1) for name, found in parts.items()}

    def _strips(self) -> Iterator[tuple[int, Tensor]]:
        batch, n = self.ids.shape
        for sequence in range(batch):
            for rows in torch.arange(n).split(max(1, STRIP // max(1, n))):
                yield sequence, rows


def _pairs(sequence: int, query: Tensor, key: Tensor) -> Tensor:
    return torch.stack([torch.full_like(query, sequence), query, key])


class TargetMasses(NamedTuple):
    """masses, baseline: name → (batch, heads, q), NaN where there is no key of the kind, and where a query is padding;
    by_distance: (batch, heads, q, bins) the mass in each bin of `DISTANCE_EDGES`, without that of a sink."""

    masses: dict[str, Tensor]
    baseline: dict[str, Tensor]
    by_distance: Tensor


def target_masses(
    call: AttentionCall, wanted: frozenset[str] = frozenset(TARGETS), tokens: SequenceTokens | None = None
) -> TargetMasses:
    """The masses of one call of self-attention.

    wanted  among `TARGETS`
    tokens  of the keys; without them what depends on tokens is left out, as are next tokens in a causal order

    >>> from cumulant.nn import Support
    >>> x = torch.zeros(1, 1, 4, 2)                                  # four tokens that look alike
    >>> call = AttentionCall(torch.nn.Identity(), x, x, x, Support(causal=True), x)
    >>> found = target_masses(call, tokens=SequenceTokens(torch.tensor([[5, 6, 5, 7]])))
    >>> found.masses["previous_mass"][0, 0, 1:], found.masses["induction_mass"][0, 0, 2]     # what followed the first 5
    (tensor([0.5000, 0.3333, 0.2500]), tensor(0.3333))
    """
    n = call.key.shape[2]
    known = tokens if tokens is not None and tokens.ids.shape == (len(call.key), n) else None
    marked = known.delimiter if known is not None and "delimiter_mass" in wanted else None
    g, marked_mass, by_distance = _sweep(call, marked)
    seen = replace(call.support, sink=None).visible_keys(call.eta, n)[0].clamp_min(1)
    masses, baseline = {}, {}
    for name in [name for name in SHIFTS if name in wanted and not (name == "next_mass" and call.support.causal)]:
        masses[name], baseline[name] = _at_distance(call, g, SHIFTS[name]), 1 / seen
    if known is not None and call.eta.shape[2] == n:
        for name in [name for name in PAIRED if name in wanted]:
            masses[name], count = _of_pairs(call, g, known.pairs[name])
            baseline[name] = count / seen
    if marked is not None and marked_mass is not None:
        count = _visible_marked(call, marked)
        masses["delimiter_mass"], baseline["delimiter_mass"] = (
            torch.where(count > 0, marked_mass, torch.nan),
            count / seen,
        )
    blank = g == -torch.inf
    if call.rows is not None:
        blank = blank | ~call.rows[:, None, :]
    masses = {name: mass.masked_fill(blank, torch.nan) for name, mass in masses.items()}
    baseline = {name: torch.where(masses[name].isnan(), torch.nan, share) for name, share in baseline.items()}
    return TargetMasses(masses, baseline, by_distance.masked_fill(blank[..., None], torch.nan))


def first_query(call: AttentionCall) -> int:
    """The key of the first query of a self-attention: with a cache there are keys before it."""
    if call.support.offset is not None:
        return call.support.offset
    return max(0, call.key.shape[-2] - call.eta.shape[-2])


def _at_distance(call: AttentionCall, g: Tensor, shift: int) -> Tensor:
    """p of the key ``shift`` places from each query."""
    (batch, heads, q, d), n = call.eta.shape, call.key.shape[2]
    rows = torch.arange(q, device=g.device)
    keys = rows + first_query(call) + shift
    there = (keys >= 0) & (keys < n)
    at = keys.clamp(0, max(0, n - 1))
    key = call.key[:, :, at]
    grouped = call.eta.reshape(batch, key.shape[1], heads // key.shape[1], q, d)
    logit = (grouped * key[:, :, None]).sum(-1).view(batch, heads, q) - g
    weights, mask, band = call.support.pair_weights(heads), call.support.pair_mask(), call.support.in_band(rows, at)
    index = at[None, None, :, None]
    if weights is not None:
        logit = logit + weights.expand(-1, -1, q, n).take_along_dim(index, 3)[..., 0]
    if mask is not None:
        there = there & mask.expand(-1, -1, q, n).take_along_dim(index, 3)[..., 0]
    if band is not None:
        there = there & band
    p = logit.exp()
    hidden = ~there if weights is None else ~there | (logit == -torch.inf)
    return p.masked_fill(hidden, torch.nan)


def _of_pairs(call: AttentionCall, g: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p over the pairs of each query, NaN where none is visible, and how many are."""
    (batch, heads, q, d), (_, key_heads, n, _) = call.eta.shape, call.key.shape
    if call.support.causal:
        pairs = pairs[:, pairs[2] <= pairs[1]]
    queries, keys, of_queries = (_by_token(t) for t in (call.eta, call.key, g[..., None]))  # rows are quick to gather
    total, count = g.new_zeros(batch * q, heads), g.new_zeros(batch * q, heads)
    weights, mask = call.support.pair_weights(heads), call.support.pair_mask()
    for b, i, j in (part.to(g.device) for part in pairs.split(max(1, NUMBERS // (heads * d)), 1)):
        row = b * q + i
        grouped = queries[row].view(len(b), key_heads, heads // key_heads, d)
        logit = (grouped * keys[b * n + j].view(len(b), key_heads, 1, d)).sum(-1).view(len(b), heads) - of_queries[row]
        there = torch.ones_like(logit, dtype=torch.bool)
        if weights is not None:
            logit = logit + _of_table(weights, b, i, j)
            there = logit > -torch.inf
        if mask is not None:
            there = there & _of_table(mask, b, i, j)
        band = call.support.in_band(i, j)
        if band is not None:
            there = there & band[:, None]
        total.index_add_(0, row, torch.where(there, logit.exp(), 0))
        count.index_add_(0, row, there.to(g.dtype))
    total, count = (t.view(batch, q, heads).mT for t in (total, count))
    return torch.where(count > 0, total, torch.nan), count


def _by_token(x: Tensor) -> Tensor:
    """(batch, heads, tokens, d) as (batch · tokens, heads · d)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def _of_table(table: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Entries (pairs, heads or 1) of a table (batch or 1, heads or 1, q or 1, n or 1)."""
    zero = torch.zeros_like(b)
    at = [index if size > 1 else zero for index, size in zip((b, i, j), (len(table), *table.shape[2:]), strict=True)]
    return table[at[0], :, at[1], at[2]]


def _sweep(call: AttentionCall, marked: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """G with the sink, mass on marked keys (batch, n), and in bins of the distance."""
    support = replace(call.support, offset=first_query(call), sink=None).arguments()
    sink = call.support.sink
    on_keys = None if marked is None else marked[:, None].expand(-1, call.key.shape[1], -1)
    found = attention_profile(
        call.eta, call.key, **support, distance_edges=DISTANCE_EDGES, marked=on_keys, statistics=()
    )
    g, mass, bins = found.moments.log_normalizer, found.marked_mass, found.bin_mass
    assert bins is not None
    if sink is None:
        return g, mass, bins
    both = torch.logaddexp(g, torch.as_tensor(sink, dtype=g.dtype, device=g.device)[..., None])
    share = torch.exp(g - both)
    return both, None if mass is None else mass * share, bins * share[..., None]


def _visible_marked(call: AttentionCall, marked: Tensor) -> Tensor:
    """(batch, heads or 1, q) how many marked keys (batch, n) a query sees."""
    q, n = call.eta.shape[2], call.key.shape[2]
    support = call.support
    if support.mask is None and support.log_weights is None and support.window is None:
        if not support.causal:
            return marked.sum(1)[:, None, None].expand(-1, 1, q).to(call.eta.dtype)
        last = (torch.arange(q, device=marked.device) + first_query(call)).clamp(0, n - 1)
        return marked.cumsum(1)[:, None, last].to(call.eta.dtype)
    table = replace(support, sink=None).weigh(call.eta.new_zeros(1, 1, q, n))
    return ((table > -torch.inf) & marked[:, None, None]).sum(-1).to(call.eta.dtype)
