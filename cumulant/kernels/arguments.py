"""The arguments of `moments` that set which keys are visible to a query and with what weight, as one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Support:
    """Which keys are visible to a query, and with what log weight: edits of the measure of the keys.

    mask         Boolean, broadcastable to (batch, heads, q, n); True = visible
    causal       key j is visible to query i iff j ≤ offset + i
    offset       index of the first query among the keys; None: 0, with as many keys as queries
    window       only the last ``window`` visible keys (causal), or |offset + i − j| < window
    log_weights  (batch | 1, heads | 1, n) per key or (batch | 1, heads | 1, q | 1, n) per pair; −inf hides a key
    sink         log weight of one more key at 0 with value 0: a number, (heads,) or (batch | 1, heads)

    `moments` takes any number of batch axes; the methods here take the two that attention layers have. As there, key
    heads that a group of heads shares may have one row of log weights.

    >>> import torch
    >>> Support(causal=True, offset=0).weigh(torch.zeros(1, 1, 2, 3))[0, 0]
    tensor([[0., -inf, -inf],
            [0., 0., -inf]])
    """

    mask: Tensor | None = None
    causal: bool = False
    offset: int | None = None
    window: int | None = None
    log_weights: Tensor | None = None
    sink: float | Tensor | None = None

    def arguments(self) -> dict:
        """Keyword arguments of `moments`: what restricts or weighs, without the rest."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None and value is not False}

    def detach(self) -> Support:
        """The same without gradients."""
        tensors = {name: t.detach() for name, t in self.arguments().items() if isinstance(t, Tensor)}
        return replace(self, **tensors)

    @property
    def unrestricted(self) -> bool:
        """Every key is visible to every query, all with the same weight; there may be a sink."""
        return self.mask is None and self.log_weights is None and not self.causal and self.window is None

    def pair_mask(self) -> Tensor | None:
        """mask with four axes."""
        return None if self.mask is None else self.mask.reshape((1,) * (4 - self.mask.ndim) + self.mask.shape)

    def pair_weights(self, heads: int) -> Tensor | None:
        """log_weights with four axes; those of shared keys are repeated for each of ``heads``."""
        w = self.log_weights
        if w is None:
            return None
        w = w[..., None, :] if w.ndim == 3 else w
        return w.repeat_interleave(heads // w.shape[1], 1) if 1 < w.shape[1] < heads else w

    def band(self, rows: Tensor, keys: int) -> Tensor | None:
        """(*, s, n) True where causal order and window show a key to queries (*, s); None without either."""
        return self.in_band(rows[..., None], torch.arange(keys, device=rows.device))

    def in_band(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """True where causal order and window show the key of a number to the query of a number, broadcast."""
        if not self.causal and self.window is None:
            return None
        behind = rows + (self.offset or 0) - keys
        visible = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        return visible if self.window is None else visible & (behind.abs() < self.window)

    def weigh(self, score: Tensor, rows: Tensor | None = None) -> Tensor:
        """Scores (batch, heads, s, n) of the queries ``rows`` (s,) plus log weights, −inf where a key is hidden.

        rows  all queries if None
        """
        w, mask = self.pair_weights(score.shape[1]), self.pair_mask()
        if rows is not None:
            w, mask = (t if t is None or t.shape[2] == 1 else t[:, :, rows] for t in (w, mask))
        if w is not None:
            score = score + w
        if mask is not None:
            score = score.masked_fill(~mask, -torch.inf)
        every = torch.arange(score.shape[-2], device=score.device) if rows is None else rows
        band = self.band(every, score.shape[-1])
        return score if band is None else score.masked_fill(~band, -torch.inf)

    def visible_keys(self, eta: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """How many of ``keys`` are visible to queries (batch, heads, q, d), with the sink, and the log of their mass.

        >>> import torch
        >>> Support(causal=True, sink=0.0).visible_keys(torch.zeros(1, 1, 3, 2), 3)[0]
        tensor([[[2., 3., 4.]]])
        """
        shape = eta.shape[:-1]
        if self.mask is None and self.log_weights is None:
            count = self._band_sizes(shape[-1], keys, eta.device).expand(shape).to(eta.dtype)
            log_mass = count.log()
        elif self.log_weights is None:
            rows = torch.arange(shape[-1], device=eta.device)
            mask = intersect(self.pair_mask(), self.band(rows, keys))
            assert mask is not None
            count = mask.sum(-1).expand(shape).to(eta.dtype)
            log_mass = count.log()
        else:
            table = self.weigh(eta.new_zeros(1, shape[1], shape[2], keys))
            count = (table > -torch.inf).sum(-1).expand(shape).to(eta.dtype)
            log_mass = torch.logsumexp(table, -1).expand(shape)
        if self.sink is None:
            return count, log_mass
        sink = torch.as_tensor(self.sink, dtype=eta.dtype, device=eta.device)[..., None].expand(shape)
        return count + (sink > -torch.inf), torch.logaddexp(log_mass, sink)

    def _band_sizes(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """How many keys are visible to each query by causal order and window, without a table of pairs."""
        position = torch.arange(queries, device=device) + (self.offset or 0)
        first = torch.zeros_like(position) if self.window is None else position - self.window + 1
        if self.causal:
            after = position + 1
        else:
            after = torch.full_like(position, keys) if self.window is None else position + self.window
        return (after.clamp(0, keys) - first.clamp(0, keys)).clamp_min(0)

    def of_sequences(self, index: Tensor | slice) -> Support:
        """For some sequences of the batch; tables that all of them share stay as they are."""
        return self._select(lambda table: table[index] if len(table) > 1 else table)

    def of_queries(self, rows: Tensor, keys: int) -> Support:
        """For the queries (batch, s), which may differ between sequences, with the band written out in the mask."""

        def pick(table: Tensor | None) -> Tensor | None:
            if table is None or table.ndim < 4 or table.shape[2] == 1:
                return table
            return table.take_along_dim(rows[:, None, :, None], 2)

        mask = intersect(pick(self.pair_mask()), self.band(rows[:, None], keys))
        return Support(mask=mask, log_weights=pick(self.log_weights), sink=self.sink)

    def of_heads(self, heads: list[int]) -> Support:
        """For some heads."""
        return self._select(lambda table: table[:, heads] if table.shape[1] > 1 else table)

    def of_first_keys(self, keys: int) -> Support:
        """For the first ``keys`` keys."""
        mask, w = self.mask, self.log_weights
        return replace(
            self,
            mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., :keys],
            log_weights=None if w is None else w[..., :keys],
        )

    def _select(self, pick: Callable[[Tensor], Tensor]) -> Support:
        """A part of every table (batch | 1, heads | 1, …)."""
        mask, w, sink = self.pair_mask(), self.log_weights, self.sink
        return replace(
            self,
            mask=None if mask is None else pick(mask),
            log_weights=None if w is None else pick(w),
            sink=pick(sink) if isinstance(sink, Tensor) and sink.ndim == 2 else sink,
        )


def intersect(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """True where both masks are; None is True everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other.to(one.device)
