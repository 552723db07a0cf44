"""Where a head looks: the mass p_ij that a query i gives to kinds of keys j, and what an even look would give them.

    self_mass        p_ii                                             previous_mass, next_mass   p_{i,i−1}, p_{i,i+1}
    same_token_mass  Σ_j p_ij [t_j = t_i, j ≠ i]                      tokens t of the sequence
    induction_mass   Σ_j p_ij [t_{j−1} = t_i, j − 1 < i]              the token after an earlier occurrence of t_i
    delimiter_mass   Σ_j p_ij [t_j is a delimiter]                    special tokens, punctuation, ends of lines
    mean_distance    Σ_j p_ij |i − j| / Σ_j p_ij                      without the mass of a sink
    baseline         (keys of the kind that i sees) / (keys that it sees)

A mass is NaN where no key of its kind is visible to the query: there was nothing to look at. Nothing here is of the
size queries × keys, and a few sequences are done at a time. Distances, delimiters and the mean position come from one
sweep of the kernel (`attention_profile`). Where attention looks both ways, a second one sees only keys up to the query,
with log-normalizer G⁻ and mean position m⁻, and says which side the mass is on:

    Σ_{j≤i} p_ij (i − j) = e^{G⁻ − G} (i − m⁻),       Σ_j p_ij |i − j| = 2 e^{G⁻ − G} (i − m⁻) − (i − m)

Where tokens are alike is looked up once a pass (`like_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels.profile import attention_profile
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.statistics import like_tokens
from cumulant.observatory.statistics.like_tokens import OccurrenceBlock, VisibleKeys, find_blocks, visible_keys
from cumulant.observatory.statistics.quantities import DISTANCE_EDGES

SHIFTS = {"self_mass": 0, "previous_mass": -1, "next_mass": 1}
PAIRED = tuple(like_tokens.STEPS)
TARGETS = (*SHIFTS, *PAIRED, "delimiter_mass", "mean_distance")
ROWS = 1 << 15  # queries × heads that are done at once, so that sums over queries are all that is kept
KEPT_MASKS = 4  # of a pass: layers have one, or two in turn
KEPT_PAIRS = 1 << 22  # of like tokens, for which it is kept which are visible


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """The tokens of the sequences of a pass, and what its layers share: where tokens are alike, and what a mask shows.

    ids         (batch, n) int64
    is_token    (batch, n) False where there is padding; None: nowhere
    delimiters  ids that separate; None: not known
    """

    ids: Tensor
    is_token: Tensor | None = None
    delimiters: Tensor | None = None
    _counts: dict = field(default_factory=dict)
    _blocks: dict = field(default_factory=dict)

    @cached_property
    def delimiter(self) -> Tensor | None:
        """(batch, n) True where the token is a delimiter."""
        return None if self.delimiters is None else torch.isin(self.ids, self.delimiters.to(self.ids.device))

    def visible(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """How many keys, and how many delimiters, a query sees, (batch | 1, heads | 1, q); kept for calls with the same
        mask, as the layers of a pass have."""
        kept = self._kept(call)
        return kept.seen, kept.marked

    def like_tokens(
        self, call: AttentionCall, own: AttentionCall, sequences: slice
    ) -> tuple[list[OccurrenceBlock], Iterable[dict[str, VisibleKeys]]]:
        """Where tokens are alike among some sequences, and what their queries see; ``own`` is the call of these."""
        heads, dim = own.eta.shape[1], own.eta.shape[3]
        at = sequences.start, sequences.stop, heads, dim
        if at not in self._blocks:
            tokens = None if self.is_token is None else self.is_token[sequences]
            self._blocks[at] = find_blocks(self.ids[sequences], tokens, heads, dim)
        blocks = self._blocks[at]
        found = (visible_keys(own.support, heads, own.key.shape[2], block) for block in blocks)
        if call.support.log_weights is not None or sum(block.real.numel() for block in blocks) > KEPT_PAIRS:
            return blocks, found
        kept = self._kept(call).pairs
        if at not in kept:
            kept[at] = list(found)
        return blocks, kept[at]

    def _kept(self, call: AttentionCall) -> _MaskCounts:
        support = call.support
        if support.log_weights is not None:  # of every layer its own, and large
            return _MaskCounts(None, _visible_keys(call), _visible_marked(call, self.delimiter), {})
        key = (id(support.mask), support.causal, support.offset, support.window, call.eta.shape[1:3], call.key.shape[2])
        if key not in self._counts:
            while len(self._counts) >= KEPT_MASKS:
                del self._counts[next(iter(self._counts))]
            # with the mask, which lives as long as its id is in use here
            counts = _visible_keys(call), _visible_marked(call, self.delimiter)
            self._counts[key] = _MaskCounts(support.mask, *counts, {})
        return self._counts[key]


class _MaskCounts(NamedTuple):
    """What queries see under a mask: keys, delimiters, and keys of like tokens by sequences."""

    mask: Tensor | None
    seen: Tensor
    marked: Tensor | None
    pairs: dict


class TargetMasses(NamedTuple):
    """masses, baseline: name → (batch, heads, q), NaN where there is no key of the kind, and where a query is padding;
    mean_distance has no baseline. by_distance, before: (heads, bins) sums over queries of the mass in each bin of
    `DISTANCE_EDGES`, without that of a sink, and of the part on keys before the query, None in a causal order, where it
    is all; queries: (heads,) how many are in these sums."""

    masses: dict[str, Tensor]
    baseline: dict[str, Tensor]
    by_distance: Tensor
    before: Tensor | None
    queries: Tensor


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
    >>> found.masses["mean_distance"]
    tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])
    """
    batch, heads, q, _ = call.eta.shape
    known = tokens if tokens is not None and tokens.ids.shape == (batch, call.key.shape[2]) else None
    seen, marked_seen = (_visible_keys(call), None) if known is None else known.visible(call)
    names = {name for name in wanted if name not in PAIRED or (known is not None and q == call.key.shape[2])}
    names -= {"next_mass"} if call.support.causal else set()
    names -= {"delimiter_mass"} if marked_seen is None else set()
    masses = {name: call.eta.new_empty(batch, heads, q) for name in TARGETS if name in names}
    counts: dict[str, Tensor] = {}
    sums = []
    for part in torch.arange(batch).split(max(1, ROWS // max(1, heads * q))):
        some = slice(int(part[0]), int(part[-1]) + 1)
        own = call_of_sequences(call, some)
        marked = None if marked_seen is None or known is None else known.delimiter[some]  # pyright: ignore[reportOptionalSubscript]
        sweep = _sweep(own, marked)
        blank = sweep.g == -torch.inf
        if own.rows is not None:
            blank = blank | ~own.rows[:, None, :]
        for name in masses.keys() & {*SHIFTS, "mean_distance", "delimiter_mass"}:
            masses[name][some] = sweep.mass(name).masked_fill(blank, torch.nan)
        if paired := {*PAIRED} & masses.keys():
            assert known is not None
            alike = like_tokens.masses(own, sweep.g, *known.like_tokens(call, own, some), paired)
            for name, (mass, count) in alike.items():
                masses[name][some] = mass.masked_fill(blank, torch.nan)
                counts.setdefault(name, call.eta.new_zeros(batch, heads, q))[some] = count
        sums.append(sweep.sums(blank))
    baseline: dict[str, Tensor] = {}
    for name in masses.keys() - {"mean_distance"}:
        if name in SHIFTS:
            count = _sees(call, SHIFTS[name])
        else:
            count = counts.get(name, marked_seen)
            assert count is not None
        masses[name] = masses[name].masked_fill(count == 0, torch.nan)
        baseline[name] = (count / seen).expand_as(masses[name]).masked_fill(masses[name].isnan(), torch.nan)
    by_distance, before, queries = (None if x[0] is None else sum(x[1:], x[0]) for x in zip(*sums, strict=True))
    return TargetMasses(masses, baseline, by_distance, before, queries)  # pyright: ignore[reportArgumentType]


def call_of_sequences(call: AttentionCall, some: slice) -> AttentionCall:
    """A few sequences of a call, without copies."""
    if some == slice(0, len(call.eta)):
        return call
    eta, key, value, output = (x[some] for x in (call.eta, call.key, call.value, call.output))
    rows = None if call.rows is None else call.rows[some]
    support = call.support.of_sequences(some)
    return replace(call, eta=eta, key=key, value=value, output=output, rows=rows, support=support)


def first_query(call: AttentionCall) -> int:
    """The key of the first query of a self-attention: with a cache there are keys before it."""
    if call.support.offset is not None:
        return call.support.offset
    return max(0, call.key.shape[-2] - call.eta.shape[-2])


def _sees(call: AttentionCall, shift: int) -> Tensor:
    """(batch | 1, heads | 1, q) 1 where a query sees the key ``shift`` places from it."""
    (_, heads, q, _), n = call.eta.shape, call.key.shape[2]
    rows = torch.arange(q, device=call.eta.device)
    keys = rows + first_query(call) + shift
    at = keys.clamp(0, max(0, n - 1))
    there = ((keys >= 0) & (keys < n))[None, None]
    weights, mask, band = call.support.pair_weights(heads), call.support.pair_mask(), call.support.in_band(rows, at)
    index = at[None, None, :, None]
    if weights is not None:
        there = there & (weights.expand(-1, -1, q, n).take_along_dim(index, 3)[..., 0] > -torch.inf)
    if mask is not None:
        there = there & mask.expand(-1, -1, q, n).take_along_dim(index, 3)[..., 0]
    if band is not None:
        there = there & band
    return there.to(call.eta.dtype)


class KernelSums(NamedTuple):
    """What the kernel says of some sequences: G with the sink; masses on marked keys and in bins of the distance, of
    all keys and of those before the query (None where all are); mean distance (batch, heads, q)."""

    g: Tensor
    marked: Tensor | None
    bins: Tensor
    before: Tensor | None
    mean_distance: Tensor

    def mass(self, name: str) -> Tensor:
        """(batch, heads, q) of what has no tokens in it."""
        if name == "mean_distance":
            return self.mean_distance
        if name == "delimiter_mass":
            assert self.marked is not None
            return self.marked
        if name == "self_mass":
            return self.bins[..., 0]
        before = self.bins[..., 1] if self.before is None else self.before[..., 1]
        return before if name == "previous_mass" else (self.bins[..., 1] - before).clamp_min(0)

    def sums(self, blank: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Sums of `bins` and `before` over queries that are not blank, (heads, bins), and the number of these."""
        counted = (~blank).to(self.g.dtype)
        bins, before = (
            None if x is None else (counted[..., None, :] @ x.masked_fill(blank[..., None], 0)).double().sum(0)[:, 0]
            for x in (self.bins, self.before)
        )
        assert bins is not None
        cpu = [None if x is None else x.cpu() for x in (bins, before)]
        return cpu[0], cpu[1], counted.double().sum((0, 2)).cpu()  # pyright: ignore[reportReturnType]


def _sweep(call: AttentionCall, marked: Tensor | None) -> KernelSums:
    """With masses on marked keys (batch, n)."""
    q, n = call.eta.shape[2], call.key.shape[2]
    support = replace(call.support, offset=first_query(call), sink=None)
    position = torch.arange(n, dtype=call.eta.dtype, device=call.eta.device)[:, None]
    own = first_query(call) + torch.arange(q, dtype=call.eta.dtype, device=call.eta.device)
    on_keys = None if marked is None else marked[:, None].expand(-1, call.key.shape[1], -1)
    settings = {"distance_edges": DISTANCE_EDGES, "statistics": ("mean",)}
    found = attention_profile(call.eta, call.key, position, **support.arguments(), marked=on_keys, **settings)
    g, bins, before = found.moments.log_normalizer, found.bin_mass, None
    assert bins is not None
    gap = own - found.moments.mean[..., 0]
    if not support.causal:
        first = attention_profile(call.eta, call.key, position, **replace(support, causal=True).arguments(), **settings)
        assert first.bin_mass is not None
        share = torch.exp(first.moments.log_normalizer - g)
        before = first.bin_mass * share[..., None]
        gap = 2 * torch.where(share > 0, share * (own - first.moments.mean[..., 0]), 0) - gap
    return _with_sink(call, KernelSums(g, found.marked_mass, bins, before, gap.clamp_min(0)))


def _with_sink(call: AttentionCall, sweep: KernelSums) -> KernelSums:
    """The same masses where a sink takes its part."""
    sink = call.support.sink
    if sink is None:
        return sweep
    both = torch.logaddexp(sweep.g, torch.as_tensor(sink, dtype=sweep.g.dtype, device=sweep.g.device)[..., None])
    share = torch.exp(sweep.g - both)
    marked, before = sweep.marked, sweep.before
    return sweep._replace(
        g=both,
        marked=None if marked is None else marked * share,
        bins=sweep.bins * share[..., None],
        before=None if before is None else before * share[..., None],
    )


def _visible_keys(call: AttentionCall) -> Tensor:
    """(batch | 1, heads | 1, q) how many keys a query sees, at least 1."""
    support = replace(call.support, sink=None)
    return support.visible_keys(call.eta, call.key.shape[2])[0].clamp_min(1)


def _visible_marked(call: AttentionCall, marked: Tensor | None) -> Tensor | None:
    """(batch, heads | 1, q) how many marked keys (batch, n) a query sees."""
    if marked is None:
        return None
    q, n = call.eta.shape[2], call.key.shape[2]
    support = call.support
    if support.mask is None and support.log_weights is None and support.window is None:
        if not support.causal:
            return marked.sum(1)[:, None, None].expand(-1, 1, q).to(call.eta.dtype)
        last = (torch.arange(q, device=marked.device) + first_query(call)).clamp(0, n - 1)
        return marked.cumsum(1)[:, None, last].to(call.eta.dtype)
    table = replace(support, sink=None).weigh(call.eta.new_zeros(1, 1, q, n))
    return ((table > -torch.inf) & marked[:, None, None]).sum(-1).to(call.eta.dtype)
