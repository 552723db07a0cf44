"""A bounded sample of the queries of one layer, of a cache that compresses while its text grows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache.fitted.growing_law import spans_of, stays
from cumulant.cache.fitted.law import QueryLaw
from cumulant.cache.fitted.query_law import SampledQueries, sample_queries
from cumulant.cache.prefix import LayerPrefix
from cumulant.checks import sentence
from cumulant.kernels.arguments import Support

PENDING = 64  # tokens whose queries are all held, until it is looked which of them stay
STORED = torch.float16  # of queries and what they read: a score of 50 is right to 0.02
LARGEST = 6e4  # that a number of it may be


class SequenceQueries(NamedTuple):
    """The queries that are kept of one sequence, by token, counted from its first that is no padding.

    queries  (heads, m, d) η = scale · query, rotated to their tokens ``at`` (m,), growing, which are held as they are
    earlier  of tokens ``earlier_at`` (m',) that are held no more, with what they read of the last tokens before them
    """

    queries: Tensor
    at: Tensor
    earlier: SampledQueries
    earlier_at: Tensor

    @classmethod
    def none(cls, heads: int, widths: tuple[int, int], like: Tensor) -> SequenceQueries:
        """No queries of ``heads`` heads, of widths d of keys and e of values."""
        d, e = widths
        at = torch.empty(0, dtype=torch.int64)
        local = torch.empty(heads, 0, e, dtype=torch.float32, device=like.device)
        queries = like.new_empty(heads, 0, d)
        return cls(queries, at, SampledQueries(stored(queries), at, local[..., 0], stored(local)), at)

    def part(self, which: Tensor) -> SequenceQueries:
        """Those that are true in ``which`` (m' + m,), earlier ones first."""
        before, own = which.split([len(self.earlier_at), len(self.at)])
        return SequenceQueries(self.queries[:, own], self.at[own], self.earlier.part(before), self.earlier_at[before])

    def kept(self, end: int, law: QueryLaw, seed: int) -> SequenceQueries:
        """Those that stay after ``end`` tokens."""
        return self.part(stays(torch.cat([self.earlier_at, self.at]), end, law, seed))

    def with_new(self, queries: Tensor, at: Tensor) -> SequenceQueries:
        """These and the queries (heads, n, d) of later tokens ``at`` (n,)."""
        return self._replace(queries=torch.cat([self.queries, queries], 1), at=torch.cat([self.at, at]))

    def settled(self, layer: LayerPrefix, law: QueryLaw, seed: int, every: int) -> SequenceQueries:
        """The same once the tokens of ``layer`` are held no more: what its queries read of them is kept in their place.
        Those that will not be recent when ``every`` more tokens have come have to be spread ones."""
        gone = self.at < layer.length
        at = self.at[gone]
        span = spans_of(at, layer.first_token, law.span, seed)
        new = sample_queries(layer, at, span)
        new = new._replace(queries=stored(new.queries), local_output=stored(new.local_output))
        at = torch.cat([self.earlier_at, at])
        later = stays(at, layer.length + every, law, seed)
        earlier = SampledQueries.joined([self.earlier, new]).part(later)
        return SequenceQueries(self.queries[:, ~gone], self.at[~gone], earlier, at[later])


class KeptQueries:
    """What one layer keeps of its queries, for every sequence: about as many recent and spread ones as a law has.

    law      how many; None: none are kept, and only how far padding reaches is known
    seed     by which they are drawn
    heads    of queries, and ``widths`` d of keys and e of values
    end      tokens that were asked, padding among them
    begins   (batch,) the first token of each sequence that is no padding; None: nothing was asked yet
    """

    def __init__(self, law: QueryLaw | None, seed: int, heads: int, widths: tuple[int, int], start: int = 0) -> None:
        self.law, self.seed, self.heads, self.widths = law, seed, heads, widths
        self.start = self.end = start
        self.begins: Tensor | None = None
        self.rows: list[SequenceQueries] = []
        self._pending: Tensor | None = None  # (batch, heads, PENDING, d), of which the first ``_count`` are queries
        self._count = 0

    def empty(self) -> KeptQueries:
        """The same before the first token."""
        return KeptQueries(self.law, self.seed, self.heads, self.widths, self.start)

    def add(self, query: Tensor, scale: float, support: Support, first: int) -> None:
        """The queries (batch, heads, q, d) of the next tokens; ``support`` says which tokens from ``first`` on they
        see."""
        batch, _, new, _ = query.shape
        eta = query.detach()
        if self.begins is None:
            self.begins = torch.full((batch,), self.end)
            self.rows = [SequenceQueries.none(self.heads, self.widths, stored(eta)) for _ in range(batch)]
        self.end += new
        if self.law is None:
            return
        eta = stored(scale * eta)
        if self._count + new > PENDING:
            self.begins = begins_of(support, self.begins, first, self.end)
            self._take(eta)
            return
        if self._pending is None:
            self._pending = eta.new_empty(batch, self.heads, PENDING, eta.shape[-1])
        self._pending[:, :, self._count : self._count + new] = eta
        self._count += new

    def settle(self, begins: Tensor) -> None:
        """Look which queries stay, where ``begins`` (batch,) is known."""
        self.begins = begins
        self._take(None)

    def _take(self, new: Tensor | None) -> None:
        """Sort pending queries, and ``new`` ones after them, into those that stay and others."""
        if self.law is None or self.begins is None:
            return
        parts = [] if self._pending is None else [self._pending[:, :, : self._count]]
        queries = torch.cat(parts + ([] if new is None else [new]), 2) if parts or new is not None else None
        if queries is None or not queries.shape[2]:
            return
        at = torch.arange(self.end - queries.shape[2], self.end)
        for b, begin in enumerate(self.begins.tolist()):
            own, length = at - begin, self.end - begin
            which = (own >= 0) & stays(own.clamp_min(0), length, self.law, self.seed)
            added = self.rows[b].with_new(queries[b][:, which], own[which])
            self.rows[b] = added.kept(length, self.law, self.seed)
        self._count = 0

    # ------------------------------------------------------------------ what generation does to a cache

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        self.end -= tokens
        pending, self._count = self._count, max(self._count - tokens, 0)
        if tokens <= pending or self.begins is None:
            return
        for b, begin in enumerate(self.begins.tolist()):
            known = self.rows[b]
            self.rows[b] = known.part(torch.cat([known.earlier_at, known.at]) < self.end - begin)
        self.begins = self.begins.clamp_max(self.end)

    def select(self, indices: Tensor) -> None:
        """Sequences by number, as often as they are named."""
        if self.begins is None:
            return
        chosen = indices.to("cpu")
        self.begins = self.begins.index_select(0, chosen)
        self.rows = [self.rows[i] for i in chosen.tolist()]
        if self._pending is not None:
            self._pending = self._pending.index_select(0, indices.to(self._pending.device))

    # ------------------------------------------------------------------ files

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by name."""
        if self.begins is None:
            return {}
        named = {"begins": self.begins}
        if self._pending is not None:
            named["pending"] = self._pending[:, :, : self._count]
        for b, row in enumerate(self.rows if self.law is not None else ()):
            parts = {"queries": row.queries, "at": row.at, "earlier_at": row.earlier_at}
            parts |= {f"earlier.{name}": t for name, t in row.earlier._asdict().items()}
            named |= {f"{b}.{name}": t for name, t in parts.items()}
        return named

    def fill(self, named: dict[str, Tensor], end: int) -> None:
        """Hold what `tensors` gave, after ``end`` tokens."""
        self.begins, self.end = named.get("begins"), end
        if self.begins is None or self.law is None:
            return
        pending = named.get("pending")
        if pending is not None and pending.shape[2]:
            self._pending = pending.new_empty(*pending.shape[:2], PENDING, pending.shape[3])
            self._count = pending.shape[2]
            self._pending[:, :, : self._count] = pending
        self.rows = []
        for b in range(len(self.begins)):
            earlier = SampledQueries(*(named[f"{b}.earlier.{name}"] for name in SampledQueries._fields))
            self.rows.append(
                SequenceQueries(named[f"{b}.queries"], named[f"{b}.at"], earlier, named[f"{b}.earlier_at"])
            )


def stored(x: Tensor) -> Tensor:
    """The same in half precision."""
    return x.clamp(-LARGEST, LARGEST).to(STORED)


def begins_of(support: Support, begins: Tensor, first: int, end: int) -> Tensor:
    """(batch,) the first token of each sequence that is no padding, from what the last query sees of the tokens from
    ``first`` to ``end`` − 1; what was known of tokens before stays.

    >>> mask = torch.tensor([[True, True], [False, True]])[:, None, None]
    >>> begins_of(Support(mask), torch.tensor([0, 0]), 0, 2)
    tensor([0, 1])
    """
    mask = support.pair_mask()
    if mask is None:
        return begins.clamp_max(first)
    seen = mask[:, 0, -1].expand(len(begins), end - first).to("cpu")
    hidden = (~seen).sum(-1)
    if bool((~seen & (torch.arange(end - first) >= hidden[:, None])).any()):
        got = "a mask that hides tokens behind the first that it shows"
        advice = 'Pad on the left: tokenizer.padding_side = "left"; one text a sequence.'
        raise ValueError(sentence("MeasureCache(compress=…)", "padding in front of a text alone", got, advice))
    return torch.where(begins < first, begins, first + hidden)
